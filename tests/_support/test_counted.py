"""Numbers of things are singular or plural."""

import pytest

from recsys._support.counted import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1000, "1,000 steps")]
)
def test_a_number_of_things_is_singular_or_plural(number, text):
    assert counted(number, "step") == text
