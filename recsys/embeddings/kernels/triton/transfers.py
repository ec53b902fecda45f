"""Copies rows between slots and the tables of a cold store, by lists that only the device knows.

The tables lie in pinned host memory, which the kernel reads and writes over PCIe itself: no list
travels to the host, and no row is copied twice. One launch serves all tables of a row space.

Letters: T tables, M places of a list, D numbers per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from recsys._support.cuda.triton_launches import launched
from recsys._support.cuda.triton_support import cdiv, next_power_of_2
from recsys.embeddings.kernels.torch.row_space import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["HostRows", "fetch_rows", "write_rows"]

# A few programs that wait for the host get from PCIe what more of them get, and leave the other
# multiprocessors to what computes meanwhile. Each has 16 reads of 16 bytes under way per thread,
# which for rows of 512 bytes takes nearly all registers of its multiprocessor: programs of other
# kernels would wait there until these reads are done. See docs/gpu.md.
_MOST_PROGRAMS = 4
_NUM_WARPS = 16
_BLOCK_BYTES = _NUM_WARPS * 32 * 16 * 16
_WIDE_BYTES = 512  # a program copies half as much of rows with more; its registers do not suffice
_WINDOW = 128  # places of the lists that a program looks at
_MOST_ROWS = 256  # that a program copies at once
# Numbers are copied as integers of their size, so every dtype is copied bit by bit.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HostRows:
    """Tables that a kernel finds by address, with rows numbered over all of them.

    Args:
        tables: (E, D) or (E,) each, contiguous, of one dtype, in memory that the device can reach:
            pinned, or registered with CUDA. They must outlive this object's last kernel.
        device: Where kernels run.
        sizes: E of each table; None for the lengths of `tables`. A table given without rows then
            has rows of zeros, which are read and never written.

    Attributes:
        dim: D.
        addresses: Where each table begins, (T,) int64; 0 for one without rows.
        first_rows: The number of each table's first row, then of all rows, (T + 1,) int64.
        is_aligned: Whether every table begins at a multiple of 16 bytes.
    """

    def __init__(
        self, tables: Sequence[Tensor], device: torch.device, sizes: Sequence[int] | None = None
    ) -> None:
        self._tables = list(tables)
        self.dim = tables[0].shape[1:].numel()
        sizes = list(map(len, tables)) if sizes is None else sizes
        starts = [table.data_ptr() if len(table) else 0 for table in tables]
        self.addresses = upload(np.array(starts, np.int64), device)
        self.first_rows = upload(np.cumsum([0, *sizes]).astype(np.int64), device)
        self.is_aligned = not any(start % 16 for start in starts)


def fetch_rows(
    host: HostRows,
    rows_M: Tensor,
    slots_M: Tensor,
    result: Tensor,
    *,
    most_programs: int = _MOST_PROGRAMS,
) -> None:
    """Copy rows from the host's tables into slots.

    Args:
        host: The tables.
        rows_M: Which rows, (M,), counted over all tables; then places of no row, which are
            negative. Copies are faster if rows are in order.
        slots_M: The slot of each row, (M,).
        result: The slots' rows, (S, D) contiguous, of the tables' dtype; changed in place.
        most_programs: The most programs that copy.
    """
    _copy(host, rows_M, slots_M, result, most_programs, is_fetch=True)


def write_rows(
    host: HostRows,
    rows_M: Tensor,
    slots_M: Tensor,
    source: Tensor,
    *,
    most_programs: int = _MOST_PROGRAMS,
) -> None:
    """Copy rows from slots to the host's tables; see `fetch_rows`. Rows must be distinct."""
    _copy(host, rows_M, slots_M, source, most_programs, is_fetch=False)


def _copy(
    host: HostRows,
    rows_M: Tensor,
    slots_M: Tensor,
    in_slots: Tensor,
    most_programs: int,
    *,
    is_fetch: bool,
) -> None:
    num_places = len(rows_M)
    if not num_places:
        return
    bits = _BITS[in_slots.dtype.itemsize]
    block_dim = next_power_of_2(host.dim)
    row_bytes = block_dim * bits.itemsize
    block_bytes = _BLOCK_BYTES if row_bytes <= _WIDE_BYTES else _BLOCK_BYTES // 2
    block_rows = min(max(1, block_bytes // row_bytes), _MOST_ROWS)
    window = max(_WINDOW, block_rows)
    _copy_kernel[(min(cdiv(num_places, window), most_programs),)](
        host.addresses,
        host.first_rows,
        rows_M,
        slots_M,
        in_slots.view(bits),
        num_places,
        NUM_TABLES=host.addresses.numel(),
        DIM=host.dim,
        BLOCK_DIM=block_dim,
        BLOCK_ROWS=block_rows,
        WINDOW=window,
        IS_ALIGNED=host.is_aligned,
        IS_FETCH=is_fetch,
        num_warps=_NUM_WARPS,
    )


@launched
@triton.jit(do_not_specialize=["num_places"])
def _copy_kernel(
    addresses,
    first_rows,
    rows_M,
    slots_M,
    in_slots,
    num_places,
    NUM_TABLES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_FETCH: tl.constexpr,
):
    """Copy the rows of WINDOW places at a time, BLOCK_ROWS at once, until a window has none."""
    window = tl.program_id(0)
    is_over = window < 0
    while (window * WINDOW < num_places) & (is_over == 0):
        in_window = window * WINDOW + tl.arange(0, WINDOW)
        is_row = tl.load(rows_M + in_window, in_window < num_places, -1) >= 0
        begin = window * WINDOW
        end = begin + tl.sum(is_row.to(tl.int32), 0)
        is_over = end == begin
        while begin < end:
            places = begin + tl.arange(0, BLOCK_ROWS)
            rows = tl.load(rows_M + places, places < end, -1).to(tl.int64)
            slots = tl.load(slots_M + places, places < end, 0).to(tl.int64)
            tables = tl.zeros_like(rows).to(tl.int32)
            for table in range(1, NUM_TABLES):
                # Of tables without rows, which begin where the next one does, the last is found.
                tables = tl.where(rows >= tl.load(first_rows + table), table, tables)
            ids = rows - tl.load(first_rows + tables)
            begins = tl.load(addresses + tables)
            starts = begins.to(tl.pointer_type(in_slots.dtype.element_ty))
            if IS_ALIGNED:
                starts = tl.multiple_of(starts, [16])
            columns = tl.arange(0, BLOCK_DIM)
            of_host = starts[:, None] + (ids[:, None] * DIM + columns[None, :])
            of_slots = in_slots + (slots[:, None] * DIM + columns[None, :])
            is_number = (rows >= 0)[:, None] & (columns < DIM)[None, :]
            is_held = is_number & (begins != 0)[:, None]
            if IS_FETCH:
                tl.store(of_slots, tl.load(of_host, is_held, 0), is_number)
            else:
                tl.store(of_host, tl.load(of_slots, is_held), is_held)
            begin += BLOCK_ROWS
        window += tl.num_programs(0)
