"""Rows moved between tables and slots, whole and in any number.

Letters: T tables, M rows that move, S slots, D columns: those of the rows, or of their state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import prange

from recsys.embeddings.kernels.copying import copy_run
from recsys.embeddings.kernels.prefetch import LINE_BYTES, prefetch
from recsys.jit import kernel, num_parts, parallel_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.row_space import RowSpace

__all__ = ["rows_from_slots", "rows_to_slots"]

_AHEAD = 8


def rows_to_slots(
    tables: RowSpace,
    first_rows: NDArray[np.uint64],
    rows: NDArray[np.int32],
    slots: NDArray[np.int32],
    target: NDArray[Any],
) -> None:
    """Copy rows of tables into slots; of a table of no rows, zeros.

    Args:
        tables: Where rows lie.
        first_rows: Where each table's rows begin among all, (T + 1,).
        rows: Counted over all tables, (M,).
        slots: Of each, (M,).
        target: (S, D), contiguous.
    """
    _move(tables, first_rows, rows, slots, target, is_fetch=True)


def rows_from_slots(
    tables: RowSpace,
    first_rows: NDArray[np.uint64],
    rows: NDArray[np.int32],
    slots: NDArray[np.int32],
    source: NDArray[Any],
) -> None:
    """Copy slots to where their rows lie; of a table of no rows, nothing.

    Args:
        tables: Where rows lie.
        first_rows: As above.
        rows: As above.
        slots: As above.
        source: (S, D), contiguous.
    """
    _move(tables, first_rows, rows, slots, source, is_fetch=False)


def _move(
    tables: RowSpace,
    first_rows: NDArray[np.uint64],
    rows: NDArray[np.int32],
    slots: NDArray[np.int32],
    hot: NDArray[Any],
    *,
    is_fetch: bool,
) -> None:
    _move_kernel(
        tables.flat,
        tables.bases,
        tables.sizes,
        first_rows,
        np.uint64(tables.dim),
        LINE_BYTES // tables.dtype.itemsize,
        rows,
        slots,
        hot.reshape(-1),
        is_fetch,
        num_parts(),
    )


@kernel
def _place_of(
    row: np.uint64,
    first_rows: NDArray[np.uint64],
    bases: NDArray[np.uint64],
    dim: np.uint64,
) -> tuple[np.uint64, np.uint64]:
    """The table of a row, and where the row begins."""
    low, high = np.uint64(0), np.uint64(len(bases))
    while low + np.uint64(1) < high:
        middle = (low + high) // np.uint64(2)
        if first_rows[middle] <= row:
            low = middle
        else:
            high = middle
    return low, bases[low] + (row - first_rows[low]) * dim


@parallel_kernel
def _move_kernel(
    flat: NDArray[Any],
    bases: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    first_rows: NDArray[np.uint64],
    dim: np.uint64,
    line: int,
    rows_M: NDArray[np.int32],
    slots_M: NDArray[np.int32],
    hot: NDArray[Any],
    is_fetch: bool,
    num_parts: int,
) -> None:
    """A part is a run of rows."""
    count = len(rows_M)
    for part in prange(num_parts):
        begin, end = part * count // num_parts, (part + 1) * count // num_parts
        for number in range(begin, end):
            if number + _AHEAD < end:
                _, ahead = _place_of(np.uint64(rows_M[number + _AHEAD]), first_rows, bases, dim)
                for d in range(np.uint64(0), dim, np.uint64(line)):
                    prefetch(flat, ahead + d)
            table, place = _place_of(np.uint64(rows_M[number]), first_rows, bases, dim)
            slot = np.uint64(slots_M[number]) * dim
            if sizes[table] == 0:
                if is_fetch:
                    for d in range(dim):
                        hot[slot + d] = 0
            elif is_fetch:
                copy_run(hot, slot, flat, place, dim)
            else:
                copy_run(flat, place, hot, slot, dim)
