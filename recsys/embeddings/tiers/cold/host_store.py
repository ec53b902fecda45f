"""The cold tier: holds every row and its state, in slower memory than the slots.

`HostStore` uses the tables in host memory: `weight` and the optimizer's state. `FileStore`
(file_store.py) uses files.

Letters: T tables, M rows that move, S slots, D columns of the rows or of their state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numba import prange

from recsys._support.jit import kernel_part, num_parts, parallel_kernel
from recsys.embeddings.kernels.cpu.intrinsics.copying import copy_run
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import LINE_BYTES, prefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.rows.row_space import RowSpace

__all__ = ["ColdStore", "HostStore", "RowMemory"]


class RowMemory(Protocol):
    """Host memory that a cold store copies rows to: the slots, or staging for a device."""

    @property
    def arrays(self) -> Sequence[NDArray[Any]]:
        """The rows, (S, D), then each state array, (S, size); or the rows alone."""

    @property
    def first_rows(self) -> NDArray[np.uint64]:
        """Where each table's rows begin among the rows of all tables, (T + 1,)."""


class ColdStore(ABC):
    """The memory that rows are fetched from and written back to."""

    def fetch(self, hot: RowMemory, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Copy rows and their state into slots.

        Args:
            hot: The memory of the slots.
            rows: Row numbers, counted over all tables, (M,).
            slots: The slot of each row, (M,).

        Raises:
            OSError: a row cannot be read; some slots may have been filled.
        """
        self._move(hot, rows, slots, is_fetch=True)

    def write_back(self, hot: RowMemory, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Copy rows and their state from slots to the cold store; arguments as for `fetch`.

        Raises:
            OSError: a row cannot be written; other rows may have been.
        """
        self._move(hot, rows, slots, is_fetch=False)

    @abstractmethod
    def _move(
        self,
        hot: RowMemory,
        rows: NDArray[np.int32],
        slots: NDArray[np.int32],
        *,
        is_fetch: bool,
    ) -> None:
        """Copy rows to slots, or back."""


class HostStore(ColdStore):
    """Tables and state in host memory.

    Args:
        spaces: Returns the tables, then each state array. A table whose rows were never updated has
            state arrays without rows: its state is zeros.
    """

    def __init__(self, spaces: Callable[[], Sequence[RowSpace]]) -> None:
        self._spaces = spaces

    def _move(
        self,
        hot: RowMemory,
        rows: NDArray[np.int32],
        slots: NDArray[np.int32],
        *,
        is_fetch: bool,
    ) -> None:
        for tables, memory in zip(self._spaces(), hot.arrays, strict=False):
            _move_kernel(
                tables.flat,
                tables.bases,
                tables.sizes,
                hot.first_rows,
                np.uint64(tables.dim),
                LINE_BYTES // tables.dtype.itemsize,
                rows,
                slots,
                memory.reshape(-1),
                is_fetch,
                num_parts(),
            )


_AHEAD = 8


@kernel_part
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
    """A part is a run of rows. A state array without rows is read as zeros."""
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
