import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.train.metrics import MetricsAccumulator, auc
from tests.train.judged_stores import evaluate_logits


def scores_and_labels(num_samples, width, seed=0):
    """Scores within `width` of each other, and labels that they predict."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=num_samples)
    labels = rng.random(num_samples) < 1 / (1 + np.exp(1 - scores))
    return (1.5 + width * scores).astype(np.float32), labels.astype(np.float32)


@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=1, max_size=60))
def test_auc_counts_pairs_with_ties_half(samples):
    scores = np.array([score for score, _ in samples], np.float32)
    labels = np.array([label for _, label in samples], np.float32)
    wins = [
        1.0 if positive > negative else 0.5 if positive == negative else 0.0
        for positive in scores[labels == 1]
        for negative in scores[labels == 0]
    ]
    expected = float(np.mean(wins)) if wins else None

    found = auc(scores, labels)

    assert found == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_auc_tells_scores_apart_that_lie_close_together():
    # A histogram of probabilities sees one bin here.
    scores = np.nextafter(np.float32(0.5), np.float32(1), dtype=np.float32)
    scores = np.array([0.5, scores, 0.5, scores], np.float32)

    assert auc(scores, np.array([0, 1, 0, 1])) == 1.0


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

    assert found.logloss == pytest.approx(loss, rel=1e-12)
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    assert found.normalized_entropy == pytest.approx(loss / entropy, rel=1e-12)
    assert found.calibration == pytest.approx(probabilities.mean() / rate, rel=1e-12)
    assert found.accuracy == np.mean((probabilities > 0.5) == (labels == 1))
    assert found.num_samples == 1000


def test_huge_logits_give_finite_losses():
    found = evaluate_logits(np.array([200.0, -200.0], np.float32), np.array([0.0, 1.0]))

    assert found.logloss == pytest.approx(200.0)
    assert found.auc == 0.0


@pytest.mark.parametrize("logit", [-80.0, -37.0, -20.0, 20.0, 80.0])
def test_calibration_sums_predictions_of_any_size(logit):
    labels = np.array([1.0, 0.0, 0.0, 0.0])

    found = evaluate_logits(np.full(4, logit, np.float32), labels)

    assert found.calibration == pytest.approx(4 / (1 + math.exp(-logit)), rel=1e-12, abs=0)


def test_labels_that_agree_leave_open_what_has_no_meaning():
    found = evaluate_logits(np.zeros(3, np.float32), np.zeros(3))

    assert (found.auc, found.normalized_entropy, found.calibration) == (None, None, None)
    assert found.logloss == pytest.approx(np.log(2))


def test_the_area_of_no_samples_is_open():
    assert auc(np.zeros(0), np.zeros(0)) is None


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.int64, np.bool_])
def test_labels_may_have_any_dtype(dtype):
    logits, labels = np.array([1.0, -1.0, 0.5], np.float32), np.array([1, 0, 0], dtype)

    assert evaluate_logits(logits, labels).auc == auc(logits, labels) == 1.0


def test_the_callers_array_may_be_used_again():
    buffer, labels = np.array([1.0, -1.0], np.float32), np.array([1, 0])
    accumulator = MetricsAccumulator()

    accumulator.add(buffer, labels)
    buffer[:] = -buffer
    accumulator.add(buffer, labels[::-1])

    assert accumulator.result().auc == 1.0


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=40))
def test_the_standard_error_is_the_published_formula(samples):
    scores = np.array([score for score, _ in samples], np.float32)
    labels = np.array([label for _, label in samples])
    wins = np.array(
        [
            [np.sign(positive - negative) / 2 + 0.5 for negative in scores[~labels]]
            for positive in scores[labels]
        ],
        np.float64,
    )
    expected = None
    if labels.sum() > 1 and (~labels).sum() > 1:
        expected = np.sqrt(
            sum(np.var(wins.mean(axis=1 - side), ddof=1) / wins.shape[side] for side in (0, 1))
        )

    found = evaluate_logits(scores, labels).auc_standard_error

    assert found == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_the_standard_error_is_the_spread_over_samples_drawn_anew():
    found = [evaluate_logits(*scores_and_labels(500, 1.0, seed)) for seed in range(400)]

    spread = np.std([metrics.auc for metrics in found])
    assert np.mean([metrics.auc_standard_error for metrics in found]) == pytest.approx(
        spread, rel=0.12
    )


def test_batches_in_any_order_have_the_auc_of_all_samples():
    scores, labels = scores_and_labels(20_000, 1e-6)
    accumulator = MetricsAccumulator()

    for begin in reversed(range(0, len(scores), 3000)):
        accumulator.add(scores[begin : begin + 3000], labels[begin : begin + 3000])

    assert accumulator.result().auc == auc(scores, labels)
