"""Row update: sum the gradients of equal rows, and update each row once, wherever it is.

The lookups of the ledger are sorted by row (`row_sort`), the gradients of each row summed
(`row_sums`), and then each row and its state are updated at the address that the row map gives. A
row in a slot makes the slot dirty. While an error is recorded, no row is updated; a sum that is not
finite is such an error.

The formulas and the order of their operations are those of `kernels.cpu.update`, with one
exception: means of squares are added up in pairs.

Letters: T tables, N lookups of a ledger, D dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from recsys._support.cuda.triton_launches import launched
from recsys._support.sizes import cdiv, next_power_of_2
from recsys._support.torch_compat import current_stream_number
from recsys.embeddings.kernels.cpu.rounding import (
    FACTOR1,
    FACTOR2,
    GOLDEN,
    INFINITY,
    LARGEST_BFLOAT16,
    TO_NEAREST,
)
from recsys.embeddings.kernels.triton.memory import (
    begins_of,
    count_at_most,
    divided,
    first_step,
    has_error,
    upload,
)
from recsys.embeddings.kernels.triton.row_sort import CHUNK, chunks_in, sort_rows
from recsys.embeddings.kernels.triton.row_sums import (
    block_rows,
    gradients_at,
    num_programs,
    sum_runs,
)
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.triton.memory import DeviceMemories
    from recsys.embeddings.kernels.triton.row_sort import DeviceEntry
    from recsys.embeddings.optimizer import RowOptimizer

__all__ = ["update_rows"]

_NUM_SETTINGS = 5  # of `_settings`
_NUM_WARPS = 4

# What a formula divides.
_RATE_TIMES_DIRECTION, _DIRECTION, _RATE = map(tl.constexpr, range(3))
_DIVISIONS = {
    SGD: _RATE,  # nothing
    Adagrad: _RATE_TIMES_DIRECTION,
    RowWiseAdagrad: _RATE,
    Adam: _DIRECTION,
    PartialRowWiseAdam: _RATE,
}
_GOLDEN, _FACTOR1, _FACTOR2 = (
    tl.constexpr(number - 2**64 if number >= 2**63 else number)
    for number in (GOLDEN, FACTOR1, FACTOR2)
)
_INFINITY, _LARGEST_BFLOAT16 = map(tl.constexpr, (INFINITY, LARGEST_BFLOAT16))


def update_rows(
    memories: DeviceMemories,
    optimizer: RowOptimizer,
    rates_T2: NDArray[np.float64],
    keys_T: NDArray[Any],
    entries: Sequence[DeviceEntry],
    changed: Tensor | None = None,
) -> None:
    """Sum the gradients of each row, and update each row once; the host waits for nothing.

    Args:
        memories: The tables and their state, in the order of the optimizer's `state_sizes`.
        optimizer: As for `kernels.cpu.update`, like the next two.
        rates_T2: Rates and eps.
        keys_T: Keys of stochastic rounding.
        entries: The ledger, in the order of lookups.
        changed: Receives 1 for each row of the ledger, and for no row, (R + 1,) uint8.
    """
    rows, record, num_rows = memories.rows, memories.record, memories.num_rows
    is_narrow = rows.slots.dtype == torch.bfloat16
    is_by_chance = is_narrow and keys_T.dtype != TO_NEAREST.dtype
    with torch.cuda.device_of(rows.slots):
        runs = sort_rows(entries, num_rows, rows.dim)
        if runs is None:
            return
        if changed is not None:
            changed.index_fill_(0, runs.rows.long(), 1)
        sums = sum_runs(runs, rows.dim, num_rows, record)
        betas = getattr(optimizer, "betas", (0.0, 0.0))
        keys = keys_T.tobytes() if is_by_chance else bytes(8 * len(rates_T2))
        stream = current_stream_number(sums.device)
        settings = _settings(rates_T2.tobytes(), betas, keys, sums.device, stream)
        # Averages of squares are the last state; there may be one of gradients, the momentum, too.
        states = [*[None] * (2 - len(memories.states)), *memories.states]
        momentum, averages = states
        num_lookups, rows_at_once = len(runs.rows), block_rows(rows.dim, sums.dtype)
        num_tables = len(rows.tensors)
        _update_kernel[(min(cdiv(num_lookups, rows_at_once), num_programs(sums.device)),)](
            rows.slots.view(torch.int16) if is_narrow else rows.slots,
            rows.addresses,
            None if momentum is None else momentum.addresses,
            None if averages is None else averages.addresses,
            settings,
            memories.first_rows,
            memories.slot_of_row,
            memories.is_dirty,
            runs.gradient,
            runs.order,
            runs.sources,
            runs.scales,
            runs.rows,
            runs.listed,
            sums,
            record.numbers,
            num_lookups,
            num_rows,
            first_step(num_tables),
            NUM_TABLES=num_tables,
            DIVISION=_DIVISIONS[type(optimizer)],
            AVERAGE_DIM=0 if averages is None else averages.dim,
            IS_NARROW=is_narrow,
            IS_BY_CHANCE=is_by_chance,
            IS_ALIGNED=all(memory.is_aligned for memory in (rows, *memories.states)),
            NUM_SETTINGS=_NUM_SETTINGS,
            DIM=rows.dim,
            BLOCK_DIM=next_power_of_2(rows.dim),
            LEVELS=next_power_of_2(rows.dim).bit_length() - 1,
            BLOCK_ROWS=rows_at_once,
            CHUNK_SIZE=CHUNK,
            VECTOR=runs.vector,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )


@lru_cache(maxsize=16)  # most optimizers have the same settings in every step
def _settings(
    rates_T2: bytes, betas: tuple[float, float], keys_T: bytes, device: torch.device, stream: int
) -> Tensor:
    """Rate, eps and 1 - betas of each table, as the bits of float64, and its key; (5 T,).

    Each stream has its own, since it is copied to the device on the current one.
    """
    rates = np.frombuffer(rates_T2).reshape(-1, 2)
    numbers = np.empty((len(rates), _NUM_SETTINGS))
    numbers[:, :2] = rates
    numbers[:, 2:4] = [1 - beta for beta in betas]
    settings = numbers.view(np.int64)
    settings[:, 4] = np.frombuffer(keys_T, np.int64)
    return upload(settings.reshape(-1), device)


@launched
@triton.jit(do_not_specialize=["num_lookups", "step"])
def _update_kernel(
    slots_SD,
    addresses,
    momentum_addresses,
    average_addresses,
    settings,
    first_rows,
    slot_of_row,
    is_dirty,
    gradient,
    order_N,
    sources_N,
    scales_N,
    rows_N,
    listed,
    sums,
    record,
    num_lookups,
    num_rows,
    step,
    NUM_TABLES: tl.constexpr,
    DIVISION: tl.constexpr,
    AVERAGE_DIM: tl.constexpr,
    IS_NARROW: tl.constexpr,
    IS_BY_CHANCE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    NUM_SETTINGS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Look at BLOCK_ROWS chunks at a time, and update the rows of those that are a run's first."""
    num_chunks, chunks = tl.load(listed), chunks_in(listed)
    num_chunks = tl.where(has_error(record), 0, num_chunks)
    columns = tl.arange(0, BLOCK_DIM)
    tile = tl.program_id(0)
    while tile * BLOCK_ROWS < num_chunks:
        numbers = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_chunk = numbers < num_chunks
        begins = tl.load(chunks + numbers, is_chunk, 0)
        ends = tl.load(chunks + num_lookups + numbers, is_chunk, 0)
        row = tl.load(rows_N + begins)
        is_row = is_chunk & (row < num_rows)
        is_row &= tl.load(rows_N + begins - 1, begins > 0, -1) != row
        is_single = ends - begins == 1
        is_long = ends - begins == CHUNK_SIZE
        is_long &= tl.load(rows_N + ends, ends < num_lookups, -1) == row
        places = (begins // 2 + is_long.to(tl.int32)).to(tl.int64)
        is_number = is_row[:, None] & (columns < DIM)[None, :]
        of_sums = sums + (places[:, None] * DIM + columns[None, :])
        summed = tl.load(of_sums, is_number & (is_single == 0)[:, None], 0)
        summed += gradients_at(
            gradient,
            order_N,
            sources_N,
            scales_N,
            begins,
            is_row & is_single,
            DIM,
            BLOCK_DIM,
            VECTOR,
        )
        row = tl.where(is_row, row, 0).to(tl.int64)
        table = count_at_most(first_rows, row, NUM_TABLES, step) - 1
        index = row - tl.load(first_rows + table)
        key = tl.load(settings + (table * NUM_SETTINGS + 4))
        if IS_BY_CHANCE:
            key = _fold(key, index)
        of_table = settings + table * NUM_SETTINGS
        if slot_of_row is not None:
            slot = tl.load(slot_of_row + row, is_row, -1).to(tl.int64)
            tl.store(is_dirty + slot, tl.full([BLOCK_ROWS], 1, tl.uint8), is_row & (slot >= 0))
            index = tl.where(slot >= 0, slot, index)
            table = tl.where(slot >= 0, NUM_TABLES, table)
        change = _change(
            summed,
            sums,
            momentum_addresses,
            average_addresses,
            of_table,
            table,
            index,
            is_row,
            DIVISION,
            AVERAGE_DIM,
            IS_ALIGNED,
            DIM,
            BLOCK_DIM,
            LEVELS,
            BLOCK_ROWS,
        )
        address = tl.load(addresses + table)
        of_row = begins_of(address, index, slots_SD, DIM, IS_ALIGNED) + columns[None, :]
        stored = tl.load(of_row, is_number, 0)
        if IS_NARROW:  # rows of bfloat16 are given as int16
            stored = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        updated = stored - change
        if IS_NARROW:
            chance = tl.full([1, 1], -1, tl.int64)
            if IS_BY_CHANCE:
                chance = _shifted(_fold(key[:, None], columns.to(tl.int64)[None, :]), 32)
            updated = _rounded(updated, chance, IS_BY_CHANCE)
        tl.store(of_row, updated, is_number)
        tile += tl.num_programs(0)


@triton.jit
def _change(
    summed,
    sums,
    momentum_addresses,
    average_addresses,
    of_table,
    table,
    index,
    is_row,
    DIVISION: tl.constexpr,
    AVERAGE_DIM: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Update the state of rows by their gradients; returns what the formula subtracts from them."""
    columns = tl.arange(0, BLOCK_DIM)
    is_number = is_row[:, None] & (columns < DIM)[None, :]
    rate = _setting(of_table, summed.dtype)
    eps = _setting(of_table + 1, summed.dtype)
    share1 = _setting(of_table + 2, summed.dtype)
    share2 = _setting(of_table + 3, summed.dtype)
    direction = summed
    if momentum_addresses is not None:
        address = tl.load(momentum_addresses + table)
        of_momentum = begins_of(address, index, sums, DIM, IS_ALIGNED) + columns[None, :]
        direction = tl.load(of_momentum, is_number, 0)
        direction += share1 * (summed - direction)
        tl.store(of_momentum, direction, is_number)
    change = rate * direction
    if average_addresses is not None:
        address = tl.load(average_addresses + table)
        of_averages = begins_of(address, index, sums, AVERAGE_DIM, IS_ALIGNED)
        is_average = is_row[:, None]
        squares = summed * summed
        if AVERAGE_DIM == DIM:
            of_averages += columns[None, :]
            is_average = is_number
        else:
            for _ in tl.static_range(LEVELS):
                # Pairs of two: no layout of threads can change the order.
                pairs = tl.reshape(squares, [BLOCK_ROWS, squares.shape[1] // 2, 2])
                squares = tl.sum(pairs, 2)
            squares = divided(squares, tl.full([1, 1], DIM, squares.dtype))
        average = tl.load(of_averages, is_average, 1)
        if AVERAGE_DIM == 1:
            tl.debug_barrier()  # all threads of a row have read the number that one replaces
        if momentum_addresses is None:
            average += squares
        else:
            average += share2 * (squares - average)
        tl.store(of_averages, average, is_average)
        divisor = (tl.sqrt_rn(average) if average.dtype == tl.float32 else tl.sqrt(average)) + eps
        if DIVISION == _RATE_TIMES_DIRECTION:
            change = divided(change, divisor)
        elif DIVISION == _DIRECTION:
            change = rate * divided(direction, divisor)
        else:
            change = divided(rate, divisor) * direction
    return change


@triton.jit
def _setting(of_rows, dtype: tl.constexpr):
    """A setting of each row, as a column."""
    return tl.load(of_rows).to(tl.float64, bitcast=True).to(dtype)[:, None]


@triton.jit
def _rounded(numbers, chance, IS_BY_CHANCE: tl.constexpr):
    """Round to bfloat16, as `cpu.rounding` describes; the result is int16."""
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.int64)
    fixed = magnitude << 16
    if not IS_BY_CHANCE:
        chance = 0x7FFFFFFF + ((fixed >> 32) & 1)
    stored = (fixed + tl.where(magnitude > _LARGEST_BFLOAT16, 1 << 31, chance)) >> 32
    stored = tl.where(magnitude > _INFINITY, 0x7FC0, stored)
    return (stored | ((bits >> 16) & 0x8000)).to(tl.int16)


@triton.jit
def _fold(key, number):
    """The hash of a key and one more number; see `cpu.rounding`."""
    mixed = key + (number + 1) * _GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * _FACTOR1
    mixed = (mixed ^ _shifted(mixed, 27)) * _FACTOR2
    return mixed ^ _shifted(mixed, 31)


@triton.jit
def _shifted(number, PLACES: tl.constexpr):
    """Logical shift to the right."""
    return (number >> PLACES) & ((1 << (64 - PLACES)) - 1)
