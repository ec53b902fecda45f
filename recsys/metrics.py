"""How good predictions are: AUC, logloss, normalized entropy, calibration, accuracy.

`MetricsAccumulator` takes scores batch by batch. Sums run in float64. AUC is exact up to a number
of samples, every float32 score being kept and sorted; beyond it the scores are counted in bins, and
the result says by how much it can be wrong at most:

    the bins' edges are quantiles of the scores kept until then, so that every bin holds about as
    many samples as any other, however close together scores lie (bins of equal width in probability
    would put most of them into a few);
    two samples of one bin count as a tie, where the exact AUC counts 0 or 1 (or a half), so with
    p positive and n negative samples per bin, out of P and N, the error is at most
    sum(p * n) / (2 * P * N), taken over the bins that can hold different scores.
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


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Quality over a set of samples.

    Attributes:
        auc: Probability that a positive sample outscores a negative one, ties counted half; None if
            all labels agree.
        max_auc_error: By how much `auc` can be wrong at most; 0 where it is exact, None as `auc`.
        logloss: Mean binary cross-entropy, in nats.
        normalized_entropy: `logloss` over that of always predicting the mean label; None if all
            labels agree.
        calibration: Mean prediction over mean label; None without positive labels.
        accuracy: Share of predictions on the right side of 0.5.
        num_samples: How many samples.
    """

    auc: float | None
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
        max_exact_samples: Up to so many samples AUC is exact; they take 5 bytes each, and a few
            times that while they are sorted.
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
            ValueError: shapes differ, or a logit is not finite.
        """
        _require_same_length(logits, labels)
        num_bad = int((~np.isfinite(logits)).sum())
        if num_bad:
            raise ValueError(f"metrics: {num_bad} of {len(logits)} logits are not finite")
        is_positive = labels > 0.5
        wide = logits.astype(np.float64)
        self._loss += float(np.sum(np.logaddexp(0, wide) - is_positive * wide))
        self._prediction += float(np.sum(0.5 * (1 + np.tanh(wide / 2))))
        self._num_positive += int(is_positive.sum())
        self._num_right += int(((wide > 0) == is_positive).sum())
        self.num_samples += len(logits)
        if self._histogram is not None:
            self._histogram.add(logits, is_positive)
            return
        self._logits.append(logits)
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
        if self._histogram is not None:
            area, max_error = self._histogram.auc()
        else:
            area = auc(np.concatenate(self._logits), np.concatenate(self._is_positive))
            max_error = None if area is None else 0.0
        logloss = self._loss / self.num_samples
        rate = self._num_positive / self.num_samples
        entropy = None
        if 0 < rate < 1:
            entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
        return Metrics(
            auc=area,
            max_auc_error=max_error,
            logloss=logloss,
            normalized_entropy=None if entropy is None else float(logloss / entropy),
            calibration=self._prediction / self._num_positive if self._num_positive else None,
            accuracy=self._num_right / self.num_samples,
            num_samples=self.num_samples,
        )


def evaluate_logits(logits: NDArray[np.float32], labels: NDArray[Any]) -> Metrics:
    """All metrics at once; see `MetricsAccumulator`.

    Raises:
        ValueError: no samples, shapes differ, or a logit is not finite.
    """
    accumulator = MetricsAccumulator()
    accumulator.add(logits, labels)
    return accumulator.result()


def auc(scores: NDArray[Any], labels: NDArray[Any]) -> float | None:
    """Area under the ROC curve, exact, ties counted half.

    Shape:
        scores (N,) any order-preserving score; labels (N,) 0 or 1; result None if all labels agree.

    Raises:
        ValueError: a score is NaN, or shapes differ.
    """
    _require_same_length(scores, labels)
    if np.isnan(scores).any():
        raise ValueError(f"auc: {int(np.isnan(scores).sum())} of {len(scores)} scores are NaN")
    order = np.argsort(scores)
    ascending = scores[order]
    is_positive = labels[order] > 0.5
    # One group per distinct score.
    group_ends = np.append(np.flatnonzero(ascending[1:] != ascending[:-1]), len(ascending) - 1)
    positives = np.diff(np.cumsum(is_positive)[group_ends], prepend=0)
    return _auc_of_groups(positives, np.diff(group_ends, prepend=-1) - positives)


class _Histogram:
    """Positive and negative samples by score, in bins of about equal numbers."""

    def __init__(self, typical_scores: NDArray[np.float32]) -> None:
        places = np.linspace(0, len(typical_scores) - 1, _NUM_BINS + 1).astype(np.int64)[1:-1]
        self._edges = np.unique(np.sort(typical_scores)[places])
        self._counts = np.zeros((2, len(self._edges) + 1), np.int64)
        # A bin that can hold one float32 alone makes no ties that are none.
        is_single = np.nextafter(self._edges[:-1], np.float32(np.inf)) == self._edges[1:]
        self._is_exact = np.concatenate([[False], is_single, [False]])

    def add(self, scores: NDArray[np.float32], is_positive: NDArray[np.bool_]) -> None:
        bins = np.searchsorted(self._edges, scores, side="right")
        for row, part in enumerate((is_positive, ~is_positive)):
            self._counts[row] += np.bincount(bins[part], minlength=self._counts.shape[1])

    def auc(self) -> tuple[float | None, float | None]:
        """AUC with the samples of a bin taken for ties, and its largest possible error."""
        positives, negatives = self._counts
        area = _auc_of_groups(positives, negatives)
        if area is None:
            return None, None
        pairs = float(positives.sum()) * float(negatives.sum())
        mixed = np.where(self._is_exact, 0.0, positives.astype(np.float64) * negatives)
        max_error = float(mixed.sum()) / 2 / pairs
        if max_error > _WORRYING_AUC_ERROR:
            warnings.warn(
                f"AUC {area:.5f} was counted in bins and may be wrong by up to {max_error:.1e}: "
                "later scores lie unlike the first ones; raise max_exact_samples",
                stacklevel=3,
            )
        return area, max_error


def _auc_of_groups(positives: NDArray[np.int64], negatives: NDArray[np.int64]) -> float | None:
    """AUC from the samples at each of ascending scores.

    A positive sample beats all negative ones of lower groups and half of its own.
    """
    num_positive, num_negative = float(positives.sum()), float(negatives.sum())
    if num_positive == 0 or num_negative == 0:
        return None
    beaten = np.cumsum(negatives).astype(np.float64) - negatives / 2
    return float(np.dot(positives.astype(np.float64), beaten)) / (num_positive * num_negative)


def _require_same_length(scores: NDArray[Any], labels: NDArray[Any]) -> None:
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(
            f"metrics: scores and labels must both be (N,), got {scores.shape} and {labels.shape}"
        )
