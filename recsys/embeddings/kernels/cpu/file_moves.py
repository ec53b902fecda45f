"""Rows moved between files and slots, without Python's global lock.

    advise_share   tells the system which rows will be moved: it reads their pages, all at once
    move_share     one read or write of the system's a row

A disk is fast by how much it is asked at once. Threads that wait for a read each could ask for as
many, but waking them takes more of the cores than reading does: rows come sooner, and for half of
the work, if a few threads announce all of theirs and then find their pages in memory. A write needs
the page that it is a part of no less.

Letters: T tables, M rows that move, S slots.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types

from recsys._support.jit import kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ALL_MOVED", "advise_share", "move_share"]

ALL_MOVED = -1

# Of libc; the offset is 64 bits wide on every system that numba runs on.
_signature = types.intp(types.int32, types.intp, types.intp, types.int64)
_pread = types.ExternalFunction("pread", _signature)
_pwrite = types.ExternalFunction("pwrite", _signature)


if hasattr(os, "posix_fadvise"):
    _fadvise = types.ExternalFunction(
        "posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32)
    )
    _WILL_NEED = np.int32(os.POSIX_FADV_WILLNEED)
else:  # the system takes no advice

    @kernel
    def _fadvise(descriptor: int, place: int, num_bytes: int, advice: int) -> int:
        return 0

    _WILL_NEED = np.int32(0)


@kernel
def _table_of(first_rows: NDArray[np.uint64], row: np.uint64) -> int:
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
    """Have the system read the pages of rows that will be moved; it does so in the background.

    Args:
        descriptors_T: As for `move_share`, and so are the others.
        first_rows: Likewise.
        rows_M: Likewise.
        num_bytes: Of a row.
        begin: Likewise.
        end: Likewise.
    """
    for number in range(begin, end):
        row = np.uint64(rows_M[number])
        table = _table_of(first_rows, row)
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
    """Copy rows of files into slots, or slots to files.

    Args:
        descriptors_T: Each table's open file; -1 of a table without one, whose rows are zeros.
        first_rows: Where each table's rows begin among all, (T + 1,).
        rows_M: Counted over all tables.
        slots_M: Of each.
        hot: Bytes of the slots, (S, bytes per row), contiguous.
        begin: First of the M that are moved.
        end: Behind the last.
        is_fetch: Whether into slots.

    Returns:
        `ALL_MOVED`, or which of the M the system did not move; those behind it were left.
    """
    num_bytes = hot.shape[1]
    memory = np.intp(hot.ctypes.data)
    for number in range(begin, end):
        row = np.uint64(rows_M[number])
        table = _table_of(first_rows, row)
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
