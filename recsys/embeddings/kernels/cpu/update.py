"""Row update: sum the gradients of equal rows in lookup order, and update each row once.

A task is a table. If there are fewer tables than threads, it is a share of a table's rows, chosen
by a hash of the row. So no two threads write to one row, and results depend neither on threads nor
on where rows are. The buffers of a table fit the caches:

    1. The table's lookups are sorted by row (`row_sort`).
    2. The location of each row is found by the row map: once a row, not once a lookup.
    3. Row by row, the gradients are summed from where backward wrote them, and the row and its
       state are updated. A row in a slot makes the slot dirty.

Letters: T tables, D dim; those of the ledger are in `row_sort`. Indices are unsigned, for the
reason given in `lookup`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import prange

from recsys._support.jit import (
    ParallelKernel,
    inlined_part,
    kernel_part,
    num_parts,
    parallel_kernel,
)
from recsys.embeddings.kernels.cpu.intrinsics.addresses import array_at
from recsys.embeddings.kernels.cpu.intrinsics.copying import RUN, add_run, copy_run, is_run_finite
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import LINE_BYTES, prefetch
from recsys.embeddings.kernels.cpu.intrinsics.turns import next_turn
from recsys.embeddings.kernels.cpu.lookup import MIN_SHARED_BYTES
from recsys.embeddings.kernels.cpu.rounding import key_of_row, narrow, widen
from recsys.embeddings.kernels.cpu.row_sort import (
    LOOKUPS_AHEAD,
    Segments,
    SortedLookups,
    ids_of,
    make_room,
    number_rows,
    place_lookups,
)
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.optimizer import RowOptimizer

__all__ = ["BadRow", "Joined", "Memories", "update_rows"]

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
# They are prefetched again this many rows ahead, into the nearest cache; see `LOOKUPS_AHEAD`. An
# entry of the row map is prefetched as many rows ahead.
_ROWS_AHEAD = np.uint64(16)
# There is a kernel for each of these dims, all multiples of `RUN`. Other dims share one kernel, and
# so do 16-bit rows.
_COMPILED_DIMS = (8, 16, 32, 64, 128)


class BadRow(NamedTuple):
    """A row whose gradient is not finite; numbers of its table and of the row in the table."""

    table: int
    row: int


class Memories(NamedTuple):
    """The tables and their state arrays, each as one array with the slots as last table.

    Attributes:
        flat: The rows.
        bases: Where each table begins in it, and last the slots, (T + 1,) uint64.
        first: The first state array; empty if there is none, as for those below.
        first_bases: Where each table's part begins in it.
        second: The second state array.
        second_bases: Where each table's part begins in it.
        slot_of_row: The row map.
        first_rows: The number of each table's row 0, and the number of all rows, (T + 1,) uint64.
        is_dirty: Of each slot, whether the cold tier is older, uint8.
    """

    flat: NDArray[Any]
    bases: NDArray[np.uint64]
    first: NDArray[Any]
    first_bases: NDArray[np.uint64]
    second: NDArray[Any]
    second_bases: NDArray[np.uint64]
    slot_of_row: NDArray[np.int32]
    first_rows: NDArray[np.uint64]
    is_dirty: NDArray[np.uint8]


class Joined(NamedTuple):
    """The ledger of a group, as the kernel takes it.

    Attributes:
        segments: What was looked up.
        num_ids: How many ids there are at most.
        gradient_at: The lowest address of all gradients.
        num_gradients: Numbers from there to the end of the last gradient.
        is_scaled: Whether lookups have factors.
    """

    segments: Segments
    num_ids: int
    gradient_at: int
    num_gradients: int
    is_scaled: bool


def update_rows(
    memories: Memories,
    dim: int,
    optimizer: RowOptimizer,
    rates_T2: NDArray[np.float64],
    keys_T: NDArray[Any],
    order_T: NDArray[np.int64],
    joined: Joined,
    like_gradient: NDArray[Any],
) -> BadRow | None:
    """Sum the gradients of each row, in lookup order, and update each row once.

    A row whose summed gradient has nan or inf in it is not updated.

    Args:
        memories: The tables and their state, in the order of the optimizer's `state_sizes`.
        dim: D.
        optimizer: The formula.
        rates_T2: The optimizer's `rate_and_eps` for each table.
        keys_T: `table_key` of each table, uint64, to round 16-bit rows stochastically; or
            `TO_NEAREST`.
        order_T: The tables, the largest first.
        joined: The ledger.
        like_gradient: An array of the dtype of gradients and state.

    Returns:
        The first row, of the first table, that was not updated; None if all were.
    """
    itemsize = like_gradient.itemsize
    has_kernel = dim in _COMPILED_DIMS and memories.flat.dtype == like_gradient.dtype
    kernel = _kernel(dim if has_kernel else 0, LINE_BYTES // itemsize)
    is_small = joined.num_ids * dim * itemsize < MIN_SHARED_BYTES
    beta1, beta2 = getattr(optimizer, "betas", (0.0, 0.0))
    # No named tuples: numba looks up the type of every argument, which takes long for those.
    table, row = (kernel.alone if is_small else kernel)(
        *memories,
        dim,
        _KINDS[type(optimizer)],
        rates_T2,
        1.0 - beta1,
        1.0 - beta2,
        keys_T,
        order_T,
        *joined.segments,
        joined.gradient_at,
        joined.num_gradients,
        like_gradient,
        int(joined.is_scaled),
        1 if is_small else num_parts(),
    )
    return None if row < 0 else BadRow(table, row)


@cache
def _kernel(compiled_dim: int, line: int) -> ParallelKernel[..., tuple[int, int]]:
    """The kernel for rows of this dim, a multiple of `RUN`; with 0, the one for any dim."""
    # The length of a tuple is a constant when kernels are compiled.
    runs, lines = (0,) * (compiled_dim // RUN), (0,) * -(-compiled_dim // line)

    @parallel_kernel
    def update(
        flat: NDArray[Any],
        bases: NDArray[np.uint64],
        first: NDArray[Any],
        first_bases: NDArray[np.uint64],
        second: NDArray[Any],
        second_bases: NDArray[np.uint64],
        slot_of_row: NDArray[np.int32],
        first_rows: NDArray[np.uint64],
        is_dirty: NDArray[np.uint8],
        any_dim: int,
        kind: int,
        rates_T2: NDArray[np.float64],
        share1: float,
        share2: float,
        keys_T: NDArray[Any],
        order_T: NDArray[np.int64],
        entries_8E: NDArray[np.uint64],
        parts_3S: NDArray[np.uint64],
        of_table: NDArray[np.uint64],
        gradient_at: int,
        num_gradients: int,
        like_gradient: NDArray[Any],
        is_scaled: int,
        num_parts: int,
    ) -> tuple[int, int]:
        """A part is a thread, which takes tasks until none is left."""
        memories = Memories(
            flat,
            bases,
            first,
            first_bases,
            second,
            second_bases,
            slot_of_row,
            first_rows,
            is_dirty,
        )
        segments = Segments(entries_8E, parts_3S, of_table)
        gradient = array_at(gradient_at, num_gradients, like_gradient)
        dim = np.uint64(any_dim)
        turns = np.zeros(1, np.int64)  # a parallel loop, too: it wakes the threads
        num_tables = len(order_T)
        num_shares = 1 if num_tables >= num_parts else (num_parts + num_tables - 1) // num_tables
        most = np.int64(0)
        for number in range(num_tables):
            most = max(most, _count_lookups(segments, np.uint64(number)))
        bad_rows = np.full(num_tables * num_shares, -1, np.int64)  # table by table, share by share
        for _ in prange(num_parts):
            found = make_room(most, is_scaled != 0, len(slot_of_row) > 0, gradient)
            summed_D = np.empty(dim, gradient.dtype)
            num_lines = np.uint64(len(lines) if len(lines) else (any_dim + line - 1) // line)
            num_prefetched = _MAX_PREFETCHED_BYTES // (num_lines * np.uint64(LINE_BYTES))
            while True:
                task = next_turn(turns)
                if task >= num_tables * num_shares:
                    break
                table = np.uint64(order_T[task // num_shares])
                num_rows, num_lookups = number_rows(
                    segments,
                    table,
                    np.uint64(task % num_shares),
                    np.uint64(num_shares),
                    gradient,
                    num_lines,
                    np.uint64(line),
                    found,
                )
                _find_rows(memories, table, found, num_rows, num_prefetched, kind, dim, num_lines)
                place_lookups(found, num_rows, num_lookups)
                bad_rows[np.int64(table) * num_shares + task % num_shares] = _update_rows(
                    memories,
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
        for number in range(num_tables * num_shares):
            of_share, in_table = bad_rows[number], number // num_shares
            if of_share >= 0 and (bad_row < 0 or (in_table == bad_table and of_share < bad_row)):
                bad_table, bad_row = in_table, of_share
        return bad_table, bad_row

    return update


@kernel_part
def _count_lookups(segments: Segments, table: np.uint64) -> np.int64:
    """How many ids the lookups in a table have."""
    count = np.uint64(0)
    for segment in range(segments.of_table[table], segments.of_table[table + _ONE]):
        entry, position = segments.parts_3S[0, segment], segments.parts_3S[1, segment]
        num_ids, num_samples = segments.entries_8E[1, entry], segments.entries_8E[2, entry]
        first, end = position * num_samples, (position + _ONE) * num_samples
        if segments.entries_8E[3, entry]:
            kept = ids_of(segments, entry)
            first, end = np.uint64(kept[num_ids + first]), np.uint64(kept[num_ids + end])
        count += end - first
    return np.int64(count)


@inlined_part
def _find_rows(
    memories: Memories,
    table: np.uint64,
    found: SortedLookups,
    num_rows: np.uint64,
    num_prefetched: np.uint64,
    kind: int,
    dim: np.uint64,
    num_lines: np.uint64,
) -> None:
    """Find the slots of all rows of a table, and prefetch as many rows as the cache can hold."""
    flat, first, second = memories.flat, memories.first, memories.second
    numbers, slots, slot_of_row = found.rows, found.slots, memories.slot_of_row
    first_row, last = memories.first_rows[table], np.uint64(len(memories.bases) - 1)
    is_tiered = len(slots) > 0
    for number in range(num_rows):
        index, at = numbers[number], table
        if is_tiered:
            if number + _ROWS_AHEAD < num_rows:
                prefetch(slot_of_row, first_row + numbers[number + _ROWS_AHEAD])
            slots[number] = slot_of_row[first_row + index]
            if slots[number] >= 0:
                index, at = np.uint64(slots[number]), last
        if number < num_prefetched:
            bases = memories.bases[at], memories.first_bases[at], memories.second_bases[at]
            _prefetch_row(flat, first, second, bases, index, kind, dim, num_lines)


@kernel_part
def _update_rows(
    memories: Memories,
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
    call per row would pass the many numbers of its arrays each time, which takes longer than the
    update of a row. It is one function: divided into inlined parts, the update of small rows takes
    1.3 times as long. `runs` and `lines` are as long as a row has runs and cache lines; they are
    empty if the dim was not known when this was compiled.
    """
    flat, first_state, second_state = memories.flat, memories.first, memories.second
    is_dirty, last = memories.is_dirty, np.uint64(len(memories.bases) - 1)
    of_table = memories.bases[table], memories.first_bases[table], memories.second_bases[table]
    of_slots = memories.bases[last], memories.first_bases[last], memories.second_bases[last]
    sources, scales, ends = found.sources_by_row, found.scales_by_row, found.ends
    numbers, slots, is_tiered = found.rows, found.slots, len(found.slots) > 0
    dim = np.uint64(len(summed_D))
    is_scaled = len(scales) > 0
    line = np.uint64(LINE_BYTES // gradient.itemsize)
    run_dim = np.uint64(RUN * len(runs))
    num_lines = np.uint64(len(lines)) if len(lines) else (dim + line - _ONE) // line
    lookup, bad_row = np.uint64(0), np.int64(-1)
    for number in range(num_rows):
        if number + _ROWS_AHEAD < num_rows:
            index, bases = numbers[number + _ROWS_AHEAD], of_table
            if is_tiered and slots[number + _ROWS_AHEAD] >= 0:
                index, bases = np.uint64(slots[number + _ROWS_AHEAD]), of_slots
            _prefetch_row(flat, first_state, second_state, bases, index, kind, dim, num_lines)
        first_lookup = lookup
        while lookup < np.uint64(ends[number]):
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
        mean_square = summed_D.dtype.type(np.inf)
        if kind in (_ROWWISE_ADAGRAD, _PARTIAL_ROWWISE_ADAM):
            mean_square = _sum_of_squares(summed_D) / summed_D.dtype.type(dim)
        row = numbers[number]
        # If the mean is finite, so are all numbers. If not, it may have overflowed.
        if not np.isfinite(mean_square) and not _is_finite(summed_D, run_dim):
            if bad_row < 0 or np.int64(row) < bad_row:
                bad_row = np.int64(row)
            continue
        index, bases = row, of_table
        if is_tiered and slots[number] >= 0:
            index, bases = np.uint64(slots[number]), of_slots
            is_dirty[index] = 1
        first = bases[0] + index * dim
        key = key_of_row(keys_T, table, row)
        if kind == _SGD:
            for d in range(dim):
                updated = widen(flat[first + d]) - rate * summed_D[d]
                flat[first + d] = narrow(flat[first + d], updated, key, d)
        elif kind == _ADAGRAD:
            of_row = bases[1] + index * dim
            for d in range(dim):
                squares = first_state[of_row + d] + summed_D[d] * summed_D[d]
                first_state[of_row + d] = squares
                updated = widen(flat[first + d]) - rate * summed_D[d] / (np.sqrt(squares) + eps)
                flat[first + d] = narrow(flat[first + d], updated, key, d)
        elif kind == _ROWWISE_ADAGRAD:
            of_row = bases[1] + index
            first_state[of_row] += mean_square
            step = rate / (np.sqrt(first_state[of_row]) + eps)
            for d in range(dim):
                updated = widen(flat[first + d]) - step * summed_D[d]
                flat[first + d] = narrow(flat[first + d], updated, key, d)
        elif kind == _ADAM:
            of_row, of_row2 = bases[1] + index * dim, bases[2] + index * dim
            for d in range(dim):
                average = first_state[of_row + d]
                average += share1 * (summed_D[d] - average)
                squares = second_state[of_row2 + d]
                squares += share2 * (summed_D[d] * summed_D[d] - squares)
                first_state[of_row + d] = average
                second_state[of_row2 + d] = squares
                updated = widen(flat[first + d]) - rate * (average / (np.sqrt(squares) + eps))
                flat[first + d] = narrow(flat[first + d], updated, key, d)
        else:  # _PARTIAL_ROWWISE_ADAM
            of_row, of_row2 = bases[1] + index * dim, bases[2] + index
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


@inlined_part
def _prefetch_row(
    flat: NDArray[Any],
    first: NDArray[Any],
    second: NDArray[Any],
    bases: tuple[np.uint64, np.uint64, np.uint64],
    index: np.uint64,
    kind: int,
    dim: np.uint64,
    num_lines: np.uint64,
) -> None:
    """Prefetch a row and its state. A tuple of arrays as argument would count references."""
    line = np.uint64(LINE_BYTES // first.itemsize)
    for of_line in range(num_lines):
        begin = index * dim + of_line * line
        prefetch(flat, bases[0] + begin)
        if kind in (_ADAGRAD, _ADAM, _PARTIAL_ROWWISE_ADAM):
            prefetch(first, bases[1] + begin)
        if kind == _ADAM:
            prefetch(second, bases[2] + begin)
    if kind == _ROWWISE_ADAGRAD:
        prefetch(first, bases[1] + index)
    if kind == _PARTIAL_ROWWISE_ADAM:
        prefetch(second, bases[2] + index)


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
