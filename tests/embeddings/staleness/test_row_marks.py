"""Bits and counts of rows, against plain Python."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Bags, Lookups
from recsys.embeddings.staleness.row_marks import MOST_COUNTED, RowMarks, marks_bytes

SIZES = [150, 64, 1, 65, 0, 9]
FIRSTS = np.cumsum([0, *SIZES])
DIM = 2
PADDING = 3


@st.composite
def entries(draw, padding=None):
    """A ledger entry, and the rows of each bag of each lookup, None for a value that is no row."""
    num_features, batch_size = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    num_bags = num_features * batch_size
    lengths = draw(st.lists(st.integers(0, 3), min_size=num_bags, max_size=num_bags))
    if draw(st.booleans()):
        lengths = [1] * num_bags
    offsets, num_values = np.cumsum([0, *lengths]), sum(lengths)
    values = draw(st.lists(st.integers(-2, 155), min_size=num_values, max_size=num_values))
    pairs = draw(
        st.lists(
            st.tuples(st.integers(0, len(SIZES) - 1), st.integers(0, num_features - 1)),
            min_size=1,
            max_size=5,
        )
    )
    bags_of = []
    for table, feature in pairs:
        bounds = offsets[feature * batch_size : (feature + 1) * batch_size + 1].tolist()
        bags_of.append(
            [
                [
                    int(FIRSTS[table]) + value if 0 <= value < SIZES[table] else None
                    for value in values[begin:end]
                    if value != padding
                ]
                for begin, end in pairwise(bounds)
            ]
        )
    tables, positions = np.array(pairs, np.uint64).reshape(-1, 2).T.copy()
    columns = np.arange(len(pairs), dtype=np.uint64) * np.uint64(DIM)
    lookups = Lookups(tables=tables, positions=positions, columns=columns, width=DIM * len(pairs))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    is_one_hot = lengths == [1] * num_bags
    has_weights, is_mean = draw(st.booleans()), draw(st.booleans()) and not is_one_hot
    bags = Bags(
        np.array(values, dtype),
        None if is_one_hot else offsets.astype(dtype),
        np.arange(1, num_values + 1, dtype=np.float32) if has_weights else None,
        batch_size,
        is_mean,
    )
    if padding is not None:
        bags = TorchBags(
            torch.from_numpy(bags.values),
            None if is_one_hot else torch.from_numpy(bags.offsets),
            torch.from_numpy(bags.weights) if has_weights else None,
            batch_size,
            is_mean,
            padding,
        )
    return LedgerEntry(lookups, bags, torch.empty(batch_size, lookups.width)), bags_of


def flat(bags_of):
    return [row for bags in bags_of for bag in bags for row in bag if row is not None]


ledgers = st.lists(entries(), min_size=1, max_size=3)
ledgers_on_device = st.lists(entries(padding=PADDING), min_size=1, max_size=3)
some_rows = st.sets(st.integers(0, sum(SIZES) - 1))


def array(rows):
    return np.array(sorted(rows), np.int64)


def stale_in(marks):
    found = [marks.stale_rows(table) + FIRSTS[table] for table in range(len(SIZES))]
    return np.concatenate(found).tolist()


@pytest.mark.threads
@given(st.lists(ledgers | ledgers_on_device, max_size=3))
def test_each_distinct_row_of_an_update_counts_once(updates):
    marks, expected = RowMarks(SIZES), {}
    for ledger in updates:
        marks.count([entry for entry, _ in ledger])
        for row in {row for _, bags_of in ledger for row in flat(bags_of)}:
            expected[row] = expected.get(row, 0) + 1
    rows, counts = marks.counted()
    assert dict(zip(rows.tolist(), counts.tolist(), strict=True)) == expected
    assert marks.counts_of(rows).tolist() == counts.tolist()
    taken, counts = marks.take_counts(2)
    assert taken.tolist() == sorted(row for row in expected if expected[row] >= 2)
    assert counts.tolist() == [expected[row] for row in taken.tolist()]
    assert not len(marks.counted()[0])


@pytest.mark.threads
def test_a_large_mini_batch_is_counted_by_several_threads():
    rng = np.random.default_rng(0)
    sizes, batch_size = [5000, 70, 40_000], 8000
    values = np.concatenate([rng.integers(0, size, batch_size) for size in sizes])
    numbers = np.arange(3, dtype=np.uint64)
    lookups = Lookups(tables=numbers, positions=numbers, columns=numbers * 2, width=6)
    bags = Bags(values, None, None, batch_size, is_mean=False)
    marks = RowMarks(sizes)
    for _ in range(3):
        marks.count([LedgerEntry(lookups, bags, torch.empty(0))])
    rows, counts = marks.take_counts(1)
    firsts = np.cumsum([0, *sizes])
    expected = [np.unique(values[i * batch_size :][:batch_size]) + firsts[i] for i in range(3)]
    assert np.array_equal(rows, np.concatenate(expected))
    assert (counts == 3).all()


@given(
    st.dictionaries(st.integers(0, sum(SIZES) - 1), st.integers(1, 9)),
    st.integers(1, 9),
    st.none() | st.integers(0, 20),
)
def test_the_rows_with_most_counts_are_taken(counted, least, most):
    marks = RowMarks(SIZES)
    rows = array(counted)
    marks.set_counts(rows, np.array([counted[row] for row in rows.tolist()], np.uint16))

    taken, counts = marks.take_counts(least, most)

    fitting = [row for row in counted if counted[row] >= least]
    fitting.sort(key=lambda row: (-counted[row], row))
    assert taken.tolist() == sorted(fitting[:most])
    assert counts.tolist() == [counted[row] for row in taken.tolist()]
    assert not len(marks.counted()[0])


def test_a_count_ends_at_15_bits():
    marks = RowMarks([4])
    marks.set_counts(np.array([1, 2]), np.array([MOST_COUNTED - 1, MOST_COUNTED], np.uint16))
    bags = Bags(np.array([1, 2, 2]), None, None, 3, is_mean=False)
    for _ in range(3):
        marks.count([LedgerEntry(Lookups.one(0, DIM), bags, torch.empty(0))])
    assert marks.counts_of(np.arange(4)).tolist() == [0, MOST_COUNTED, MOST_COUNTED, 0]


@given(some_rows, some_rows, some_rows)
def test_bits_are_set_and_cleared(first, cleared, more):
    marks = RowMarks(SIZES)
    marks.set_stale(array(first), True)
    marks.set_stale(array(cleared), False)
    marks.set_stale(array(more), True)
    expected = (first - cleared) | more
    assert stale_in(marks) == sorted(expected)
    assert marks.num_stale == len(expected)


def test_a_wrong_id_is_not_stale():
    marks, found = RowMarks([4]), np.ones(2, bool)
    bags = Bags(np.array([-1, 2]), None, None, 2, is_mean=False)
    marks.set_stale(np.arange(4), True)

    marks.all_stale(Lookups.one(0, DIM), bags, found)

    assert found.tolist() == [False, True]


@given(entries() | entries(padding=PADDING), some_rows)
def test_a_bag_is_stale_if_all_its_rows_are(made, stale):
    (entry, bags_of), marks = made, RowMarks(SIZES)
    marks.set_stale(array(stale), True)
    found = np.ones(entry.bags.batch_size, bool)
    marks.all_stale(entry.lookups, entry.bags, found)
    expected = [
        all(row in stale for bags in bags_of for row in bags[sample])
        for sample in range(entry.bags.batch_size)
    ]
    assert found.tolist() == expected


def contributions(entry, kept):
    """For each lookup and bag, the rows that are not left out, each with its factor."""
    bags, found = entry.bags, []
    offsets = np.arange(len(bags.values) + 1) if bags.offsets is None else np.asarray(bags.offsets)
    padding = getattr(bags, "padding", None)
    lookups = entry.lookups
    for table, position, column in zip(
        lookups.tables.tolist(), lookups.positions.tolist(), lookups.columns.tolist(), strict=True
    ):
        for sample in range(bags.batch_size):
            begin, end = offsets[position * bags.batch_size + sample :][:2].tolist()
            places = [at for at in range(begin, end) if int(bags.values[at]) != padding]
            for at in places:
                row = int(bags.values[at])
                factor = np.float32(1 if bags.weights is None else float(bags.weights[at]))
                if bags.is_mean:
                    factor = factor / np.float32(len(places))
                if 0 <= row < SIZES[table] and FIRSTS[table] + row in kept:
                    found.append((table, sample, column, row, float(factor)))
    return found


@given(st.lists(entries() | entries(padding=PADDING), max_size=3), some_rows)
def test_without_stale_rows_the_other_rows_keep_their_gradients(ledger, stale):
    marks, every = RowMarks(SIZES), set(range(sum(SIZES)))
    marks.is_freezing = True
    marks.set_stale(array(stale), True)
    ledger = [entry for entry, _ in ledger]
    expected = [each for entry in ledger for each in contributions(entry, every - stale)]

    found = marks.before_update(ledger)

    assert [each for entry in found for each in contributions(entry, every)] == expected
    assert all(entry.is_cut or any(entry is each for each in ledger) for entry in found)


def test_a_ledger_without_stale_rows_is_not_copied():
    marks, bags = RowMarks([5]), Bags(np.array([1, 2]), None, None, 2, is_mean=False)
    entry = LedgerEntry(Lookups.one(0, DIM), bags, torch.empty(2, DIM))
    ledger, marks.is_freezing = [entry], True
    assert marks.before_update(ledger) is ledger
    marks.set_stale(np.array([4]), True)
    assert marks.before_update(ledger)[0] is entry


@given(st.lists(st.integers(0, 200), min_size=1))
def test_bytes_are_those_allocated(sizes):
    marks = RowMarks(sizes)
    arrays = marks._stale, marks._counts, marks._is_counted
    assert sum(array.nbytes for array in arrays) == marks_bytes(sizes)
