"""Where the time of training went, stage by stage."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from recsys.embeddings.transfer_clock import MoveSeconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from recsys.pipeline.timeline import Timeline

__all__ = ["STAGES", "StageClock", "format_stalls", "stage_seconds", "stage_title"]

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
        self._count_waited: Callable[[], MoveSeconds] = MoveSeconds
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.start()

    def start(self) -> None:
        """What went before is booked to no stage."""
        self._last, self._waited = time.perf_counter(), self._count_waited()

    def watch(self, count_waited: Callable[[], MoveSeconds]) -> None:
        """Ask from now on how long rows have been waited for; a `TrainPipeline` says where.

        Args:
            count_waited: Since whatever beginning.
        """
        self._count_waited, self._waited = count_waited, count_waited()

    def mark(self, stage: str) -> None:
        """The time since the last mark was spent on `stage`, or in waiting for rows.

        Args:
            stage: One of `STAGES`.
        """
        last, before = self._last, self._waited
        now, waited = time.perf_counter(), self._count_waited()
        self._last, self._waited = now, waited
        found = MoveSeconds() if stage == "evaluate" else waited - before
        self.seconds[stage] += now - last - found.total
        self.seconds["prefetch_wait"] += found.fetch
        self.seconds["write_back_wait"] += found.write_back
        if self.timeline is not None:
            self.timeline.add("steps", stage, last, now)

    @property
    def train_seconds(self) -> float:
        """All stages but evaluation."""
        return sum(self.seconds.values()) - self.seconds["evaluate"]


_TITLES = {"prefetch_wait": "prefetch wait", "write_back_wait": "write-back wait"}
_LOOSENED_BY = {
    "load": "more mini-batches read ahead (prefetch), or data on a faster disk",
    "prefetch_wait": "a larger budget, or more mini-batches looked ahead to (schedule.depth)",
    "write_back_wait": "a larger budget, or more mini-batches looked ahead to (schedule.depth)",
    "other": "fewer reports, or less between two steps",
}
_COMPUTING = "faster computing alone: neither data nor rows are waited for longer"


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


def format_stalls(seconds: Mapping[str, float]) -> str:
    """A table of the stages of training, the one that takes most, and what would loosen that.

    Args:
        seconds: By stage; evaluation is left out.
    """
    training = {stage: spent for stage, spent in seconds.items() if stage != "evaluate"}
    total = sum(training.values())
    if not total:
        return "no step was made"
    lines = [f"{'stage':<20}{'seconds':>10}{'share':>8}"]
    lines += [
        f"{stage_title(stage):<20}{spent:>10.2f}{spent / total:>8.1%}"
        for stage, spent in training.items()
    ]
    binding = max(training, key=lambda stage: training[stage])
    way_out = _LOOSENED_BY.get(binding, _COMPUTING)
    lines.append(f"most is {stage_title(binding)}; less of it by {way_out}")
    return "\n".join(lines)
