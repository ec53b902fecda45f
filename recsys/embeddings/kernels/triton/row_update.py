"""Row update: sum the gradients of equal rows, and update each row once.

`row_runs` sorts lookups by row. `row_sums` sums every row's gradients and looks for nan and inf,
because one of them keeps all rows as they are. Then one kernel reads each sum, the row and its
state, and writes row and state. A row that is looked up once has no stored sum: its gradient is
read again.

Bytes moved for N lookups of U distinct rows, M of them looked up more than once, with D numbers of
c bytes in a gradient, w bytes in a number of a row, and S numbers of state per row:

    gradients and sums   c D (N + M + U), and c D N / 16 at most for sums of chunks
    rows and state       2 U (w D + c S)
    positions            about 150 N, nearly all by torch's sort of keys of 4 bytes

No row may change before every sum is known, so each gradient is read, and then a sum or a gradient
for each row.

Letters: T tables, N lookups, D dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from recsys._support.cuda.triton_launches import launched
from recsys._support.cuda.triton_support import cdiv, next_power_of_2
from recsys._support.torch_compat import current_stream_number
from recsys.embeddings.kernels.cpu.rounding import (
    FACTOR1,
    FACTOR2,
    GOLDEN,
    INFINITY,
    LARGEST_BFLOAT16,
    TO_NEAREST,
)
from recsys.embeddings.kernels.cpu.slot_arrays import DIRTY
from recsys.embeddings.kernels.torch.bags import layers_of
from recsys.embeddings.kernels.torch.errors import BAD_GRADIENT, KIND_BITS
from recsys.embeddings.kernels.torch.joined_entries import join_entries
from recsys.embeddings.kernels.torch.row_space import upload
from recsys.embeddings.kernels.triton.row_runs import (
    CHUNK,
    chunks_in,
    count_at_most,
    divided,
    find_runs,
    first_step,
)
from recsys.embeddings.kernels.triton.row_sums import (
    block_rows,
    gradients_at,
    num_programs,
    sum_runs,
)
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.rows.ledger import tables_in

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.torch.row_space import TorchRows
    from recsys.embeddings.kernels.triton.row_runs import Runs
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.rows.ledger import LedgerEntry

__all__ = ["row_update"]

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
_DIRTY = tl.constexpr(DIRTY)
_GOLDEN, _FACTOR1, _FACTOR2 = (
    tl.constexpr(number - 2**64 if number >= 2**63 else number)
    for number in (GOLDEN, FACTOR1, FACTOR2)
)
_INFINITY, _LARGEST_BFLOAT16 = map(tl.constexpr, (INFINITY, LARGEST_BFLOAT16))
_NO_ERROR = tl.constexpr((BAD_GRADIENT + 1) << KIND_BITS)  # greater than every error


def row_update(
    space: TorchRows,
    states: Sequence[TorchRows],
    optimizer: RowOptimizer,
    rates_T2: NDArray[np.float64],
    ledger: Sequence[LedgerEntry],
    keys_T: NDArray[Any] = TO_NEAREST,
) -> None:
    """Sum each row's gradients in an order of its own, and update each row once.

    While a recorded error has not been raised, no row is updated. A sum that is not finite is such
    an error. The slots of updated rows are marked.

    Args:
        space: The tables.
        states: The tables' state arrays, in the order of the optimizer's `state_sizes`.
        optimizer: The formula.
        rates_T2: `rate_and_eps` of the optimizer, for each table's learning rate and step.
        ledger: One entry per backward pass since the last update, in order; bags are `TorchBags`.
        keys_T: `table_key` of each table, uint64, for stochastic rounding to 16 bits.

    Raises:
        IdOutOfRange: an id of an earlier lookup is not a row of its table.
        MalformedBags: the offsets of an earlier lookup are invalid.
        NonFiniteGradient: a gradient of an earlier update has nan or inf in it.
        ValueError: a per-sample weight of an earlier lookup is nan.
    """
    space.errors.poll()
    tables = tables_in(ledger)
    if not tables:
        return
    ledger = join_entries(ledger)
    is_by_chance = space.is_narrow and keys_T.dtype != TO_NEAREST.dtype
    betas = tuple(getattr(optimizer, "betas", (0.0, 0.0)))
    keys = keys_T.tobytes() if is_by_chance else None
    division = _DIVISIONS[type(optimizer)]

    # With what is added to a row's number for its number there.
    of_states = [(state, state.shifts(space, tables)) for state in states]

    def launch(settings: Tensor, values: Tensor | None = None) -> None:
        runs = find_runs(space, ledger if values is None else [_with_values(ledger[0], values)])
        if runs is not None:
            sums = sum_runs(space, runs)
            _update(space, of_states, settings, runs, sums, division, is_by_chance=is_by_chance)

    with torch.cuda.device_of(space.rows):  # where Triton launches kernels
        device, stream = space.device, current_stream_number(space.device)
        settings = _settings(rates_T2.tobytes(), betas, tuple(tables), keys, device, stream)
        bags: Any = ledger[0].bags  # `TorchBags`
        # Other ledgers have sizes that change from step to step.
        if len(ledger) > 1 or not bags.is_plain or not bags.batch_size:
            launch(settings)
            return
        lookups, _, gradient, *_ = ledger[0]
        key = (
            lookups,
            bags.batch_size,
            division,
            is_by_chance,
            (gradient.data_ptr(), gradient.dtype, gradient.shape, gradient.stride()),
            *(None if shifts is None else shifts.data_ptr() for _, shifts in of_states),
            *(state.rows.data_ptr() for state in states),
        )
        reads = layers_of(space, lookups, bags.num_features), of_states
        space.replays.run(key, launch, [settings, bags.values], reads)


def _with_values(entry: LedgerEntry, values: Tensor) -> LedgerEntry:
    bags: Any = entry.bags
    return entry._replace(bags=bags._replace(values=values))


def _update(
    space: TorchRows,
    of_states: Sequence[tuple[TorchRows, Tensor | None]],
    settings: Tensor,
    runs: Runs,
    sums: Tensor,
    division: int,
    *,
    is_by_chance: bool,
) -> None:
    # Averages of squares are the last state; there may be one of gradients, the momentum, too.
    pairs: list[Any] = [*[(None, None)] * (2 - len(of_states)), *of_states]
    (momentum, momentum_shifts), (averages, average_shifts) = pairs
    is_by_table = len(settings) > 1
    starts_T = tables_T = row_of_slot = None
    slots = space.slots
    shifts = momentum_shifts, average_shifts
    if is_by_table or is_by_chance or any(shift is not None for shift in shifts):
        starts_T, tables_T, row_of_slot = space.starts
    num_lookups, num_tables = len(runs.rows), 0 if starts_T is None else len(starts_T)
    rows_at_once = block_rows(space.dim, space.compute_dtype)
    _update_kernel[(min(cdiv(num_lookups, rows_at_once), num_programs(space.device)),)](
        space.rows.view(torch.int16) if space.is_narrow else space.rows,
        None if momentum is None else momentum.rows,
        None if averages is None else averages.rows,
        *shifts,
        settings,
        starts_T,
        tables_T,
        row_of_slot,
        None if slots is None else slots.flags,
        runs.gradients[0],
        runs.order,
        runs.sources,
        runs.scales,
        runs.first_columns,
        runs.rows,
        runs.listed,
        sums,
        space.errors.first,
        num_lookups,
        runs.batch_size,
        runs.gradients[0].stride(0),
        space.num_rows,
        num_tables,
        first_step(num_tables),
        DIVISION=division,
        AVERAGE_DIM=0 if averages is None else averages.dim,
        IS_NARROW=space.is_narrow,
        IS_BY_TABLE=is_by_table,
        IS_BY_CHANCE=is_by_chance,
        NUM_SETTINGS=_NUM_SETTINGS,
        DIM=space.dim,
        BLOCK_DIM=next_power_of_2(space.dim),
        LEVELS=next_power_of_2(space.dim).bit_length() - 1,
        BLOCK_ROWS=rows_at_once,
        CHUNK_SIZE=CHUNK,
        VECTOR=runs.vector,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )


@lru_cache(maxsize=16)  # most optimizers have the same settings in every step
def _settings(
    rates_T2: bytes,
    betas: tuple[float, float],
    tables: tuple[int, ...],
    keys_T: bytes | None,
    device: torch.device,
    stream: int,
) -> Tensor:
    """Rate, eps, 1 - betas as the bits of float64, and the key; of each table, or of all.

    Each stream has its own, since it is copied to the device on the current one.

    Shape:
        result (T, 5), or (1, 5) if all tables have the same, which is the usual case.
    """
    rates = np.frombuffer(rates_T2).reshape(-1, 2)
    of_updated = rates[list(tables)]
    if keys_T is None and (of_updated == of_updated[0]).all():
        rates = of_updated[:1]
    numbers = np.empty((len(rates), 4))
    numbers[:, :2] = rates
    numbers[:, 2:] = [1 - beta for beta in betas]
    settings = np.zeros((len(rates), _NUM_SETTINGS), np.int64)
    settings[:, :4] = numbers.view(np.int64)
    if keys_T is not None:
        settings[:, 4] = np.frombuffer(keys_T, np.int64)
    return upload(settings, device)


@launched
@triton.jit(do_not_specialize=["num_lookups", "batch_size", "stride", "num_tables", "step"])
def _update_kernel(
    rows,
    momentum,
    averages,
    momentum_shifts_T,
    average_shifts_T,
    settings,
    starts_T,
    tables_T,
    row_of_slot,
    flags,
    gradient,
    order_N,
    sources_N,
    scales_N,
    first_columns,
    rows_N,
    listed,
    sums,
    first_error,
    num_lookups,
    batch_size,
    stride,
    num_rows,
    num_tables,
    step,
    DIVISION: tl.constexpr,
    AVERAGE_DIM: tl.constexpr,
    IS_NARROW: tl.constexpr,
    IS_BY_TABLE: tl.constexpr,
    IS_BY_CHANCE: tl.constexpr,
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
    if tl.load(first_error) < _NO_ERROR:
        num_chunks = 0
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
            first_columns,
            begins,
            is_row & is_single,
            batch_size,
            stride,
            DIM,
            BLOCK_DIM,
            VECTOR,
        )
        row = row.to(tl.int64)
        table = tl.zeros([BLOCK_ROWS], tl.int64)
        id_of_row = table
        if starts_T is not None:
            named = row
            if row_of_slot is not None:
                named = tl.load(row_of_slot + row, is_row, 0).to(tl.int64)
            at = count_at_most(starts_T, named, num_tables, step) - 1
            table = tl.load(tables_T + at)
            id_of_row = named - tl.load(starts_T + at)
        of_table = settings + (table * NUM_SETTINGS if IS_BY_TABLE else tl.zeros_like(table))
        rate = _setting(of_table, summed.dtype)
        eps = _setting(of_table + 1, summed.dtype)
        share1 = _setting(of_table + 2, summed.dtype)
        share2 = _setting(of_table + 3, summed.dtype)

        # The formulas and the order of their operations are those of `cpu.row_update`.
        direction = summed
        if momentum is not None:
            at = row if momentum_shifts_T is None else row + tl.load(momentum_shifts_T + table)
            of_momentum = momentum + (at[:, None] * DIM + columns[None, :])
            direction = tl.load(of_momentum, is_number, 0)
            direction += share1 * (summed - direction)
            tl.store(of_momentum, direction, is_number)
        change = rate * direction
        if averages is not None:
            at = row if average_shifts_T is None else row + tl.load(average_shifts_T + table)
            squares = summed * summed
            if AVERAGE_DIM == 1:
                for _ in tl.static_range(LEVELS):
                    # Pairs of two: no layout of threads can change the order.
                    pairs = tl.reshape(squares, [BLOCK_ROWS, squares.shape[1] // 2, 2])
                    squares = tl.sum(pairs, 2)
                squares = divided(squares, tl.full([1, 1], DIM, squares.dtype))
                of_averages, is_average = averages + at[:, None], is_row[:, None]
            else:
                of_averages = averages + (at[:, None] * DIM + columns[None, :])
                is_average = is_number
            average = tl.load(of_averages, is_average, 1)
            if AVERAGE_DIM == 1:
                tl.debug_barrier()  # all threads of a row have read the number that one replaces
            if momentum is None:
                average += squares
            else:
                average += share2 * (squares - average)
            tl.store(of_averages, average, is_average)
            divisor = _root(average) + eps
            if DIVISION == _RATE_TIMES_DIRECTION:
                change = divided(change, divisor)
            elif DIVISION == _DIRECTION:
                change = rate * divided(direction, divisor)
            else:
                change = divided(rate, divisor) * direction

        of_row = rows + (row[:, None] * DIM + columns[None, :])
        stored = tl.load(of_row, is_number, 0)
        updated = _widened(stored, IS_NARROW) - change
        if IS_NARROW:
            chance = tl.full([1, 1], -1, tl.int64)
            if IS_BY_CHANCE:
                key = _fold(tl.load(of_table + 4), id_of_row)
                chance = _shifted(_fold(key[:, None], columns.to(tl.int64)[None, :]), 32)
            updated = _rounded(updated, chance, IS_BY_CHANCE)
        tl.store(of_row, updated, is_number)
        if flags is not None:
            tl.store(flags + row, tl.load(flags + row, is_row, 0) | _DIRTY, is_row)
        tile += tl.num_programs(0)


@triton.jit
def _setting(of_rows, dtype: tl.constexpr):
    """A setting of each row, as a column."""
    return tl.load(of_rows).to(tl.float64, bitcast=True).to(dtype)[:, None]


@triton.jit
def _root(numbers):
    return tl.sqrt_rn(numbers) if numbers.dtype == tl.float32 else tl.sqrt(numbers)


@triton.jit
def _widened(numbers, IS_NARROW: tl.constexpr):
    """Rows in the dtype of the computation; those of bfloat16 are given as int16."""
    if IS_NARROW:
        numbers = (numbers.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return numbers


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
