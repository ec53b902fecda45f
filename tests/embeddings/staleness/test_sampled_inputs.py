"""Sampled inputs, and the threshold as a quantile of their levels."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.rows.bags import Bags, Lookups
from recsys.embeddings.staleness import sampled_inputs
from recsys.embeddings.staleness.sampled_inputs import (
    InputRows,
    SampledInputs,
    bags_per_sample,
    below_ties,
    quantile,
)

FIRSTS = [np.array([0, 10, 16], np.uint64), np.array([0, 4], np.uint64)]


def lookups_of(*tables):
    return Lookups([(table, place, place) for place, table in enumerate(tables)], is_mean=False)


def bags_of(ids, batch_size, offsets=None):
    ids = torch.as_tensor(ids)
    num_bags = len(ids) if offsets is None else len(offsets) - 1
    offsets = None if offsets is None else torch.tensor(offsets)
    return Bags(ids, offsets, None, batch_size, num_bags)


@given(
    st.lists(st.floats(0, 1) | st.just(math.inf), max_size=30),
    st.floats(0, 1) | st.sampled_from([0.1, 0.2, 0.3]),
)
def test_the_quantile_is_the_highest_level_that_keeps_the_share(levels, share):
    found = quantile(np.array(levels), share)
    allowed = int(share * len(levels))  # inputs
    if allowed == 0:
        assert found == -math.inf
        return
    below = sum(level < found for level in levels)
    at_most = sum(level <= found for level in levels)
    assert below < allowed <= at_most
    assert found in levels
    if len(set(levels)) == len(levels):
        assert at_most == allowed
        assert Fraction(at_most) <= Fraction(share) * len(levels) + Fraction(1, 10**9)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.floats(0.01, 1))
def test_ties_exceed_the_share_by_a_half_at_most(levels, share):
    array = np.array(levels, np.float64)
    threshold = quantile(array, share)
    found = below_ties(array, threshold, share)
    num_wanted = share * len(levels)
    if (array <= threshold).sum() <= 1.5 * num_wanted:
        assert found == threshold
        return
    assert found == max((each for each in levels if each < threshold), default=-math.inf)
    assert (array <= found).sum() < num_wanted


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.99])
def test_the_quantile_equals_a_search_by_bisection(share):
    levels = np.random.default_rng(0).random(4096)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if (levels <= middle).mean() * len(levels) >= int(share * len(levels)):
            high = middle
        else:
            low = middle
    assert quantile(levels, share) == pytest.approx(high, abs=1e-12)


@given(
    st.lists(st.lists(st.integers(-1, 15), max_size=4), max_size=8),
    st.dictionaries(st.integers(0, 15), st.floats(0, 5)),
)
def test_an_input_has_the_greatest_level_of_its_rows(inputs, levels):
    rows = np.array([row for each in inputs for row in each], np.int64)
    bounds = np.cumsum([0, *map(len, inputs)])
    followed = np.array(sorted(levels), np.int64)
    found = np.full(len(inputs), -np.inf)
    known = np.array([levels[row] for row in sorted(levels)], np.float64)
    InputRows(rows, bounds).raise_levels(followed, known, found)
    expected = [max((levels.get(r, np.inf) for r in each), default=-np.inf) for each in inputs]
    assert found.tolist() == expected


def test_rows_are_numbered_over_the_tables_of_each_group():
    inputs = SampledInputs(FIRSTS)
    one_hot = bags_of([1, 2, 3, 4, 5, 0], 3)
    jagged = bags_of([3, 9, 0], 3, [0, 2, 2, 3])
    parts = [(0, lookups_of(0, 1), one_hot), (1, lookups_of(0), jagged)]
    inputs.add(np.array([7, 9]), parts, 3, np.array([0, 2]))
    indices, groups = inputs.newest(100)
    assert indices.tolist() == [7, 9]
    assert [each.rows.tolist() for each in groups] == [[1, 14, 3, 10], [3, -1, 0]]
    assert [each.bounds.tolist() for each in groups] == [[0, 2, 4], [0, 2, 3]]


def test_a_sample_may_have_several_bags():
    inputs = SampledInputs(FIRSTS[:1])
    bags = bags_of([1, 2, 3, 4], 4)
    inputs.add(np.array([1]), [(0, lookups_of(0), bags)], 2, np.array([1]))
    _, [found] = inputs.newest(2)
    assert found.rows.tolist() == [3, 4]
    with pytest.raises(ValueError, match="4 bags is not of 3 samples"):
        bags_per_sample(bags, 3)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.lists(st.booleans(), min_size=3, max_size=3))),
    st.integers(0, 40),
    st.integers(1, 6),
)
def test_the_newest_inputs_that_are_used_up_are_chosen(steps, num_seen, most):
    inputs, expected = SampledInputs(FIRSTS[:1]), []
    before, sampled_inputs.MOST_INPUTS = sampled_inputs.MOST_INPUTS, most
    try:
        for number, (first, is_chosen) in enumerate(steps):
            samples = np.flatnonzero(is_chosen)
            bags = bags_of(np.arange(3) + first % 5, 3)
            indices = 3 * first + samples
            inputs.add(indices, [(0, lookups_of(0), bags)], 3, samples)
            if len(samples):
                expected = [each for each in expected if each[0] < indices[0]]
                expected += [(int(i), int(i) % 3 + first % 5) for i in indices]
            # Those that are used up by now; none of them is taken again.
            inputs.trim(min([num_seen, *(3 * later for later, _ in steps[number + 1 :])]))
        indices, [found] = inputs.newest(num_seen)
    finally:
        sampled_inputs.MOST_INPUTS = before
    chosen = [each for each in expected if each[0] < num_seen][-most:]
    assert list(zip(indices.tolist(), found.rows.tolist(), strict=True)) == chosen


def test_inputs_that_no_window_uses_are_forgotten_when_others_are_added(monkeypatch):
    monkeypatch.setattr(sampled_inputs, "MOST_INPUTS", 10)
    inputs = SampledInputs(FIRSTS[:1])
    bags = bags_of(np.arange(4), 4)
    num_held = []
    for number in range(20):  # two mini-batches of 4 are taken ahead
        inputs.add(4 * number + np.arange(4), [(0, lookups_of(0), bags)], 4, np.arange(4))
        inputs.trim(4 * (number - 2))
        num_held.append(sum(len(each.indices) for each in inputs._chunks))
    # 3 mini-batches have the 10 newest that are used up; 3 were taken after them.
    assert max(num_held) == 4 * (3 + 3)
    assert inputs.newest(4 * 18)[0].tolist() == list(range(62, 72))
