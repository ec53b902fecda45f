"""The guard: lowers or stops skipping when predictions get worse.

At the start of every `every` steps, `steps` steps train on all samples. They are a *window*: their
predictions are made before the model is trained on these samples, so they measure held-out quality.
The guard measures three things, over all samples and over the samples of the kind that skipping
leaves out:

    logloss      divided by an entropy, so that harder data does not look worse; d = ln(window /
                 estimate)
    auc          area under the ROC curve; for the kind: compared with what predictions promise;
                 d = estimate - window
    calibration  mean prediction / mean label; d = |ln window| - |ln estimate|

`window_quality` has the formulas of these measures and of their standard errors.

d is how much worse the window is than the running *estimate* from the windows before. Its standard
error is e = sqrt(error of the window^2 + error of the estimate^2). A measure leaves its band if

    c >= k - 1,   c <- min(k - 1, max(0, c + (d - band) / e - 1)),   k = `standard_errors`

(Page's cumulative sum, with an allowance of one standard error). So one window that is worse by
band + k e leaves the band, and so do several windows that are each a little worse. It is *far*
outside if d >= far (band + k e).

A window with a measure outside its band lowers skipping. Nothing is skipped until the next window
has ended, so that the model recovers, and the estimate starts again with that window. Then skipping
goes on with half the share of samples: its *factor* halves. If the first window after that is
outside its band too, or a measure was far outside, skipping stops: the factor becomes 0. After each
`calm` windows inside the band the factor rises by `recovery`, up to 1.

The estimate follows the windows, so that slow changes of the data cause no alarm: it is a mean with
weight `rate` for the newest window, from which it learns at most one band. A window that is clearly
better replaces it. Nothing that a window shows after steps without skipping is due to skipping, so
the estimate follows such a window freely. A harm that grows by less than about rate * band per
window is therefore not noticed; compare with a run without skipping.

On simulated streams of a calm model, a fifth of whose samples are of the skipped kind, no measure
left its band in 6,000 windows of 50 steps of 128 samples, nor in 2,000 of 50 steps of 2048. Noise
in the predictions of the skipped kind that raises their logloss by 3 % lowered skipping in the
first window at 2048 samples a step; at 128 it took one to eight windows, or was not noticed. A rise
by 8 % takes one to three windows at 128.

References:
    Page (1954), Continuous inspection schemes, Biometrika 41, 100-115.
"""

from __future__ import annotations

from math import copysign, exp, hypot, log
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.states import SavedState
from recsys._support.user_warnings import warn_caller
from recsys.embeddings.staleness.settings import LEAD
from recsys.errors import ConfigError
from recsys.pipeline.skip.guard_settings import Guard
from recsys.pipeline.skip.window_quality import MEASURES, Measured, WindowQuality

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Guard", "QualityGuard"]

_KINDS = ("all", "skipped")
_MOST_DECISIONS = 256
_DECISION_KEYS = ("step", "from_step", "paused_until", "action", "factor", "reasons")
_LEAST_FACTOR = 0.1  # a smaller factor becomes 0
_INSIDE, _OUTSIDE, _FAR = range(3)
_LEAST_ERROR = 1e-9
_MOST = 1e12


class QualityGuard:
    """Measures quality in windows, and decides what part of the share is skipped.

    Attributes:
        guard: The settings.
        decisions: The last 256 changes of the factor, oldest first, in JSON types: `step`, the last
            of its window; `from_step`, the mini-batch number from which it holds; `paused_until`,
            the number before which nothing is skipped; `action`; `factor`; `reasons`, the measures
            outside their bands.
        num_decisions: All changes of the factor.
        num_windows: Windows that have ended.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.reset()

    def reset(self) -> None:
        """Forget everything: the guard is as new."""
        self.decisions: list[dict[str, Any]] = []
        self.num_decisions = self.num_windows = 0
        self._factor = 1.0
        self._num_calm = 0
        self._was_outside = False  # in the last window after steps with skipping
        self._had_skipped = False  # whether the window before had samples of the skipped kind
        self._window = _new_window()
        self._next_step = 0  # after the last step that was added
        self._estimates = self._new_estimates()

    def is_open(self, number: int) -> bool:
        """Whether the mini-batch with this number is in a window: nothing is skipped in it."""
        return number % self.guard.every < self.guard.steps

    def factor_of(self, number: int) -> float:
        """The factor of the share of skipped samples that holds for a mini-batch; 0: skip none.

        The mini-batch is one that is yet to be trained on: a decision holds before the next one is
        made, so the last two are enough to know the factor.
        """
        for decision in reversed(self.decisions):
            if decision["from_step"] <= number:
                return float(decision["factor"]) if decision["paused_until"] <= number else 0.0
        return 1.0

    @property
    def tracked_factor(self) -> float:
        """The factor of the share of samples that are to have stale rows only.

        It stays above 0 when skipping stops, so that windows still have samples of the kind.
        """
        return max(self._factor, self.guard.recovery)

    def add(self, number: int, logits: Tensor, labels: Tensor, is_stale: Tensor) -> bool:
        """Add the predictions of a step that is in a window; the last step of one decides.

        A step that failed is not in its window. If it was the last one, the window is dropped.

        Args:
            number: The mini-batch number.
            logits: Predictions before the sigmoid, made before training on these samples.
            labels: Labels.
            is_stale: Which samples are of the kind that skipping leaves out.

        Shape:
            logits, labels, is_stale (B,) or (B, 1).

        Returns:
            Whether the factor changes. The change holds for mini-batches from number + LEAD on.

        Raises:
            ConfigError: a label is neither 0 nor 1.
        """
        every = self.guard.every
        if (self._next_step - 1) // every != number // every:
            self._window = _new_window()
        self._next_step = number + 1
        scores, are_positive = _to_numpy(logits), _to_numpy(labels)
        mask = _to_numpy(is_stale).astype(bool)
        # A model with infinite predictions has diverged; its loss says so.
        if np.isfinite(scores).all():
            try:
                self._window["all"].add(scores, are_positive)
                self._window["skipped"].add(scores[mask], are_positive[mask])
            except ValueError as error:
                raise ConfigError(
                    f"a guard needs labels 0 or 1: {error}; set guard=None"
                ) from error
        if number % every != self.guard.steps - 1:
            return False
        return self._end_window(number)

    def _end_window(self, step: int) -> bool:
        found = {kind: window.result() for kind, window in self._window.items()}
        has_skipped = self._window["skipped"].num_samples > 0
        is_paused = bool(self.decisions) and self.decisions[-1]["paused_until"] > step
        is_unskipped = is_paused or not self._factor or not (has_skipped or self._had_skipped)
        self._had_skipped = has_skipped
        self._window = _new_window()
        self.num_windows += 1

        reasons: list[dict[str, Any]] = []
        worst = _INSIDE
        for (kind, measure), estimate in self._estimates.items():
            measured = found[kind].get(measure)
            if measured is None:
                continue
            if is_unskipped:
                estimate.renew(measured, self.guard.rate)
                continue
            verdict, expected = estimate.judge(measured, self.guard), estimate.value
            worst = max(worst, verdict)
            if verdict != _INSIDE:
                reasons.append(
                    {
                        "samples": kind,
                        "measure": measure,
                        "value": measured.value,
                        "estimate": expected,
                    }
                )
        return not is_paused and self._decide(step, worst, reasons)

    def _decide(self, step: int, worst: int, reasons: list[dict[str, Any]]) -> bool:
        was_outside, self._was_outside = self._was_outside, worst != _INSIDE
        if worst == _INSIDE:
            self._num_calm += 1
            if self._factor == 1 or self._num_calm < self.guard.calm:
                return False
            self._set_factor(step, "raised", min(1.0, self._factor + self.guard.recovery), [])
            return True
        factor = self._factor / 2
        if worst == _FAR or was_outside or factor < _LEAST_FACTOR:
            factor, self._was_outside = 0.0, False
        self._estimates = self._new_estimates()
        self._set_factor(step, "lowered" if factor else "stopped", factor, reasons)
        return True

    def _set_factor(
        self, step: int, action: str, factor: float, reasons: list[dict[str, Any]]
    ) -> None:
        self._factor, self._num_calm = factor, 0
        decision = {
            "step": step,
            "from_step": step + LEAD,
            "paused_until": step + LEAD + (self.guard.every if action == "lowered" else 0),
            "action": action,
            "factor": factor,
            "reasons": reasons,
        }
        self.num_decisions += 1
        self.decisions = [*self.decisions[1 - _MOST_DECISIONS :], decision]
        if reasons:
            warn_caller(f"guard: {_describe(decision)}")

    def report(self) -> dict[str, Any]:
        """For a run record, in JSON types: the factor, the estimates, and the decisions."""
        return {
            "num_windows": self.num_windows,
            "factor": self._factor,
            "estimates": {
                kind: {
                    measure: self._estimates[kind, measure].value
                    for measure in MEASURES
                    if self._estimates[kind, measure].num_windows
                }
                for kind in _KINDS
            },
            "num_decisions": self.num_decisions,
            "decisions": self.decisions,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, in JSON types."""
        return {
            "num_windows": self.num_windows,
            "factor": self._factor,
            "num_calm": self._num_calm,
            "was_outside": self._was_outside,
            "had_skipped": self._had_skipped,
            "next_step": self._next_step,
            "window": {kind: window.as_list() for kind, window in self._window.items()},
            "estimates": {
                f"{kind} {measure}": estimate.as_list()
                for (kind, measure), estimate in self._estimates.items()
            },
            "num_decisions": self.num_decisions,
            "decisions": [{**each, "reasons": list(each["reasons"])} for each in self.decisions],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ConfigError: it is no state of a guard.
        """
        found = SavedState("guard state", state, self.state_dict())
        num_windows, num_calm = found.whole("num_windows"), found.whole("num_calm")
        factor = found.number("factor", most=1)
        was_outside, had_skipped = found.flag("was_outside"), found.flag("had_skipped")
        next_step = found.whole("next_step")
        sums = found.inner("window", _KINDS)
        length = WindowQuality.NUM_SUMS
        window = _new_window(
            {kind: sums.numbers(kind, range(length, length + 1)) for kind in _KINDS}
        )
        saved = found.inner("estimates", [f"{kind} {measure}" for kind, measure in self._estimates])
        estimates = self._new_estimates()
        for (kind, measure), estimate in estimates.items():
            estimate.load(saved.numbers(f"{kind} {measure}", range(4, 5)))
        decisions = []
        for entry in found.items("decisions", range(_MOST_DECISIONS + 1), "entries"):
            read = SavedState("guard decision", entry, _DECISION_KEYS)
            steps = {key: read.whole(key) for key in _DECISION_KEYS[:3]}
            decisions.append({**entry, **steps, "factor": read.number("factor", most=1)})
        num_decisions = found.whole("num_decisions", least=len(decisions))
        self.num_windows, self._num_calm, self._factor = num_windows, num_calm, factor
        self._was_outside, self._had_skipped = was_outside, had_skipped
        self._window, self._next_step, self._estimates = window, next_step, estimates
        self.decisions, self.num_decisions = decisions, num_decisions

    def _new_estimates(self) -> dict[tuple[str, str], _Estimate]:
        return {
            (kind, measure): _Estimate(measure, getattr(self.guard, measure))
            for kind in _KINDS
            for measure in MEASURES
        }


def _new_window(sums: Mapping[str, Sequence[float]] | None = None) -> dict[str, WindowQuality]:
    """Sums of a window for each kind, all 0 or as given."""
    sums = sums or dict.fromkeys(_KINDS, [0.0] * WindowQuality.NUM_SUMS)
    return {kind: WindowQuality(of_a_kind=kind != "all", sums=sums[kind]) for kind in _KINDS}


def _describe(decision: dict[str, Any]) -> str:
    """A decision in words, such as "from mini-batch 1081 on, the run stops skipping: ..."."""
    factor = decision["factor"]
    what = f"skips {factor:.0%} of the share that was asked for" if factor else "stops skipping"
    if decision["paused_until"] > decision["from_step"]:
        what = f"skips nothing until mini-batch {decision['paused_until']}, and then {what[6:]}"
    reasons = ", ".join(
        f"{reason['measure']} of {reason['samples']} samples is {reason['value']:.4f} "
        f"(estimate {reason['estimate']:.4f})"
        for reason in decision["reasons"]
    )
    return (
        f"from mini-batch {decision['from_step']} on, the run {what}"
        f"{f': {reasons}' if reasons else ''}"
    )


class _Estimate:
    """The running estimate of one measure of one kind of samples, and its cumulative sum.

    Args:
        measure: One of MEASURES.
        band: Its band.

    Attributes:
        value: The estimate; 0 before the first window.
        num_windows: Windows in it.
    """

    def __init__(self, measure: str, band: float) -> None:
        self._measure, self._band = measure, band
        self.value = self._variance = self._excess = 0.0
        self.num_windows = 0

    def judge(self, found: Measured, guard: Guard) -> int:
        """Compare a window with the estimate, which then follows it unless it is outside."""
        if not self.num_windows:
            self.renew(found, guard.rate)
            return _INSIDE
        error = max(hypot(found.error, self._variance**0.5), _LEAST_ERROR)
        reach = self._band + guard.standard_errors * error
        distance = self._distance(found.value)
        if distance < -reach:  # clearly better
            self.num_windows, self._excess = 0, 0.0
            self.renew(found, guard.rate)
            return _INSIDE
        most = guard.standard_errors - 1
        beyond = (distance - self._band) / error
        self._excess = min(most, max(0.0, self._excess + beyond - 1))
        if self._excess >= most:
            return _FAR if distance >= guard.far * reach else _OUTSIDE
        self.renew(Measured(self._within_band(found.value), found.error), guard.rate)
        return _INSIDE

    def renew(self, found: Measured, rate: float) -> None:
        """Let the estimate follow a window."""
        self.num_windows += 1
        weight = max(1 / self.num_windows, rate)
        # Not value + weight * (found - value), which could round a small value to 0.
        self.value = (1 - weight) * self.value + weight * found.value
        self._variance = (1 - weight) ** 2 * self._variance + (weight * found.error) ** 2

    def _distance(self, value: float) -> float:
        """How much worse a value is than the estimate; negative if it is better."""
        if self._measure == "auc":
            return self.value - value
        if self._measure == "logloss":
            return log(value / self.value)
        return abs(log(value)) - abs(log(self.value))

    def _within_band(self, value: float) -> float:
        """The value nearest to a window's that differs from the estimate by at most the band."""
        if self._measure == "auc":
            return self.value + min(max(value - self.value, -self._band), self._band)
        ratio = log(value / self.value)
        return self.value * exp(copysign(min(abs(ratio), self._band), ratio))

    def as_list(self) -> list[float]:
        return [self.value, self._variance, self._excess, self.num_windows]

    def load(self, numbers: list[float]) -> None:
        self.value, self._variance, self._excess = numbers[:3]
        self.num_windows = int(min(numbers[3], _MOST))
        if not self.value and self._measure != "auc":
            self.num_windows = 0


def _to_numpy(values: Tensor) -> NDArray[np.float64]:
    """The values of a tensor (B,) or (B, 1) in float64 on the CPU."""
    found: NDArray[np.float64] = values.detach().reshape(-1).to("cpu", torch.float64).numpy()
    return found
