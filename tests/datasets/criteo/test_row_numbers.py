import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.datasets.criteo.row_numbers import RowNumbers

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


@given(st.lists(IDS, max_size=50), st.lists(IDS, max_size=50))
def test_a_numbering_taken_back_from_its_ids_goes_on_as_it_would_have(before, after):
    numbers = RowNumbers()
    numbers.number(np.array(before, np.uint32))

    taken_back = RowNumbers.from_ids(numbers.ids_by_row())

    expected = numbers.number(np.array(after, np.uint32))
    assert taken_back.number(np.array(after, np.uint32)).tolist() == expected.tolist()
    assert taken_back.num_rows == numbers.num_rows
    assert taken_back.ids_by_row().tolist() == numbers.ids_by_row().tolist()


@given(st.lists(IDS, max_size=50), st.lists(IDS, max_size=50))
def test_ids_from_a_row_on_are_those_that_came_since(before, after):
    numbers = RowNumbers()
    numbers.number(np.array(before, np.uint32))
    first_row = numbers.num_rows

    numbers.number(np.array(after, np.uint32))

    assert numbers.ids_by_row(first_row).tolist() == numbers.ids_by_row().tolist()[first_row:]


def test_ids_are_taken_back_in_pieces(monkeypatch):
    monkeypatch.setattr("recsys.datasets.criteo.row_numbers._BLOCK_IDS", 7)
    ids = np.random.default_rng(0).permutation(10_000).astype(np.uint32)
    kept = ids.copy()

    numbers = RowNumbers.from_ids(ids)

    np.testing.assert_array_equal(ids, kept)
    np.testing.assert_array_equal(numbers.ids_by_row(), ids)


@pytest.mark.parametrize("second", [1, 9])
def test_an_id_with_two_rows_is_refused(monkeypatch, second):
    monkeypatch.setattr("recsys.datasets.criteo.row_numbers._BLOCK_IDS", 7)
    ids = np.arange(10, dtype=np.uint32)
    ids[second] = 0

    with pytest.raises(ValueError, match="an id must have one row, but one before row"):
        RowNumbers.from_ids(ids)
