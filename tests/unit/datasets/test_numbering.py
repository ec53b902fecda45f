import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.datasets.numbering import MISSING, UNKNOWN, HashedRows, Numbers

pa = pytest.importorskip("pyarrow")


def test_integers_are_numbered_by_first_appearance():
    numbers = Numbers("item", np.int64)
    assert numbers.number(pa.array([7, -(2**63), None, 7])).tolist() == [0, 1, MISSING, 0]
    assert numbers.number(pa.array([1, 2**63 - 1, 7]).slice(1)).tolist() == [2, 0]
    assert numbers.values().to_pylist() == [7, -(2**63), 2**63 - 1]


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
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 30_000, 60_000)
    texts, integers = Numbers("x"), Numbers("x", np.int64)
    for start in range(0, len(drawn), 7_000):
        block = drawn[start : start + 7_000]
        found = texts.number(pa.array(block.astype(str)))
        np.testing.assert_array_equal(integers.number(pa.array(block)), found)
        np.testing.assert_array_equal(integers.values().to_numpy()[found], block)
    assert texts.num_values == len(np.unique(drawn))
    assert texts.values().to_pylist() == list(map(str, integers.values().to_pylist()))


def test_hashed_rows_depend_on_the_value_alone():
    rows = HashedRows(1000)
    # 64-bit FNV-1a of "a" is af63dc4c8601ec8c; of no bytes, cbf29ce484222325.
    by_hand = [split_mix(0xAF63DC4C8601EC8C) % 1000, split_mix(0xCBF29CE484222325) % 1000]
    assert rows.number(pa.array(["a", None, ""])).tolist() == [by_hand[0], by_hand[1], by_hand[1]]
    # The first output of SplitMix64 with seed 0 is e220a8397b1dcdaf.
    assert rows.number(pa.array([0, None])).tolist() == [0xE220A8397B1DCDAF % 1000, by_hand[1]]


def split_mix(state):
    end = 2**64
    bits = (state + 0x9E3779B97F4A7C15) % end
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % end
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % end
    return bits ^ (bits >> 31)


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
