"""Samples read by a thread, mini-batches ahead of who trains on them.

Small mini-batches are read several at a time: to hand one over, two threads wait for each other
and for the interpreter's lock, which takes longer than reading it.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from numpy.typing import NDArray

    from recsys.batch import Batch
    from recsys.datasets.source import SampleSource

__all__ = ["ReadAhead", "num_read_ahead"]

_SAMPLES_AT_ONCE, _BATCHES_AT_ONCE = 2048, 16


def num_read_ahead(prefetch: int, batch_size: int) -> int:
    """Mini-batches that are read ahead where so many are asked for."""
    return max(prefetch, min(_BATCHES_AT_ONCE, -(-_SAMPLES_AT_ONCE // batch_size)))


class ReadAhead:
    """Reads mini-batches of a source in order, some ahead.

    Owner of the reading thread: the running iteration of `read`; it ends with it.

    Args:
        source: Where samples come from.
        num_ahead: Mini-batches read ahead, at least; of small ones more, `num_read_ahead`.
    """

    def __init__(self, source: SampleSource, num_ahead: int) -> None:
        self._source, self._num_ahead = source, num_ahead
        self._ahead: deque[tuple[int, Future[_Read]]] = deque()  # groups, and how many are in each

    def read(self, parts: Iterable[NDArray[np.integer]]) -> Generator[Batch]:
        """The samples of each part as a mini-batch; one iteration at a time."""
        reader = ThreadPoolExecutor(1, "recsys-load")
        groups = _grouped(parts)
        # Its own: if a Ctrl-C ends the waiting below, the next iteration begins with none of these.
        ahead = self._ahead = deque()

        def read_on() -> None:
            while sum(num for num, _ in ahead) < self._num_ahead and (group := next(groups, None)):
                ahead.append((len(group), reader.submit(self._read_group, group)))

        try:
            read_on()
            while ahead:
                _, future = ahead.popleft()
                batches, error = future.result()
                read_on()
                yield from batches
                if error is not None:
                    raise error
        finally:
            self._ahead = deque()
            reader.shutdown(cancel_futures=True)

    def finish(self) -> None:
        """Wait until all that is being read is there; until the next group no more is read."""
        wait([future for _, future in self._ahead])

    def _read_group(self, group: list[NDArray[np.integer]]) -> _Read:
        read = _Read([], None)
        try:
            for samples in group:
                read.batches.append(self._source.read(samples.astype(np.int64)))
        except Exception as error:  # its turn is behind the mini-batches before it
            return read._replace(error=error)
        return read


class _Read(NamedTuple):
    """Mini-batches of a group, and what ended it early."""

    batches: list[Batch]
    error: Exception | None


def _grouped(parts: Iterable[NDArray[np.integer]]) -> Iterator[list[NDArray[np.integer]]]:
    """Mini-batches to be read at once."""
    group: list[NDArray[np.integer]] = []
    for part in parts:
        group.append(part)
        if len(group) == _BATCHES_AT_ONCE or sum(map(len, group)) >= _SAMPLES_AT_ONCE:
            yield group
            group = []
    if group:
        yield group
