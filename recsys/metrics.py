"""How good predictions are: AUC, logloss, normalized entropy, calibration, accuracy.

All are exact: every score is kept, in float32, and sums run in float64.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Metrics", "auc", "evaluate_logits"]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Quality over a set of samples.

    Attributes:
        auc: Probability that a positive sample outscores a negative one, ties counted half; None if
            all labels agree.
        logloss: Mean binary cross-entropy, in nats.
        normalized_entropy: `logloss` over that of always predicting the mean label; None if all
            labels agree.
        calibration: Mean prediction over mean label; None without positive labels.
        accuracy: Share of predictions on the right side of 0.5.
        num_samples: How many samples.
    """

    auc: float | None
    logloss: float
    normalized_entropy: float | None
    calibration: float | None
    accuracy: float
    num_samples: int

    def as_dict(self) -> dict[str, Any]:
        """JSON types, under the names of the run record."""
        return asdict(self)


def auc(scores: NDArray[Any], labels: NDArray[Any]) -> float | None:
    """Area under the ROC curve, exact, ties counted half.

    Shape:
        scores (N,) any order-preserving score; labels (N,) 0 or 1; result None if all labels agree.

    Raises:
        ValueError: a score is NaN, or shapes differ.
    """
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(
            f"auc: scores and labels must both be (N,), got {scores.shape} and {labels.shape}"
        )
    if np.isnan(scores).any():
        raise ValueError(f"auc: {int(np.isnan(scores).sum())} of {len(scores)} scores are NaN")
    order = np.argsort(scores)
    ascending = scores[order]
    is_positive = labels[order] > 0.5
    # One group per distinct score: its positives beat all negatives of lower groups and half of its
    # own.
    group_ends = np.append(np.flatnonzero(ascending[1:] != ascending[:-1]), len(ascending) - 1)
    positives_below = np.concatenate([[0], np.cumsum(is_positive)[group_ends]]).astype(np.float64)
    all_below = np.concatenate([[0], group_ends + 1]).astype(np.float64)
    negatives_below = all_below - positives_below
    num_positive, num_negative = positives_below[-1], negatives_below[-1]
    if num_positive == 0 or num_negative == 0:
        return None
    beaten = (negatives_below[1:] + negatives_below[:-1]) / 2
    return float(np.dot(np.diff(positives_below), beaten) / (num_positive * num_negative))


def evaluate_logits(logits: NDArray[np.float32], labels: NDArray[Any]) -> Metrics:
    """All metrics at once.

    Shape:
        logits (N,) float32, before the sigmoid; labels (N,) 0 or 1; N at least 1.

    Raises:
        ValueError: no samples, shapes differ, or a logit is not finite.
    """
    if len(logits) == 0:
        raise ValueError("evaluate_logits: at least one sample is needed, got none")
    num_bad = int((~np.isfinite(logits)).sum())
    if num_bad:
        raise ValueError(f"evaluate_logits: {num_bad} of {len(logits)} logits are not finite")
    area = auc(logits, labels)
    logits_64, labels_64 = logits.astype(np.float64), labels.astype(np.float64)
    logloss = float(np.mean(np.logaddexp(0, logits_64) - labels_64 * logits_64))
    mean_prediction = float(np.mean(0.5 * (1 + np.tanh(logits_64 / 2))))
    mean_label = float(labels_64.mean())
    entropy = None
    if 0 < mean_label < 1:
        entropy = -mean_label * np.log(mean_label) - (1 - mean_label) * np.log1p(-mean_label)
    return Metrics(
        auc=area,
        logloss=logloss,
        normalized_entropy=None if entropy is None else float(logloss / entropy),
        calibration=mean_prediction / mean_label if mean_label else None,
        accuracy=float(np.mean((logits_64 > 0) == (labels_64 > 0.5))),
        num_samples=len(logits),
    )
