import pytest

from recsys.embeddings.kernels.triton.constants import Constant


@pytest.mark.parametrize(("other", "expected"), [(3, False), (4, True), (None, True)])
def test_a_constant_is_compared_by_value_and_the_answer_is_a_bool(other, expected):
    for each in (other, Constant(other)):
        assert (Constant(3) != each) is expected
