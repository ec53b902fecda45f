"""Threads that read mini-batches before they are needed.

Small mini-batches are read in groups: handing one from thread to thread, which waits for the GIL,
takes longer than reading it.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from recsys._support.machine import num_cores
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from numpy.typing import NDArray

    from recsys.batch import Batch, SampleSource

    _Read = tuple[list[Batch], Exception | None]

__all__ = ["ReadAhead", "num_read_ahead", "one_ahead"]

_T = TypeVar("_T")

_SAMPLES_AT_ONCE, _BATCHES_AT_ONCE = 2048, 16
_CORES_PER_READER = 4  # the others train


def num_read_ahead(prefetch: int, batch_size: int) -> int:
    """How many mini-batches are read ahead: at least `prefetch`, more if they are small."""
    return max(prefetch, min(_BATCHES_AT_ONCE, -(-_SAMPLES_AT_ONCE // batch_size)))


def one_ahead(items: Iterator[_T], thread_name: str) -> Generator[_T]:
    """The same items; a thread makes the next one while the caller uses one.

    Close it where it may not come to its end: the thread ends then.
    """
    with ThreadPoolExecutor(1, thread_name) as reader:
        upcoming = reader.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = reader.submit(next, items, None)
            yield item


class ReadAhead:
    """Reads mini-batches of a source in order, some of them ahead.

    As many of them are read at once as there are readers: one thread for every four cores. The
    running iteration of `read` owns these threads, which end with the iteration.

    Args:
        source: Is read.
        num_ahead: Mini-batches read ahead, at least; see `num_read_ahead`.
        pin_memory: Return mini-batches in page-locked memory, from which CUDA copies without
            waiting.

    Raises:
        ConfigError: `pin_memory` is set, and there is no CUDA device.
    """

    def __init__(self, source: SampleSource, num_ahead: int, *, pin_memory: bool = False) -> None:
        if pin_memory and not torch.cuda.is_available():
            raise ConfigError(
                "pin_memory=True is for copies to a CUDA device, and there is none; leave it out"
            )
        self._source, self._num_ahead, self._pin_memory = source, num_ahead, pin_memory
        self._ahead: deque[tuple[int, Future[_Read]]] = deque()  # sizes and results of groups

    def read(self, parts: Iterable[NDArray[np.integer]]) -> Generator[Batch]:
        """The samples of each part as a mini-batch; one iteration at a time."""
        num_readers = min(self._num_ahead, max(1, num_cores() // _CORES_PER_READER))
        begin = None
        if self._pin_memory:  # a thread begins with device 0, and would take memory there
            begin = partial(torch.cuda.set_device, torch.cuda.current_device())
        readers = ThreadPoolExecutor(num_readers, "recsys-load", begin)
        groups = _grouped(parts)
        # Each iteration has its own queue: a Ctrl-C below leaves nothing for the next one.
        ahead = self._ahead = deque()

        def read_on() -> None:
            while sum(num for num, _ in ahead) < self._num_ahead and (group := next(groups, None)):
                ahead.append((len(group), readers.submit(self._read_group, group)))

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
            readers.shutdown(cancel_futures=True)

    def finish(self) -> None:
        """Wait until all groups under way are read; no other is read before the next is taken."""
        wait([future for _, future in self._ahead])

    def _read_group(self, group: list[NDArray[np.integer]]) -> _Read:
        """The mini-batches of a group, and the error that ended it early."""
        batches: list[Batch] = []
        try:
            for samples in group:
                batch = self._source.read(samples.astype(np.int64))
                batches.append(batch.pin_memory() if self._pin_memory else batch)
        except Exception as error:  # raised after the mini-batches before it are handed out
            return batches, error
        return batches, None


def _grouped(parts: Iterable[NDArray[np.integer]]) -> Iterator[list[NDArray[np.integer]]]:
    """Group mini-batches to be read in one go."""
    group: list[NDArray[np.integer]] = []
    for part in parts:
        group.append(part)
        if len(group) == _BATCHES_AT_ONCE or sum(map(len, group)) >= _SAMPLES_AT_ONCE:
            yield group
            group = []
    if group:
        yield group
