"""How good predictions are: AUC, logloss, normalized entropy, calibration, accuracy.

`MetricsAccumulator` takes scores batch by batch. Sums run in float64. Up to a number of samples AUC
is exact: every float32 score is kept and sorted. Beyond that number scores are counted in bins, and
the result holds an upper bound of its error:

    The edges of the bins are quantiles of the scores kept until then, so all bins hold about the
    same number of samples, however close together the scores are. (Bins of equal width in
    probability would put most samples into a few bins.) A score that equals several quantiles,
    because many samples have it, gets a bin of its own.
    Two samples of one bin count as a tie, while the exact AUC counts them as 0, 1 or a half. With
    p positive and n negative samples in a bin, of P and N in all, the error is at most
    sum(p * n) / (2 * P * N), summed over the bins that can hold different scores.

Scores must be float32: rounding wider scores to the bins would add ties. Pairs are counted in
integers. So AUC is exact except for its last bit, unless a bin holds different scores.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.auc import (
    are_positive,
    area_under_curve,
    auc,
    count_by_score,
    require_same_length,
    sum_of_products,
    twice_below,
)
from recsys.train.metrics.group_metrics import GroupMetrics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.train.metrics.ranking_metrics import RankingMetrics

__all__ = ["Metrics", "MetricsAccumulator", "auc", "evaluate_logits", "keys_of_evaluation"]

_MAX_EXACT_SAMPLES = 1 << 26
_NUM_BINS = 1 << 20
_WORRYING_AUC_ERROR = 1e-4
_ROUNDING = 2.0**-52  # of two AUCs and a bound in float64
_PARTS = ("groups", "auc_by_day", "ranking")  # fields of `Metrics` that only some data has


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Quality over a set of samples. Each counts once: sample weights are not read.

    Attributes:
        auc: Probability that a positive sample has a higher score than a negative one; a tie counts
            half. None if all labels are equal.
        auc_standard_error: Standard error of `auc` as an estimate from a sample; None with fewer
            than two positive or two negative samples. It is too large for the difference of two
            models on the same samples.
        max_auc_error: Upper bound of the error of `auc`; 0 if it is exact, None if `auc` is None.
        logloss: Mean binary cross-entropy, in nats.
        normalized_entropy: `logloss` divided by the logloss of always predicting the mean label;
            None if all labels are equal.
        calibration: Mean prediction divided by mean label; None without positive labels.
        accuracy: Share of predictions on the right side of 0.5.
        num_samples: Number of samples.
        groups: Quality inside groups; None for data without groups.
        auc_by_day: AUC of each day, by date in UTC, None for a day with one kind of label; None for
            data without times.
        ranking: Quality of rankings of all items; None for data that is not judged by rankings.
    """

    auc: float | None
    auc_standard_error: float | None
    max_auc_error: float | None
    logloss: float
    normalized_entropy: float | None
    calibration: float | None
    accuracy: float
    num_samples: int
    groups: GroupMetrics | None = None
    auc_by_day: dict[str, float | None] | None = None
    ranking: RankingMetrics | None = None

    def as_dict(self) -> dict[str, Any]:
        """The metrics in JSON types, under the names of the run record.

        Those of `groups` and `ranking` stand beside the others; those that are None are left out.
        """
        found = {name: getattr(self, name) for name in _field_names(Metrics) if name not in _PARTS}
        if self.groups is not None:
            found |= asdict(self.groups)
        if self.auc_by_day is not None:
            found["auc_by_day"] = self.auc_by_day
        if self.ranking is not None:
            found |= asdict(self.ranking)
        return found


class MetricsAccumulator:
    """Collects logits and labels, and computes their metrics.

    Args:
        max_exact_samples: AUC is exact up to this number of samples. They take 5 bytes each, and
            about 50 more while they are sorted.
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
        """Add samples.

        Shape:
            logits (N,) float32, before the sigmoid; labels (N,) 0 or 1.

        Raises:
            ValueError: the shapes differ, the logits are not float32, a logit is not finite, or a
                label is neither 0 nor 1.
        """
        require_same_length("metrics", logits, labels)
        if logits.dtype != np.float32:
            raise ValueError(
                f"metrics: logits must be float32, got {logits.dtype}; round them with "
                "astype(numpy.float32) if additional ties do not matter"
            )
        num_bad = len(logits) - int(np.count_nonzero(np.isfinite(logits)))
        if num_bad:
            raise ValueError(f"metrics: {num_bad} of {len(logits)} logits are not finite")
        is_positive = are_positive("metrics", labels)
        wide = logits.astype(np.float64)
        softplus = np.logaddexp(0, wide)
        self._loss += float(np.sum(softplus - is_positive * wide))
        # The sigmoid of `wide`. Its other forms round small predictions, or overflow.
        self._prediction += float(np.sum(np.exp(wide - softplus)))
        self._num_positive += int(np.count_nonzero(is_positive))
        self._num_right += int(np.count_nonzero((wide > 0) == is_positive))
        self.num_samples += len(logits)
        if self._histogram is not None:
            self._histogram.add(logits, is_positive)
            return
        self._logits.append(logits.copy())  # the caller may reuse its array
        self._is_positive.append(is_positive)
        if self.num_samples > self._max_exact_samples:
            kept, labels_of_kept = np.concatenate(self._logits), np.concatenate(self._is_positive)
            self._logits, self._is_positive = [], []
            self._histogram = _Histogram(kept)
            self._histogram.add(kept, labels_of_kept)

    def result(self) -> Metrics:
        """Metrics of all samples so far.

        Raises:
            ValueError: there are no samples.
        """
        if not self.num_samples:
            raise ValueError("metrics: at least one sample is needed, got none")
        if self._histogram is None:
            positives, negatives = count_by_score(
                np.concatenate(self._logits), np.concatenate(self._is_positive)
            )
            max_error = 0.0
        else:
            positives, negatives = self._histogram.counts
            max_error = self._histogram.max_auc_error()
        area = area_under_curve(positives, negatives)
        if self._histogram is not None and max_error > _WORRYING_AUC_ERROR:
            warnings.warn(
                f"AUC {area:.5f} was counted in bins and may be wrong by up to {max_error:.1e}: "
                f"later scores fall into few of the bins made for the first "
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
    """All metrics of some samples; see `MetricsAccumulator`.

    Raises:
        ValueError: there are no samples, or `MetricsAccumulator.add` raises.
    """
    accumulator = MetricsAccumulator()
    accumulator.add(logits, labels)
    return accumulator.result()


def keys_of_evaluation(has_groups: bool) -> list[str]:
    """The keys that `Metrics.as_dict` gives an evaluation during training."""
    of_groups = _field_names(GroupMetrics) if has_groups else []
    return [name for name in _field_names(Metrics) if name not in _PARTS] + of_groups


def _field_names(kind: type[Metrics | GroupMetrics]) -> list[str]:
    return [each.name for each in fields(kind)]


class _Histogram:
    """Counts of positive and negative samples by score, in bins of about equal counts.

    Args:
        typical_scores: Scores whose quantiles are the edges of the bins.

    Attributes:
        num_typical: Number of these scores.
        counts: Samples per bin, (2, number of bins): positive ones first, then negative ones.
    """

    def __init__(self, typical_scores: NDArray[np.float32]) -> None:
        self.num_typical = len(typical_scores)
        places = np.linspace(0, self.num_typical - 1, _NUM_BINS).round().astype(np.int64)
        quantiles = np.sort(typical_scores)[places]
        # A score that equals several quantiles gets a second edge, and so a bin of its own.
        tied = quantiles[1:][quantiles[1:] == quantiles[:-1]]
        self._edges = np.unique(np.concatenate([quantiles, _next(tied)]))
        self.counts = np.zeros((2, len(self._edges) + 1), np.int64)
        # A bin that can hold only one float32 value adds no ties.
        is_single = _next(self._edges[:-1]) == self._edges[1:]
        self._is_exact = np.concatenate([[False], is_single, [False]])

    def add(self, scores: NDArray[np.float32], is_positive: NDArray[np.bool_]) -> None:
        bins = np.searchsorted(self._edges, scores, side="right")
        for row, part in enumerate((is_positive, ~is_positive)):
            self.counts[row] += np.bincount(bins[part], minlength=self.counts.shape[1])

    def max_auc_error(self) -> float:
        """Upper bound of the difference between the AUCs of `counts` and of the scores."""
        positives, negatives = np.where(self._is_exact, 0, self.counts)
        num_mixed = sum_of_products(positives, negatives)
        if not num_mixed:
            return 0.0
        num_pairs = int(self.counts[0].sum()) * int(self.counts[1].sum())
        return num_mixed / (2 * num_pairs) + _ROUNDING


def _next(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """The next larger float32 of each score; infinity after the largest one."""
    with np.errstate(over="ignore"):
        return np.nextafter(scores, np.float32(np.inf))


def _standard_error(positives: NDArray[np.int64], negatives: NDArray[np.int64]) -> float | None:
    """Standard error of the AUC from the numbers of samples at each score, ascending.

    Each of the m positive samples beats a share of the negative samples; S10 is the variance of
    these shares. Each of the n negative samples is beaten by a share of the positive samples; S01
    is the variance of those. The variance of the AUC is S10 / m + S01 / n.

    References:
        DeLong, DeLong and Clarke-Pearson (1988), "Comparing the areas under two or more correlated
        receiver operating characteristic curves", Biometrics 44, 837-845, for a single curve.
    """
    variance = 0.0
    for own, others in ((positives, negatives), (negatives, positives)):
        num_own, num_others = int(own.sum()), int(others.sum())
        if num_own < 2 or not num_others:
            return None
        shares = twice_below(others) / (2 * num_others)
        shares -= np.dot(own, shares) / num_own
        variance += float(np.dot(own, shares * shares)) / (num_own - 1) / num_own
    return float(np.sqrt(variance))
