"""Where the time of training went, stage by stage."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys.embeddings.transfers import MoveSeconds
from recsys.pipeline.suggestions import Suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from recsys.pipeline.timeline import Timeline

__all__ = [
    "STAGES",
    "Moved",
    "StageClock",
    "describe_stalls",
    "format_stalls",
    "stage_seconds",
    "stage_title",
]

STAGES = (
    "load",
    "prefetch_wait",
    "forward",
    "backward",
    "update",
    "write_back_wait",
    "evaluate",
    "other",
)


class Moved(NamedTuple):
    """What transfers of rows took, and how long they were waited for."""

    busy: MoveSeconds = MoveSeconds()
    exposed: MoveSeconds = MoveSeconds()


class StageClock:
    """Books every instant since `start` to one stage.

        load              waiting for the next mini-batch
        prefetch_wait     waiting for rows to come from the cold tier
        forward           and claiming slots for mini-batches to come
        backward
        update            optimizer steps (fused optimizers update within backward)
        write_back_wait   waiting for rows that go there, so that others can come
        evaluate          left out of `train_seconds`
        other             reports and the progress bar; whatever is done between two steps

    Waiting for rows is taken out of the stage that it was in, but for evaluations. On a CUDA device
    a stage holds the time to queue its work, not to do it.

    Attributes:
        seconds: Of every stage.
        timeline: Told of every stage, too, if there is one.
    """

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self._count_moves: Callable[[], Moved] = Moved
        self.seconds = dict.fromkeys(STAGES, 0.0)
        # Steps by how much of their transfers was waited for: seconds waited, seconds transferred.
        self._waited, self._busy = [0.0] * (_RATIOS + 1), [0.0] * (_RATIOS + 1)
        self._step_waited = self._step_busy = 0.0
        self.start()

    def start(self) -> None:
        """What went before is booked to no stage."""
        self._last, self._moved = time.perf_counter(), self._count_moves()

    def watch(self, count_moves: Callable[[], Moved]) -> None:
        """Ask from now on what transfers took, and what was waited for; a `TrainPipeline` does it.

        Args:
            count_moves: Since whatever beginning.
        """
        self._count_moves, self._moved = count_moves, count_moves()

    def mark(self, stage: str) -> None:
        """The time since the last mark was spent on `stage`, or in waiting for rows.

        Args:
            stage: One of `STAGES`; a step begins with "load".
        """
        last, before = self._last, self._moved
        now, moved = time.perf_counter(), self._count_moves()
        self._last, self._moved = now, moved
        if stage == "load":
            self._end_step()
        self.seconds[stage] += now - last
        if stage != "evaluate" and moved != before:
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
        """All stages but evaluation."""
        return sum(self.seconds.values()) - self.seconds["evaluate"]

    @property
    def waited_seconds(self) -> float:
        """Both stages of waiting for rows."""
        return self.seconds["prefetch_wait"] + self.seconds["write_back_wait"]

    def saved_without(self, share: float) -> float:
        """Seconds that would not have been waited for if a share of all transfers had not been.

        Args:
            share: Of the time that they took.
        """
        self._end_step()
        steps = zip(self._waited, self._busy, strict=True)
        return sum(min(waited, share * busy) for waited, busy in steps)

    def _end_step(self) -> None:
        waited, busy = self._step_waited, self._step_busy
        self._step_waited = self._step_busy = 0.0
        ratio = int(_RATIOS * min(1.0, waited / busy)) if busy else 0
        self._waited[ratio] += waited
        self._busy[ratio] += busy


_RATIOS = 64
_TITLES = {"prefetch_wait": "prefetch wait", "write_back_wait": "write-back wait"}
_LOOSENED_BY = {
    "load": "more mini-batches read ahead (prefetch), or data on a faster disk",
    "prefetch_wait": "a larger budget, or more mini-batches looked ahead to (schedule.depth)",
    "write_back_wait": "a larger budget, or more mini-batches looked ahead to (schedule.depth)",
    "other": "fewer reports, or less between two steps",
}
_COMPUTING = "faster computing: neither data nor rows are waited for longer"
_LEAST_SHARE = 0.01  # of the time; what saves less is told in the record alone


def stage_title(stage: str) -> str:
    """What a stage is called where people read it."""
    return _TITLES.get(stage, stage)


def stage_seconds(stalls: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of every stage, by the `stalls` of a run record."""
    return {
        key.removesuffix("_seconds"): spent
        for key, spent in stalls.items()
        if key.endswith("_seconds")
    }


def describe_stalls(clock: StageClock, suggestions: Iterable[Suggestion | None]) -> dict[str, Any]:
    """What a run record says of stalls.

    Args:
        clock: Of the run.
        suggestions: Some may be None.

    Returns:
        `<stage>_seconds`; `binding`, the stage that takes most of training, None before the first
        step; `predicted`, what other settings would save, the most first, each with `key`, `value`,
        `saved_seconds`, `saved_share` of training, `speedup` and `is_upper_bound`.
    """
    total = clock.train_seconds
    found = [each.describe(total) for each in suggestions if each is not None] if total else []
    training = {stage: spent for stage, spent in clock.seconds.items() if stage != "evaluate"}
    return {
        **{f"{stage}_seconds": spent for stage, spent in clock.seconds.items()},
        "binding": max(training, key=lambda stage: training[stage]) if total else None,
        "predicted": sorted(found, key=lambda each: -each["saved_seconds"]),
    }


def format_stalls(stalls: Mapping[str, Any]) -> str:
    """A table of the stages of training, the one that takes most, and what would loosen it.

    Args:
        stalls: As `describe_stalls` gives it; evaluation is left out.
    """
    training = stage_seconds(stalls)
    del training["evaluate"]
    total = sum(training.values())
    if not total:
        return "no step was made"
    lines = [f"{'stage':<20}{'seconds':>10}{'share':>8}"]
    lines += [
        f"{stage_title(stage):<20}{spent:>10.2f}{spent / total:>8.1%}"
        for stage, spent in training.items()
    ]
    binding = stalls["binding"]
    way_out = _LOOSENED_BY.get(binding, _COMPUTING)
    lines.append(f"{stage_title(binding)} binds; it is loosened by {way_out}")
    lines += [
        Suggestion.sentence(each)
        for each in stalls["predicted"]
        if each["saved_share"] >= _LEAST_SHARE
    ]
    return "\n".join(lines)
