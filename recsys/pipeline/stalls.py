"""Where the time of training went, stage by stage."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys._support.states import SavedState
from recsys.embeddings.tiers.transfers import MoveSeconds
from recsys.pipeline.suggestions import Suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from recsys.pipeline.timeline import Timeline

__all__ = [
    "STAGES",
    "Moved",
    "StageClock",
    "describe_stalls",
    "format_predicted",
    "format_stalls",
    "stage_seconds",
    "stage_title",
]

STAGES = (
    "load",
    "skip",
    "prefetch_wait",
    "forward",
    "backward",
    "update",
    "write_back_wait",
    "evaluate",
    "checkpoint",
    "other",
)
_NOT_DIVIDED = ("evaluate", "checkpoint")


class Moved(NamedTuple):
    """Seconds that transfers of rows took, and seconds that training waited for them."""

    busy: MoveSeconds = MoveSeconds()
    exposed: MoveSeconds = MoveSeconds()


class StageClock:
    """Assigns all time since `start` to stages.

        load              waiting for the next mini-batch
        skip              finding stale rows, choosing and joining samples, the guard
        prefetch_wait     waiting for rows from the cold tier
        forward           also claiming slots for later mini-batches
        backward
        update            optimizer steps (fused optimizers update within backward)
        write_back_wait   waiting until rows are written back, which frees slots for others
        evaluate          not part of `train_seconds`
        checkpoint        copying what a checkpoint holds; it is written in the background
        other             reports, the progress bar, everything between two steps

    Waiting for rows is subtracted from the stage in which it happened, except in evaluations and
    checkpoints. On a CUDA device a stage counts the time to enqueue its work, not to run it.

    Attributes:
        seconds: Seconds of every stage.
        timeline: Receives every stage as a span; None for no timeline.
    """

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self._count_moves: Callable[[], Moved] = Moved
        self.seconds = dict.fromkeys(STAGES, 0.0)
        # Seconds waited and seconds of transfers, summed over steps with a similar ratio of both.
        self._waited, self._busy = [0.0] * (_RATIOS + 1), [0.0] * (_RATIOS + 1)
        self._step_waited = self._step_busy = 0.0
        self.start()

    def start(self) -> None:
        """Begin now; the time before is not counted."""
        self._last, self._moved = time.perf_counter(), self._count_moves()

    def watch(self, count_moves: Callable[[], Moved]) -> None:
        """Count waiting for rows from now on; a `TrainPipeline` calls this.

        Args:
            count_moves: Returns the seconds of transfers since any fixed time.
        """
        self._count_moves, self._moved = count_moves, count_moves()

    def mark(self, stage: str) -> None:
        """Assign the time since the last mark to `stage`, except for waiting for rows.

        Args:
            stage: One of `STAGES`.
        """
        last, before = self._last, self._moved
        now, moved = time.perf_counter(), self._count_moves()
        self._last, self._moved = now, moved
        self.seconds[stage] += now - last
        if stage not in _NOT_DIVIDED and moved != before:
            waited = moved.exposed - before.exposed
            self.seconds[stage] -= waited.total
            self.seconds["prefetch_wait"] += waited.fetch
            self.seconds["write_back_wait"] += waited.write_back
            self._step_waited += waited.total
            self._step_busy += moved.busy.total - before.busy.total
        if self.timeline is not None:
            self.timeline.add("steps", stage, last, now)

    @property
    def train_seconds(self) -> float:
        """All stages except evaluation."""
        return sum(self.seconds.values()) - self.seconds["evaluate"]

    @property
    def waited_seconds(self) -> float:
        """Seconds of both stages of waiting for rows."""
        return self.seconds["prefetch_wait"] + self.seconds["write_back_wait"]

    def saved_without(self, share: float) -> float:
        """Seconds of waiting that would be saved without a share of the transfers.

        Args:
            share: Share of the time of all transfers.
        """
        self.begin_step()
        steps = zip(self._waited, self._busy, strict=True)
        return sum(min(waited, share * busy) for waited, busy in steps)

    def state_dict(self) -> dict[str, Any]:
        """The seconds measured so far, in JSON types; called between two steps."""
        self.begin_step()
        return {
            "seconds": dict(self.seconds),
            "waited": list(self._waited),
            "busy": list(self._busy),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the seconds of `state`, as if they had been measured by this clock.

        Raises:
            ConfigError: `state` is no state of a clock.
        """
        found = SavedState("clock state", state, ("seconds", "waited", "busy"))
        stages = found.inner("seconds", STAGES, absent={"skip": 0.0})
        seconds = {stage: stages.number(stage) for stage in STAGES}
        lengths = range(_RATIOS + 1, _RATIOS + 2)
        waited, busy = found.numbers("waited", lengths), found.numbers("busy", lengths)
        self.seconds, self._waited, self._busy = seconds, waited, busy
        self._step_waited = self._step_busy = 0.0

    def begin_step(self) -> None:
        """Count what is waited for from now on as that of another step."""
        waited, busy = self._step_waited, self._step_busy
        self._step_waited = self._step_busy = 0.0
        ratio = int(_RATIOS * min(1.0, waited / busy)) if busy else 0
        self._waited[ratio] += waited
        self._busy[ratio] += busy


_RATIOS = 64  # resolution of the ratio of waiting to transfers
_TITLES = {"prefetch_wait": "prefetch wait", "write_back_wait": "write-back wait"}
_REMEDIES = {
    "load": "read more mini-batches ahead (prefetch), or put the data on a faster disk",
    "skip": "decide less often (skip.staleness.window, skip.staleness.count_every)",
    "prefetch_wait": "use a larger budget, or look more mini-batches ahead (schedule.depth)",
    "write_back_wait": "use a larger budget, or look more mini-batches ahead (schedule.depth)",
    "checkpoint": "write checkpoints less often (checkpoint.every_seconds, checkpoint.every_steps)",
    "other": "report less often, or do less between two steps",
}
_SKIP_NOTHING = (
    "train on all samples (skip.policy=none): choosing samples takes longer than computing on them"
)
_COMPUTE_FASTER = "compute faster: neither data nor rows are the bottleneck"
_EXCHANGE_LESS = (
    "compute faster, or use fewer processes or larger mini-batches: it includes the exchange with "
    "the other processes"
)
_LEAST_SHARE = 0.01  # of the time; smaller savings are only in the record, not in the table


def stage_title(stage: str) -> str:
    """The name of a stage in tables and pages."""
    return _TITLES.get(stage, stage)


def stage_seconds(stalls: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of every stage, read from the `stalls` of a run record."""
    return {
        key.removesuffix("_seconds"): spent
        for key, spent in stalls.items()
        if key.endswith("_seconds")
    }


def describe_stalls(clock: StageClock, suggestions: Iterable[Suggestion | None]) -> dict[str, Any]:
    """The stalls of a run, for its record.

    Args:
        clock: The run's clock.
        suggestions: Some may be None.

    Returns:
        `<stage>_seconds`; `binding`, the stage that takes the most time of training, None before
        the first step; `predicted`, what other settings would save, largest saving first, each with
        `key`, `value`, `saved_seconds`, `saved_share` of training, `speedup`, `is_upper_bound`.
    """
    total = clock.train_seconds
    found = [each.describe(total) for each in suggestions if each is not None] if total else []
    training = {stage: spent for stage, spent in clock.seconds.items() if stage != "evaluate"}
    return {
        **{f"{stage}_seconds": spent for stage, spent in clock.seconds.items()},
        "binding": max(training, key=lambda stage: training[stage]) if total else None,
        "predicted": sorted(found, key=lambda each: -each["saved_seconds"]),
    }


def format_stalls(
    stalls: Mapping[str, Any], *, is_alone: bool = True, follows_rows: bool = True
) -> str:
    """Format the stages of training as a table, with the longest one and what would shorten it.

    Args:
        stalls: As returned by `describe_stalls`; evaluation is left out.
        is_alone: Whether one process trained. Of several, these are the stages of the first one.
        follows_rows: Whether skipping, if any, follows the drift of rows, so that its cost depends
            on `skip.staleness`.
    """
    training = stage_seconds(stalls)
    del training["evaluate"]
    if not training.get("skip"):
        training.pop("skip", None)  # nothing is skipped
    total = sum(training.values())
    if not total:
        return "no step was made"
    lines = [f"{'stage':<20}{'seconds':>10}{'share':>8}"]
    lines += [
        f"{stage_title(stage):<20}{spent:>10.2f}{spent / total:>8.1%}"
        for stage, spent in training.items()
    ]
    binding = stalls["binding"]
    remedy = _REMEDIES.get(binding, _COMPUTE_FASTER if is_alone else _EXCHANGE_LESS)
    if binding == "skip" and not follows_rows:
        remedy = _SKIP_NOTHING
    lines.append(f"{stage_title(binding)} takes the most time; to shorten it, {remedy}")
    return "\n".join([*lines, *format_predicted(stalls)])


def format_predicted(stalls: Mapping[str, Any]) -> list[str]:
    """A sentence for each setting that would save some time.

    Args:
        stalls: `describe_stalls`, from a run record; those of older versions have no predictions.
    """
    return [
        Suggestion.sentence(each)
        for each in stalls.get("predicted", ())
        if each["saved_share"] >= _LEAST_SHARE
    ]
