"""A disk's random reads: pages of 4 KiB from all over a file, so many at once.

    direct      past the page cache: what the disk can do
    ordinary    by way of an empty cache, as rows in files are read

How many reads at once a disk likes best differs from one to another, so it is tried.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from recsys.bench.harness import Row, summarize, take_turns
from recsys.bench.worker import Worker
from recsys.embeddings.file_store import NUM_THREADS
from recsys.embeddings.kernels.file_moves import advise_share, move_share

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["PAGE_BYTES", "Disk", "best_num_threads", "read_empty_cache", "rows_of_empty_cache"]

PAGE_BYTES = 4096
_NUM_THREADS = (1, 4, 16, 32, 64)
_NUM_ROUNDS = 3
_MOST_READS = 1 << 14  # of a thread in a turn
_READS_OF_CALL = 64


class Disk:
    """Lives in a worker: reads the largest of a folder's files of rows.

    Args:
        folder: Has them.
        seconds: Of a turn.
        is_direct: Whether past the page cache.
    """

    def __init__(self, folder: Path, seconds: float, *, is_direct: bool) -> None:
        path = max(folder.glob("*.bin"), key=lambda each: each.stat().st_size)
        self._is_direct = is_direct
        self._num_pages, self._seconds = path.stat().st_size // PAGE_BYTES, 0.0
        how = os.O_RDONLY | (os.O_DIRECT if is_direct else 0)
        self._descriptor = np.array([os.open(path, how)], np.int32)
        os.posix_fadvise(int(self._descriptor[0]), 0, 0, os.POSIX_FADV_RANDOM)
        self._first = np.array([0, self._num_pages], np.uint64)
        memory = [mmap.mmap(-1, PAGE_BYTES) for _ in range(max(NUM_THREADS, *_NUM_THREADS))]
        self._memory = [np.frombuffer(each, np.uint8).reshape(1, PAGE_BYTES) for each in memory]
        self._random = np.random.default_rng(0)
        self._read(0, np.zeros(1, np.int32), 0, 1)  # compiles
        self._seconds = seconds

    def turn(self, num_threads: int) -> float:
        """Reads per second, with as many at once as there are threads."""
        counts = [0] * num_threads
        pages = self._random.integers(0, self._num_pages, (num_threads, _MOST_READS), np.int32)
        # No page may be cached by an earlier turn.
        os.posix_fadvise(int(self._descriptor[0]), 0, 0, os.POSIX_FADV_DONTNEED)
        end = time.perf_counter() + self._seconds

        def read(thread: int) -> None:
            while time.perf_counter() < end and counts[thread] < _MOST_READS:
                begin = counts[thread]
                self._read(thread, pages[thread], begin, begin + _READS_OF_CALL)
                counts[thread] += _READS_OF_CALL

        begin = time.perf_counter()
        threads = [threading.Thread(target=read, args=(each,)) for each in range(num_threads)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return sum(counts) / (time.perf_counter() - begin)

    def _read(self, thread: int, pages: np.typing.NDArray[np.int32], begin: int, end: int) -> None:
        slots = np.zeros(len(pages), np.int32)
        memory = self._memory[thread]
        if not self._is_direct:
            advise_share(self._descriptor, self._first, pages, PAGE_BYTES, begin, end)
        move_share(self._descriptor, self._first, pages, slots, memory, begin, end, True)


def read_empty_cache(case: str, folder: Path, seconds: float) -> dict[tuple[str, int], list[float]]:
    """Reads per second with nothing cached, and nobody else at work.

    Args:
        case: What is measured.
        folder: As for `Disk`, and so is `seconds`.
        seconds: Likewise.

    Returns:
        By how ("direct" or "ordinary") and the number of threads.
    """
    with ExitStack() as stack:
        workers = {
            how: stack.enter_context(
                Worker("disk", case, partial(Disk, is_direct=how == "direct"), folder, seconds)
            )
            for how in ("direct", "ordinary")
        }
        return take_turns(
            {
                (how, num_threads): partial(workers[how].call, "turn", num_threads)
                for how, num_threads in [
                    *(("direct", number) for number in _NUM_THREADS),
                    ("ordinary", NUM_THREADS),
                ]
            },
            _NUM_ROUNDS,
            num_warm_up_rounds=0,
        )


def best_num_threads(found: Mapping[tuple[str, int], list[float]]) -> int:
    """With how many threads the disk gave most, of what `read_empty_cache` has found."""
    direct = {number: np.median(reads) for (how, number), reads in found.items() if how == "direct"}
    return max(direct, key=lambda number: direct[number])


def rows_of_empty_cache(case: str, found: Mapping[tuple[str, int], list[float]]) -> list[Row]:
    """What `read_empty_cache` has found."""
    return [
        summarize(
            bench="tiers",
            case=f"{case},threads={num_threads}",
            provider="disk",
            metric=f"{how}_reads_of_empty_cache",
            unit="reads/s",
            values=reads,
        )
        for (how, num_threads), reads in found.items()
    ]
