"""Pooled lookup: sums the rows of every bag in lookup order, for all tables in one launch.

See `kernels.cpu.pooled_lookup` for the contract. Sums of float32 and float64 equal those of torch
on the CPU to the bit: a bag's rows are added one by one, products with weights are rounded before
they are added (`enable_fp_fusion=False`), and means are divided with correct rounding.

A program handles some bags of one lookup, and at most `_MOST_COLUMNS` columns of them. The program
that reads an id checks it. Rows are read and written 16 bytes per thread at a time if D allows it.
No two programs write to one place, except to the first error, which they lower atomically.

Of rows in two tiers (`ReachedRows`), a program reads each row from its slot or, over PCIe, from the
host's memory.

Letters: B samples, F features, L lookups, N values, R rows, D dim, W columns of the output.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from recsys._support.cuda.triton_launches import launched
from recsys._support.cuda.triton_support import cdiv, next_power_of_2
from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED
from recsys.embeddings.kernels.torch.bags import clear_if_full
from recsys.embeddings.kernels.torch.errors import BAD_BOUND, BAD_WEIGHT, KIND_BITS, NO_ROW
from recsys.embeddings.kernels.torch.row_space import ReachedRows

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.embeddings.kernels.torch.bags import TorchBags
    from recsys.embeddings.kernels.torch.row_space import TorchRows
    from recsys.embeddings.rows.lookups import Lookups

__all__ = ["pooled_lookup", "row_gradient_dots"]

_MOST_COLUMNS = 256  # of a program; a power of two
_BLOCK_CHECKED = 256  # offsets and weights that a program checks
# A one-hot program copies this many times 16 bytes per thread, which are under way at once.
_COPIES = 4
_COPYING_WARPS = 4
# Jagged bags have one warp per program, so that a bag waits for few others: with D=128 in float32,
# one warp reads one row at a time. This many rows of a bag are under way at once.
_UNROLL = 4
_UNROLL_IN_TIERS = 3  # of four, some forms spill registers: each row is read by two loads
_MOST_BAGS = 64  # per warp, for short rows; each bag takes registers
_BOUND_KEY, _WEIGHT_KEY, _ROW_KEY = (
    tl.constexpr(kind << KIND_BITS) for kind in (BAD_BOUND, BAD_WEIGHT, NO_ROW)
)
_NO_PLACE = tl.constexpr(1 << KIND_BITS)
_AWAITED = tl.constexpr(AWAITED)
# Arguments of a mini-batch, which must not compile a kernel anew.
_OF_INPUT: dict[str, Any] = {
    "do_not_specialize": ["batch_size", "num_values", "num_bags"],
    "do_not_specialize_on_alignment": ["values_N", "offsets", "weights_N"],
}


class _Placed(NamedTuple):
    """Lookups as the kernels read them.

    Attributes:
        of_lookups: First row of the table, its E, number of the feature, first column, number of
            the table, (5 * L,); in the order of features.
        feature_ends: Where the lookups of each distinct feature begin, and the end, (G + 1,).
        num_features: G.
        num_chunks: How many programs share the columns of a bag.
        of_model: The arguments of `_one_hot_kernel` and `_bags_kernel` that no mini-batch changes;
            MULTIPLE divides every first column, and is a power of two.
    """

    of_lookups: Tensor
    feature_ends: Tensor
    num_features: int
    num_chunks: int
    of_model: dict[str, int]


def pooled_lookup(
    space: TorchRows | ReachedRows, lookups: Lookups, bags: TorchBags, result: Tensor
) -> int:
    """Write the pooled rows of every lookup into its columns; see `kernels.cpu.pooled_lookup`.

    Errors of the input are recorded in `space.errors`; the result is always -1. Not for
    `TieredRows`: for them the host copies rows, and `kernels.torch.pooled_lookup` reads them.
    """
    num_lookups = len(lookups.tables)
    if not bags.batch_size or not num_lookups:
        return -1
    placed = _place(space, lookups)
    num_parts, of_model = num_lookups * placed.num_chunks, placed.of_model
    values, offsets, weights = bags.values, bags.offsets, bags.weights
    in_tiers: tuple[Any, Any] = None, None
    is_aligned, unroll = False, _UNROLL
    if isinstance(space, ReachedRows):
        in_tiers = space.slots.slot_of_row, space.host.addresses
        is_aligned, unroll = space.host.is_aligned, _UNROLL_IN_TIERS
    tensors = values, space.rows, placed.of_lookups, result, space.errors.first, *in_tiers
    with torch.cuda.device_of(result):
        if bags.is_plain:
            block_bags = _block_bags(space, _COPYING_WARPS, _COPIES)
            num_programs = cdiv(bags.batch_size, block_bags) * num_parts
            _one_hot_kernel[(num_programs,)](
                *tensors,
                bags.batch_size,
                **of_model,
                BLOCK_BAGS=block_bags,
                IS_ALIGNED=is_aligned,
                num_warps=_COPYING_WARPS,
            )
            return -1
        block_bags = _block_bags(space)
        num_programs = cdiv(bags.batch_size, block_bags) * num_parts
        num_checked = max(
            0 if offsets is None else len(offsets), 0 if weights is None else len(values)
        )
        _bags_kernel[(num_programs + cdiv(num_checked, _BLOCK_CHECKED),)](
            *tensors,
            bags.batch_size,
            offsets,
            weights,
            len(values),
            bags.num_features * bags.batch_size,
            **of_model,
            BLOCK_BAGS=block_bags,
            IS_MEAN=bags.is_mean,
            PADDING=bags.padding,
            UNROLL=1 if offsets is None else unroll,
            BLOCK_CHECKED=_BLOCK_CHECKED,
            IS_ALIGNED=is_aligned,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return -1


def row_gradient_dots(
    space: TorchRows, lookups: Lookups, bags: TorchBags, gradient: Tensor, result: Tensor
) -> None:
    """The gradient of per-sample weights; see `kernels.cpu.pooled_lookup`."""
    if not bags.batch_size or not len(bags.values) or not len(lookups.tables):
        return
    placed, block_bags = _place(space, lookups), _block_bags(space)
    with torch.cuda.device_of(result):
        _dots_kernel[(cdiv(bags.batch_size, block_bags) * placed.num_features,)](
            bags.values,
            space.rows,
            placed.of_lookups,
            placed.feature_ends,
            gradient,
            result,
            bags.batch_size,
            bags.offsets,
            len(bags.values),
            NUM_LOOKUPS=len(lookups.tables),
            NUM_FEATURES=placed.num_features,
            WIDTH=lookups.width,
            DIM=space.dim,
            MULTIPLE=placed.of_model["MULTIPLE"],
            BLOCK_DIM=_block_dim(space.dim),
            BLOCK_BAGS=block_bags,
            IS_MEAN=bags.is_mean,
            PADDING=bags.padding,
            num_warps=1,
        )


def _block_bags(space: TorchRows | ReachedRows, num_warps: int = 1, num_copies: int = 1) -> int:
    """How many bags a program has, if each thread reads 16 bytes `num_copies` times."""
    return _bags_at_once(_block_dim(space.dim), space.rows.itemsize, num_warps, num_copies)


@cache  # a model may launch a lookup for each table, so each microsecond counts
def _bags_at_once(block_dim: int, itemsize: int, num_warps: int, num_copies: int) -> int:
    num_numbers = num_warps * num_copies * 32 * 16 // itemsize
    return min(max(1, num_numbers // block_dim), num_warps * _MOST_BAGS)


@cache  # as above
def _block_dim(dim: int) -> int:
    """The columns of a program, with those that it leaves out."""
    return min(next_power_of_2(dim), _MOST_COLUMNS)


def _place(space: TorchRows | ReachedRows, lookups: Lookups) -> _Placed:
    """Cached by the row space, because it copies arrays to the device."""
    known = space.placed
    if lookups not in known:
        clear_if_full(space, known)
        order = np.argsort(lookups.positions, kind="stable")
        tables = [int(lookups.tables[number]) for number in order]
        positions, columns = lookups.positions[order].tolist(), lookups.columns[order].tolist()
        first_rows = [space.first_rows[table] for table in tables]
        sizes = [space.sizes[table] for table in tables]
        _, firsts = np.unique(lookups.positions[order], return_index=True)
        num_chunks = cdiv(space.dim, _block_dim(space.dim))
        known[lookups] = _Placed(
            space.numbers_of([*first_rows, *sizes, *positions, *columns, *tables]),
            space.numbers_of([*firsts.tolist(), len(tables)]),
            len(firsts),
            num_chunks,
            {
                "NUM_LOOKUPS": len(tables),
                "NUM_CHUNKS": num_chunks,
                "WIDTH": lookups.width,
                "DIM": space.dim,
                "MULTIPLE": gcd(16, *columns),
                "BLOCK_DIM": _block_dim(space.dim),
            },
        )
    placed: _Placed = known[lookups]
    return placed


@launched
@triton.jit(**_OF_INPUT)
def _one_hot_kernel(
    values_N,
    rows_RD,
    lookups_5L,
    result_BW,
    first_error,
    slot_of_row,
    addresses,
    batch_size,
    NUM_LOOKUPS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    MULTIPLE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_BAGS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Copy one row per bag; zeros for an id that is no row."""
    lookup, samples, d = _share_of(tl.program_id(0), NUM_LOOKUPS, NUM_CHUNKS, BLOCK_BAGS, BLOCK_DIM)
    first_row, size, position, column = _lookup(lookups_5L, lookup, NUM_LOOKUPS, MULTIPLE)
    is_sample = samples < batch_size
    at = position * batch_size + samples
    ids = tl.load(values_N + at, is_sample, 0).to(tl.int64)
    is_row = is_sample & (ids >= 0) & (ids < size)
    _note(first_error, tl.where(is_sample & ~is_row, at, _NO_PLACE), _ROW_KEY)
    number_at = lookups_5L + 4 * NUM_LOOKUPS + lookup
    found = _rows(
        rows_RD, first_row, ids, is_row, d, slot_of_row, addresses, number_at, DIM, IS_ALIGNED
    )
    target = result_BW + (samples * WIDTH + column)[:, None] + d[None, :]
    computed = found.to(result_BW.dtype.element_ty)
    tl.store(target, computed, is_sample[:, None] & (d < DIM)[None, :])


@launched
@triton.jit(**_OF_INPUT)
def _bags_kernel(
    values_N,
    rows_RD,
    lookups_5L,
    result_BW,
    first_error,
    slot_of_row,
    addresses,
    batch_size,
    offsets,
    weights_N,
    num_values,
    num_bags,
    NUM_LOOKUPS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    MULTIPLE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_BAGS: tl.constexpr,
    IS_MEAN: tl.constexpr,
    PADDING: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_CHECKED: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Add the rows of bags. The last programs check offsets and weights instead."""
    program = tl.program_id(0)
    num_pooling = tl.cdiv(batch_size, BLOCK_BAGS) * NUM_LOOKUPS * NUM_CHUNKS
    if program >= num_pooling:
        at = (program - num_pooling).to(tl.int64) * BLOCK_CHECKED + tl.arange(0, BLOCK_CHECKED)
        _check(at, offsets, weights_N, first_error, num_values, num_bags)
        return
    lookup, samples, d = _share_of(program, NUM_LOOKUPS, NUM_CHUNKS, BLOCK_BAGS, BLOCK_DIM)
    first_row, size, position, column = _lookup(lookups_5L, lookup, NUM_LOOKUPS, MULTIPLE)
    is_sample = samples < batch_size
    begins, lengths = _bounds(offsets, position * batch_size + samples, is_sample, num_values)
    first_bad = tl.full([BLOCK_BAGS], _NO_PLACE, tl.int64)
    num_kept = tl.zeros([BLOCK_BAGS], tl.int64)
    pooled = tl.zeros([BLOCK_BAGS, BLOCK_DIM], result_BW.dtype.element_ty)
    number_at = lookups_5L + 4 * NUM_LOOKUPS + lookup
    longest = tl.max(lengths, 0)
    first = longest * 0
    while first < longest:
        for ahead in tl.static_range(UNROLL):
            at = begins + first + ahead
            ids, is_kept, is_row = _ids(values_N, at, first + ahead < lengths, size, PADDING)
            first_bad = tl.minimum(first_bad, tl.where(is_kept & ~is_row, at, _NO_PLACE))
            num_kept += is_kept.to(tl.int64)
            found = _rows(
                rows_RD,
                first_row,
                ids,
                is_row,
                d,
                slot_of_row,
                addresses,
                number_at,
                DIM,
                IS_ALIGNED,
            ).to(pooled.dtype)
            if weights_N is not None:
                found *= tl.load(weights_N + at, is_row, 0).to(pooled.dtype)[:, None]
            pooled += found
        first += UNROLL
    _note(first_error, first_bad, _ROW_KEY)
    if IS_MEAN:
        pooled = _divided(pooled, tl.maximum(num_kept, 1).to(pooled.dtype)[:, None])
    target = result_BW + (samples * WIDTH + column)[:, None] + d[None, :]
    tl.store(target, pooled, is_sample[:, None] & (d < DIM)[None, :])


@launched
@triton.jit(**_OF_INPUT)
def _dots_kernel(
    values_N,
    rows_RD,
    lookups_5L,
    feature_ends,
    gradient_BW,
    result_N,
    batch_size,
    offsets,
    num_values,
    NUM_LOOKUPS: tl.constexpr,
    NUM_FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    MULTIPLE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_BAGS: tl.constexpr,
    IS_MEAN: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Multiply the rows of some bags of one feature, in all its tables, by their gradients.

    A value belongs to one program, so no two programs add to one place.
    """
    feature, samples, d = _share_of(tl.program_id(0), NUM_FEATURES, 1, BLOCK_BAGS, BLOCK_DIM)
    first_lookup, end_lookup = tl.load(feature_ends + feature), tl.load(feature_ends + feature + 1)
    position = tl.load(lookups_5L + 2 * NUM_LOOKUPS + first_lookup)
    is_sample = samples < batch_size
    begins, lengths = _bounds(offsets, position * batch_size + samples, is_sample, num_values)
    longest = tl.max(lengths, 0)
    num_kept = tl.zeros([BLOCK_BAGS], tl.int64)
    if IS_MEAN:
        place = longest * 0
        while place < longest:
            _, is_kept, _ = _ids(values_N, begins + place, place < lengths, 0, PADDING)
            num_kept += is_kept.to(tl.int64)
            place += 1
    place = longest * 0
    while place < longest:
        at = begins + place
        dots = tl.zeros([BLOCK_BAGS], result_N.dtype.element_ty)
        lookup = first_lookup
        while lookup < end_lookup:
            first_row, size, _, column = _lookup(lookups_5L, lookup, NUM_LOOKUPS, MULTIPLE)
            ids, _, is_row = _ids(values_N, at, place < lengths, size, PADDING)
            for start in range(0, DIM, BLOCK_DIM):
                of_rows = rows_RD + ((first_row + ids) * DIM)[:, None] + (start + d)[None, :]
                of_bags = gradient_BW + (samples * WIDTH + column)[:, None] + (start + d)[None, :]
                is_number = is_row[:, None] & (start + d < DIM)[None, :]
                found = tl.load(of_rows, is_number, 0).to(dots.dtype)
                dots += tl.sum(found * tl.load(of_bags, is_number, 0), 1)
            lookup += 1
        if IS_MEAN:
            dots = dots / tl.maximum(num_kept, 1).to(dots.dtype)
        is_value = place < lengths
        tl.store(result_N + at, tl.load(result_N + at, is_value, 0) + dots, is_value)
        place += 1


@triton.jit
def _share_of(
    program,
    NUM_LOOKUPS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_BAGS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """The lookup, samples and columns of a program. Neighbours write neighbouring columns."""
    lookup = program // NUM_CHUNKS % NUM_LOOKUPS
    block = (program // (NUM_CHUNKS * NUM_LOOKUPS)).to(tl.int64)
    d = program % NUM_CHUNKS * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    return lookup, block * BLOCK_BAGS + tl.arange(0, BLOCK_BAGS), d


@triton.jit
def _lookup(lookups_5L, lookup, NUM_LOOKUPS: tl.constexpr, MULTIPLE: tl.constexpr):
    """First row of the table, its size, number of the feature, first column."""
    of_lookup = lookups_5L + lookup
    first_row, size = tl.load(of_lookup), tl.load(of_lookup + NUM_LOOKUPS)
    column = tl.load(of_lookup + 3 * NUM_LOOKUPS) // MULTIPLE * MULTIPLE  # shows that it divides
    return first_row, size, tl.load(of_lookup + 2 * NUM_LOOKUPS), column


@triton.jit
def _rows(
    rows_RD,
    first_row,
    ids,
    is_row,
    d,
    slot_of_row,
    addresses,
    number_at,
    DIM: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Rows of a table, zeros for ids that are none; in two tiers, from slots or the host."""
    is_number = is_row[:, None] & (d < DIM)[None, :]
    if slot_of_row is None:
        return tl.load(rows_RD + ((first_row + ids) * DIM)[:, None] + d[None, :], is_number, 0)
    else:  # noqa: RET505  # Triton compiles one of both
        slots = tl.load(slot_of_row + first_row + ids, is_row, 0).to(tl.int64)
        is_here = ((slots >= 0) & (slots < _AWAITED))[:, None]
        here = tl.load(rows_RD + (slots * DIM)[:, None] + d[None, :], is_number & is_here, 0)
        begin = tl.load(addresses + tl.load(number_at))
        table_ED = begin.to(tl.pointer_type(rows_RD.dtype.element_ty))
        if IS_ALIGNED:
            table_ED = tl.multiple_of(table_ED, [16])
        there = tl.load(table_ED + (ids * DIM)[:, None] + d[None, :], is_number & ~is_here, 0)
        return tl.where(is_here, here, there)


@triton.jit
def _bounds(offsets, bags, is_bag, num_values):
    """Where bags begin, and their lengths; within the values even if offsets are invalid."""
    if offsets is None:
        return bags, is_bag.to(tl.int64)
    else:  # noqa: RET505  # Triton compiles one of both
        begins = tl.load(offsets + bags, is_bag, 0).to(tl.int64)
        ends = tl.load(offsets + bags + 1, is_bag, 0).to(tl.int64)
        begins = tl.minimum(tl.maximum(begins, 0), num_values)
        return begins, tl.maximum(tl.minimum(ends, num_values) - begins, 0)


@triton.jit
def _ids(values_N, at, is_value, size, PADDING: tl.constexpr):
    """Ids; which of them are looked up, for they are not padding; and which are rows."""
    ids = tl.load(values_N + at, is_value, 0).to(tl.int64)
    is_kept = is_value
    if PADDING is not None:
        is_kept = is_kept & (ids != PADDING)
    return ids, is_kept, is_kept & (ids >= 0) & (ids < size)


@triton.jit
def _check(at, offsets, weights_N, first_error, num_values, num_bags):
    """Record an offset that is negative, too large, or less than the one before it; and nan."""
    if offsets is not None:
        bounds = tl.load(offsets + at, at <= num_bags, 0).to(tl.int64)
        before = tl.load(offsets + at - 1, (at > 0) & (at <= num_bags), 0).to(tl.int64)
        is_bad = (
            (bounds < before) | (bounds < 0) | (bounds > num_values) | ((at == 0) & (bounds != 0))
        )
        _note(first_error, tl.where(is_bad & (at <= num_bags), at, _NO_PLACE), _BOUND_KEY)
    if weights_N is not None:
        weights = tl.load(weights_N + at, at < num_values, 0)
        _note(first_error, tl.where(weights != weights, at, _NO_PLACE), _WEIGHT_KEY)


@triton.jit
def _note(first_error, places, KEY: tl.constexpr):
    """Record the first place that is not `_NO_PLACE`; see `DeferredErrors`."""
    first = tl.min(places, 0)
    if first < _NO_PLACE:
        tl.atomic_min(first_error, first + KEY)


@triton.jit
def _divided(numbers, divisors):
    """Correctly rounded, which `/` of float32 is not."""
    if numbers.dtype == tl.float32:
        return tl.div_rn(numbers, divisors)
    else:  # noqa: RET505  # Triton compiles one of both
        return numbers / divisors
