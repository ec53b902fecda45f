import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.torch.rounding import fold, round_rows
from recsys.embeddings.rows import rounding as reference

numbers = st.integers(-(2**63), 2**63 - 1)


@given(key=numbers, number=st.integers(0, 2**40))
def test_the_hash_is_that_of_the_reference(key, number):
    found = int(fold(torch.tensor(key), torch.tensor(number)))

    assert found % 2**64 == reference.fold(key, number)


@given(
    bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=6, max_size=6),
    keys=st.none() | st.lists(numbers, min_size=2, max_size=2),
)
def test_numbers_are_rounded_as_by_the_reference(bits, keys):
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32).view(2, 3)

    found = round_rows(values, None if keys is None else torch.tensor(keys))

    expected = reference.round_reference(values, keys)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
