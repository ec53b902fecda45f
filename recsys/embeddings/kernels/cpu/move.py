"""Copies rows and their state between slots and the tables, which may be mapped from files.

    announce_rows   tells the system which rows will be read, which then reads their pages at once
    move_rows       copies them

A disk is fastest when many reads are pending. Writing part of a page reads the page first, so
writes are announced, too. One call of `move_rows` writes back and fetches everything that a
transfer moves. It sets `DONE` itself: a signal in Python comes before the call or after it, and a
second call does nothing.

Letters: T tables, M moves.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import prange, types

from recsys._support.jit import inlined_part, kernel, kernel_part, num_parts, parallel_kernel
from recsys.embeddings.kernels.cpu.claim import (
    DONE,
    FETCHED,
    FETCHED_ROWS,
    FETCHED_SLOTS,
    WRITTEN,
    WRITTEN_ROWS,
    WRITTEN_SLOTS,
)
from recsys.embeddings.kernels.cpu.intrinsics.copying import copy_run
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import LINE_BYTES, prefetch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.kernels.cpu.update import Memories

__all__ = ["NO_BASE", "announce_rows", "move_rows"]

_MIN_SHARED_ROWS = 1024  # fewer are copied before a second thread wakes
_AHEAD = 8
NO_BASE = 2**64 - 1  # of a table whose state does not exist yet; it is not moved
_NO_BASE = np.uint64(NO_BASE)
_madvise = types.ExternalFunction("madvise", types.int32(types.intp, types.intp, types.int32))
_WILL_NEED = np.int32(mmap.MADV_WILLNEED)
_PAGE = np.uint64(mmap.PAGESIZE)
_ONE = np.uint64(1)


def move_rows(
    memories: Memories,
    dims: tuple[int, int, int],
    moves_4M: NDArray[np.int32],
    counts: NDArray[np.int64],
    *,
    is_alone: bool,
) -> None:
    """Write back, then fetch: a slot's old row leaves before the new one arrives.

    Args:
        memories: The tables and their state.
        dims: Numbers per row of the tables and of each state; 0 where there is none.
        moves_4M: The rows to move.
        counts: Their numbers; sets DONE, and does nothing if it is set.
        is_alone: Whether the calling thread does it alone, as one in the background must.
    """
    is_alone = is_alone or counts[FETCHED] + counts[WRITTEN] < _MIN_SHARED_ROWS
    (_move_kernel.alone if is_alone else _move_kernel)(
        *memories[:6], memories.first_rows, *dims, moves_4M, counts, 1 if is_alone else num_parts()
    )


def announce_rows(
    memories: Memories,
    dims: tuple[int, int, int],
    moves_4M: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> None:
    """Have the system read the pages of rows that will be moved; arguments as for `move_rows`."""
    parts = [(memories.flat, memories.bases), memories[2:4], memories[4:6]]
    for (flat, bases), dim in zip(parts, dims, strict=True):
        if dim:
            for rows, count in ((WRITTEN_ROWS, WRITTEN), (FETCHED_ROWS, FETCHED)):
                _announce(flat, bases, memories.first_rows, dim, moves_4M[rows], counts[count])


@kernel
def _announce(
    flat: NDArray[Any],
    bases: NDArray[np.uint64],
    first_rows: NDArray[np.uint64],
    dim: int,
    rows: NDArray[np.int32],
    count: int,
) -> None:
    begin_of_flat, last = np.uint64(flat.ctypes.data), np.uint64(0)
    num_bytes = np.uint64(dim * flat.itemsize)
    for number in range(count):
        row = np.uint64(rows[number])
        table = _table_of(row, first_rows)
        if bases[table] == _NO_BASE:
            continue
        offset = bases[table] * np.uint64(flat.itemsize) + (row - first_rows[table]) * num_bytes
        page = (begin_of_flat + offset) // _PAGE
        end = begin_of_flat + offset + num_bytes
        if page != last:  # rows that follow each other often share a page
            _madvise(np.int64(page * _PAGE), np.int64(end - page * _PAGE), _WILL_NEED)
        last = page


@inlined_part
def _table_of(row: np.uint64, first_rows: NDArray[np.uint64]) -> np.uint64:
    low, high = np.uint64(0), np.uint64(len(first_rows) - 1)
    while low + _ONE < high:
        middle = (low + high) // np.uint64(2)
        if first_rows[middle] <= row:
            low = middle
        else:
            high = middle
    return low


@kernel_part
def _copy(
    flat: NDArray[Any],
    bases: NDArray[np.uint64],
    first_rows: NDArray[np.uint64],
    dim: np.uint64,
    rows: NDArray[np.int32],
    slots: NDArray[np.int32],
    begin: int,
    end: int,
    is_fetch: bool,
) -> None:
    """Copy rows `begin` to `end` of the list into slots, or back."""
    slots_base = bases[len(bases) - 1]
    line = np.uint64(LINE_BYTES // flat.itemsize)
    for number in range(begin, end):
        if number + _AHEAD < end:
            ahead = np.uint64(rows[number + _AHEAD])
            table = _table_of(ahead, first_rows)
            first = bases[table] + (ahead - first_rows[table]) * dim
            column = np.uint64(0)
            while column < dim:
                prefetch(flat, first + column)
                column += line
        row = np.uint64(rows[number])
        table = _table_of(row, first_rows)
        if bases[table] == _NO_BASE:
            continue
        cold = bases[table] + (row - first_rows[table]) * dim
        hot = slots_base + np.uint64(slots[number]) * dim
        if is_fetch:
            copy_run(flat, hot, flat, cold, dim)
        else:
            copy_run(flat, cold, flat, hot, dim)


@parallel_kernel
def _move_kernel(
    flat: NDArray[Any],
    bases: NDArray[np.uint64],
    first: NDArray[Any],
    first_bases: NDArray[np.uint64],
    second: NDArray[Any],
    second_bases: NDArray[np.uint64],
    first_rows: NDArray[np.uint64],
    dim: int,
    first_dim: int,
    second_dim: int,
    moves_4M: NDArray[np.int32],
    counts: NDArray[np.int64],
    num_parts: int,
) -> None:
    """A part is a range of the rows to move."""
    if counts[DONE]:
        return
    for is_fetch in (False, True):
        count = counts[FETCHED] if is_fetch else counts[WRITTEN]
        of_rows, of_slots = WRITTEN_ROWS, WRITTEN_SLOTS
        if is_fetch:
            of_rows, of_slots = FETCHED_ROWS, FETCHED_SLOTS
        for part in prange(num_parts):
            begin, end = part * count // num_parts, (part + 1) * count // num_parts
            run = moves_4M[of_rows], moves_4M[of_slots], begin, end, is_fetch
            _copy(flat, bases, first_rows, np.uint64(dim), *run)
            if first_dim:
                _copy(first, first_bases, first_rows, np.uint64(first_dim), *run)
            if second_dim:
                _copy(second, second_bases, first_rows, np.uint64(second_dim), *run)
    counts[DONE] = 1
