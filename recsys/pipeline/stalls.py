"""Where the time of training went, stage by stage."""

from __future__ import annotations

import time

__all__ = ["STAGES", "StageClock"]

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
    """

    def __init__(self) -> None:
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
        self._last = now

    @property
    def train_seconds(self) -> float:
        """All stages but evaluation."""
        return sum(self.seconds.values()) - self.seconds["evaluate"]
