"""`Refill`: mini-batches of full size from the samples that a policy chooses.

A *raw mini-batch* is what an iterator returns. A policy chooses some of its samples; the others are
left out. The chosen samples wait until there are enough of them for a mini-batch of full size, that
of the largest raw mini-batch so far. Samples keep their order. The last mini-batch of a pass may be
smaller.

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

import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from recsys.datasets.loader import BatchIterator
from recsys.pipeline.micro_batches import count_samples
from recsys.pipeline.skip.chosen_samples import (
    EVERYTHING,
    Chosen,
    Part,
    RawBatch,
    WaitingSamples,
    join,
)
from recsys.pipeline.take import OverwrittenBatch, take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Position", "Refill", "Refilled", "full_size_of"]

# Raw mini-batches for one mini-batch, after which the next ones are kept whole.
_MOST_RAW = 256


class Position(NamedTuple):
    """A position between two mini-batches, counted since training began.

    Attributes:
        num_batches: Mini-batches before it.
        num_raw: Raw mini-batches that are used up.
        offset: Samples that are used up of the next raw mini-batch.
        num_seen: Raw samples that are used up, also those left out.
        num_kept: Samples of all mini-batches before it.
        num_checked: Raw samples that were checked for staleness.
        num_stale: Samples among these that had stale rows only.
        full_size: Samples of a full mini-batch; 0 if unknown.
    """

    num_batches: int = 0
    num_raw: int = 0
    offset: int = 0
    num_seen: int = 0
    num_kept: int = 0
    num_checked: int = 0
    num_stale: int = 0
    full_size: int = 0


class Refilled(NamedTuple):
    """A mini-batch to train on.

    Attributes:
        batch: The mini-batch.
        number: Its number.
        size: Samples that it stands for: its own, or all those of its raw mini-batch if the ones
            left out are not replaced.
        is_stale: Which samples have stale rows only, (B,) bool; None if no one asked.
        weights: The chosen weights, without a scale, (B,) float32; None for 1.
    """

    batch: Any
    number: int
    size: int
    is_stale: NDArray[np.bool_] | None
    weights: NDArray[np.float32] | None = None


class Refill:
    """Makes the mini-batches of one iterator.

    It knows which mini-batches that it has handed out are not used yet, and sets the iterator's
    `num_waiting`, if it has this attribute, to the raw mini-batches that are not used up.

    Args:
        choose: Chooses samples of a raw mini-batch. Equal arguments must give equal choices.
        position: Where the iterator begins. If its offset is not 0, the iterator first returns the
            raw mini-batch that was used in part.
        setting: The setting that leaves samples out, for errors and warnings.
        on_too_few: Called with a warning if a policy leaves so many samples out that others are
            kept, or nothing is trained in a pass.
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
        on_too_few: Callable[[str], None] = warnings.warn,
        mark: Callable[[str], None] = lambda stage: None,
        *,
        refills: bool = True,
    ) -> None:
        self._refills = refills
        self._choose, self._setting, self._on_too_few = choose, setting, on_too_few
        self._mark = mark
        # After the last mini-batch that was used, and after each one that was handed out since.
        self._positions = deque([position])
        # After the last raw mini-batch that was taken. A resumed run may have smaller ones than
        # before; then the offset is that of several.
        self._taken = position._replace(offset=0, num_seen=position.num_seen - position.offset)
        self._first_number, self._offset = position.num_batches, position.offset
        self._raw: Any = None  # taken, and not yet chosen from
        self._waiting: deque[WaitingSamples] = deque()
        self._num_waiting = 0  # samples in it
        self._num_raw = 0  # raw mini-batches taken for the next mini-batch
        self._is_exhausted = False
        # The loader, and its position, if it will return a raw mini-batch again.
        self._place: tuple[ref[Any], Any] | None = None
        self.has_ended = False

    @property
    def position(self) -> Position:
        """The position after the last mini-batch that was used."""
        return self._positions[0]

    @property
    def holds_samples(self) -> bool:
        """Whether there are mini-batches or samples that were taken and not used."""
        return bool(self._num_waiting) or self._raw is not None or len(self._positions) > 1

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
        while not self._waiting or (self._refills and self._num_waiting < self._taken.full_size):
            has_raw = self._raw is not None or self._take_raw(iterator, handed_out)
            self._mark("load")
            if not has_raw:
                if self._waiting:
                    break
                raise StopIteration
            made = self._choose_from_raw(iterator, prepare)
            self._mark("skip")
            if made is not None:
                return made
        made = self._hand_out()
        self._mark("skip")
        return made

    def set_num_waiting(self, iterator: Any, num_batches: int) -> None:
        """Count all mini-batches but the last `num_batches` as used."""
        if len(self._positions) <= 1 + num_batches and not self._positions[0].offset:
            return  # fast path: nothing has changed
        while len(self._positions) > 1 + num_batches:
            self._positions.popleft()
        self._write_num_waiting(iterator)
        if self._positions[0].offset and isinstance(iterator, BatchIterator):
            self._place = ref(iterator.loader), iterator.position

    def is_continued_by(self, iterator: Any) -> bool:
        """Whether an iterator begins with the raw mini-batch that was used in part.

        That is so for a new iterator of the same loader, if the loader's position is unchanged.
        """
        if self._place is None or not isinstance(iterator, BatchIterator):
            return False
        loader, position = self._place
        return iterator.loader is loader() and bool(iterator.position == position)

    def end(self, iterator: Iterator[Any]) -> None:
        """Count the raw mini-batches after the last mini-batch as used; nothing is left."""
        self._positions = deque([self._taken])
        self.has_ended = True
        if self._num_raw and self._taken.num_batches == self._first_number:
            self._on_too_few(
                f"{self._setting} left out every sample of a pass over the data, so nothing was "
                "trained; lower share"
            )
        if hasattr(iterator, "num_waiting"):
            iterator.num_waiting = 0
            next(iterator, None)  # a loader counts its epoch when it is asked again

    def close(self) -> None:
        """Drop the samples that wait."""
        self._waiting.clear()
        self._num_waiting, self._raw, self.has_ended = 0, None, True

    def _take_raw(self, iterator: Iterator[Any], handed_out: Sequence[Any]) -> bool:
        """Take a raw mini-batch; False if there is none left."""
        if not self._is_exhausted:
            try:
                self._raw = take(
                    iterator, [*handed_out, *(each.raw.batch for each in self._waiting)]
                )
            except StopIteration:
                self._is_exhausted = True
            except OverwrittenBatch:
                self._remove(self._num_waiting)
                raise
        return not self._is_exhausted

    def _choose_from_raw(
        self, iterator: Iterator[Any], prepare: Callable[[Any], Any]
    ) -> Refilled | None:
        """Choose samples, which then wait; or return the mini-batch if it passes through."""
        taken, size = self._taken, 0
        try:
            batch = prepare(self._raw)
            size = _size_of(batch, self._setting)
            offset = min(self._offset, size)
            taken_for = taken.num_batches - bool(offset)
            raw = RawBatch(batch, size, taken.num_raw, taken.num_seen, offset, taken_for)
            chosen = EVERYTHING if self._num_raw >= _MOST_RAW else self._choose(raw)
            is_whole = chosen.samples is None and chosen.weights is None and not offset
            waiting = (
                None
                if is_whole and not self._waiting
                else WaitingSamples(raw, chosen, is_scaled=not self._refills)
            )
        except Exception:
            self._count_raw(iterator, size, EVERYTHING)
            raise
        if self._num_raw == _MOST_RAW:
            self._on_too_few(
                f"{self._setting} left out almost all samples of {_MOST_RAW} mini-batches in a "
                "row, so the next ones are kept; lower share"
            )
        if waiting is None:
            self._count_raw(iterator, size, chosen, num_made=1)
            self._num_raw = 0
            self._positions.append(self._taken)
            return Refilled(batch, taken.num_batches, size, chosen.is_stale)
        self._count_raw(iterator, size, chosen)
        if len(waiting):
            self._waiting.append(waiting)
            self._num_waiting += len(waiting)
        return None

    def _count_raw(
        self, iterator: Iterator[Any], size: int, chosen: Chosen, num_made: int = 0
    ) -> None:
        """Count a raw mini-batch as taken, and as `num_made` mini-batches of all its samples."""
        taken = self._taken
        is_new, self._raw = not self._offset, None
        self._offset = max(0, self._offset - size)
        self._taken = Position(
            taken.num_batches + num_made,
            taken.num_raw + 1,
            0,
            taken.num_seen + size,
            taken.num_kept + num_made * size,
            taken.num_checked + chosen.num_checked * is_new,
            taken.num_stale + chosen.num_stale * is_new,
            max(taken.full_size, size),
        )
        self._num_raw += is_new
        self._write_num_waiting(iterator)

    def _hand_out(self) -> Refilled:
        size = left = min(self._num_waiting, self._taken.full_size)
        parts: list[Part] = []
        try:
            for waiting in self._waiting:
                parts.append(waiting.take(min(left, len(waiting)), self._setting))
                left -= parts[-1].size
                if not left:
                    break
            made = parts[0] if len(parts) == 1 else join(parts, self._setting)
        except Exception:  # they would fail again
            self._remove(size)
            self._num_raw = 0
            raise
        num_raw = size if self._refills else self._waiting[0].num_raw
        self._remove(size)
        return self._refilled(made, num_raw)

    def _remove(self, size: int) -> None:
        """Let the next `size` samples wait no more."""
        self._num_waiting -= size
        while size:
            waiting = self._waiting[0]
            count = min(size, len(waiting))
            waiting.num_used += count
            size -= count
            if not len(waiting):
                self._waiting.popleft()

    def _refilled(self, made: Part, num_raw: int) -> Refilled:
        """Hand out a mini-batch: count it, and note the position after it."""
        number = self._taken.num_batches
        taken = self._taken = self._taken._replace(
            num_batches=number + 1, num_kept=self._taken.num_kept + made.size
        )
        self._num_raw = 0
        position = taken
        if self._waiting:
            raw, offset = self._waiting[0].raw, self._waiting[0].next_sample
            position = taken._replace(
                num_raw=raw.number, offset=offset, num_seen=raw.first_index + offset
            )
        self._positions.append(position)
        return Refilled(made.batch, number, num_raw, made.is_stale, made.weights)

    def _write_num_waiting(self, iterator: Any) -> None:
        if hasattr(iterator, "num_waiting"):
            iterator.num_waiting = self.num_raw_waiting


def full_size_of(loader: Any, refilled_by: str) -> int:
    """The samples of a loader's full mini-batches; 0 if unknown.

    Args:
        loader: The loader.
        refilled_by: The setting that leaves samples out and replaces them; empty if none does.

    Raises:
        ValueError: mini-batches are refilled, and the loader hands out one process's part of each.
            Processes leave out different numbers of samples, so one of them would make more steps
            than another, which would wait forever.
    """
    num_ranks = getattr(loader, "num_ranks", 1)
    if refilled_by and num_ranks > 1:
        raise ValueError(
            f"{refilled_by} fills mini-batches up with later samples, so it needs whole ones, but "
            f"the loader hands out the part of one of {num_ranks} processes (num_ranks); train on "
            "one process, or use Importance or RandomDrop(refill=False), which make a step of each "
            "part"
        )
    size: int = getattr(loader, "batch_size", 0)
    return size


def _size_of(batch: Any, setting: str) -> int:
    """B.

    Raises:
        ValueError: it is not known, or 0.
    """
    size = count_samples(batch)
    if not size:
        raise ValueError(
            f"{setting}: the number of samples of a mini-batch of type {type(batch).__name__} must "
            "be known and not 0; use tensors (B, ...), or a class with select(samples), "
            "concatenate(parts) and __len__"
        )
    return size
