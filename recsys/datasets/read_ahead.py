"""Samples read by a thread, mini-batches ahead of who trains on them."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from numpy.typing import NDArray

    from recsys.batch import Batch
    from recsys.datasets.source import SampleSource

__all__ = ["ReadAhead"]


class ReadAhead:
    """Reads mini-batches of a source in order, some ahead.

    Owner of the reading thread: the running iteration of `read`; it ends with it.

    Args:
        source: Where samples come from.
        num_ahead: Mini-batches read ahead.
    """

    def __init__(self, source: SampleSource, num_ahead: int) -> None:
        self._source, self._num_ahead = source, num_ahead
        self._ahead: deque[Future[Batch]] = deque()

    def read(self, parts: Iterable[NDArray[np.integer]]) -> Generator[Batch]:
        """The samples of each part as a mini-batch; one iteration at a time."""
        reader = ThreadPoolExecutor(1, "recsys-load")

        def begin(samples: NDArray[np.integer]) -> Future[Batch]:
            return reader.submit(self._source.read, samples.astype(np.int64))

        waiting = iter(parts)
        try:
            ahead = self._ahead = deque(map(begin, islice(waiting, self._num_ahead)))
            while ahead:
                batch = ahead.popleft().result()
                ahead.extend(map(begin, islice(waiting, 1)))
                yield batch
        finally:
            reader.shutdown(cancel_futures=True)
            self._ahead = deque()

    def finish(self) -> None:
        """Wait until all that is being read is there; until the next mini-batch no more is read."""
        wait(self._ahead)
