"""Quality of predictions over a window of steps, from running sums, with standard errors.

N samples have labels y, predictions p = sigmoid(logit) and losses l. Each measure has two forms:

    measure      over all samples                 over a kind of samples
    logloss      L / H(r)                         L / mean of H(p)
    auc          A                                1 + A - A'
    calibration  sum of p / sum of y              the same

    L   mean of l
    r   mean label
    H   entropy, H(x) = -x ln x - (1 - x) ln(1 - x)
    A   mean of the AUCs of the steps, weighted by their pairs (positive, negative)
    A'  the same if labels were drawn with the probabilities p

The first form is normalized entropy and AUC. Two windows with other mean labels compare, and worse
predictions show. But which samples are of a kind changes from window to window, and some are harder
to predict than others. The second form compares with what the predictions themselves promise. So it
is near 1 for every kind as long as the predictions are right about it.

Standard errors, relative except for the AUC (delta method, samples are independent):

    logloss      sqrt(var(l / L - y ln((1 - r) / r) / H(r)) / N)
                 of a kind: sqrt(var(l / L - H(p) / mean of H(p)) / N)
    auc          sqrt(m / (m - 1) sum(w^2 (a - mean)^2)) / sum(w), over m steps with a and w pairs
    calibration  sqrt(var(p / mean p - y / mean y) / N)
"""

from __future__ import annotations

from math import log, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from recsys._support.auc import auc, expected_auc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["MEASURES", "Measured", "WindowQuality"]

MEASURES = ("logloss", "auc", "calibration")

_LEAST_LABELS = 20  # of each kind: with fewer, standard errors say little
_LEAST_STEPS = 10  # with both kinds of labels, for the AUC
# A model that has collapsed may predict 0 or 1 with no loss, or almost. Ratios stay finite.
_LEAST_MEAN = 1e-12
_LARGEST_LOGIT = 1e6


class Measured(NamedTuple):
    """A measure of a window.

    Attributes:
        value: The measure.
        error: Its standard error; relative to the value for "logloss" and "calibration".
    """

    value: float
    error: float


class WindowQuality:
    """Sums over the samples of a window.

    Args:
        of_a_kind: Whether measures have the form for a kind of samples.
        sums: Sums to continue with, from `as_list`.
    """

    NUM_SUMS = 17

    def __init__(self, *, of_a_kind: bool, sums: Sequence[float] = (0.0,) * NUM_SUMS) -> None:
        self._of_a_kind = of_a_kind
        # n, l, l^2, y, l y, p, p^2, p y, h, h^2, l h; steps, w, w a, w^2, w^2 a, w^2 a^2
        self._sums: NDArray[np.float64] = np.array(sums, np.float64)

    @property
    def num_samples(self) -> int:
        """Samples so far."""
        return int(self._sums[0])

    def add(self, logits: NDArray[np.float64], labels: NDArray[np.float64]) -> None:
        """Add the samples of one step.

        Shape:
            logits (N,) finite; labels (N,) 0 or 1.

        Raises:
            ValueError: a label is neither 0 nor 1.
        """
        if not len(logits):
            return
        area = auc(logits, labels)
        # Without differences of almost equal numbers, so that no sum is negative.
        distances = np.minimum(np.abs(logits), _LARGEST_LOGIT)
        odds = np.exp(-distances)  # of the label that is predicted to be less likely
        unlikely = odds / (1 + odds)
        predictions = np.where(logits > 0, 1 - unlikely, unlikely)
        losses = np.log1p(odds) + distances * ((logits > 0) != (labels == 1))
        entropies = np.log1p(odds) + distances * unlikely
        num_positive = float(labels.sum())
        self._sums[:11] += (
            len(logits),
            losses.sum(),
            np.dot(losses, losses),
            num_positive,
            np.dot(losses, labels),
            predictions.sum(),
            np.dot(predictions, predictions),
            np.dot(predictions, labels),
            entropies.sum(),
            np.dot(entropies, entropies),
            np.dot(losses, entropies),
        )
        if area is None:
            return
        if self._of_a_kind:
            promised = expected_auc(predictions[np.argsort(logits, kind="stable")])
            area = max(0.0, 1 + area - promised)
        pairs = num_positive * (len(logits) - num_positive)
        squared = pairs * pairs
        self._sums[11:] += (1, pairs, pairs * area, squared, squared * area, squared * area * area)

    def result(self) -> dict[str, Measured]:
        """The measures; those that too few samples determine are left out."""
        count, positive = float(self._sums[0]), float(self._sums[3])
        if min(positive, count - positive) < _LEAST_LABELS:
            return {}
        found = {"logloss": self._logloss(), "auc": self._auc(), "calibration": self._calibration()}
        return {measure: each for measure, each in found.items() if each is not None}

    def as_list(self) -> list[float]:
        """The sums, for a state."""
        return [float(value) for value in self._sums]

    def _logloss(self) -> Measured:
        count, loss, loss2, positive, loss_y = map(float, self._sums[:5])
        entropy, entropy2, loss_entropy = map(float, self._sums[8:11])
        mean = max(loss / count, _LEAST_MEAN)
        if self._of_a_kind:
            promised = max(entropy / count, _LEAST_MEAN)
            variance = loss2 / mean**2 - 2 * loss_entropy / (mean * promised)
            variance += entropy2 / promised**2
            return Measured(mean / promised, _error(variance, 0.0, count))
        rate = positive / count
        promised = -rate * log(rate) - (1 - rate) * log(1 - rate)
        slope = log((1 - rate) / rate) / promised
        variance = loss2 / mean**2 - 2 * slope * loss_y / mean + slope**2 * positive
        return Measured(mean / promised, _error(variance, 1 - slope * rate, count))

    def _auc(self) -> Measured | None:
        steps, weight, weighted, weight2, weighted2, squares = map(float, self._sums[11:])
        if steps < _LEAST_STEPS:
            return None
        area = weighted / weight
        squared = max(0.0, squares - 2 * area * weighted2 + area**2 * weight2)
        return Measured(area, sqrt(steps / (steps - 1) * squared) / weight)

    def _calibration(self) -> Measured:
        count, positive = float(self._sums[0]), float(self._sums[3])
        prediction, prediction2, prediction_y = map(float, self._sums[5:8])
        mean, rate = max(prediction / count, _LEAST_MEAN), positive / count
        variance = prediction2 / mean**2 - 2 * prediction_y / (mean * rate) + positive / rate**2
        return Measured(mean / rate, _error(variance, 0.0, count))


def _error(squares: float, mean: float, count: float) -> float:
    """Standard error of a mean, from the sum of squares of `count` numbers."""
    return sqrt(max(squares / count - mean**2, 0.0) / count)
