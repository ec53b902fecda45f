"""Where the time of training went, stage by stage."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from numba.core import event

from recsys._support.untrusted import require_state

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "STAGES",
    "StageClock",
    "describe_stalls",
    "format_stalls",
    "stage_seconds",
]

STAGES = (
    "load",
    "skip",
    "prefetch_wait",
    "forward",
    "backward",
    "update",
    "compile",
    "evaluate",
    "checkpoint",
    "other",
)
_NOT_TRAINING = ("compile", "evaluate")
_NOT_DIVIDED = ("evaluate", "checkpoint")


class _Compiling(event.Listener, threading.local):  # type: ignore[misc]  # numba has no types
    """Counts the seconds in which each thread compiles kernels, or loads compiled ones."""

    seconds, begin, depth = 0.0, 0.0, 0

    def on_start(self, event: Any) -> None:
        if not self.depth:
            self.begin = time.perf_counter()
        self.depth += 1

    def on_end(self, event: Any) -> None:
        self.depth -= 1
        if not self.depth:
            self.seconds += time.perf_counter() - self.begin


_COMPILING = _Compiling()
event.register("numba:compiler_lock", _COMPILING)


class StageClock:
    """Assigns all time since `start` to stages.

        load              waiting for the next mini-batch
        skip              finding stale rows, choosing and joining samples, the guard
        prefetch_wait     waiting for rows from the cold tier
        forward           also claiming slots for later mini-batches
        backward
        update            optimizer steps (fused optimizers update within backward)
        compile           compiling kernels, or loading them; not part of `train_seconds`
        evaluate          not part of `train_seconds`
        checkpoint        copying what a checkpoint holds; it is written in the background
        other             reports, the progress bar, everything between two steps

    Waiting for rows is subtracted from the stage in which it happened, except in evaluations and
    checkpoints. On a CUDA device a stage counts the time to enqueue its work, not to run it.

    Attributes:
        seconds: Seconds of every stage.
    """

    def __init__(self) -> None:
        self._count_waiting: Callable[[], float] = float
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.start()

    def start(self) -> None:
        """Begin now; the time before is not counted."""
        self._last, self._waited = time.perf_counter(), self._count_waiting()
        self._compiled = _COMPILING.seconds

    def watch(self, count_waiting: Callable[[], float]) -> None:
        """Count waiting for rows from now on; a `TrainPipeline` calls this.

        Args:
            count_waiting: Returns the seconds waited for rows since any fixed time.
        """
        self._count_waiting, self._waited = count_waiting, count_waiting()

    def mark(self, stage: str) -> None:
        """Assign the time since the last mark to `stage`, except for waiting for rows.

        Args:
            stage: One of `STAGES`.
        """
        last, before, compiled = self._last, self._waited, self._compiled
        self.start()
        spent, waited = self._last - last, 0.0
        if stage not in _NOT_DIVIDED:
            waited = self._waited - before
        # A kernel may be compiled during a wait: that time counts once.
        compiling = max(0.0, min(self._compiled - compiled, spent - waited))
        self.seconds["compile"] += compiling
        self.seconds["prefetch_wait"] += waited
        self.seconds[stage] += spent - waited - compiling

    @property
    def train_seconds(self) -> float:
        """All stages except evaluation and compiling."""
        return sum(self.seconds.values()) - sum(self.seconds[stage] for stage in _NOT_TRAINING)

    def state_dict(self) -> dict[str, Any]:
        """The seconds measured so far, in JSON types; called between two steps."""
        return {"seconds": dict(self.seconds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the seconds of `state`, as if they had been measured by this clock.

        Raises:
            ConfigError: `state` is no state of a clock.
        """
        found = require_state("clock state", state, ("seconds",))["seconds"]
        self.seconds = dict(require_state("clock state", found, STAGES))


def stage_seconds(stalls: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of every stage, read from the `stalls` of a run record."""
    return {
        key.removesuffix("_seconds"): spent
        for key, spent in stalls.items()
        if key.endswith("_seconds")
    }


def describe_stalls(clock: StageClock) -> dict[str, Any]:
    """The stalls of a run, for its record.

    Args:
        clock: The run's clock.

    Returns:
        `<stage>_seconds`; `binding`, the stage that takes the most time of training, None before
        the first step.
    """
    training = {
        stage: spent for stage, spent in clock.seconds.items() if stage not in _NOT_TRAINING
    }
    return {
        **{f"{stage}_seconds": spent for stage, spent in clock.seconds.items()},
        "binding": max(training, key=training.__getitem__) if clock.train_seconds else None,
    }


def format_stalls(stalls: Mapping[str, Any]) -> str:
    """The stages of training in one line, each with its share of the time.

    Args:
        stalls: As returned by `describe_stalls`; what is no training, and stages below 1 %, are
            left out.
    """
    spent_on = stage_seconds(stalls)
    training = {stage: spent for stage, spent in spent_on.items() if stage not in _NOT_TRAINING}
    total = sum(training.values())
    shares = {stage.replace("_", " "): spent / total for stage, spent in training.items() if total}
    found = [f"{title} {share:.0%}" for title, share in shares.items() if share >= 0.01]
    return ", ".join(found) or "no step was made"
