"""How good predictions are: AUC, logloss, normalized entropy, calibration, accuracy.

`MetricsAccumulator` takes scores batch by batch. Sums run in float64. Every float32 score is kept,
so AUC is exact: pairs are counted in integers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.auc import (
    are_positive,
    area_under_curve,
    auc,
    require_same_length,
    sorted_by_label,
    twice_below,
)
from recsys.train.metrics.group_metrics import GroupMetrics, evaluate_groups

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.train.metrics.ranking_metrics import RankingMetrics

__all__ = ["Metrics", "MetricsAccumulator", "auc", "evaluate_logits"]

_PARTS = ("groups", "ranking")  # fields of `Metrics` that only some data has


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Quality over a set of samples. Each counts once: sample weights are not read.

    Attributes:
        auc: Probability that a positive sample has a higher score than a negative one; a tie counts
            half. None if all labels are equal.
        auc_standard_error: Standard error of `auc` as an estimate from a sample; None with fewer
            than two positive or two negative samples. It is too large for the difference of two
            models on the same samples.
        logloss: Mean binary cross-entropy, in nats.
        normalized_entropy: `logloss` divided by the logloss of always predicting the mean label;
            None if all labels are equal.
        calibration: Mean prediction divided by mean label; None without positive labels.
        accuracy: Share of predictions on the right side of 0.5.
        num_samples: Number of samples.
        groups: Quality inside groups; None for data without groups.
        ranking: Quality of rankings of all items; None for data that is not judged by rankings.
    """

    auc: float | None
    auc_standard_error: float | None
    logloss: float
    normalized_entropy: float | None
    calibration: float | None
    accuracy: float
    num_samples: int
    groups: GroupMetrics | None = None
    ranking: RankingMetrics | None = None

    def as_dict(self) -> dict[str, Any]:
        """The metrics in JSON types, under the names of the run record.

        Those of `groups` and `ranking` stand beside the others; those that are None are left out.
        """
        names = [each.name for each in fields(self) if each.name not in _PARTS]
        found = {name: getattr(self, name) for name in names}
        if self.groups is not None:
            found |= asdict(self.groups)
        if self.ranking is not None:
            found |= asdict(self.ranking)
        return found


class MetricsAccumulator:
    """Collects logits and labels, and computes their metrics.

    It keeps 5 bytes a sample. `result` uses about 25 more for a while, and 75 with groups.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self._logits: list[NDArray[np.float32]] = []
        self._is_positive: list[NDArray[np.bool_]] = []
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
        self._logits.append(logits.copy())  # the caller may reuse its array
        self._is_positive.append(is_positive)

    def result(self, groups: NDArray[Any] | None = None) -> Metrics:
        """Metrics of all samples so far.

        Args:
            groups: The group of each sample, integers (N,); None for data without groups.

        Raises:
            ValueError: there are no samples.
        """
        if not self.num_samples:
            raise ValueError("metrics: at least one sample is needed, got none")
        logits, is_positive = np.concatenate(self._logits), np.concatenate(self._is_positive)
        positives, negatives = sorted_by_label(logits, is_positive)
        logloss = self._loss / self.num_samples
        rate = self._num_positive / self.num_samples
        entropy = None
        if 0 < rate < 1:
            entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
        return Metrics(
            auc=area_under_curve(positives, negatives),
            auc_standard_error=_standard_error(positives, negatives),
            logloss=logloss,
            normalized_entropy=None if entropy is None else float(logloss / entropy),
            calibration=self._prediction / self._num_positive if self._num_positive else None,
            accuracy=self._num_right / self.num_samples,
            num_samples=self.num_samples,
            groups=None if groups is None else evaluate_groups(logits, is_positive, groups),
        )


def evaluate_logits(logits: NDArray[np.float32], labels: NDArray[Any]) -> Metrics:
    """All metrics of some samples; see `MetricsAccumulator`.

    Raises:
        ValueError: there are no samples, or `MetricsAccumulator.add` raises.
    """
    accumulator = MetricsAccumulator()
    accumulator.add(logits, labels)
    return accumulator.result()


def _standard_error(positives: NDArray[np.float32], negatives: NDArray[np.float32]) -> float | None:
    """Standard error of the AUC from the scores of both kinds of samples, ascending.

    Each of the m positive samples beats a share of the negative samples; S10 is the variance of
    these shares. Each of the n negative samples is beaten by a share of the positive samples; S01
    is the variance of those. The variance of the AUC is S10 / m + S01 / n.

    References:
        DeLong, DeLong and Clarke-Pearson (1988), "Comparing the areas under two or more correlated
        receiver operating characteristic curves", Biometrics 44, 837-845, for a single curve.
    """
    if min(len(positives), len(negatives)) < 2:
        return None
    beaten = twice_below(positives, negatives) / (2 * len(negatives))
    beating = twice_below(negatives, positives) / (2 * len(positives))
    variance = np.var(beaten, ddof=1) / len(positives) + np.var(beating, ddof=1) / len(negatives)
    return float(np.sqrt(variance))
