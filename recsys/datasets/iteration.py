"""One pass over a loader, and the loader's position: its first mini-batch that was not used.

A `TrainPipeline` that looks ahead takes mini-batches before it trains on them. It writes their
number to `num_waiting`, and the position stays before them.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Self

    from recsys.batch import Batch

__all__ = ["BatchIterator", "ResumableLoader"]

P = TypeVar("P")


class ResumableLoader(ABC, Generic[P]):
    """A loader with one position, which at most one running iterator changes.

    Args:
        split: The name of the split, for errors.
        position: Where the first iteration begins.
        in_turn_because: See `BatchIterator`.
    """

    def __init__(self, split: str, position: P, in_turn_because: str = "") -> None:
        self.split = split
        self._in_turn_because = in_turn_because
        self._settled = position  # the position while no iterator runs
        self._running: weakref.ref[BatchIterator[P]] | None = None

    def __iter__(self) -> BatchIterator[P]:
        return BatchIterator(self, self._in_turn_because)

    @abstractmethod
    def _read(self, position: P) -> Generator[tuple[Batch, P]]:
        """Yield the rest of the epoch: each mini-batch with the position after it."""

    @abstractmethod
    def _end_epoch(self) -> P:
        """Count an epoch that has ended, and return the position where the next one begins."""

    @property
    def _position(self) -> P:
        iterator = self._running and self._running()
        return iterator.position if iterator else self._settled

    def _require_idle(self, action: str) -> None:
        iterator = self._running and self._running()
        if iterator and iterator.is_running:
            raise RuntimeError(
                f"the loader of the {self.split} split cannot be {action}: an iteration of it is "
                "still running; end that one first, or use a second loader"
            )
        if iterator:
            iterator.close()


class BatchIterator(Iterator["Batch"], Generic[P]):
    """One pass over a loader: the rest of its epoch.

    The iteration begins with the first `next`. It ends when `next` is called after the last
    mini-batch was used, by `close`, or when the iterator is dropped.

    Args:
        loader: Is read.
        in_turn_because: See the attribute.

    Attributes:
        loader: The loader that is read.
        num_waiting: How many of the last mini-batches handed out are not used yet. A caller that
            takes mini-batches before it uses them, as `TrainPipeline` does, sets it after each one
            taken and after each one used. The loader's position stays before these mini-batches,
            and the epoch does not end before they are used.
        is_over: Whether the iteration has ended. Then mini-batches that wait must not be used: the
            next iteration of the loader returns them again.
        in_turn_because: The reason why each mini-batch must be used before the next one is taken;
            empty if there is none.

    Raises:
        RuntimeError: another iteration of the loader is running, or this one began in a process
            that forked this one.
        ValueError: `num_waiting` is negative, or includes mini-batches that already count as used.
    """

    def __init__(self, loader: ResumableLoader[P], in_turn_because: str) -> None:
        self._num_waiting = 0
        self.in_turn_because = in_turn_because
        self.loader = loader
        self._batches: Generator[tuple[Batch, P]] | None = None
        # Before the first mini-batch that may wait, and after each of them.
        self._positions: deque[P] = deque()
        self._process = 0
        self.is_over = self._has_failed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self.is_over:
            raise StopIteration
        if self._batches is None:
            self._begin()
            assert self._batches is not None
        if self._process != os.getpid():  # the thread that reads exists only there
            raise RuntimeError(
                f"this iteration of the loader of the {self.loader.split} split began in another "
                "process, which forked this one; close it and iterate the loader again, or make "
                "a loader here"
            )
        while len(self._positions) > 1 + self._num_waiting:
            self._positions.popleft()
        try:
            batch, position = next(self._batches)
        except StopIteration:
            if self._has_failed and not self._num_waiting:
                self.close()
            elif not self._num_waiting:
                self._end()
            raise
        except BaseException:
            self._has_failed = True
            raise
        self._positions.append(position)
        return batch

    def close(self) -> None:
        """End the iteration. The loader's next one begins with the first unused mini-batch."""
        batches, self._batches = self._batches, None
        self.is_over = True
        if batches is not None:
            self.loader._settled, self.loader._running = self.position, None
            batches.close()

    def __del__(self) -> None:
        """Close an iterator that was dropped."""
        self.close()

    @property
    def num_waiting(self) -> int:
        """How many of the last mini-batches handed out are not used yet."""
        return self._num_waiting

    @num_waiting.setter
    def num_waiting(self, value: int) -> None:
        most = max(0, len(self._positions) - 1)
        if not 0 <= value <= most:
            raise ValueError(
                f"num_waiting must lie in [0, {most}], got {value}: mini-batches that count as "
                "used cannot wait; set it after each mini-batch taken and after each one used"
            )
        self._num_waiting = value

    @property
    def position(self) -> P:
        """The loader's position: before the first mini-batch that is not used."""
        if not self._positions:  # the iteration has not begun
            return self.loader._position
        return self._positions[-1 - self._num_waiting]

    @property
    def last_taken(self) -> tuple[P, P]:
        """The positions before and after the last mini-batch handed out."""
        return self._positions[-2], self._positions[-1]

    @property
    def is_running(self) -> bool:
        """Whether more mini-batches may follow, or some that were handed out are not used yet."""
        return self._batches is not None and not (self._has_failed and not self._num_waiting)

    def _begin(self) -> None:
        self.loader._require_idle("iterated")
        start = self.loader._position
        self._positions.append(start)
        self._process = os.getpid()
        self._batches = self.loader._read(start)
        self.loader._running = weakref.ref(self)

    def _end(self) -> None:
        self._batches, self.is_over = None, True
        self.loader._settled, self.loader._running = self.loader._end_epoch(), None
