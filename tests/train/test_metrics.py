import math
import warnings
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys._support.auc import area_under_curve
from recsys.train.metrics.metrics import MetricsAccumulator, auc, evaluate_logits


def scores_and_labels(num_samples, width, seed=0):
    """Scores within `width` of each other, and labels that they predict."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=num_samples)
    labels = rng.random(num_samples) < 1 / (1 + np.exp(1 - scores))
    return (1.5 + width * scores).astype(np.float32), labels.astype(np.float32)


def area_of_counts(positives, negatives):
    """AUC of samples counted by score, pair by pair."""
    wins = sum(
        int(more) * int(less) * Fraction((high > low) - (high < low) + 1, 2)
        for high, more in enumerate(positives)
        for low, less in enumerate(negatives)
    )
    return wins / (int(positives.sum()) * int(negatives.sum()))


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


@pytest.mark.parametrize("logit", [-80.0, -37.0, -20.0, 20.0, 80.0])
def test_calibration_sums_predictions_of_any_size(logit):
    labels = np.array([1.0, 0.0, 0.0, 0.0])

    found = evaluate_logits(np.full(4, logit, np.float32), labels)

    assert found.calibration == pytest.approx(4 / (1 + math.exp(-logit)), rel=1e-12, abs=0)


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


def test_the_area_of_no_samples_is_open():
    assert auc(np.zeros(0), np.zeros(0)) is None


@pytest.mark.parametrize("bad", [-1.0, np.nan, 0.5, 2.0])
def test_labels_that_are_neither_0_nor_1_are_refused(bad):
    logits, labels = np.zeros(4, np.float32), np.array([0.0, 1.0, bad, bad])
    message = rf"labels must be 0 or 1, got {bad} at place 2 \(2 of 4 are invalid\)"

    with pytest.raises(ValueError, match=f"metrics: {message}"):
        evaluate_logits(logits, labels)
    with pytest.raises(ValueError, match=f"auc: {message}"):
        auc(logits, labels)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.int64, np.bool_])
def test_labels_may_have_any_dtype(dtype):
    logits, labels = np.array([1.0, -1.0, 0.5], np.float32), np.array([1, 0, 0], dtype)

    assert evaluate_logits(logits, labels).auc == auc(logits, labels) == 1.0


def test_logits_that_are_not_float32_are_refused_in_any_batch():
    logits, labels = np.zeros(4, np.float32), np.array([0, 1, 0, 1])
    accumulator = MetricsAccumulator(max_exact_samples=3)

    for _ in range(3):  # kept, counted in bins, counted in bins
        with pytest.raises(ValueError, match=r"must be float32, got float64; round them with ast"):
            accumulator.add(logits.astype(np.float64), labels)
        accumulator.add(logits, labels)

    assert accumulator.result().num_samples == 12


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


def test_more_pairs_than_64_bits_can_count_are_counted():
    positives, negatives = np.array([2**31, 2**32, 2**33 + 1]), np.array([2**33, 2**32, 3])

    found = area_under_curve(positives, negatives)

    assert found == float(area_of_counts(positives, negatives))


@pytest.mark.parametrize("width", [1.0, 1e-3, 1e-6])
def test_auc_counted_in_bins_is_within_the_error_it_states(width, monkeypatch):
    monkeypatch.setattr("recsys.train.metrics.metrics._NUM_BINS", 1 << 14)
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


def counted_in_bins(batches, max_exact_samples, num_bins):
    """The metrics of (scores, labels) batches; large errors, which few samples have, unsaid."""
    accumulator = MetricsAccumulator(max_exact_samples)
    with mock.patch("recsys.train.metrics.metrics._NUM_BINS", num_bins), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scores, labels in batches:
            accumulator.add(scores, labels)
        return accumulator.result()


def assert_within_stated_error(batches, max_exact_samples, num_bins):
    found = counted_in_bins(batches, max_exact_samples, num_bins)

    scores, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    exact = auc(scores, labels)
    if exact is None:
        assert (found.auc, found.max_auc_error, found.auc_standard_error) == (None, None, None)
    else:
        assert abs(Fraction(found.auc) - Fraction(exact)) <= Fraction(found.max_auc_error)
    return found


def one_of(*kinds):
    return st.lists(st.tuples(st.one_of(*kinds), st.booleans()), min_size=1, max_size=12)


ulps = st.integers(-6, 6).map(lambda n: float(np.float32(1.5) + n * np.float32(2**-23)))
denormals = st.integers(-6, 6).map(lambda n: n * 2.0**-149)
huge = st.integers(0, 3).map(lambda n: float(np.finfo(np.float32).max) * (1 - n * 2.0**-24 * 2))
anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
ties = st.integers(-2, 2).map(float)
SCORES = (ulps, denormals, huge, huge.map(lambda score: -score), anything, ties)


@given(
    batches=st.lists(st.one_of(*map(one_of, SCORES), one_of(*SCORES)), min_size=1, max_size=6),
    max_exact_samples=st.integers(0, 30),
    num_bins=st.sampled_from([1, 2, 3, 8, 1 << 10]),
)
def test_no_scores_whatever_exceed_the_stated_error(batches, max_exact_samples, num_bins):
    arrays = [
        (np.array([s for s, _ in batch], np.float32), np.array([label for _, label in batch]))
        for batch in batches
    ]

    assert_within_stated_error(arrays, max_exact_samples, num_bins)


@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(
        st.sampled_from(["normal", "narrow", "tied", "constant", "sorted", "moved", "one class"]),
        min_size=2,
        max_size=5,
    ),
    num_bins=st.sampled_from([4, 100, 1 << 12]),
)
def test_no_drift_of_many_scores_exceeds_the_stated_error(seed, kinds, num_bins):
    batches = []
    for number, kind in enumerate(kinds):
        scores, labels = scores_and_labels(1_000, 1e-6 if kind == "narrow" else 1.0, seed + number)
        if kind == "tied":
            scores[::3] = 0.25
        elif kind == "constant":
            scores[:] = scores[0]
        elif kind == "sorted":
            scores.sort()
        elif kind == "moved":
            scores *= 1e30
        elif kind == "one class":
            labels[:] = 1
        batches.append((scores, labels))

    assert_within_stated_error(batches, 1_500, num_bins)


@given(
    samples=st.lists(st.tuples(st.one_of(*SCORES), st.booleans()), min_size=1, max_size=40),
    data=st.data(),
)
def test_scores_that_were_among_the_first_ones_leave_no_error(samples, data):
    scores, labels = (np.array(column) for column in zip(*samples, strict=True))
    order = np.array(data.draw(st.permutations(range(len(samples)))))
    batches = [(scores.astype(np.float32), labels)]
    batches.append((batches[0][0][order], ~labels))

    found = counted_in_bins(batches, 0, 1 << 10)

    assert found.max_auc_error == 0.0
    assert found.auc == auc(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))


@pytest.mark.parametrize("kind", ["constant", "tied", "integers", "zero or normal"])
def test_tied_scores_leave_next_to_no_error(kind):
    scores, labels = scores_and_labels(200_000, 1.0)
    if kind == "constant":
        scores[:] = -1.1
    elif kind == "tied":
        scores[np.random.default_rng(1).random(200_000) < 0.3] = 1.7
    elif kind == "integers":
        scores = np.round(4 * scores)
    else:
        scores = np.maximum(scores - 1.5, 0)

    found = assert_within_stated_error(
        [(scores[part::8], labels[part::8]) for part in range(8)], 50_000, 1 << 14
    )

    assert found.max_auc_error < 2e-5


def test_a_large_error_is_told_aloud():
    accumulator = MetricsAccumulator(max_exact_samples=10)
    accumulator.add(np.full(11, 0.0, np.float32), np.arange(11) % 2)
    scores, labels = scores_and_labels(1000, 1.0)
    accumulator.add(scores, labels)

    with pytest.warns(UserWarning, match=r"may be wrong by up to .* made for the first 11; raise"):
        accumulator.result()
