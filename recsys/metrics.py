"""How good predictions are: AUC, logloss, normalized entropy, calibration, accuracy.

`MetricsAccumulator` takes scores batch by batch. Sums run in float64. AUC is exact up to a number
of samples, every float32 score being kept and sorted; beyond it the scores are counted in bins, and
the result says by how much it can be wrong at most:

    the bins' edges are quantiles of the scores kept until then, so that every bin holds about as
    many samples as any other, however close together scores lie (bins of equal width in probability
    would put most of them into a few); a score that is more than one of the quantiles, because many
    samples have it, gets a bin of its own;
    two samples of one bin count as a tie, where the exact AUC counts 0 or 1 (or a half), so with
    p positive and n negative samples per bin, out of P and N, the error is at most
    sum(p * n) / (2 * P * N), taken over the bins that can hold different scores.

Scores must be float32 for that: rounding others to fit the bins would make ties that are none.
Pairs are counted in integers, so where scores were not counted in bins, or every bin holds one
score, AUC is exact but for its last bit.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Metrics", "MetricsAccumulator", "auc", "evaluate_logits"]

_MAX_EXACT_SAMPLES = 1 << 26
_NUM_BINS = 1 << 20
_WORRYING_AUC_ERROR = 1e-4
_ROUNDING = 2.0**-52  # of two AUCs and a bound in float64


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Quality over a set of samples.

    Attributes:
        auc: Probability that a positive sample outscores a negative one, ties counted half; None if
            all labels agree.
        auc_standard_error: How far `auc` strays from that of endlessly many such samples; None with
            fewer than two positive or two negative samples. For the difference of two models on the
            same samples it is too large.
        max_auc_error: By how much `auc` can be wrong at most; 0 where it is exact, None as `auc`.
        logloss: Mean binary cross-entropy, in nats.
        normalized_entropy: `logloss` over that of always predicting the mean label; None if all
            labels agree.
        calibration: Mean prediction over mean label; None without positive labels.
        accuracy: Share of predictions on the right side of 0.5.
        num_samples: How many samples.
    """

    auc: float | None
    auc_standard_error: float | None
    max_auc_error: float | None
    logloss: float
    normalized_entropy: float | None
    calibration: float | None
    accuracy: float
    num_samples: int

    def as_dict(self) -> dict[str, Any]:
        """JSON types, under the names of the run record."""
        return asdict(self)


class MetricsAccumulator:
    """Gathers logits and labels, and computes the metrics of all of them.

    Args:
        max_exact_samples: Up to so many samples AUC is exact; they take 5 bytes each, and some
            50 more while they are sorted.
    """

    def __init__(self, max_exact_samples: int = _MAX_EXACT_SAMPLES) -> None:
        self.num_samples = 0
        self._max_exact_samples = max_exact_samples
        self._logits: list[NDArray[np.float32]] = []
        self._is_positive: list[NDArray[np.bool_]] = []
        self._histogram: _Histogram | None = None
        self._loss = self._prediction = 0.0
        self._num_positive = self._num_right = 0

    def add(self, logits: NDArray[np.float32], labels: NDArray[Any]) -> None:
        """Take note of more samples.

        Shape:
            logits (N,) float32, before the sigmoid; labels (N,) 0 or 1.

        Raises:
            ValueError: shapes differ, logits are not float32, one is not finite, or a label is
                neither 0 nor 1.
        """
        _require_same_length("metrics", logits, labels)
        if logits.dtype != np.float32:
            raise ValueError(
                f"metrics: logits must be float32, got {logits.dtype}; round them with "
                "astype(numpy.float32) if the ties that makes do not matter"
            )
        num_bad = len(logits) - int(np.count_nonzero(np.isfinite(logits)))
        if num_bad:
            raise ValueError(f"metrics: {num_bad} of {len(logits)} logits are not finite")
        is_positive = _is_positive("metrics", labels)
        wide = logits.astype(np.float64)
        self._loss += float(np.sum(np.logaddexp(0, wide) - is_positive * wide))
        self._prediction += float(np.sum(0.5 * (1 + np.tanh(wide / 2))))
        self._num_positive += int(np.count_nonzero(is_positive))
        self._num_right += int(np.count_nonzero((wide > 0) == is_positive))
        self.num_samples += len(logits)
        if self._histogram is not None:
            self._histogram.add(logits, is_positive)
            return
        self._logits.append(logits.copy())  # the caller's array may be used again
        self._is_positive.append(is_positive)
        if self.num_samples > self._max_exact_samples:
            kept, labels_of_kept = np.concatenate(self._logits), np.concatenate(self._is_positive)
            self._logits, self._is_positive = [], []
            self._histogram = _Histogram(kept)
            self._histogram.add(kept, labels_of_kept)

    def result(self) -> Metrics:
        """The metrics of all samples so far.

        Raises:
            ValueError: there are none.
        """
        if not self.num_samples:
            raise ValueError("metrics: at least one sample is needed, got none")
        if self._histogram is None:
            positives, negatives = _count_by_score(
                np.concatenate(self._logits), np.concatenate(self._is_positive)
            )
            max_error = 0.0
        else:
            positives, negatives = self._histogram.counts
            max_error = self._histogram.max_auc_error()
        area = _area(positives, negatives)
        if self._histogram is not None and max_error > _WORRYING_AUC_ERROR:
            warnings.warn(
                f"AUC {area:.5f} was counted in bins and may be wrong by up to {max_error:.1e}: "
                f"later scores crowd into few of the bins made for the first "
                f"{self._histogram.num_typical:,}; raise max_exact_samples or shuffle the samples",
                stacklevel=2,
            )
        logloss = self._loss / self.num_samples
        rate = self._num_positive / self.num_samples
        entropy = None
        if 0 < rate < 1:
            entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
        return Metrics(
            auc=area,
            auc_standard_error=_standard_error(positives, negatives),
            max_auc_error=None if area is None else max_error,
            logloss=logloss,
            normalized_entropy=None if entropy is None else float(logloss / entropy),
            calibration=self._prediction / self._num_positive if self._num_positive else None,
            accuracy=self._num_right / self.num_samples,
            num_samples=self.num_samples,
        )


def evaluate_logits(logits: NDArray[np.float32], labels: NDArray[Any]) -> Metrics:
    """All metrics at once; see `MetricsAccumulator`.

    Raises:
        ValueError: no samples, or what `MetricsAccumulator.add` refuses.
    """
    accumulator = MetricsAccumulator()
    accumulator.add(logits, labels)
    return accumulator.result()


def auc(scores: NDArray[Any], labels: NDArray[Any]) -> float | None:
    """Area under the ROC curve, exact, ties counted half.

    Shape:
        scores (N,) any order-preserving score; labels (N,) 0 or 1; result None if all labels agree,
        as those of no samples do.

    Raises:
        ValueError: a score is NaN, a label is neither 0 nor 1, or shapes differ.
    """
    _require_same_length("auc", scores, labels)
    num_bad = int(np.count_nonzero(np.isnan(scores)))
    if num_bad:
        raise ValueError(f"auc: {num_bad} of {len(scores)} scores are NaN; leave them out")
    return _area(*_count_by_score(scores, _is_positive("auc", labels)))


class _Histogram:
    """Positive and negative samples by score, in bins of about equal numbers.

    Args:
        typical_scores: What the bins are made for.

    Attributes:
        num_typical: How many these were.
        counts: Positive samples in its first row, negative ones in its second, by bin.
    """

    def __init__(self, typical_scores: NDArray[np.float32]) -> None:
        self.num_typical = len(typical_scores)
        places = np.linspace(0, self.num_typical - 1, _NUM_BINS).round().astype(np.int64)
        quantiles = np.sort(typical_scores)[places]
        # More than a bin's share of the samples have a score that is met again: it is fenced in.
        tied = quantiles[1:][quantiles[1:] == quantiles[:-1]]
        self._edges = np.unique(np.concatenate([quantiles, _next(tied)]))
        self.counts = np.zeros((2, len(self._edges) + 1), np.int64)
        # A bin that can hold one float32 alone makes no ties that are none.
        is_single = _next(self._edges[:-1]) == self._edges[1:]
        self._is_exact = np.concatenate([[False], is_single, [False]])

    def add(self, scores: NDArray[np.float32], is_positive: NDArray[np.bool_]) -> None:
        bins = np.searchsorted(self._edges, scores, side="right")
        for row, part in enumerate((is_positive, ~is_positive)):
            self.counts[row] += np.bincount(bins[part], minlength=self.counts.shape[1])

    def max_auc_error(self) -> float:
        """How far the AUC of `counts` can be from that of the scores; 0 where there is none."""
        positives, negatives = np.where(self._is_exact, 0, self.counts)
        num_mixed = _sum_of_products(positives, negatives)
        if not num_mixed:
            return 0.0
        num_pairs = int(self.counts[0].sum()) * int(self.counts[1].sum())
        return num_mixed / (2 * num_pairs) + _ROUNDING


def _next(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """The next larger float32 each, infinity behind the largest one."""
    with np.errstate(over="ignore"):
        return np.nextafter(scores, np.float32(np.inf))


def _count_by_score(
    scores: NDArray[Any], is_positive: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positive and negative samples at each distinct score, ascending."""
    order = np.argsort(scores)
    ascending = scores[order]
    is_last = np.ones(len(scores), np.bool_)
    is_last[:-1] = ascending[1:] != ascending[:-1]
    ends = np.flatnonzero(is_last)
    positives = np.diff(np.cumsum(is_positive[order], dtype=np.int64)[ends], prepend=0)
    return positives, np.diff(ends, prepend=-1) - positives


def _area(positives: NDArray[np.int64], negatives: NDArray[np.int64]) -> float | None:
    """AUC from the samples at each of ascending scores.

    A positive sample beats all negative ones of lower groups and half of its own.
    """
    num_pairs = int(positives.sum()) * int(negatives.sum())
    if not num_pairs:
        return None
    return _sum_of_products(positives, _twice_below(negatives)) / (2 * num_pairs)


def _standard_error(positives: NDArray[np.int64], negatives: NDArray[np.int64]) -> float | None:
    """Standard error of the AUC from the samples at each of ascending scores.

    The share of the negative samples that a positive one beats varies from one to the next; so does
    the share of the positive ones that beat a negative one. With the variance S10 of the former
    among m samples and S01 of the latter among n, that of the AUC is S10 / m + S01 / n.

    References:
        DeLong, DeLong and Clarke-Pearson (1988), "Comparing the areas under two or more correlated
        receiver operating characteristic curves", Biometrics 44, 837-845, for a single curve.
    """
    variance = 0.0
    for own, others in ((positives, negatives), (negatives, positives)):
        num_own, num_others = int(own.sum()), int(others.sum())
        if num_own < 2 or not num_others:
            return None
        shares = _twice_below(others) / (2 * num_others)
        shares -= np.dot(own, shares) / num_own
        variance += float(np.dot(own, shares * shares)) / (num_own - 1) / num_own
    return float(np.sqrt(variance))


def _twice_below(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each group, twice the samples of the groups below and those of its own."""
    return 2 * np.cumsum(counts) - counts


def _sum_of_products(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Exact, whatever its size; neither holds negative numbers."""
    if int(first.sum()) * int(second.max(initial=0)) < 2**63:
        return int(np.dot(first, second))
    return int(np.dot(first.astype(object), second.astype(object)))


def _is_positive(place: str, labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Which labels are 1, the others being 0."""
    is_positive: NDArray[np.bool_] = labels == 1
    if np.count_nonzero(is_positive) != np.count_nonzero(labels):  # NaN is not zero either
        is_bad = ~(is_positive | (labels == 0))
        sample = int(is_bad.argmax())
        raise ValueError(
            f"{place}: labels must be 0 or 1, got {labels[sample]} at place {sample} and "
            f"{int(is_bad.sum())} such of {len(labels)}; leave samples without a label out"
        )
    return is_positive


def _require_same_length(place: str, scores: NDArray[Any], labels: NDArray[Any]) -> None:
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(
            f"{place}: scores and labels must both be (N,), got {scores.shape} and {labels.shape}"
        )
