import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.metrics import MetricsAccumulator, auc, evaluate_logits


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


def test_auc_refuses_scores_that_are_no_numbers():
    with pytest.raises(ValueError, match="1 of 2 scores are NaN"):
        auc(np.array([0.5, np.nan]), np.array([0, 1]))
    with pytest.raises(ValueError, match=r"must both be \(N,\)"):
        auc(np.zeros(2), np.zeros(3))


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


def test_labels_that_agree_leave_open_what_has_no_meaning():
    found = evaluate_logits(np.zeros(3, np.float32), np.zeros(3))

    assert (found.auc, found.normalized_entropy, found.calibration) == (None, None, None)
    assert found.logloss == pytest.approx(np.log(2))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_logits_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="1 of 2 logits are not finite"):
        evaluate_logits(np.array([bad, 0.0], np.float32), np.array([0.0, 1.0]))


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        evaluate_logits(np.zeros(0, np.float32), np.zeros(0))


def scores_and_labels(num_samples, width, seed=0):
    """Scores within `width` of each other, and labels that they predict."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=num_samples)
    labels = rng.random(num_samples) < 1 / (1 + np.exp(1 - scores))
    return (1.5 + width * scores).astype(np.float32), labels.astype(np.float32)


@pytest.mark.parametrize("width", [1.0, 1e-3, 1e-6])
def test_auc_counted_in_bins_is_within_the_error_it_states(width, monkeypatch):
    monkeypatch.setattr("recsys.metrics._NUM_BINS", 1 << 14)
    scores, labels = scores_and_labels(200_000, width)
    accumulator = MetricsAccumulator(max_exact_samples=50_000)

    for begin in range(0, len(scores), 8192):
        accumulator.add(scores[begin : begin + 8192], labels[begin : begin + 8192])

    found, exact = accumulator.result(), evaluate_logits(scores, labels)
    assert exact.max_auc_error == 0.0
    assert 0 <= found.max_auc_error < 1e-4
    assert abs(found.auc - exact.auc) <= found.max_auc_error
    assert found.logloss == pytest.approx(exact.logloss, rel=1e-12)
    assert found.num_samples == 200_000


def test_bins_of_equal_width_would_not_do():
    scores, labels = scores_and_labels(200_000, 1e-6)
    exact = evaluate_logits(scores, labels).auc
    probabilities = 1 / (1 + np.exp(-scores.astype(np.float64)))

    coarse = auc(np.floor(probabilities * 65_536), labels)

    assert abs(coarse - exact) > 1e-2


@given(st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=80))
def test_the_stated_error_holds_for_any_samples(samples):
    scores = np.array([score for score, _ in samples], np.float32)
    labels = np.array([label for _, label in samples], np.float32)
    accumulator = MetricsAccumulator(max_exact_samples=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large errors: these are few samples
        for number in range(0, len(scores), 7):
            accumulator.add(scores[number : number + 7], labels[number : number + 7])
        found = accumulator.result()

    exact = auc(scores, labels)
    if exact is None:
        assert found.auc is None
    else:
        assert abs(found.auc - exact) <= found.max_auc_error + 1e-12


def test_a_large_error_is_told_aloud():
    accumulator = MetricsAccumulator(max_exact_samples=10)
    accumulator.add(np.full(11, 0.0, np.float32), np.arange(11) % 2)
    scores, labels = scores_and_labels(1000, 1.0)
    accumulator.add(scores, labels)

    with pytest.warns(UserWarning, match="may be wrong by up to"):
        accumulator.result()
