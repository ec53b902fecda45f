"""Providers of `recsys bench gpu`: each trains the same DLRM, on embeddings of its own.

    step       one optimizer step on one mini-batch that lies on the device already
    turn       untimed steps, then timed ones, whose mean is the result

A turn begins with steps that are not timed: they fill the window of a schedule, and the caches of
the device with what this provider leaves there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from contextlib import nullcontext
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from recsys._support.cuda.replays import replaying
from recsys.bench.gpu.clock import Clock, allocated_bytes, peak_bytes, reset_peak
from recsys.bench.parts.scheduled import (
    SCHEDULES,
    TurnSteps,
    count_rows,
    num_ahead,
    subtract_counts,
)
from recsys.embeddings.tiers.counts import TierCounts
from recsys.models import DLRM, DLRMTrain
from recsys.pipeline import TrainPipeline
from recsys.pipeline.captured_dense import CapturedDense

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from recsys.batch import Batch
    from recsys.bench.gpu.cases import Model
    from recsys.bench.gpu.samples import MiniBatches

__all__ = [
    "LEARNING_RATE",
    "AbstractProvider",
    "PlainLoop",
    "ScheduledLoop",
    "Setting",
    "Turn",
    "steps_of_turn",
]

LEARNING_RATE = 0.01
_SLOW_SECONDS = 0.25  # a step that takes longer is measured once or twice per turn


class SupportsStep(Protocol):
    """The part of a torch optimizer that a step needs."""

    def zero_grad(self) -> None: ...
    def step(self) -> Any: ...


class Setting(NamedTuple):
    """What all providers of a case have in common.

    Attributes:
        model: The dense part.
        device: Where it trains.
        batches: The mini-batches.
        steps: Numbers of steps in a turn.
        capture: Whether the dense part is replayed as CUDA graphs.
        pool: The memory pool that all these graphs share: only one provider is in a step at a time.
    """

    model: Model
    device: torch.device
    batches: MiniBatches
    steps: TurnSteps
    capture: bool = False
    pool: Any = None


class Turn(NamedTuple):
    """The result of a turn.

    Attributes:
        seconds: Mean seconds of a timed step.
        num_steps: Timed steps.
        host_seconds: Of these, until the host had queued the step.
        beside_bytes: The most memory of the device during them, beyond what was in use when they
            began: activations, gradients, and lists of rows.
        counts: Counts of the tiers over the timed steps.
    """

    seconds: float
    num_steps: int
    host_seconds: float
    beside_bytes: int
    counts: TierCounts = TierCounts()


def steps_of_turn(batch_size: int, *, is_quick: bool) -> TurnSteps:
    """Numbers of steps in a turn: more for small mini-batches."""
    return TurnSteps(1, 1) if is_quick else TurnSteps(4, max(4, min(16, 2**18 // batch_size)))


class AbstractProvider(ABC):
    """Trains a DLRM with some embeddings.

    Args:
        setting: The case.
        embeddings: Maps a mini-batch's ids to pooled vectors on the device.

    Attributes:
        captured: Replays the dense part; None if it runs op by op.
    """

    captured: CapturedDense | None = None

    def __init__(self, setting: Setting, embeddings: nn.Module) -> None:
        self._setting, self._clock = setting, Clock(setting.device)
        model, device = setting.model, setting.device
        torch.manual_seed(0)
        dlrm = DLRM(embeddings, 13, model.dense_arch, model.over_arch, device)
        self._model = DLRMTrain(dlrm)
        of_tables = set(embeddings.parameters())
        dense = [each for each in self._model.parameters() if each not in of_tables]
        self._of_dense = torch.optim.SGD(dense, lr=LEARNING_RATE)
        self._embeddings = embeddings

    def turn(self) -> Turn:
        """Make the steps of a turn.

        Raises:
            RuntimeError: the loss is not finite.
        """
        device, steps = self._setting.device, self._setting.steps
        self.prepare(steps.num_all)
        num_warm = 1
        if self._clock.time(self.step) > _SLOW_SECONDS:  # the first may fill a window
            num_warm = 2
            if self._clock.time(self.step) > _SLOW_SECONDS:
                steps = TurnSteps(2, min(2, steps.num_timed))
        for _ in range(steps.num_warm - num_warm):
            self.step()
        losses: list[Tensor] = []
        queued = begin = 0.0

        def timed() -> None:
            nonlocal begin, queued
            begin = perf_counter()
            losses[:] = [self.step() for _ in range(steps.num_timed)]
            queued = perf_counter()

        before, held = self._counts(), allocated_bytes(device)
        reset_peak(device)
        seconds = self._clock.time(timed) / steps.num_timed
        beside = peak_bytes(device) - held
        counts = subtract_counts(self._counts(), before)
        self._leave()
        if not isfinite(losses[-1].item()):
            raise RuntimeError(f"the loss is {losses[-1].item()}")
        return Turn(seconds, steps.num_timed, (queued - begin) / steps.num_timed, beside, counts)

    @abstractmethod
    def step(self) -> Tensor:
        """Train on the next mini-batch; returns its loss, detached."""

    @abstractmethod
    def prepare(self, num_steps: int) -> None:
        """Make the mini-batches of the next steps, so that no step makes its own."""

    def _leave(self) -> None:  # noqa: B027  # most have nothing to do
        """After a turn: let others use the tables."""

    def _counts(self) -> TierCounts:
        return TierCounts()

    def _forward(self, batch: Batch) -> tuple[Tensor, Any]:
        is_bf16 = self._setting.model.precision == "bf16"
        with torch.autocast(self._setting.device.type, torch.bfloat16, enabled=is_bf16):
            found: tuple[Tensor, Any] = self._model(batch)
        return found


class PlainLoop(AbstractProvider):
    """A plain loop over mini-batches that are used again and again.

    Args:
        setting: As for `AbstractProvider`.
        embeddings: As for `AbstractProvider`.
        of_rows: The optimizers of the rows.
        are_ids_on_host: Whether the embeddings look ids up on the host.
    """

    def __init__(
        self,
        setting: Setting,
        embeddings: nn.Module,
        of_rows: Sequence[SupportsStep],
        *,
        are_ids_on_host: bool = False,
    ) -> None:
        super().__init__(setting, embeddings)
        self._optimizers: list[SupportsStep] = [self._of_dense, *of_rows]
        self._are_ids_on_host, self._next = are_ids_on_host, 0
        if setting.capture:
            self.captured = CapturedDense(self._model)
            self.captured.pool = setting.pool

    def step(self) -> Tensor:
        """Train on the next mini-batch."""
        batch = self._batch(self._next)
        self._next += 1
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        with nullcontext() if self.captured is None else self.captured.one_step():
            loss, _ = self._forward(batch)
        self._between(self._batch(self._next))
        backward = torch.Tensor.backward if self.captured is None else self.captured.backward
        backward(loss)
        with replaying(self.captured is not None and not self.captured.reason):
            for optimizer in self._optimizers:
                optimizer.step()
        return loss.detach()

    def _between(self, following: Batch) -> None:
        """Between forward and backward: start work for the next mini-batch."""

    def prepare(self, num_steps: int) -> None:
        """Make the mini-batches of the next steps; see `AbstractProvider`."""
        for number in range(self._next, self._next + num_steps + 1):
            self._batch(number)

    def _batch(self, number: int) -> Batch:
        return self._setting.batches.cycled(number, are_ids_on_host=self._are_ids_on_host)


class ScheduledLoop(AbstractProvider):
    """A `TrainPipeline` under a schedule, on mini-batches that no other loop of these tables uses.

    Args:
        setting: As for `AbstractProvider`.
        embeddings: As for `AbstractProvider`.
        schedule: A name from `SCHEDULES`.
        numbers: Numbers of the mini-batches to train on, shared by all loops over the same slots.
    """

    def __init__(
        self, setting: Setting, embeddings: nn.Module, schedule: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(setting, embeddings)
        self._numbers = numbers
        self._num_ahead = num_ahead(schedule)
        self._pipeline = TrainPipeline(
            self._model,
            self._of_dense,
            schedule=SCHEDULES[schedule],
            custom_model_fwd=self._forward,
            capture=setting.capture,
        )
        self.captured = self._pipeline.captured
        if self.captured is not None:
            self.captured.pool = setting.pool
        self._queue: deque[Batch] = deque()
        self._num_untrained = 0  # in the queue and in the pipeline's window
        self._iterator = self._batches()

    @property
    def mean_depth(self) -> float:
        """Mean number of mini-batches ahead whose rows had slots."""
        return self._pipeline.mean_depth

    def step(self) -> Tensor:
        """Train on the next mini-batch."""
        self.prepare(1)
        self._num_untrained -= 1
        loss, _ = self._pipeline.progress(self._iterator)
        return loss

    def prepare(self, num_steps: int) -> None:
        """Make the mini-batches of the next steps; see `AbstractProvider`."""
        while self._num_untrained < num_steps + self._num_ahead:
            self._queue.append(self._setting.batches.batch(next(self._numbers)))
            self._num_untrained += 1

    def _batches(self) -> Iterator[Batch]:
        while True:
            yield self._queue.popleft()

    def _leave(self) -> None:
        self._pipeline.detach()

    def _counts(self) -> TierCounts:
        return count_rows(self._model)
