"""Bits and counts of rows, against plain Python."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.lookup.inputs import LEFT_OUT
from recsys.embeddings.rows.bags import Bags, Lookups
from recsys.embeddings.rows.ledger import Call, Entry
from recsys.embeddings.staleness.row_marks import MOST_COUNTED, RowMarks, marks_bytes
from recsys.errors import MalformedBags

SIZES = [150, 64, 1, 65, 0, 9]
FIRSTS = np.cumsum([0, *SIZES])
DIM = 2


class Made(NamedTuple):
    """A lookup, its input, and the rows of each bag of each lookup; None for what is no row."""

    entry: Entry
    bags: Bags
    rows: list


def made_of(lookups, ids, offsets=None, weights=None, batch_size=None):
    """The input of a lookup, and its entry in a ledger."""
    ids = torch.as_tensor(ids)
    num_bags = len(ids) if offsets is None else len(offsets) - 1
    batch_size = num_bags if batch_size is None else batch_size
    bags = Bags(ids, offsets, weights, batch_size, num_bags)
    has_bounds = offsets is not None or weights is not None
    bounds = torch.arange(num_bags + 1) if offsets is None else offsets
    kept = torch.cat([ids, bounds]).int()
    of_input = kept, len(ids), batch_size, num_bags if has_bounds else 0, weights, 0
    call = Call(0, lookups, *of_input)
    return Entry(call, torch.empty(batch_size, DIM * len(lookups.locations)), 0, 0), bags


@st.composite
def entries(draw):
    num_features, batch_size = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    num_bags = num_features * batch_size
    lengths = draw(st.lists(st.integers(0, 3), min_size=num_bags, max_size=num_bags))
    is_one_hot = draw(st.booleans())
    if is_one_hot:
        lengths = [1] * num_bags
    offsets, num_ids = np.cumsum([0, *lengths]), sum(lengths)
    some_ids = st.integers(-2, 155) | st.just(LEFT_OUT)
    ids = draw(st.lists(some_ids, min_size=num_ids, max_size=num_ids))
    tables, features = st.integers(0, len(SIZES) - 1), st.integers(0, num_features - 1)
    pairs = sorted(draw(st.lists(st.tuples(tables, features), min_size=1, max_size=5)))
    rows = []
    for table, feature in pairs:
        bounds = offsets[feature * batch_size : (feature + 1) * batch_size + 1].tolist()
        rows.append(
            [
                [
                    int(FIRSTS[table]) + value if 0 <= value < SIZES[table] else None
                    for value in ids[begin:end]
                    if value != LEFT_OUT
                ]
                for begin, end in pairwise(bounds)
            ]
        )
    locations = [(*pair, column * DIM) for column, pair in enumerate(pairs)]
    lookups = Lookups(locations, is_mean=draw(st.booleans()) and not is_one_hot)
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    weights = torch.arange(1.0, num_ids + 1) if draw(st.booleans()) else None
    entry, bags = made_of(
        lookups,
        torch.tensor(ids, dtype=dtype),
        None if is_one_hot else torch.from_numpy(offsets).to(dtype),
        weights,
        batch_size,
    )
    if not is_one_hot and draw(st.booleans()):  # without the end of the last bag
        bags = bags._replace(offsets=bags.offsets[:-1])
    return Made(entry, bags._replace(num_bags=num_bags), rows)


def flat(bags_of):
    return [row for bags in bags_of for bag in bags for row in bag if row is not None]


ledgers = st.lists(entries(), min_size=1, max_size=3)
ONE = Lookups([(0, 0, 0)], is_mean=False)
some_rows = st.sets(st.integers(0, sum(SIZES) - 1))


def array(rows):
    return np.array(sorted(rows), np.int64)


def stale_in(marks):
    found = [marks.stale_rows(table) + FIRSTS[table] for table in range(len(SIZES))]
    return np.concatenate(found).tolist()


@pytest.mark.threads
@given(st.lists(ledgers, max_size=3))
def test_each_distinct_row_of_an_update_counts_once(updates):
    marks, expected = RowMarks(SIZES), {}
    for ledger in updates:
        marks.count([made.entry for made in ledger])
        for row in {row for made in ledger for row in flat(made.rows)}:
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
    lookups = Lookups([(table, table, 2 * table) for table in range(3)], is_mean=False)
    entry, _ = made_of(lookups, values, batch_size=batch_size)
    marks = RowMarks(sizes)
    for _ in range(3):
        marks.count([entry])
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
    entry, _ = made_of(ONE, [1, 2, 2])
    for _ in range(3):
        marks.count([entry])
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
    marks.set_stale(np.arange(4), True)

    marks.all_stale(ONE, made_of(ONE, [-1, 2])[1], found)

    assert found.tolist() == [False, True]


@pytest.mark.parametrize("offsets", [[1, 1, 2], [0, 2, 1], [0, 1, 3]])
def test_offsets_that_no_lookup_takes_are_refused(offsets):
    _, bags = made_of(ONE, [1, 2], torch.tensor(offsets))
    with pytest.raises(MalformedBags, match="offsets must ascend"):
        RowMarks([4]).all_stale(ONE, bags, np.ones(2, bool))


@given(entries(), some_rows)
def test_a_bag_is_stale_if_all_its_rows_are(made, stale):
    marks = RowMarks(SIZES)
    marks.set_stale(array(stale), True)
    found = np.ones(made.bags.num_samples, bool)
    marks.all_stale(made.entry.call.lookups, made.bags, found)
    expected = [
        all(row in stale for bags in made.rows for row in bags[sample])
        for sample in range(made.bags.num_samples)
    ]
    assert found.tolist() == expected


def contributions(entry, kept):
    """For each lookup and bag, the rows that are not left out, each with its factor."""
    call, found = entry.call, []
    ids, bounds = call.kept[: call.num_ids].tolist(), call.kept[call.num_ids :].tolist()
    bounds = bounds if call.num_bounds else list(range(len(ids) + 1))
    for table, position, column in call.lookups.locations:
        for sample in range(call.num_samples):
            begin, end = bounds[position * call.num_samples + sample :][:2]
            places = [at for at in range(begin, end) if ids[at] != LEFT_OUT]
            for at in places:
                factor = np.float32(1 if call.weights is None else float(call.weights[at]))
                if call.lookups.is_mean:
                    factor = factor / np.float32(len(places))
                if 0 <= ids[at] < SIZES[table] and FIRSTS[table] + ids[at] in kept:
                    found.append((table, sample, column, ids[at], float(factor)))
    return found


@given(st.lists(entries(), max_size=3), some_rows)
def test_without_stale_rows_the_other_rows_keep_their_gradients(ledger, stale):
    marks, every = RowMarks(SIZES), set(range(sum(SIZES)))
    marks.is_freezing = True
    marks.set_stale(array(stale), True)
    ledger = [made.entry for made in ledger]
    expected = [each for entry in ledger for each in contributions(entry, every - stale)]

    found = marks.before_update(ledger)

    assert [each for entry in found for each in contributions(entry, every)] == expected


def test_a_ledger_without_stale_rows_is_not_copied():
    marks, (entry, _) = RowMarks([5]), made_of(ONE, [1, 2])
    ledger, marks.is_freezing = [entry], True
    assert marks.before_update(ledger) is ledger
    marks.set_stale(np.array([4]), True)
    assert marks.before_update(ledger)[0] is entry


@given(st.lists(st.integers(0, 200), min_size=1))
def test_bytes_are_those_allocated(sizes):
    marks = RowMarks(sizes)
    arrays = marks._stale, marks._counts, marks._is_counted
    assert sum(array.nbytes for array in arrays) == marks_bytes(sizes)
