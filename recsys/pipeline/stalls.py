"""Where the time of training went, stage by stage."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from recsys.pipeline.timeline import Timeline

__all__ = ["STAGES", "StageClock", "format_stalls"]

STAGES = ("load", "fetch", "forward", "backward", "update", "evaluate", "other")


class StageClock:
    """Books every instant since `start` to one stage.

        load        waiting for the next mini-batch
        fetch       waiting, in a forward, for rows to come from the cold tier
        forward     the rest of it, and claiming slots for mini-batches to come
        backward
        update      optimizer steps (fused optimizers update within backward)
        evaluate    left out of `train_seconds`
        other       reports and the progress bar; whatever is done between two steps

    On a CUDA device a stage holds the time to queue its work, not to do it.

    Attributes:
        seconds: Of every stage.
        timeline: Told of every stage, too, if there is one.
    """

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.start()

    def start(self) -> None:
        """What went before is booked to no stage."""
        self._last = time.perf_counter()

    def mark(self, stage: str, fetch_seconds: float = 0.0) -> None:
        """The time since the last mark was spent on `stage`.

        Args:
            stage: One of `STAGES`.
            fetch_seconds: How much of it was spent in waiting for rows, which is a stage of its
                own.
        """
        now = time.perf_counter()
        self.seconds[stage] += now - self._last - fetch_seconds
        self.seconds["fetch"] += fetch_seconds
        if self.timeline is not None:
            self.timeline.add("steps", stage, self._last, now)
        self._last = now

    @property
    def train_seconds(self) -> float:
        """All stages but evaluation."""
        return sum(self.seconds.values()) - self.seconds["evaluate"]


_LOOSENED_BY = {
    "load": "more mini-batches read ahead (prefetch), or data on a faster disk",
    "fetch": "a larger budget, or more mini-batches looked ahead to (schedule.depth)",
    "other": "fewer reports, or less between two steps",
}
_COMPUTING = "faster computing alone: neither data nor rows are waited for longer"


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
        f"{stage:<20}{spent:>10.2f}{spent / total:>8.1%}" for stage, spent in training.items()
    ]
    binding = max(training, key=lambda stage: training[stage])
    lines.append(f"most is {binding}; less of it by {_LOOSENED_BY.get(binding, _COMPUTING)}")
    return "\n".join(lines)
