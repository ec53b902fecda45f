"""Training steps under a schedule, in the turns of a benchmark.

    make      the turn's mini-batches, and those for the window ahead
    warm up   untimed steps, which fill the window
    timed     steps with a full window: each one takes a mini-batch out of it and adds another
    rest      waits for transfers, untimed

The next turn continues with the same stream of mini-batches and the same window. After a rest all
rows of the window have arrived. A slow disk would not give this lead, so the untimed steps of the
next turn use it up: there are four for each mini-batch of look-ahead depth.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from recsys.embeddings.lookup.abstract_tables import tiers_of
from recsys.embeddings.tiers.counts import TierCounts
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
    "count_rows",
    "num_ahead",
    "parse_schedules",
    "steps_of_turn",
    "subtract_counts",
    "sum_counts",
    "train_plainly",
]

SCHEDULES: dict[str, Schedule] = {
    "sequential": Sequential(),
    "lookahead-1": LookAhead(1),
    "lookahead-2": LookAhead(2),
    "lookahead-4": LookAhead(4),
    "lookahead-8": LookAhead(8),
    # No rows are pinned, because other schedules take turns on the same slots.
    "hotline": Hotline(learning_steps=0),
}

_SAMPLES_OF_TURN = 8192
_LEAST_STEPS, _MOST_STEPS = 4, 16
_WARM_STEPS_PER_DEPTH = 4
_TIMED_STEPS_PER_DEPTH = 2


class TurnSteps(NamedTuple):
    """Numbers of steps in a turn.

    Attributes:
        num_warm: Untimed steps.
        num_timed: Timed steps, after the untimed ones.
    """

    num_warm: int
    num_timed: int

    @property
    def num_all(self) -> int:
        """Untimed and timed steps together."""
        return self.num_warm + self.num_timed


class Turn(NamedTuple):
    """The result of a turn.

    Attributes:
        seconds: Mean seconds of a timed step.
        exposed_seconds: Mean seconds of a timed step spent waiting for rows.
        counts: Counts of the tiers, over all timed steps.
        disk_bytes: Bytes that this process read from the disk in all timed steps; NaN if the system
            does not report it.
        mean_depth: Mean number of mini-batches ahead with slots, over all steps of the schedule.
    """

    seconds: float
    exposed_seconds: float = 0.0
    counts: TierCounts = TierCounts()
    disk_bytes: float = float("nan")
    mean_depth: float = 0.0


def parse_schedules(text: str) -> tuple[str, ...]:
    """Parse names of schedules; duplicates are dropped.

    Args:
        text: The names, separated by commas.

    Raises:
        ConfigError: a name is not in `SCHEDULES`.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in SCHEDULES:
            raise ConfigError(
                f"--schedule: {name!r} must be one of the schedules {', '.join(SCHEDULES)}"
            )
    return names


def num_ahead(name: str) -> int:
    """The look-ahead depth of a schedule."""
    return int(getattr(SCHEDULES[name], "depth", 0))


def steps_of_turn(
    batch_size: int, schedules: Sequence[str], *, is_quick: bool = False
) -> TurnSteps:
    """Numbers of steps in a turn, the same for all providers.

    Args:
        batch_size: B.
        schedules: Names of the schedules that are measured.
        is_quick: Whether turns are as short as the schedules allow.
    """
    deepest = max(map(num_ahead, schedules), default=0)
    num_timed = 1
    if not is_quick:
        num_timed = max(_LEAST_STEPS, min(_MOST_STEPS, _SAMPLES_OF_TURN // batch_size))
    num_timed = max(num_timed, _TIMED_STEPS_PER_DEPTH * deepest)
    return TurnSteps(max(num_timed, _WARM_STEPS_PER_DEPTH * deepest), num_timed)


class ScheduledSteps:
    """Trains a model under a schedule, turn by turn.

    Args:
        model: Maps a mini-batch to (loss, output).
        optimizers: The optimizers to step.
        schedule: Name of the schedule.
        next_batch: Makes the next mini-batch.
        steps: Numbers of steps in a turn.
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
        self._queue: deque[Batch] = deque()
        self._num_untrained = 0  # in the queue and in the pipeline's window
        self._iterator = self._batches()

    def turn(self) -> Turn:
        """Make the steps of a turn; call `rest` or `leave` afterwards to end transfers."""
        while self._num_untrained < self._steps.num_all + self._num_ahead:
            self._queue.append(self._next_batch())
            self._num_untrained += 1
        for _ in range(self._steps.num_warm):
            self._pipeline.progress(self._iterator)
        clock, counts = self._pipeline.clock, count_rows(self._model)
        exposed = clock.waited_seconds
        disk_bytes = _bytes_read_from_disk()
        begin = time.perf_counter()
        for _ in range(self._steps.num_timed):
            self._pipeline.progress(self._iterator)
        seconds = time.perf_counter() - begin
        self._num_untrained -= self._steps.num_all
        return Turn(
            seconds / self._steps.num_timed,
            (clock.waited_seconds - exposed) / self._steps.num_timed,
            subtract_counts(count_rows(self._model), counts),
            _bytes_read_from_disk() - disk_bytes,
            self._pipeline.mean_depth,
        )

    def rest(self) -> None:
        """Wait for all transfers; the window keeps its claims."""
        for tiers in tiers_of(self._model):
            tiers.residency.queue.settle()

    def leave(self) -> None:
        """Release all claims, so that others can use the model; the next turn claims again."""
        self._pipeline.detach()

    def _batches(self) -> Iterator[Batch]:
        while True:
            yield self._queue.popleft()


def train_plainly(
    model: nn.Module, optimizers: Sequence[Optimizer], batches: Iterable[Batch]
) -> None:
    """Train on mini-batches in a plain loop, without a pipeline."""
    for batch in batches:
        loss, _ = model(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def count_rows(model: nn.Module) -> TierCounts:
    """The counts of all tiers of a model, since they were made."""
    return sum_counts(tiers.residency.counts for tiers in tiers_of(model))


def sum_counts(counts: Iterable[TierCounts]) -> TierCounts:
    """The sum of several counts."""
    return TierCounts(*map(sum, zip(TierCounts(), *counts, strict=True)))


def subtract_counts(counts: TierCounts, before: TierCounts) -> TierCounts:
    """The difference between later and earlier counts."""
    return TierCounts(*(now - then for now, then in zip(counts, before, strict=True)))


def _bytes_read_from_disk() -> float:
    """Bytes that this process has read from the disk: page cache misses and direct reads."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return float("nan")
    return float(dict(line.split(": ") for line in text.splitlines())["read_bytes"])
