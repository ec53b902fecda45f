"""Copies rows and their state between slots and the tables, by lists that only the device knows.

Tables in page-locked host memory are read and written by the device itself, over PCIe: no list
travels to the host, and no row is copied twice. Rows are written back before others are fetched
into their slots.

Letters: T tables, M moves, D numbers per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from recsys._support.cuda.triton_launches import launched
from recsys._support.sizes import cdiv, next_power_of_2
from recsys.embeddings.kernels.cpu.claim import FETCHED, WRITTEN
from recsys.embeddings.kernels.triton.claim import Moves
from recsys.embeddings.kernels.triton.memory import begins_of, count_at_most, first_step

if TYPE_CHECKING:
    from recsys.embeddings.kernels.triton.claim import DeviceMarks
    from recsys.embeddings.kernels.triton.memory import DeviceMemories

__all__ = ["dirty_rows", "move_rows"]

# A few programs that wait for the host get from PCIe what more of them get, and leave the other
# multiprocessors to what computes meanwhile. Each has 16 reads of 16 bytes under way per thread,
# which for rows of 512 bytes takes nearly all registers of its multiprocessor.
_MOST_PROGRAMS = 4
_NUM_WARPS = 16
_BLOCK_BYTES = _NUM_WARPS * 32 * 16 * 16
_WIDE_BYTES = 512  # a program copies half as much of rows with more; its registers do not suffice
_MOST_ROWS = 256  # that a program copies at once
# Numbers are copied as integers of their size, so every dtype is copied bit by bit.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def move_rows(memories: DeviceMemories, moves: Moves) -> None:
    """Write back, then fetch, rows and their state; the host waits for nothing.

    Args:
        memories: The tables and their state. State that does not exist yet is not moved.
        moves: Of a claim.
    """
    num_tables, most = len(memories.rows.tensors), moves.lists_2M.shape[1]
    for memory in (memories.rows, *memories.states) if most else ():
        bits = _BITS[memory.slots.itemsize]
        block_dim = next_power_of_2(memory.dim)
        row_bytes = block_dim * bits.itemsize
        block_bytes = _BLOCK_BYTES if row_bytes <= _WIDE_BYTES else _BLOCK_BYTES // 2
        block_rows = min(max(1, block_bytes // row_bytes), _MOST_ROWS)
        for is_fetch, count in ((False, WRITTEN), (True, FETCHED)):
            with torch.cuda.device_of(memory.slots):
                _move_kernel[(min(cdiv(most, block_rows), _MOST_PROGRAMS),)](
                    memory.slots.view(bits),
                    memory.addresses,
                    memories.first_rows,
                    moves.lists_2M,
                    moves.counts,
                    most,
                    first_step(num_tables),
                    NUM_TABLES=num_tables,
                    COUNT=count,
                    DIM=memory.dim,
                    BLOCK_DIM=block_dim,
                    BLOCK_ROWS=block_rows,
                    IS_ALIGNED=memory.is_aligned,
                    IS_FETCH=is_fetch,
                    num_warps=_NUM_WARPS,
                )


def dirty_rows(marks: DeviceMarks) -> Moves:
    """The rows that are newer than in the cold tier; they count as written from now on.

    The host waits, to learn how many they are.
    """
    slots = marks.is_dirty.nonzero().view(-1)
    keys = ((marks.row_of_slot[slots].long() << 32) | slots).sort().values
    counts = torch.zeros(16, dtype=torch.int32, device=slots.device)
    counts[WRITTEN] = len(slots)
    marks.is_dirty.zero_()
    return Moves(keys.expand(2, -1).contiguous(), counts)


@launched
@triton.jit(do_not_specialize=["most", "step"])
def _move_kernel(
    slots_SD,
    addresses,
    first_rows,
    lists_2M,
    counts,
    most,
    step,
    NUM_TABLES: tl.constexpr,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_FETCH: tl.constexpr,
):
    """Copy BLOCK_ROWS rows of a list at a time."""
    keys_M, count, columns = lists_2M, tl.load(counts + COUNT), tl.arange(0, BLOCK_DIM)
    if IS_FETCH:
        keys_M += most
    begin = tl.program_id(0) * BLOCK_ROWS
    while begin < count:
        places = begin + tl.arange(0, BLOCK_ROWS)
        keys = tl.load(keys_M + places, places < count, 0)
        rows, slots = keys >> 32, keys & 0xFFFFFFFF
        tables = count_at_most(first_rows, rows, NUM_TABLES, step) - 1
        cold = tl.load(addresses + tables)
        ids = rows - tl.load(first_rows + tables)
        hot = tl.load(addresses + NUM_TABLES) + tl.zeros_like(cold)
        of_cold = begins_of(cold, ids, slots_SD, DIM, IS_ALIGNED) + columns[None, :]
        of_slots = begins_of(hot, slots, slots_SD, DIM, IS_ALIGNED) + columns[None, :]
        is_number = ((places < count) & (cold != 0))[:, None] & (columns < DIM)[None, :]
        if IS_FETCH:
            tl.store(of_slots, tl.load(of_cold, is_number), is_number)
        else:
            tl.store(of_cold, tl.load(of_slots, is_number), is_number)
        begin += tl.num_programs(0) * BLOCK_ROWS
