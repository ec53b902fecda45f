"""Moves rows between files and slots without holding the GIL.

    advise_share   tells the system which rows will be moved; it then reads their pages in parallel
    move_share     moves them, with one `pread` or `pwrite` per row

A disk is fastest when many requests are pending. One thread per pending read would spend more time
on waking up than on reading. So a few threads first announce all their rows, and then find the
pages in memory: rows arrive sooner, for half the CPU time. Writing part of a page reads the page
first, so writes are announced too.

Letters: T tables, M rows that move, S slots.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types

from recsys._support.jit import kernel, kernel_part

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ALL_MOVED", "advise_share", "move_share", "table_of"]

ALL_MOVED = -1

# From libc. The offset has 64 bits on every system that numba runs on.
_signature = types.intp(types.int32, types.intp, types.intp, types.int64)
_pread = types.ExternalFunction("pread", _signature)
_pwrite = types.ExternalFunction("pwrite", _signature)


if hasattr(os, "posix_fadvise"):
    _fadvise = types.ExternalFunction(
        "posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32)
    )
    _WILL_NEED = np.int32(os.POSIX_FADV_WILLNEED)
else:  # the system has no posix_fadvise

    @kernel
    def _fadvise(descriptor: int, place: int, num_bytes: int, advice: int) -> int:
        return 0

    _WILL_NEED = np.int32(0)


@kernel_part
def table_of(first_rows: NDArray[np.uint64], row: np.uint64) -> int:
    """The table of a row that is counted over all tables."""
    table, above = 0, len(first_rows) - 1
    while table + 1 < above:
        middle = (table + above) // 2
        if first_rows[middle] <= row:
            table = middle
        else:
            above = middle
    return table


@kernel
def advise_share(
    descriptors_T: NDArray[np.int32],
    first_rows: NDArray[np.uint64],
    rows_M: NDArray[np.int32],
    num_bytes: int,
    begin: int,
    end: int,
) -> None:
    """Have the system read the pages of some rows in the background.

    Args:
        descriptors_T: Each table's open file, or -1.
        first_rows: Where each table's rows begin among the rows of all tables, (T + 1,).
        rows_M: Row numbers, counted over all tables.
        num_bytes: Bytes per row.
        begin: Index in `rows_M` of the first row to announce.
        end: Index after the last one.
    """
    for number in range(begin, end):
        row = np.uint64(rows_M[number])
        table = table_of(first_rows, row)
        if descriptors_T[table] >= 0:
            place = np.int64(row - first_rows[table]) * num_bytes
            _fadvise(descriptors_T[table], place, num_bytes, _WILL_NEED)


@kernel
def move_share(
    descriptors_T: NDArray[np.int32],
    first_rows: NDArray[np.uint64],
    rows_M: NDArray[np.int32],
    slots_M: NDArray[np.int32],
    hot: NDArray[Any],
    begin: int,
    end: int,
    is_fetch: bool,
) -> int:
    """Copy rows from files to slots, or from slots to files.

    Args:
        descriptors_T: Each table's open file; -1 for a table without a file, whose rows are zeros.
        first_rows: Where each table's rows begin among the rows of all tables, (T + 1,).
        rows_M: Row numbers, counted over all tables.
        slots_M: The slot of each row.
        hot: Bytes of the slots, (S, bytes per row), contiguous.
        begin: Index in `rows_M` of the first row to move.
        end: Index after the last one.
        is_fetch: Whether to copy from files to slots.

    Returns:
        `ALL_MOVED`, or the index of the first row that the system failed to move; the rows after it
        were not tried.
    """
    num_bytes = hot.shape[1]
    memory = np.intp(hot.ctypes.data)
    for number in range(begin, end):
        row = np.uint64(rows_M[number])
        table = table_of(first_rows, row)
        slot = np.int64(slots_M[number])
        if descriptors_T[table] < 0:
            if is_fetch:
                for byte in range(num_bytes):
                    hot[slot, byte] = 0
            continue
        place = np.int64(row - first_rows[table]) * num_bytes
        address = memory + slot * num_bytes
        done = 0
        while done < num_bytes:
            if is_fetch:
                moved = _pread(descriptors_T[table], address + done, num_bytes - done, place + done)
            else:
                moved = _pwrite(
                    descriptors_T[table], address + done, num_bytes - done, place + done
                )
            if moved <= 0:
                return number
            done += moved
    return ALL_MOVED
