"""Steps of training under a schedule, as turns of a benchmark make them.

    made      the turn's mini-batches, and as many as are looked ahead to
    warm      steps that are not timed, which fill the window
    timed     steps with the window full: for each one that leaves it, one comes
    at rest   transfers still under way are waited for, not timed

A turn's mini-batches come from a stream that goes on in the next turn, and so does the window: what
was looked ahead to is what the next turn begins with. At rest every row ahead has come, which is a
lead that a slow disk would not give; it is used up by the warm steps, four for each mini-batch
ahead.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from recsys.embeddings.residency import TierCounts
from recsys.embeddings.tier_report import tiers_of
from recsys.errors import ConfigError
from recsys.pipeline import Hotline, LookAhead, Sequential, TrainPipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from recsys.batch import Batch
    from recsys.pipeline.schedule import Schedule

__all__ = [
    "SCHEDULES",
    "ScheduledSteps",
    "Turn",
    "TurnSteps",
    "added_up",
    "count_rows",
    "less",
    "num_ahead",
    "parse_schedules",
    "steps_of_turn",
]

SCHEDULES: dict[str, Schedule] = {
    "sequential": Sequential(),
    "lookahead-1": LookAhead(1),
    "lookahead-2": LookAhead(2),
    "lookahead-4": LookAhead(4),
    "lookahead-8": LookAhead(8),
    # Nothing is kept for being popular: others take turns in the same slots.
    "hotline": Hotline(learning_steps=0),
    "hotline-2": Hotline(depth=2, learning_steps=0),
}

_SAMPLES_OF_TURN = 8192
_LEAST_STEPS, _MOST_STEPS = 4, 16
_WARM_STEPS_PER_DEPTH = 4
_TIMED_STEPS_PER_DEPTH = 2


class TurnSteps(NamedTuple):
    """How many steps a turn has.

    Attributes:
        num_warm: Not timed.
        num_timed: Behind them.
    """

    num_warm: int
    num_timed: int

    @property
    def num_all(self) -> int:
        """Both."""
        return self.num_warm + self.num_timed


class Turn(NamedTuple):
    """What a turn has measured.

    Attributes:
        seconds: Of a timed step, the mean.
        exposed_seconds: Of those, waiting for rows.
        counts: Of the tiers, over all timed steps.
        disk_bytes: Read from the disk by this process, likewise; NaN where nobody says.
        mean_depth: Mini-batches ahead whose rows had slots, over all steps of the schedule so far.
    """

    seconds: float
    exposed_seconds: float = 0.0
    counts: TierCounts = TierCounts()
    disk_bytes: float = float("nan")
    mean_depth: float = 0.0


def parse_schedules(text: str) -> tuple[str, ...]:
    """Names of schedules, each once.

    Args:
        text: The names, with commas between them.

    Raises:
        ConfigError: one is not among `SCHEDULES`.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in SCHEDULES:
            raise ConfigError(
                f"--schedule: {name!r} must be a schedule's name; these are {', '.join(SCHEDULES)}"
            )
    return names


def num_ahead(name: str) -> int:
    """Mini-batches that a schedule looks ahead to."""
    return int(getattr(SCHEDULES[name], "depth", 0))


def steps_of_turn(
    batch_size: int, schedules: Sequence[str], *, is_quick: bool = False
) -> TurnSteps:
    """How many steps a turn has, the same for everybody who takes turns.

    Args:
        batch_size: B.
        schedules: Names of those that are measured.
        is_quick: Whether one step would do.
    """
    deepest = max(map(num_ahead, schedules), default=0)
    num_timed = 1
    if not is_quick:
        num_timed = max(_LEAST_STEPS, min(_MOST_STEPS, _SAMPLES_OF_TURN // batch_size))
    num_timed = max(num_timed, _TIMED_STEPS_PER_DEPTH * deepest)
    return TurnSteps(max(num_timed, _WARM_STEPS_PER_DEPTH * deepest), num_timed)


class ScheduledSteps:
    """A model that is trained under a schedule, turn by turn.

    Args:
        model: Maps a mini-batch to (loss, output).
        optimizers: To be stepped.
        schedule: Its name.
        next_batch: Makes the next mini-batch.
        steps: Of a turn.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedule: str,
        next_batch: Callable[[], Batch],
        steps: TurnSteps,
    ) -> None:
        self._model, self._next_batch, self._steps = model, next_batch, steps
        self._num_ahead = num_ahead(schedule)
        self._pipeline = TrainPipeline(model, optimizers, schedule=SCHEDULES[schedule])
        self._made: deque[Batch] = deque()
        self._num_untrained = 0  # those made, and those in the pipeline's window
        self._feed = self._batches()

    def turn(self) -> Turn:
        """Make a turn's steps; what they leave under way is for `rest` or `leave`."""
        while self._num_untrained < self._steps.num_all + self._num_ahead:
            self._made.append(self._next_batch())
            self._num_untrained += 1
        for _ in range(self._steps.num_warm):
            self._pipeline.progress(self._feed)
        clock, counts = self._pipeline.clock, count_rows(self._model)
        exposed = clock.waited_seconds
        disk_bytes = _bytes_read_from_disk()
        begin = time.perf_counter()
        for _ in range(self._steps.num_timed):
            self._pipeline.progress(self._feed)
        seconds = time.perf_counter() - begin
        self._num_untrained -= self._steps.num_all
        return Turn(
            seconds / self._steps.num_timed,
            (clock.waited_seconds - exposed) / self._steps.num_timed,
            less(count_rows(self._model), counts),
            _bytes_read_from_disk() - disk_bytes,
            self._pipeline.mean_depth,
        )

    def rest(self) -> None:
        """Wait for transfers that are under way; the window keeps its claims."""
        for tiers in tiers_of(self._model):
            tiers.residency.queue.settle()

    def leave(self) -> None:
        """Leave the model to others: no slot is claimed. The next turn begins by claiming anew."""
        self._pipeline.detach()

    def _batches(self) -> Iterator[Batch]:
        while True:
            yield self._made.popleft()


def count_rows(model: nn.Module) -> TierCounts:
    """What has happened in a model's tiers since the beginning."""
    return added_up(tiers.residency.counts for tiers in tiers_of(model))


def added_up(counts: Iterable[TierCounts]) -> TierCounts:
    """Counts of several, taken together."""
    return TierCounts(*map(sum, zip(TierCounts(), *counts, strict=True)))


def less(counts: TierCounts, before: TierCounts) -> TierCounts:
    """What has been counted since."""
    return TierCounts(*(now - then for now, then in zip(counts, before, strict=True)))


def _bytes_read_from_disk() -> float:
    """By this process, since it began: pages that the page cache did not have, and direct reads."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return float("nan")
    return float(dict(line.split(": ") for line in text.splitlines())["read_bytes"])
