"""The cold tier on disk: a few threads announce rows to the system, then read or write them.

All reads and writes go through the system's page cache: cached rows are read at the speed of
memory, and a write returns before the disk has the data. Files may be larger than memory, because
the system shrinks the cache when other memory is needed.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.interrupts import interrupts_held_back
from recsys.embeddings.kernels.cpu.file_moves import ALL_MOVED, advise_share, move_share
from recsys.embeddings.tiers.cold.host_store import ColdStore
from recsys.errors import ColdTierError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.row_space import RowSpace
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles, OpenArray
    from recsys.embeddings.tiers.cold.host_store import RowMemory

__all__ = ["NUM_THREADS", "FileStore", "arrays_of", "move_rows", "read_range", "write_range"]

NUM_THREADS = 4  # more threads are no faster, because reads are announced
_LEAST_SHARE = 16  # rows per thread; waking a thread takes as long as reading a few rows


class FileStore(ColdStore):
    """Tables and state in files.

    Args:
        files: The open files.
        spaces: Returns the tables, then each state array. A table whose rows were never updated has
            state arrays without rows: its state is zeros.
    """

    def __init__(self, files: ColdFiles, spaces: Callable[[], Sequence[RowSpace]]) -> None:
        self._files, self._spaces = files, spaces
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="recsys-files")

    def _move(
        self,
        hot: RowMemory,
        rows: NDArray[np.int32],
        slots: NDArray[np.int32],
        *,
        is_fetch: bool,
    ) -> None:
        self._files.require_owner()  # a forked process does not have the threads
        order = np.argsort(rows)  # so that one thread reads the rows of a page consecutively
        rows, slots = rows[order], slots[order]
        for space, memory in zip(self._spaces(), hot.arrays, strict=False):
            arrays = arrays_of(self._files, space.tables)
            move_rows(self._threads, arrays, hot.first_rows, rows, slots, memory, is_fetch=is_fetch)


def move_rows(
    threads: ThreadPoolExecutor,
    arrays: Sequence[OpenArray | None],
    first_rows: NDArray[np.uint64],
    rows: NDArray[np.int32],
    slots: NDArray[np.int32],
    memory: NDArray[Any],
    *,
    is_fetch: bool,
) -> None:
    """Copy rows of one array of every table from files to memory, or back.

    Args:
        threads: Share the rows with the caller, which moves one share itself.
        arrays: The array of each table; None for one without rows, which is read as zeros.
        first_rows: Where each table's rows begin among the rows of all tables, (T + 1,).
        rows: Row numbers, counted over all tables, (M,) ascending.
        slots: The place of each row in `memory`, (M,).
        memory: One row per place, contiguous.
        is_fetch: Whether to copy from files to memory.

    Raises:
        ColdTierError: a row cannot be read or written, or a file is too short.
    """
    descriptors = np.array([-1 if each is None else each.descriptor for each in arrays], np.int32)
    hot = memory.view(np.uint8)
    num_shares = max(1, min(NUM_THREADS, len(rows) // _LEAST_SHARE))
    bounds = [len(rows) * share // num_shares for share in range(num_shares + 1)]

    def move(share: int) -> None:
        begin, end = bounds[share : share + 2]
        if is_fetch or hot.shape[1] % mmap.PAGESIZE:  # writes of whole pages read nothing
            advise_share(descriptors, first_rows, rows, hot.shape[1], begin, end)
        stopped = move_share(descriptors, first_rows, rows, slots, hot, begin, end, is_fetch)
        while stopped != ALL_MOVED:
            table = int(np.searchsorted(first_rows, rows[stopped], side="right")) - 1
            array = arrays[table]
            assert array is not None
            row = int(rows[stopped]) - int(first_rows[table])
            _move_row(array, row, hot[slots[stopped]], is_fetch=is_fetch)
            stopped = move_share(
                descriptors, first_rows, rows, slots, hot, stopped + 1, end, is_fetch
            )

    with interrupts_held_back():  # no thread may still be running when this raises
        others = [_start(threads, move, share) for share in range(1, num_shares)]
        try:
            move(0)
        finally:
            wait(others)
    for each in others:
        each.result()


def _start(threads: ThreadPoolExecutor, move: Callable[[int], None], share: int) -> Future[None]:
    done: Future[None] = Future()
    try:
        threads.submit(_run, done, move, share)
    except RuntimeError:  # the process is ending, or may start no more threads
        # The pool may have queued the share all the same, for a thread that it starts later. So the
        # share is cancelled there and moved here, unless a thread has it already.
        if done.cancel():
            done = Future()
            _run(done, move, share)
    return done


def _run(done: Future[None], move: Callable[[int], None], share: int) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        move(share)
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


def arrays_of(files: ColdFiles, tables: Sequence[Tensor]) -> list[OpenArray | None]:
    """The files of tables or state arrays; None for one without rows.

    Args:
        files: The open files.
        tables: The mapped tensors.

    Raises:
        ColdTierError: another tensor has replaced a mapped one.
    """
    found = []
    for table in tables:
        array = files.find(table) if len(table) else None
        if array is None and len(table):
            raise ColdTierError(
                f"{files.folder}: a table or state of shape {tuple(table.shape)} is not in its "
                "file any more, because a tensor in memory has replaced it; copy values into it "
                "instead (weight.data.copy_, load_state_dict without assign=True)"
            )
        found.append(array)
    return found


def _move_row(array: OpenArray, row: int, memory: NDArray[np.uint8], *, is_fetch: bool) -> None:
    """Move a row that a kernel failed to move, or raise the reason.

    Raises:
        ColdTierError: the row cannot be read or written, or the file is too short.
    """
    place = row * len(memory)
    try:
        if is_fetch:
            found = os.pread(array.descriptor, len(memory), place)
            moved = len(found)
            memory[:moved] = np.frombuffer(found, np.uint8)
        else:
            moved = os.pwrite(array.descriptor, memory.tobytes(), place)
    except OSError as error:
        verb = "read" if is_fetch else "written"
        raise ColdTierError(
            error.errno,
            f"{array.name}: row {row} cannot be {verb} ({error.strerror}); load a checkpoint into "
            "new tables",
        ) from error
    if moved < len(memory):
        raise ColdTierError(
            f"{array.name}: row {row} ends at byte {place + len(memory)}, but the file ends at "
            f"{place + moved}: it was cut off; load a checkpoint into new tables"
        )


def read_range(array: OpenArray, first_row: int, memory: NDArray[np.uint8]) -> None:
    """Read consecutive rows of a file, without its memory map.

    Args:
        array: The open file.
        first_row: The first row.
        memory: Receives the rows, (M, bytes per row), contiguous.

    Raises:
        ColdTierError: the rows cannot be read, or the file is too short.
    """
    _move_range(array, first_row, memory, is_read=True)


def write_range(array: OpenArray, first_row: int, memory: NDArray[np.uint8]) -> None:
    """Write consecutive rows of a file, without its memory map; arguments as for `read_range`.

    Raises:
        ColdTierError: the rows cannot be written.
    """
    _move_range(array, first_row, memory, is_read=False)


def _move_range(
    array: OpenArray, first_row: int, memory: NDArray[np.uint8], *, is_read: bool
) -> None:
    left, place = memory.reshape(-1).data, first_row * memory.shape[1]
    while len(left):
        move = os.preadv if is_read else os.pwritev
        try:
            moved = move(array.descriptor, [left], place)
        except OSError as error:
            verb = "read" if is_read else "written"
            raise ColdTierError(
                error.errno,
                f"{array.name}: rows from {first_row} on cannot be {verb} ({error.strerror}); load "
                "a checkpoint into new tables",
            ) from error
        if not moved:
            raise ColdTierError(
                f"{array.name}: rows up to byte {place + len(left)} are needed, but the file ends "
                f"at {place}: it was cut off; load a checkpoint into new tables"
            )
        left, place = left[moved:], place + moved
