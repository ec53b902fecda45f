"""`Refill`: mini-batches of full size from the samples that a policy chooses.

A *raw mini-batch* is what an iterator returns. A policy chooses some of its samples; the others are
left out. The chosen samples wait until there are enough of them for a mini-batch of full size, that
of the largest raw mini-batch so far. Samples keep their order. The last mini-batch of a pass may be
smaller, and a raw mini-batch of which all samples are chosen while none wait stays as it is.

    raw mini-batches     [a b c d] [e f g h] [i j k l] [m n]
    chosen                a   c d   e       |i j   l | m        of full size 4
    mini-batches         [a c d e] [i j l m]

The *position* after a mini-batch says how much of the raw stream is used up: so many raw
mini-batches, and the first `offset` samples of the next one. Above, the position after `[a c d e]`
is two raw mini-batches and offset 0, because nothing else of them is left. A raw mini-batch is
taken only if the samples that wait do not suffice. So at every position the samples that wait are
of one raw mini-batch, which was taken for the mini-batch before the position. On resume it is taken
again, with the same choice, and its first `offset` samples are passed over.

Without refilling, the chosen samples of one raw mini-batch make one mini-batch, and weights are
scaled so that the mean of the weighted losses is their sum / raw B. A raw mini-batch of which
nothing is chosen makes none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recsys._support.hashing import GOLDEN, mix64
from recsys.pipeline.micro_batches import concatenate, count_samples, select_samples
from recsys.pipeline.take import OverwrittenBatch, take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["EVERYTHING", "Chosen", "Position", "RawBatch", "Refill", "Refilled"]


class RawBatch(NamedTuple):
    """A raw mini-batch to choose from.

    Attributes:
        batch: The mini-batch.
        size: B.
        number: Raw mini-batches before it.
        first_index: Raw samples before it.
        offset: The first samples that were used before; they are not chosen again.
        taken_for: Number of the mini-batch that it is taken for.
    """

    batch: Any
    size: int
    number: int
    first_index: int
    offset: int
    taken_for: int

    def random_bits(self, seed: int) -> NDArray[np.uint64]:
        """64 random bits for each sample: a hash of the seed and the stream index."""
        first = mix64(np.array([seed + 1], np.uint64) * GOLDEN)
        indices = np.arange(self.first_index, self.first_index + self.size, dtype=np.uint64)
        return mix64(first + indices * GOLDEN)


class Chosen(NamedTuple):
    """What was chosen of a raw mini-batch.

    Attributes:
        samples: The samples, (M,) int64 ascending; None for all.
        weights: Their weights, (M,) float32; None for 1.
    """

    samples: NDArray[np.int64] | None = None
    weights: NDArray[np.float32] | None = None


EVERYTHING = Chosen()


class Position(NamedTuple):
    """A position between two mini-batches, counted since training began.

    Attributes:
        num_batches: Mini-batches before it.
        num_raw: Raw mini-batches that are used up.
        offset: Samples that are used up of the next raw mini-batch.
        num_seen: Raw samples that are used up, also those left out.
        num_kept: Samples of all mini-batches before it.
        full_size: Samples of a full mini-batch; 0 if unknown.
    """

    num_batches: int = 0
    num_raw: int = 0
    offset: int = 0
    num_seen: int = 0
    num_kept: int = 0
    full_size: int = 0


class Refilled(NamedTuple):
    """A mini-batch to train on.

    Attributes:
        batch: The mini-batch.
        number: Its number.
        size: Samples that it stands for: its own, or all those of its raw mini-batch if the ones
            left out are not replaced.
        weights: The chosen weights, without a scale, (B,) float32; None for 1.
    """

    batch: Any
    number: int
    size: int
    weights: NDArray[np.float32] | None = None


@dataclass
class _Waiting:
    """Chosen samples of one raw mini-batch that wait, (M,), and their weights, (M,)."""

    raw: RawBatch
    samples: NDArray[np.int64]
    weights: NDArray[np.float32]
    has_weights: bool

    def take(self, count: int, setting: str) -> tuple[Any, NDArray[np.float32], bool]:
        """The next samples, their weights, and whether these are not all 1. They wait no more."""
        samples, self.samples = self.samples[:count], self.samples[count:]
        weights, self.weights = self.weights[:count], self.weights[count:]
        batch = self.raw.batch
        if count < self.raw.size:
            batch = select_samples(batch, torch.from_numpy(samples), self.raw.size, setting)
        return batch, weights, self.has_weights


class Refill:
    """Makes the mini-batches of one iterator.

    It knows which mini-batches that it has handed out are not used yet, and sets the iterator's
    `num_waiting`, if it has this attribute, to the raw mini-batches that are not used up.

    Args:
        choose: Chooses samples of a raw mini-batch. Equal arguments must give equal choices.
        position: Where the iterator begins. If its offset is not 0, the iterator first returns the
            raw mini-batch that was used in part.
        setting: The setting that leaves samples out, for errors.
        mark: Called with the stage that has ended: "load" after a raw mini-batch was taken, "skip"
            after choosing and joining.
        refills: Whether mini-batches have full size.

    Attributes:
        has_ended: Whether the iterator has ended and every mini-batch was used.
    """

    def __init__(
        self,
        choose: Callable[[RawBatch], Chosen],
        position: Position,
        setting: str,
        mark: Callable[[str], None] = lambda stage: None,
        *,
        refills: bool = True,
    ) -> None:
        self._choose, self._setting, self._mark = choose, setting, mark
        self._refills = refills
        # After the last mini-batch that was used, and after each one that was handed out since.
        self._positions = deque([position])
        # After the last raw mini-batch that was taken. A resumed run may have smaller ones than
        # before; then the offset is that of several.
        self._taken = position._replace(offset=0, num_seen=position.num_seen - position.offset)
        self._offset = position.offset
        self._waiting: deque[_Waiting] = deque()
        self._is_exhausted = self.has_ended = False

    @property
    def position(self) -> Position:
        """The position after the last mini-batch that was used."""
        return self._positions[0]

    @property
    def holds_samples(self) -> bool:
        """Whether there are mini-batches or samples that were taken and not used."""
        return not self.has_ended and (bool(self._waiting) or len(self._positions) > 1)

    @property
    def num_raw_waiting(self) -> int:
        """Raw mini-batches that were taken and are not used up."""
        return self._taken.num_raw - self._positions[0].num_raw

    def take(
        self,
        iterator: Iterator[Any],
        prepare: Callable[[Any], Any],
        handed_out: Sequence[Any] = (),
    ) -> Refilled:
        """Make the next mini-batch.

        Args:
            iterator: Returns raw mini-batches; always the same one.
            prepare: Applied to each raw mini-batch, for example to move it to a device.
            handed_out: Mini-batches that were made and not used; the iterator must not write there.

        Raises:
            OverwrittenBatch: it wrote there, or to samples that wait, which are dropped.
            StopIteration: the iterator has ended, and no sample waits.
            Exception: any error of the iterator, of `prepare`, of choosing or of joining. The raw
                mini-batch, or the samples of the mini-batch that was to be made, are left out, and
                count as skipped.
        """
        while not (self._has_enough() or self._is_exhausted):
            try:
                batch = take(iterator, [*handed_out, *(one.raw.batch for one in self._waiting)])
            except StopIteration:
                self._is_exhausted = True
                break
            except OverwrittenBatch:
                self._waiting.clear()
                raise
            self._mark("load")
            self._choose_from(batch, iterator, prepare)
            self._mark("skip")
        if not self._waiting:
            raise StopIteration
        made = self._hand_out()
        self._mark("skip")
        return made

    def set_num_waiting(self, iterator: Any, num_batches: int) -> None:
        """Count all mini-batches but the last `num_batches` as used."""
        while len(self._positions) > 1 + num_batches:
            self._positions.popleft()
        self._write_num_waiting(iterator)

    def end(self, iterator: Iterator[Any]) -> None:
        """Count the raw mini-batches after the last mini-batch as used; nothing is left."""
        self._positions = deque([self._taken])
        self.has_ended = True
        if hasattr(iterator, "num_waiting"):
            iterator.num_waiting = 0
            next(iterator, None)  # a loader counts its epoch when it is asked again

    def close(self) -> None:
        """Drop the samples that wait."""
        self._waiting.clear()
        self.has_ended = True

    def _has_enough(self) -> bool:
        """Whether samples wait for a full mini-batch, or all samples of one raw mini-batch."""
        if not self._waiting or not self._refills:
            return bool(self._waiting)
        is_whole = len(self._waiting) == 1 and self._num_waiting == self._waiting[0].raw.size
        return is_whole or self._num_waiting >= self._taken.full_size

    @property
    def _num_waiting(self) -> int:
        return sum(len(waiting.samples) for waiting in self._waiting)

    def _choose_from(
        self, batch: Any, iterator: Iterator[Any], prepare: Callable[[Any], Any]
    ) -> None:
        """Choose samples, which then wait; count the raw mini-batch as taken."""
        taken, size = self._taken, 0
        try:
            batch = prepare(batch)
            size = count_samples(batch) or 0
            if not size:
                raise ValueError(
                    f"{self._setting}: the number of samples of a mini-batch of type "
                    f"{type(batch).__name__} must be known and not 0; use tensors (B, ...), or a "
                    "class with select(samples), concatenate(parts) and __len__"
                )
            offset = min(self._offset, size)
            taken_for = taken.num_batches - bool(offset)
            raw = RawBatch(batch, size, taken.num_raw, taken.num_seen, offset, taken_for)
            samples, chosen = self._choose(raw)
            samples = np.arange(size) if samples is None else samples
            weights = np.ones(len(samples), np.float32) if chosen is None else chosen
            kept = samples >= offset
            if kept.any():
                has_weights = chosen is not None
                self._waiting.append(_Waiting(raw, samples[kept], weights[kept], has_weights))
        finally:
            self._offset = max(0, self._offset - size)
            self._taken = taken._replace(
                num_raw=taken.num_raw + 1,
                num_seen=taken.num_seen + size,
                full_size=max(taken.full_size, size),
            )
            self._write_num_waiting(iterator)

    def _hand_out(self) -> Refilled:
        """Join samples that wait; count the mini-batch, and note the position after it."""
        size = left = min(self._num_waiting, self._taken.full_size)
        raw = self._waiting[0].raw
        parts = []
        while left:  # what fails is removed first: it would fail again
            waiting = self._waiting[0]
            count = min(left, len(waiting.samples))
            if count == len(waiting.samples):
                self._waiting.popleft()
            parts.append(waiting.take(count, self._setting))
            left -= count
        batches, found, are_weighted = zip(*parts, strict=True)
        batch = batches[0] if len(parts) == 1 else concatenate(batches, self._setting)
        weights = np.concatenate(found) if any(are_weighted) else None
        num_raw = size if self._refills else raw.size - raw.offset
        if weights is not None:
            scaled = weights * np.float32(size / num_raw)
            batch = _weighted(batch, torch.from_numpy(scaled), self._setting)
        number = self._taken.num_batches
        self._taken = position = self._taken._replace(
            num_batches=number + 1, num_kept=self._taken.num_kept + size
        )
        if self._waiting:
            raw, offset = self._waiting[0].raw, int(self._waiting[0].samples[0])
            position = position._replace(
                num_raw=raw.number, offset=offset, num_seen=raw.first_index + offset
            )
        self._positions.append(position)
        return Refilled(batch, number, num_raw, weights)

    def _write_num_waiting(self, iterator: Any) -> None:
        if hasattr(iterator, "num_waiting"):
            iterator.num_waiting = self.num_raw_waiting


def _weighted(batch: Any, weights: Tensor, setting: str) -> Any:
    """The same mini-batch with the loss of each sample multiplied by a weight.

    Raises:
        TypeError: the mini-batch has no weights.
    """
    if not is_dataclass(batch) or not hasattr(batch, "weights"):
        raise TypeError(
            f"{setting} gives samples weights, so mini-batches must be recsys.Batch, or "
            f"dataclasses with a field weights, got {type(batch).__name__}"
        )
    tensors = [value for value in vars(batch).values() if isinstance(value, Tensor)]
    weights = weights.to(tensors[0].device) if tensors else weights
    known = batch.weights
    return replace(batch, weights=weights if known is None else known * weights)  # type: ignore[type-var]
