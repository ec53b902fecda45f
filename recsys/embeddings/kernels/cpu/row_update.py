"""Row update: sum the gradients of equal rows in lookup order, and update each row once.

A task is a table. If there are fewer tables than threads, it is a share of a table's rows, chosen
by a hash of the row. So no two threads write to one row. A thread that finishes a task takes the
next one, the largest table first; the result does not depend on which thread updates a row. The
buffers of a table fit the caches:

    1. The table's lookups are sorted by row (`row_sort`).
    2. Row by row, the gradients are summed from where backward wrote them, and the row and its
       state are updated. Rows and gradients are prefetched.

Letters: T tables, D dim; those of the ledger are in `ledger`. Indices are unsigned, for the reason
given in `pooled_lookup`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import prange

from recsys._support.jit import ParallelKernel, kernel_part, num_parts, parallel_kernel
from recsys.embeddings.kernels.cpu.intrinsics.addresses import array_at
from recsys.embeddings.kernels.cpu.intrinsics.copying import RUN, add_run, copy_run, is_run_finite
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import LINE_BYTES, prefetch
from recsys.embeddings.kernels.cpu.intrinsics.turns import next_turn
from recsys.embeddings.kernels.cpu.pooled_lookup import MIN_SHARED_BYTES
from recsys.embeddings.kernels.cpu.rounding import TO_NEAREST, key_of_row, narrow, widen
from recsys.embeddings.kernels.cpu.row_sort import (
    LOOKUPS_AHEAD,
    NO_INTEGERS,
    LookupValues,
    SortedLookups,
    by_width,
    integer_at,
    make_room,
    number_rows,
    place_lookups,
)
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.rows.ledger import Segments, join_ledger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.rows.ledger import LedgerEntry
    from recsys.embeddings.rows.row_space import RowSpace

__all__ = ["BadRow", "row_update"]

_SGD, _ADAGRAD, _ROWWISE_ADAGRAD, _ADAM, _PARTIAL_ROWWISE_ADAM = range(5)
_KINDS = {
    SGD: _SGD,
    Adagrad: _ADAGRAD,
    RowWiseAdagrad: _ROWWISE_ADAGRAD,
    Adam: _ADAM,
    PartialRowWiseAdam: _PARTIAL_ROWWISE_ADAM,
}

_ONE = np.uint64(1)
# A table's rows are prefetched as soon as all are known, as many as the core's own cache can hold.
_MAX_PREFETCHED_BYTES = np.uint64(2**20)
# They are prefetched again this many rows ahead, into the nearest cache; see `LOOKUPS_AHEAD`.
_ROWS_AHEAD = np.uint64(16)
# There is a kernel for each of these dims, all multiples of `RUN`. It adds gradients and prefetches
# rows without a loop. Updates of Kaggle's 26 features of 2,048 samples took 20 % less time at D=8
# and 16, 10 % at 32, 5 % at 64 and 14 % at 128. Other dims share one kernel, and so do 16-bit rows.
_COMPILED_DIMS = (8, 16, 32, 64, 128)


def row_update(
    space: RowSpace,
    states: Sequence[RowSpace],
    optimizer: RowOptimizer,
    rates_T2: NDArray[np.float64],
    ledger: Sequence[LedgerEntry],
    keys_T: NDArray[Any] = TO_NEAREST,
) -> BadRow | None:
    """Sum the ledger's gradients of each row, in lookup order, and update each row once.

    The result does not depend on the number of threads. A row whose summed gradient has nan or inf
    in it is not updated.

    Args:
        space: The tables.
        states: The tables' state, in the order of the optimizer's `state_sizes`.
        optimizer: The formula.
        rates_T2: The optimizer's `rate_and_eps` for each table.
        ledger: One entry per backward pass since the last update, in order.
        keys_T: `table_key` of each table, uint64, to round 16-bit rows stochastically.

    Returns:
        The first row, of the first table, that was not updated; None if all were.
    """
    if not ledger:
        return None
    beta1, beta2 = getattr(optimizer, "betas", (0.0, 0.0))
    with_states = space.with_states
    if with_states is None or with_states.states != states:
        with_states = space.join_states(states)
    joined = join_ledger(ledger, space)
    bags = joined.bags
    # No named tuples, and flags as integers: numba looks up the type of every argument, and for a
    # named tuple or a bool this takes longer than copying a row.
    has_kernel = space.dim in _COMPILED_DIMS and not space.is_narrow
    compiled_dim = space.dim if has_kernel else 0
    update = _row_update_kernel(compiled_dim, LINE_BYTES // space.compute_dtype.itemsize)
    is_small = len(bags.values) * space.dim * space.compute_dtype.itemsize < MIN_SHARED_BYTES
    table, row = (update.alone if is_small else update)(
        space.flat,
        *with_states.flats,
        with_states.bases,
        space.row_names,
        space.first_names,
        _KINDS[type(optimizer)],
        rates_T2,
        1.0 - beta1,
        1.0 - beta2,
        keys_T,
        joined.order,
        joined.segments,
        *by_width(bags.values),
        *(NO_INTEGERS if bags.offsets is None else by_width(bags.offsets)),
        space.nothing if bags.weights is None else bags.weights,
        int(bags.offsets is None),
        int(bags.weights is not None),
        int(bags.is_mean),
        joined.gradient_at,
        joined.num_gradients,
        space.nothing,
        space.dim,
        1 if is_small else num_parts(),
    )
    return None if row < 0 else BadRow(table, row)


class BadRow(NamedTuple):
    """A row whose gradient is not finite; numbers of its table and of the row in the table."""

    table: int
    row: int


class _Rows(NamedTuple):
    """The tables and their state arrays, which are empty if the optimizer has fewer."""

    flat: NDArray[Any]
    first: NDArray[Any]
    second: NDArray[Any]
    bases: NDArray[np.uint64]  # (T,)
    first_bases: NDArray[np.uint64]  # (T,)
    second_bases: NDArray[np.uint64]  # (T,)
    row_of_slot: NDArray[np.int32]  # numbered over all tables; empty if rows are not in slots
    first_rows: NDArray[np.uint64]  # (T + 1,): number of each table's first row; also empty then


@cache
def _row_update_kernel(compiled_dim: int, line: int) -> ParallelKernel[..., tuple[int, int]]:
    """The kernel for rows of this dim; with 0, the one for any dim.

    Args:
        compiled_dim: A multiple of `RUN`, or 0.
        line: Numbers per cache line, in the dtype of the computation.
    """
    assert compiled_dim % RUN == 0
    # The length of a tuple is a constant when kernels are compiled.
    runs, lines = (0,) * (compiled_dim // RUN), (0,) * -(-compiled_dim // line)

    @parallel_kernel
    def update(
        flat: NDArray[Any],
        first_state: NDArray[Any],
        second_state: NDArray[Any],
        bases_3T: NDArray[np.uint64],
        row_of_slot: NDArray[np.int32],
        first_rows: NDArray[np.uint64],
        kind: int,
        rates_T2: NDArray[np.float64],
        share1: float,
        share2: float,
        keys_T: NDArray[Any],
        order_2T: NDArray[np.uint64],
        segments_4S: NDArray[np.uint64],
        ids32: NDArray[np.int32],
        ids64: NDArray[np.int64],
        offsets32: NDArray[np.int32],
        offsets64: NDArray[np.int64],
        weights: NDArray[Any],
        is_one_hot: int,
        has_weights: int,
        is_mean: int,
        gradient_at: int,
        num_gradients: int,
        like_gradient: NDArray[Any],
        any_dim: int,
        num_parts: int,
    ) -> tuple[int, int]:
        """A part is a thread, which takes tasks until none is left.

        Returns:
            Table and row of the first row that was not updated; -1 and -1 if all were.
        """
        rows = _Rows(
            flat,
            first_state,
            second_state,
            bases_3T[0],
            bases_3T[1],
            bases_3T[2],
            row_of_slot,
            first_rows,
        )
        segments = Segments(
            order_2T[0],
            order_2T[1],
            segments_4S[0],
            segments_4S[1],
            segments_4S[2],
            segments_4S[3],
        )
        values = LookupValues(
            ids32,
            ids64,
            offsets32,
            offsets64,
            weights,
            is_one_hot != 0,
            has_weights != 0,
            is_mean != 0,
        )
        gradient = array_at(gradient_at, num_gradients, like_gradient)
        dim = np.uint64(any_dim)
        turns = np.empty(1, np.int64)
        turns[0] = 0
        num_tables = len(rows.bases)
        num_shares = 1 if num_tables >= num_parts else (num_parts + num_tables - 1) // num_tables
        most = np.int64(0)
        for table in range(num_tables):
            num_lookups = np.int64(0)
            for segment in range(segments.of_table[table], segments.of_table[table + 1]):
                first, count = segments.first_bags[segment], segments.num_bags[segment]
                if values.is_one_hot:
                    num_lookups += np.int64(count)
                else:
                    begin = integer_at(offsets32, offsets64, first)
                    end = integer_at(offsets32, offsets64, first + count)
                    num_lookups += np.int64(end - begin)
            most = max(most, num_lookups)
        bad_rows = np.full(num_tables * num_shares, -1, np.int64)  # table by table, share by share
        for _ in prange(num_parts):
            found = make_room(most, values.has_weights or values.is_mean, gradient)
            summed_D = np.empty(dim, gradient.dtype)
            num_lines = np.uint64(len(lines) if len(lines) else (any_dim + line - 1) // line)
            num_prefetched = _MAX_PREFETCHED_BYTES // (num_lines * np.uint64(LINE_BYTES))
            while True:
                task = next_turn(turns)
                if task >= num_tables * num_shares:
                    break
                table = segments.tables[task // num_shares]
                num_rows, num_lookups = number_rows(
                    segments,
                    values,
                    segments.of_table[table],
                    segments.of_table[table + _ONE],
                    np.uint64(task % num_shares),
                    np.uint64(num_shares),
                    gradient,
                    num_lines,
                    np.uint64(line),
                    found,
                )
                for number in range(min(num_rows, num_prefetched)):
                    _prefetch_row(rows, table, found.rows[number], kind, dim, num_lines)
                place_lookups(found, num_rows, num_lookups)
                place = np.int64(table) * num_shares + task % num_shares
                bad_rows[place] = _update_rows(
                    rows,
                    table,
                    found,
                    num_rows,
                    gradient,
                    kind,
                    gradient.dtype.type(rates_T2[table, 0]),
                    gradient.dtype.type(rates_T2[table, 1]),
                    gradient.dtype.type(share1),
                    gradient.dtype.type(share2),
                    keys_T,
                    summed_D,
                    runs,
                    lines,
                )
        bad_table = bad_row = -1
        for place in range(num_tables * num_shares):
            of_share, of_table = bad_rows[place], place // num_shares
            if of_share >= 0 and (bad_row < 0 or (of_table == bad_table and of_share < bad_row)):
                bad_table, bad_row = of_table, of_share
        return bad_table, bad_row

    return update


@kernel_part
def _update_rows(
    rows: _Rows,
    table: np.uint64,
    found: SortedLookups,
    num_rows: np.uint64,
    gradient: NDArray[Any],
    kind: int,
    rate: float,
    eps: float,
    share1: float,
    share2: float,
    keys_T: NDArray[Any],
    summed_D: NDArray[Any],
    runs: tuple[int, ...],
    lines: tuple[int, ...],
) -> np.int64:
    """Sum every row's gradients in lookup order, and update the row if the sum is finite.

    The formulas are those of `recsys.embeddings.optimizer`. One call processes a whole table: a
    call per row would pass the fifty numbers of its arrays each time, which takes longer than the
    update of a row (short functions such as `_prefetch_row` are inlined). The lengths of `runs` and
    `lines` are the numbers of runs and cache lines of a row; they are empty if the dim was not
    known when this was compiled.
    """
    flat, first_state, second_state = rows.flat, rows.first, rows.second
    base, base1, base2 = rows.bases[table], rows.first_bases[table], rows.second_bases[table]
    sources, scales = found.sources_by_row, found.scales_by_row
    dim = np.uint64(len(summed_D))
    is_scaled = len(scales) > 0
    line = np.uint64(LINE_BYTES // gradient.itemsize)
    run_dim = np.uint64(RUN * len(runs))
    num_lines = np.uint64(len(lines)) if len(lines) else (dim + line - _ONE) // line
    lookup, bad_row = np.uint64(0), np.int64(-1)
    for number in range(num_rows):
        if number + _ROWS_AHEAD < num_rows:
            _prefetch_row(rows, table, found.rows[number + _ROWS_AHEAD], kind, dim, num_lines)
        first_lookup = lookup
        while lookup < np.uint64(found.ends[number]):
            ahead, source = sources[lookup + LOOKUPS_AHEAD], sources[lookup]
            for of_line in range(num_lines):
                prefetch(gradient, ahead + of_line * line)
            if is_scaled:
                scale = scales[lookup]
                if lookup == first_lookup:
                    for d in range(dim):
                        summed_D[d] = scale * gradient[source + d]
                else:
                    for d in range(dim):
                        summed_D[d] += scale * gradient[source + d]
            elif lookup == first_lookup:
                if len(runs):
                    copy_run(summed_D, np.uint64(0), gradient, source, run_dim)
                else:
                    for d in range(dim):
                        summed_D[d] = gradient[source + d]
            elif len(runs):
                add_run(summed_D, np.uint64(0), gradient, source, run_dim)
            else:
                for d in range(dim):
                    summed_D[d] += gradient[source + d]
            lookup += _ONE
        place = found.rows[number]
        first = base + place * dim
        row = place
        if len(rows.row_of_slot):
            row = np.uint64(rows.row_of_slot[place]) - rows.first_rows[table]
        mean_square = summed_D.dtype.type(np.inf)
        if kind in (_ROWWISE_ADAGRAD, _PARTIAL_ROWWISE_ADAM):
            mean_square = _sum_of_squares(summed_D) / summed_D.dtype.type(dim)
        # If the mean is finite, so are all numbers. If not, it may have overflowed.
        if not np.isfinite(mean_square) and not _is_finite(summed_D, run_dim):
            if bad_row < 0 or np.int64(row) < bad_row:
                bad_row = np.int64(row)
            continue
        key = key_of_row(keys_T, table, row)
        if kind == _SGD:
            for d in range(dim):
                updated = widen(flat[first + d]) - rate * summed_D[d]
                flat[first + d] = narrow(flat[first + d], updated, key, d)
        elif kind == _ADAGRAD:
            of_row = base1 + place * dim
            for d in range(dim):
                squares = first_state[of_row + d] + summed_D[d] * summed_D[d]
                first_state[of_row + d] = squares
                updated = widen(flat[first + d]) - rate * summed_D[d] / (np.sqrt(squares) + eps)
                flat[first + d] = narrow(flat[first + d], updated, key, d)
        elif kind == _ROWWISE_ADAGRAD:
            of_row = base1 + place
            first_state[of_row] += mean_square
            step = rate / (np.sqrt(first_state[of_row]) + eps)
            for d in range(dim):
                updated = widen(flat[first + d]) - step * summed_D[d]
                flat[first + d] = narrow(flat[first + d], updated, key, d)
        elif kind == _ADAM:
            of_row, of_row2 = base1 + place * dim, base2 + place * dim
            for d in range(dim):
                average = first_state[of_row + d]
                average += share1 * (summed_D[d] - average)
                squares = second_state[of_row2 + d]
                squares += share2 * (summed_D[d] * summed_D[d] - squares)
                first_state[of_row + d] = average
                second_state[of_row2 + d] = squares
                updated = widen(flat[first + d]) - rate * (average / (np.sqrt(squares) + eps))
                flat[first + d] = narrow(flat[first + d], updated, key, d)
        else:
            of_row, of_row2 = base1 + place * dim, base2 + place
            squares = second_state[of_row2]
            squares += share2 * (mean_square - squares)
            second_state[of_row2] = squares
            step = rate / (np.sqrt(squares) + eps)
            for d in range(dim):
                average = first_state[of_row + d]
                average += share1 * (summed_D[d] - average)
                first_state[of_row + d] = average
                updated = widen(flat[first + d]) - step * average
                flat[first + d] = narrow(flat[first + d], updated, key, d)
    return bad_row


@kernel_part
def _prefetch_row(
    rows: _Rows, table: np.uint64, row: np.uint64, kind: int, dim: np.uint64, num_lines: np.uint64
) -> None:
    line = np.uint64(LINE_BYTES // rows.first.itemsize)
    for of_line in range(num_lines):
        begin = row * dim + of_line * line
        prefetch(rows.flat, rows.bases[table] + begin)
        if kind in (_ADAGRAD, _ADAM, _PARTIAL_ROWWISE_ADAM):
            prefetch(rows.first, rows.first_bases[table] + begin)
        if kind == _ADAM:
            prefetch(rows.second, rows.second_bases[table] + begin)
    if kind == _ROWWISE_ADAGRAD:
        prefetch(rows.first, rows.first_bases[table] + row)
    if kind == _PARTIAL_ROWWISE_ADAM:
        prefetch(rows.second, rows.second_bases[table] + row)


@kernel_part
def _sum_of_squares(summed_D: NDArray[Any]) -> Any:
    """Add squares in eight independent sums, always the same eight, so that they can overlap."""
    zero = summed_D.dtype.type(0)
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = zero
    whole = len(summed_D) - len(summed_D) % 8
    for d in range(np.uint64(0), np.uint64(whole), np.uint64(8)):
        s0 += summed_D[d] * summed_D[d]
        s1 += summed_D[d + np.uint64(1)] * summed_D[d + np.uint64(1)]
        s2 += summed_D[d + np.uint64(2)] * summed_D[d + np.uint64(2)]
        s3 += summed_D[d + np.uint64(3)] * summed_D[d + np.uint64(3)]
        s4 += summed_D[d + np.uint64(4)] * summed_D[d + np.uint64(4)]
        s5 += summed_D[d + np.uint64(5)] * summed_D[d + np.uint64(5)]
        s6 += summed_D[d + np.uint64(6)] * summed_D[d + np.uint64(6)]
        s7 += summed_D[d + np.uint64(7)] * summed_D[d + np.uint64(7)]
    for d in range(np.uint64(whole), np.uint64(len(summed_D))):
        s0 += summed_D[d] * summed_D[d]
    return ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))


@kernel_part
def _is_finite(summed_D: NDArray[Any], run_dim: np.uint64) -> bool:
    """Whether all numbers are finite.

    Args:
        summed_D: The numbers.
        run_dim: D if it was known when this was compiled, else 0.
    """
    if run_dim:
        return bool(is_run_finite(summed_D, np.uint64(0), run_dim))
    dim = np.uint64(len(summed_D))
    whole = dim - dim % np.uint64(RUN)
    is_finite = is_run_finite(summed_D, np.uint64(0), whole)
    for d in range(whole, dim):
        is_finite = is_finite and np.isfinite(summed_D[d])
    return bool(is_finite)
