import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.datasets.numbering import MISSING, UNKNOWN, Numbers

pa = pytest.importorskip("pyarrow")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.int64()])
def test_a_numbering_that_does_not_grow_knows_only_its_values(kind):
    numbers = Numbers("x", np.int64 if kind == pa.int64() else np.uint8)
    one, two = pa.array([1, 2]).cast(kind).to_pylist()
    numbers.number(pa.array([one], kind))
    assert numbers.number(pa.array([two, None, one], kind), grow=False).tolist() == [
        UNKNOWN,
        MISSING,
        0,
    ]
    assert numbers.num_values == 1
    assert numbers.number(pa.array([], kind)).tolist() == []
    assert numbers.number(pa.nulls(2, kind)).tolist() == [MISSING, MISSING]


def test_many_values_keep_their_numbers_while_the_table_grows():
    drawn = np.random.default_rng(0).integers(0, 30_000, 60_000)
    texts, integers = Numbers("x"), Numbers("x", np.int64)
    for start in range(0, len(drawn), 7_000):
        block = drawn[start : start + 7_000]
        found = texts.number(pa.array(block.astype(str)))
        np.testing.assert_array_equal(integers.number(pa.array(block)), found)
        np.testing.assert_array_equal(integers.values().to_numpy()[found], block)
    assert texts.num_values == len(np.unique(drawn))
    assert texts.values().to_pylist() == list(map(str, integers.values().to_pylist()))


IDS = st.integers(0, 2**32 - 1) | st.integers(0, 20) | st.integers(2**32 - 20, 2**32 - 1)


@given(st.lists(st.lists(IDS, max_size=50), max_size=5))
def test_ids_are_numbered_by_first_appearance_over_all_calls(chunks):
    numbers = Numbers("ids", np.uint32)
    expected = {}

    for chunk in chunks:
        rows = numbers.number_array(np.array(chunk, np.uint32))

        assert rows.tolist() == [expected.setdefault(raw_id, len(expected)) for raw_id in chunk]

    assert numbers.num_values == len(expected)
    assert numbers.known.tolist() == list(expected)
