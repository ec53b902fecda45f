import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recsys.datasets.criteo import RowNumbers

IDS = st.integers(0, 2**32 - 1) | st.integers(0, 20) | st.integers(2**32 - 20, 2**32 - 1)


@given(st.lists(st.lists(IDS, max_size=50), max_size=5))
def test_ids_are_numbered_by_first_appearance_over_all_calls(chunks):
    numbers = RowNumbers()
    expected = {}

    for chunk in chunks:
        rows = numbers.number(np.array(chunk, np.uint32))

        assert rows.tolist() == [expected.setdefault(raw_id, len(expected)) for raw_id in chunk]

    assert numbers.num_rows == len(expected)
    assert numbers.ids_by_row().tolist() == list(expected)


def test_numbering_survives_growth_to_many_ids():
    numbers = RowNumbers()
    ids = np.random.default_rng(0).permutation(200_000).astype(np.uint32)

    first = numbers.number(ids.copy())
    second = numbers.number(ids[::-1].copy())

    np.testing.assert_array_equal(first, np.arange(200_000))
    np.testing.assert_array_equal(second, np.arange(200_000)[::-1])
    np.testing.assert_array_equal(numbers.ids_by_row(), ids)
