"""The guard: lowers or stops skipping when predictions get worse.

At the start of every `every` steps, `steps` steps train on all samples. They are a *window*: their
predictions are made before the model is trained on these samples, so they measure held-out quality.
With labels y, predictions p, losses l and the mean label r, the guard measures

    logloss      mean of l / H(r), the normalized entropy;   H(r) = -r ln r - (1 - r) ln(1 - r)
    calibration  mean of p / r

d is how much worse a window is than the running *estimate* from the windows before:
ln(window / estimate) of the logloss, |ln window| - |ln estimate| of calibration. A measure is
outside if d > reach = band + 5 standard errors of the window, and *far* outside if d > 3 reach.

A window with a measure outside lowers skipping. Nothing is skipped until the next window has ended,
so that the model recovers, and the estimate starts again with that window. Then skipping goes on
with half the share of samples: its *factor* halves. If the first window after that is outside, too,
or a measure was far outside, skipping stops for good: the factor is 0. After two windows inside in
a row a lowered factor doubles. Each decision that lowers or stops is a warning.

The estimate moves a fifth of the way to each window, at most a fifth of the band, so slow changes
of the data cause no alarm. A window that is better by more than the reach replaces it. A harm that
grows by less than a fifth of the band per window is not noticed: compare with a run that skips
nothing.

Standard errors, relative (delta method, samples are independent; N samples):

    logloss      sqrt(var(l / mean l - y ln((1 - r) / r) / H(r)) / N)
    calibration  sqrt(var(p / mean p - y / r) / N)
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.user_code import warn_caller
from recsys.embeddings.staleness.settings import LEAD

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.pipeline.skip.policies import Guard

__all__ = ["QualityGuard"]

_STANDARD_ERRORS = 5.0
_FAR = 3.0
_RATE = 0.2
_CALM = 2
_LEAST_FACTOR = 0.1  # a smaller factor becomes 0
_LEAST_LABELS = 20  # of each kind: with fewer, standard errors say little
# A model that has collapsed may predict 0 or 1 with no loss, or almost. Ratios stay finite.
_LEAST_MEAN = 1e-12
_LARGEST_LOGIT = 1e6


@dataclass
class QualityGuard:
    """Measures quality in windows, and decides what part of the share is skipped.

    All but `guard` is its state, in JSON types.

    Attributes:
        guard: The settings.
        factor: The part of the share that is skipped by the last decision; 0 after a stop.
        decisions: Changes of the factor, oldest first: `step`, the last of its window; `from_step`,
            the mini-batch number from which it holds; `paused_until`, the number before which
            nothing is skipped; `action`, "lowered", "stopped" or "raised"; `factor`; `reasons`, the
            measures outside with `value` and `estimate`.
        num_windows: Windows that have ended.
        estimates: The logarithm of each measure.
        window: Number of the window that `sums` belongs to.
        sums: Of its samples: n, l, l^2, y, l y, p, p^2, p y.
        num_calm: Windows inside in a row.
        was_outside: Whether the last window was outside.
    """

    guard: Guard
    factor: float = 1.0
    decisions: list[dict[str, Any]] = field(default_factory=list)
    num_windows: int = 0
    estimates: dict[str, float] = field(default_factory=dict)
    window: int = -1
    sums: list[float] = field(default_factory=list)
    num_calm: int = 0
    was_outside: bool = False

    def is_open(self, number: int) -> bool:
        """Whether the mini-batch with this number is in a window: nothing is skipped in it."""
        return number % self.guard.every < self.guard.steps

    def factor_of(self, number: int) -> float:
        """The factor that holds for a mini-batch yet to be trained on; 0: skip nothing."""
        if self.is_open(number):
            return 0.0
        for decision in reversed(self.decisions):
            if decision["from_step"] <= number:
                return float(decision["factor"]) if decision["paused_until"] <= number else 0.0
        return 1.0

    def add(self, number: int, logits: Tensor, labels: Tensor) -> None:
        """Add the predictions of a step that is in a window; the last step of one decides.

        A step that failed is not in its window. If it was the last one, the window is dropped. So
        is a step with an infinite prediction: the loss of such a model says that it has diverged.

        Args:
            number: The mini-batch number.
            logits: Predictions before the sigmoid, made before training on these samples.
            labels: Labels.

        Shape:
            logits, labels (B,) or (B, 1).

        Raises:
            ValueError: a label is neither 0 nor 1.
        """
        if self.window != number // self.guard.every:
            self.window, self.sums = number // self.guard.every, [0.0] * 8
        scores, truth = _to_numpy(logits), _to_numpy(labels)
        if not ((truth == 0) | (truth == 1)).all():
            raise ValueError("a guard needs labels of 0 and 1; set guard.every to 0")
        if np.isfinite(scores).all():
            self.sums = (np.array(self.sums) + _sums_of(scores, truth)).tolist()
        if number % self.guard.every == self.guard.steps - 1:
            self._end_window(number)

    def report(self) -> dict[str, Any]:
        """For a run record, in JSON types: the factor, the estimates, and the decisions."""
        return {
            "num_windows": self.num_windows,
            "factor": self.factor,
            "estimates": {measure: exp(value) for measure, value in self.estimates.items()},
            "decisions": deepcopy(self.decisions),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, in JSON types."""
        return {key: deepcopy(value) for key, value in vars(self).items() if key != "guard"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        vars(self).update(deepcopy(state))

    def _end_window(self, step: int) -> None:
        self.num_windows += 1
        reasons, is_far = [], False
        for measure, (value, error) in _measures(self.sums).items():
            known = self.estimates.get(measure, value)
            band = getattr(self.guard, measure)
            reach = band + _STANDARD_ERRORS * error
            is_ratio = measure == "calibration"  # 1 is right
            worse = abs(value) - abs(known) if is_ratio else value - known
            if worse > reach:
                is_far |= worse > _FAR * reach
                reasons.append({"measure": measure, "value": exp(value), "estimate": exp(known)})
            if worse < -reach:
                known = value
            self.estimates[measure] = known + _RATE * min(max(value - known, -band), band)
        if not self.factor or (self.decisions and self.decisions[-1]["paused_until"] > step):
            return  # nothing was skipped before it
        was_outside, self.was_outside = self.was_outside, bool(reasons)
        self.num_calm = 0 if reasons else self.num_calm + 1
        if reasons:
            is_over = is_far or was_outside or self.factor / 2 < _LEAST_FACTOR
            self._set_factor(step, 0.0 if is_over else self.factor / 2, reasons)
        elif self.factor < 1 and self.num_calm == _CALM:
            self._set_factor(step, 2 * self.factor, [])

    def _set_factor(self, step: int, factor: float, reasons: list[dict[str, Any]]) -> None:
        action = "raised" if not reasons else "lowered" if factor else "stopped"
        from_step = paused_until = step + LEAD
        what = "stops skipping"
        if action == "lowered":
            paused_until += self.guard.every
            what = (
                f"skips nothing until mini-batch {paused_until}, and then {factor:.0%} of the "
                "share that was asked for"
            )
        self.factor, self.num_calm = factor, 0
        self.decisions.append(
            {
                "step": step,
                "from_step": from_step,
                "paused_until": paused_until,
                "action": action,
                "factor": factor,
                "reasons": reasons,
            }
        )
        if reasons:
            self.estimates = {}
            why = ", ".join(
                f"{one['measure']} is {one['value']:.4g} (estimate {one['estimate']:.4g})"
                for one in reasons
            )
            warn_caller(f"guard: from mini-batch {from_step} on, the run {what}: {why}")


def _sums_of(logits: NDArray[np.float64], labels: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of some samples; without differences of almost equal numbers."""
    distances = np.minimum(np.abs(logits), _LARGEST_LOGIT)
    odds = np.exp(-distances)  # of the label that is predicted to be less likely
    unlikely = odds / (1 + odds)
    predictions = np.where(logits > 0, 1 - unlikely, unlikely)
    losses = np.log1p(odds) + distances * ((logits > 0) != (labels == 1))
    pairs = (losses, losses), (losses, labels), (predictions, predictions), (predictions, labels)
    squares = [np.dot(first, second) for first, second in pairs]
    return np.array(
        [
            *(len(logits), losses.sum(), squares[0], labels.sum()),
            *(squares[1], predictions.sum(), squares[2], squares[3]),
        ]
    )


def _measures(sums: list[float]) -> dict[str, tuple[float, float]]:
    """The logarithm of each measure and its standard error; empty if labels are too few."""
    count, loss, loss2, positive, loss_y, prediction, prediction2, prediction_y = sums
    if min(positive, count - positive) < _LEAST_LABELS:
        return {}
    rate = positive / count
    entropy = -rate * log(rate) - (1 - rate) * log(1 - rate)
    mean, predicted = (max(total / count, _LEAST_MEAN) for total in (loss, prediction))
    slope = log((1 - rate) / rate) / entropy
    squares = loss2 / mean**2 - 2 * slope * loss_y / mean + slope**2 * positive
    of_loss = max(squares / count - (1 - slope * rate) ** 2, 0.0)
    squares = prediction2 / predicted**2 - 2 * prediction_y / (predicted * rate)
    of_calibration = max((squares + positive / rate**2) / count, 0.0)
    return {
        "logloss": (log(mean / entropy), sqrt(of_loss / count)),
        "calibration": (log(predicted / rate), sqrt(of_calibration / count)),
    }


def _to_numpy(values: Tensor) -> NDArray[np.float64]:
    """The values of a tensor (B,) or (B, 1) in float64 on the CPU."""
    return values.detach().reshape(-1).double().cpu().numpy()
