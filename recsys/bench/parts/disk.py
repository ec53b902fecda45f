"""Measures random reads of a disk: pages of 4 KiB all over a file, by several threads.

    direct      bypasses the page cache: the speed of the disk
    ordinary    reads through an empty page cache, as the file tier does

The best number of concurrent reads depends on the disk, so several are tried.
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

from recsys.bench.parts.harness import Row, summarize, take_turns
from recsys.bench.parts.worker import Worker
from recsys.embeddings.kernels.cpu.file_moves import advise_share, move_share
from recsys.embeddings.tiers.cold.file_store import NUM_THREADS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["PAGE_BYTES", "Disk", "best_num_threads", "read_empty_cache", "rows_of_empty_cache"]

PAGE_BYTES = 4096
_NUM_THREADS = (1, 4, 16, 32, 64)
_NUM_ROUNDS = 3
_MOST_READS = 1 << 14  # per thread and turn
_READS_PER_CALL = 64


class Disk:
    """Lives in a worker: reads the largest file of rows in a folder.

    Args:
        folder: Contains the files.
        seconds: Duration of a turn.
        is_direct: Whether reads bypass the page cache.
    """

    def __init__(self, folder: Path, seconds: float, *, is_direct: bool) -> None:
        path = max(folder.glob("*.bin"), key=lambda each: each.stat().st_size)
        self._is_direct = is_direct
        self._num_pages, self._seconds = path.stat().st_size // PAGE_BYTES, 0.0
        flags = os.O_RDONLY | (os.O_DIRECT if is_direct else 0)
        self._descriptor = np.array([os.open(path, flags)], np.int32)
        os.posix_fadvise(int(self._descriptor[0]), 0, 0, os.POSIX_FADV_RANDOM)
        self._first = np.array([0, self._num_pages], np.uint64)
        memory = [mmap.mmap(-1, PAGE_BYTES) for _ in range(max(NUM_THREADS, *_NUM_THREADS))]
        self._memory = [np.frombuffer(each, np.uint8).reshape(1, PAGE_BYTES) for each in memory]
        self._random = np.random.default_rng(0)
        self._read(0, np.zeros(1, np.int32), 0, 1)  # compiles the kernel
        self._seconds = seconds

    def turn(self, num_threads: int) -> float:
        """Reads per second, with one read at a time in each thread."""
        counts = [0] * num_threads
        pages = self._random.integers(0, self._num_pages, (num_threads, _MOST_READS), np.int32)
        # Drop the pages that earlier turns have cached.
        os.posix_fadvise(int(self._descriptor[0]), 0, 0, os.POSIX_FADV_DONTNEED)
        end = time.perf_counter() + self._seconds

        def read(thread: int) -> None:
            # At least once, however late a busy machine starts the thread.
            while not counts[thread] or (
                time.perf_counter() < end and counts[thread] < _MOST_READS
            ):
                begin = counts[thread]
                self._read(thread, pages[thread], begin, begin + _READS_PER_CALL)
                counts[thread] += _READS_PER_CALL

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
    """Measure reads per second with an empty page cache, while nothing else runs.

    Args:
        case: Name of the case, for errors.
        folder: As for `Disk`.
        seconds: As for `Disk`.

    Returns:
        Reads per second by ("direct" or "ordinary", number of threads), one value per round.
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
    """The number of threads with the most direct reads per second in `read_empty_cache`."""
    direct = {number: np.median(reads) for (how, number), reads in found.items() if how == "direct"}
    return max(direct, key=lambda number: direct[number])


def rows_of_empty_cache(case: str, found: Mapping[tuple[str, int], list[float]]) -> list[Row]:
    """The result of `read_empty_cache` as rows."""
    return [
        summarize(
            "tiers",
            f"{case},threads={num_threads}",
            "disk",
            f"{how}_reads_of_empty_cache",
            "reads/s",
            reads,
        )
        for (how, num_threads), reads in found.items()
    ]
