"""Metrics are their definitions, worked out in plain Python, pair by pair and item by item."""

import math
from math import log2

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.train.metrics import (
    MetricsAccumulator,
    Rankings,
    auc,
    evaluate_groups,
)

SAMPLES = st.lists(
    st.tuples(st.integers(-3, 3), st.booleans(), st.integers(-2, 3)), min_size=1, max_size=60
)
ALL = np.ones(3, np.bool_)


def evaluate_logits(logits, labels):
    """All metrics of some samples."""
    accumulator = MetricsAccumulator()
    accumulator.add(logits, labels)
    return accumulator.result()


def arrays(samples):
    scores, labels, keys = map(np.array, zip(*samples, strict=True))
    return scores.astype(np.float32), labels.astype(np.int8), keys


def wins_of(samples):
    """For each positive sample: whether it has the higher score than each negative one."""
    scores = {
        is_positive: [s for s, label, _ in samples if label == is_positive]
        for is_positive in (0, 1)
    }
    return np.array([[np.sign(one - zero) / 2 + 0.5 for zero in scores[0]] for one in scores[1]])


def approx(value):
    return None if value is None else pytest.approx(value, abs=1e-12)


@given(SAMPLES)
def test_auc_gauc_and_the_standard_error_are_their_definitions(samples):
    scores, labels, keys = arrays(samples)
    wins = wins_of(samples)
    error = None
    if min(wins.shape) > 1 and wins.ndim > 1:
        both = (np.var(wins.mean(axis=1 - side), ddof=1) / wins.shape[side] for side in (0, 1))
        error = np.sqrt(sum(both))
    own = [[each for each in samples if each[2] == key] for key in set(keys.tolist())]
    judged = [(wins_of(group).mean(), len(group)) for group in own if wins_of(group).size]

    found, of_groups = evaluate_logits(scores, labels), evaluate_groups(scores, labels, keys)

    assert found["auc"] == auc(scores, labels) == approx(wins.mean() if wins.size else None)
    assert found["auc_standard_error"] == approx(error)
    total = sum(count for _, count in judged)
    gauc = sum(area * count for area, count in judged) / total if judged else None
    assert of_groups["gauc"] == approx(gauc)
    assert (of_groups["num_groups"], of_groups["num_groups_left_out"]) == (
        len(judged),
        len(own) - len(judged),
    )


def test_auc_distinguishes_scores_that_lie_close_together():
    # A histogram of probabilities sees one bin here.
    above = np.nextafter(np.float32(0.5), np.float32(1), dtype=np.float32)

    assert auc(np.array([0.5, above, 0.5, above], np.float32), np.array([0, 1, 0, 1])) == 1.0


def test_the_other_metrics_are_their_definitions():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=1000).astype(np.float32) * 5
    labels = (rng.random(1000) < 0.3).astype(np.float32)
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(logits).double(), torch.from_numpy(labels).double()
    ).item()
    rate = labels.mean(dtype=np.float64)

    found = evaluate_logits(logits, labels)

    assert found["logloss"] == pytest.approx(loss, rel=1e-12)
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    assert found["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-12)
    assert found["calibration"] == pytest.approx(probabilities.mean() / rate, rel=1e-12)
    assert found["accuracy"] == np.mean((probabilities > 0.5) == (labels == 1))
    assert (found["num_samples"], found["num_positives"]) == (1000, labels.sum())


@pytest.mark.parametrize("logit", [-200.0, -37.0, -20.0, 20.0, 200.0])
def test_logits_of_any_size_have_finite_losses_and_exact_calibrations(logit):
    found = evaluate_logits(np.full(4, logit, np.float32), np.array([1.0, 0.0, 0.0, 0.0]))

    softplus = np.logaddexp(0, logit)
    assert found["logloss"] == pytest.approx(softplus - logit / 4, rel=1e-12)
    assert found["calibration"] == pytest.approx(4 * math.exp(logit - softplus), rel=1e-12, abs=0)


def test_labels_that_agree_leave_open_what_has_no_meaning():
    found, none = evaluate_logits(np.zeros(3, np.float32), np.zeros(3)), np.zeros(0, np.float32)

    assert (found["auc"], found["normalized_entropy"], found["calibration"]) == (None, None, None)
    assert found["logloss"] == pytest.approx(np.log(2))
    assert auc(none, none) is None


def test_batches_in_any_order_and_of_any_dtype_have_the_auc_of_all_samples():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=20_000).astype(np.float32).round(2)
    labels = (rng.random(20_000) < 1 / (1 + np.exp(1 - scores))).astype(np.int64)
    accumulator, buffer = MetricsAccumulator(), np.empty(3000, np.float32)

    dtypes = [np.float32, np.int8, np.int64, np.bool_]
    for place, begin in enumerate(reversed(range(0, len(scores), 3000))):
        part = slice(begin, begin + 3000)
        own = buffer[: len(scores[part])]
        own[:] = scores[part]  # the caller's array may be used again
        accumulator.add(own, labels[part].astype(dtypes[place % 4]))

    assert accumulator.result()["auc"] == auc(scores, labels)


def test_the_standard_error_is_the_spread_over_samples_drawn_anew():
    found = []
    for seed in range(400):
        rng = np.random.default_rng(seed)
        scores = rng.normal(size=500)
        labels = rng.random(500) < 1 / (1 + np.exp(1 - scores))
        found.append(evaluate_logits(scores.astype(np.float32), labels))

    spread = np.std([metrics["auc"] for metrics in found])
    errors = [metrics["auc_standard_error"] for metrics in found]
    assert np.mean(errors) == pytest.approx(spread, rel=0.12)


@st.composite
def rankings(draw):
    """Scores of items, which of them are candidates, and some candidates as relevant items."""
    scores = draw(st.lists(st.integers(-3, 3), min_size=1, max_size=30))
    is_candidate = draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    candidates = [item for item, is_one in enumerate(is_candidate) if is_one]
    relevant = draw(st.lists(st.sampled_from(candidates), unique=True)) if candidates else []
    return scores, is_candidate, relevant


@given(rankings(), st.integers(1, 12), st.integers(0, 3))
def test_recall_and_ndcg_are_their_definitions(ranking, k, num_unknown):
    scores, is_candidate, relevant = ranking
    num_relevant = len(relevant) + num_unknown
    if not num_relevant:
        return
    # After all other candidates of at least its score.
    expected = [
        1
        + sum(
            is_candidate[o] and o != item and scores[o] >= scores[item] for o in range(len(scores))
        )
        for item in relevant
    ]

    found = Rankings(k)
    given = np.array(scores, np.float32), np.array(relevant, np.int64), np.array(is_candidate)
    found.add(0, *given, num_unknown)

    places = [place for place in expected if place <= k]
    best = sum(1 / log2(1 + place) for place in range(1, min(k, num_relevant) + 1))
    assert found.result()["recall_at_k"] == len(places) / num_relevant
    ndcg = sum(1 / log2(1 + place) for place in places) / best
    assert found.result()["ndcg_at_k"] == pytest.approx(ndcg, abs=1e-12)
    assert ndcg <= 1


def test_a_group_counts_once_however_many_rankings_it_has():
    found = Rankings(2)
    asked = ((5, 0, 0), (3, 0, 0), (5, 2, 0), (5, 2, 0), (5, 2, 0), (8, 1, 1))
    for group, relevant, num_unknown in asked:
        found.add(group, np.array([3, 2, 1]), np.array([relevant]), ALL, num_unknown)

    recalls = np.array([1, 1 / 4, 1 / 2])
    ndcgs = np.array([1, 1 / 4, (1 / log2(3)) / (1 + 1 / log2(3))])
    assert found.result() == {
        "recall_at_k": pytest.approx(recalls.mean()),
        "recall_standard_error": pytest.approx(recalls.std(ddof=1) / 3**0.5),
        "ndcg_at_k": pytest.approx(ndcgs.mean()),
        "ndcg_standard_error": pytest.approx(ndcgs.std(ddof=1) / 3**0.5),
        "ranking_k": 2,
        "num_rankings": 6,
        "num_unknown_items": 1,
    }


def test_without_two_groups_there_is_no_error():
    none, one = Rankings(5).result(), Rankings(5)
    one.add(7, np.zeros(3), np.array([0]), ALL)

    assert (none["recall_at_k"], none["ndcg_at_k"], none["num_rankings"]) == (None, None, 0)
    assert one.result()["recall_standard_error"] is None


@pytest.mark.parametrize("labels", [[0, 1, -1, -1], [0, 1, np.nan, 0], [0, 1, 0.5, 0.5], [0, 1, 2]])
def test_other_labels_and_scores_are_refused(labels):
    zeros = np.zeros(len(labels), np.float32)

    for judge in (evaluate_logits, auc):
        with pytest.raises(ValueError, match="labels"):
            judge(zeros, np.array(labels))
    with pytest.raises(ValueError, match="NaN"):
        auc(np.full(2, np.nan), np.array([0, 1]))
