"""Pooled lookup: sums the rows of every bag in lookup order, for all tables in one launch.

Sums of float32 and float64 equal those of the numba kernel to the bit: a bag's rows are added one
by one, products with weights are rounded before they are added (`enable_fp_fusion=False`), and
means are divided with correct rounding.

A program handles some bags of one lookup, and at most `_MOST_COLUMNS` columns of them. It checks
the ids that it reads, and copies them to `kept` as int32, for the update. Other programs check
offsets and weights, and copy offsets. An id that is not a row adds zeros.

Letters: B samples, L lookups, N ids, D dim, W columns of the result.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from recsys._support.cuda.triton_launches import launched
from recsys._support.sizes import cdiv, next_power_of_2
from recsys.embeddings.kernels.cpu.row_map import LEFT_OUT
from recsys.embeddings.kernels.triton.memory import (
    BAD_OFFSETS,
    BAD_WEIGHT,
    NO_ROW,
    divided,
    note,
    upload,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.embeddings.kernels.triton.memory import DeviceMemories

__all__ = ["DeviceInput", "DeviceLookups", "bounds_of", "pool", "weight_gradients"]

_MOST_COLUMNS = 256  # of a program; a power of two
_BLOCK_CHECKED = 256  # offsets and weights that a program checks
# A one-hot program copies this many times 16 bytes per thread, which are under way at once.
_COPIES, _COPYING_WARPS = 4, 4
_UNROLL = 3  # rows of a bag that are under way at once; of four, some forms spill registers
_MOST_BAGS = 64  # per warp, for short rows; each bag takes registers
_NO_ROW, _BAD_OFFSETS, _BAD_WEIGHT = map(tl.constexpr, (NO_ROW, BAD_OFFSETS, BAD_WEIGHT))
_LEFT_OUT = tl.constexpr(LEFT_OUT)


class DeviceInput(NamedTuple):
    """The input of a lookup, contiguous tensors on the device.

    Attributes:
        ids: (N,) int32 or int64; `LEFT_OUT` for one that adds nothing to its bag.
        offsets: Where bags begin, with or without the end of the last; None if all are equal.
        weights: A factor for each id, in the dtype of the result; None for 1.
        num_samples: B.
        num_bags: Bags of all features.
        is_mean: Whether bags are averaged.
    """

    ids: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    num_samples: int
    num_bags: int
    is_mean: bool


class DeviceLookups:
    """Lookups as kernels read them.

    Args:
        locations: Of each lookup: the number of the table, the position of the feature, and the
            first column; sorted by table.
        sizes: Rows of each table.
        first_rows: The number of each table's row 0.
        device: Where kernels run.

    Attributes:
        numbers: Table, its rows, number of its row 0, position, first column, (5 L,) int64. Then
            for the k-th lookup of each feature, number by number, the lookup, or L if there is
            none, (K F,).
        num_lookups: L.
        num_layers: K, in how many lookups a feature is at most.
        num_features: F, the largest position, plus 1.
        multiple: Divides 16 and every first column.
    """

    def __init__(
        self,
        locations: Sequence[tuple[int, int, int]],
        sizes: Sequence[int],
        first_rows: Sequence[int],
        device: torch.device,
    ) -> None:
        tables, positions, columns = zip(*locations, strict=True)
        of_tables = [sizes[table] for table in tables], [first_rows[table] for table in tables]
        numbers = np.array([tables, *of_tables, positions, columns], np.int64)
        self.num_lookups, self.multiple = len(tables), gcd(16, *columns)
        self.num_layers, self.num_features = (
            max(map(positions.count, positions)),
            max(positions) + 1,
        )
        layers_KF = np.full((self.num_layers, self.num_features), self.num_lookups)
        for lookup, position in enumerate(positions):
            layers_KF[positions[:lookup].count(position), position] = lookup
        self.numbers = upload(np.concatenate([numbers, layers_KF], axis=None), device)


def pool(
    memories: DeviceMemories,
    lookups: DeviceLookups,
    given: DeviceInput,
    kept: Tensor,
    result: Tensor,
) -> None:
    """Pool the rows of all lookups into their columns of the result; the host does not wait.

    Args:
        memories: Where rows are.
        lookups: What is looked up.
        given: The input.
        kept: Receives ids; unless bag i is id i, where bags begin; and, for means, how many ids of
            each bag are not left out, (N + bags + 1 + bags,) int32.
        result: Receives the pooled rows, (B, W), contiguous.
    """
    rows, num_ids = memories.rows, given.ids.numel()
    if not given.num_samples:
        return
    dim, is_plain = rows.dim, given.offsets is None and given.weights is None
    is_one_hot = is_plain and given.ids.numel() == given.num_bags
    block_dim = min(next_power_of_2(dim), _MOST_COLUMNS)
    num_warps, copies = (_COPYING_WARPS, _COPIES) if is_one_hot else (1, 1)
    num_numbers = num_warps * copies * 32 * 16 // rows.slots.itemsize
    block_bags = min(max(1, num_numbers // block_dim), num_warps * _MOST_BAGS)
    num_chunks = cdiv(dim, block_dim)
    num_programs = cdiv(given.num_samples, block_bags) * lookups.num_lookups * num_chunks
    of_rows = rows.slots, rows.addresses, memories.slot_of_row, memories.record.numbers
    of_model = {
        "NUM_LOOKUPS": lookups.num_lookups,
        "NUM_CHUNKS": num_chunks,
        "WIDTH": result.shape[1],
        "DIM": dim,
        "MULTIPLE": lookups.multiple,
        "BLOCK_DIM": block_dim,
        "BLOCK_BAGS": block_bags,
        "IS_ALIGNED": rows.is_aligned,
        "num_warps": num_warps,
    }
    of_input = given.ids, *of_rows, lookups.numbers, kept, result, given.num_samples
    with torch.cuda.device_of(result):
        if is_one_hot:
            _one_hot_kernel[(num_programs,)](*of_input, **of_model)
            return
        num_checked = max(given.num_bags + 1, 0 if given.weights is None else num_ids)
        _bags_kernel[(num_programs + cdiv(num_checked, _BLOCK_CHECKED),)](
            *of_input,
            given.offsets,
            given.weights,
            num_ids,
            given.num_bags,
            0 if given.offsets is None else given.offsets.numel(),
            num_ids // max(given.num_bags, 1),
            **of_model,
            IS_MEAN=given.is_mean,
            UNROLL=_UNROLL,
            BLOCK_CHECKED=_BLOCK_CHECKED,
            enable_fp_fusion=False,
        )


def weight_gradients(
    memories: DeviceMemories,
    lookups: DeviceLookups,
    given: DeviceInput,
    kept: Tensor,
    gradient: Tensor,
    result: Tensor,
) -> None:
    """Add the gradient of every id's weight: the dot product of its row and its bag's gradient.

    If bags are averaged, it is divided by the number of ids that count in the bag.

    Args:
        memories: Where rows are, as the lookup found them.
        lookups: As for `pool`.
        given: As for `pool`; ids and offsets are not read.
        kept: As `pool` wrote it, with the beginnings of bags.
        gradient: Of the pooled rows, (B, W), contiguous.
        result: (N,).
    """
    rows, num_ids = memories.rows, result.numel()
    block_dim = min(next_power_of_2(rows.dim), _MOST_COLUMNS)
    block_bags = min(max(1, 32 * 16 // rows.slots.itemsize // block_dim), _MOST_BAGS)
    num_programs = cdiv(given.num_samples, block_bags) * lookups.num_features
    for layer in range(lookups.num_layers if num_programs else 0):
        with torch.cuda.device_of(result):
            _dots_kernel[(num_programs,)](
                rows.slots,
                rows.addresses,
                memories.slot_of_row,
                lookups.numbers,
                kept,
                gradient,
                result,
                given.num_samples,
                num_ids,
                given.num_bags,
                layer,
                NUM_LOOKUPS=lookups.num_lookups,
                NUM_FEATURES=lookups.num_features,
                WIDTH=gradient.shape[1],
                DIM=rows.dim,
                MULTIPLE=lookups.multiple,
                BLOCK_DIM=block_dim,
                BLOCK_BAGS=block_bags,
                IS_ALIGNED=rows.is_aligned,
                IS_MEAN=given.is_mean,
                num_warps=1,
            )


@launched
@triton.jit(do_not_specialize=["num_samples"], do_not_specialize_on_alignment=["ids_N", "kept"])
def _one_hot_kernel(
    ids_N,
    slots_SD,
    addresses,
    slot_of_row,
    record,
    lookups_5L,
    kept,
    result_BW,
    num_samples,
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
    table, size, first_row, position, column = _lookup(lookups_5L, lookup, NUM_LOOKUPS, MULTIPLE)
    is_sample = samples < num_samples
    at = position * num_samples + samples
    ids = tl.load(ids_N + at, is_sample, 0).to(tl.int64)
    tl.store(kept + at, ids.to(tl.int32), is_sample)
    is_row = is_sample & (ids >= 0) & (ids < size)
    note(record, is_sample & (is_row == 0) & (ids != _LEFT_OUT), _NO_ROW, table, ids, at)
    found = _rows(
        slots_SD, addresses + table, slot_of_row, first_row, ids, is_row, d, DIM, IS_ALIGNED
    )
    target = result_BW + (samples * WIDTH + column)[:, None] + d[None, :]
    computed = found.to(result_BW.dtype.element_ty)
    tl.store(target, computed, is_sample[:, None] & (d < DIM)[None, :])


@launched
@triton.jit(
    do_not_specialize=["num_samples", "num_ids", "num_bags", "num_offsets", "length"],
    do_not_specialize_on_alignment=["ids_N", "kept", "offsets", "weights_N"],
)
def _bags_kernel(
    ids_N,
    slots_SD,
    addresses,
    slot_of_row,
    record,
    lookups_5L,
    kept,
    result_BW,
    num_samples,
    offsets,
    weights_N,
    num_ids,
    num_bags,
    num_offsets,
    length,
    NUM_LOOKUPS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    MULTIPLE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_BAGS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_MEAN: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_CHECKED: tl.constexpr,
):
    """Add the rows of bags. The last programs check and copy offsets and weights instead."""
    program = tl.program_id(0)
    num_pooling = tl.cdiv(num_samples, BLOCK_BAGS) * NUM_LOOKUPS * NUM_CHUNKS
    if program >= num_pooling:
        at = (program - num_pooling).to(tl.int64) * BLOCK_CHECKED + tl.arange(0, BLOCK_CHECKED)
        _check(at, offsets, weights_N, record, kept, num_ids, num_bags, num_offsets, length)
        return
    lookup, samples, d = _share_of(program, NUM_LOOKUPS, NUM_CHUNKS, BLOCK_BAGS, BLOCK_DIM)
    table, size, first_row, position, column = _lookup(lookups_5L, lookup, NUM_LOOKUPS, MULTIPLE)
    is_sample = samples < num_samples
    bags = position * num_samples + samples
    begins = bounds_of(offsets, bags, num_ids, num_offsets, length)
    ends = bounds_of(offsets, bags + 1, num_ids, num_offsets, length)
    begins = tl.minimum(tl.maximum(begins, 0), num_ids)
    lengths = tl.where(is_sample, tl.maximum(tl.minimum(ends, num_ids) - begins, 0), 0)
    num_kept = tl.zeros([BLOCK_BAGS], tl.int64)
    pooled = tl.zeros([BLOCK_BAGS, BLOCK_DIM], result_BW.dtype.element_ty)
    longest = tl.max(lengths, 0)
    first = longest * 0
    while first < longest:
        for ahead in tl.static_range(UNROLL):
            at = begins + first + ahead
            is_id = first + ahead < lengths
            ids = tl.load(ids_N + at, is_id, 0).to(tl.int64)
            tl.store(kept + at, ids.to(tl.int32), is_id)
            is_row = is_id & (ids >= 0) & (ids < size)
            is_used = is_id & (ids != _LEFT_OUT)
            note(record, is_used & (is_row == 0), _NO_ROW, table, ids, at)
            num_kept += is_used.to(tl.int64)
            found = _rows(
                slots_SD, addresses + table, slot_of_row, first_row, ids, is_row, d, DIM, IS_ALIGNED
            ).to(pooled.dtype)
            if weights_N is not None:
                found *= tl.load(weights_N + at, is_row, 0).to(pooled.dtype)[:, None]
            pooled += found
        first += UNROLL
    if IS_MEAN:
        tl.store(kept + (num_ids + num_bags + 1 + bags), num_kept.to(tl.int32), is_sample)
        pooled = divided(pooled, tl.maximum(num_kept, 1).to(pooled.dtype)[:, None])
    target = result_BW + (samples * WIDTH + column)[:, None] + d[None, :]
    tl.store(target, pooled, is_sample[:, None] & (d < DIM)[None, :])


@launched
@triton.jit(
    do_not_specialize=["num_samples", "num_ids", "num_bags", "layer"],
    do_not_specialize_on_alignment=["kept", "result_N"],
)
def _dots_kernel(
    slots_SD,
    addresses,
    slot_of_row,
    numbers_5L,
    kept,
    gradient_BW,
    result_N,
    num_samples,
    num_ids,
    num_bags,
    layer,
    NUM_LOOKUPS: tl.constexpr,
    NUM_FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    MULTIPLE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_BAGS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_MEAN: tl.constexpr,
):
    """Multiply the rows of some bags of one lookup by their gradients.

    An id is in one lookup of the layer, so no two programs add to one place.
    """
    feature, samples, d = _share_of(tl.program_id(0), NUM_FEATURES, 1, BLOCK_BAGS, BLOCK_DIM)
    lookup = tl.load(numbers_5L + (5 * NUM_LOOKUPS + layer * NUM_FEATURES) + feature)
    if lookup < NUM_LOOKUPS:
        numbers = _lookup(numbers_5L, lookup, NUM_LOOKUPS, MULTIPLE)
        table, size, first_row, position, column = numbers
        is_sample, bags = samples < num_samples, position * num_samples + samples
        bounds = kept + num_ids + bags
        begins = tl.load(bounds, is_sample, 0).to(tl.int64)
        lengths = tl.load(bounds + 1, is_sample, 0) - begins
        longest = tl.max(lengths, 0)
        place = longest * 0
        while place < longest:
            at, is_id = begins + place, place < lengths
            ids = tl.load(kept + at, is_id, -1).to(tl.int64)
            is_row = (ids >= 0) & (ids < size)
            dots = tl.zeros([BLOCK_BAGS], result_N.dtype.element_ty)
            for start in range(0, DIM, BLOCK_DIM):
                columns = start + d
                found = _rows(
                    slots_SD,
                    addresses + table,
                    slot_of_row,
                    first_row,
                    ids,
                    is_row,
                    columns,
                    DIM,
                    IS_ALIGNED,
                ).to(dots.dtype)
                of_bags = gradient_BW + (samples * WIDTH + column)[:, None] + columns[None, :]
                is_number = is_row[:, None] & (columns < DIM)[None, :]
                dots += tl.sum(found * tl.load(of_bags, is_number, 0), 1)
            if IS_MEAN:
                num_kept = tl.load(bounds + (num_bags + 1), is_sample, 1)
                dots = divided(dots, tl.maximum(num_kept, 1).to(dots.dtype))
            tl.store(result_N + at, tl.load(result_N + at, is_id, 0) + dots, is_id)
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
    """Table, its rows, the number of its row 0, position of the feature, first column."""
    of_lookup = lookups_5L + lookup
    table, size = tl.load(of_lookup), tl.load(of_lookup + NUM_LOOKUPS)
    first_row, position = (
        tl.load(of_lookup + 2 * NUM_LOOKUPS),
        tl.load(of_lookup + 3 * NUM_LOOKUPS),
    )
    column = tl.load(of_lookup + 4 * NUM_LOOKUPS) // MULTIPLE * MULTIPLE  # shows that it divides
    return table, size, first_row, position, column


@triton.jit
def _rows(
    slots_SD,
    address,
    slot_of_row,
    first_row,
    ids,
    is_row,
    d,
    DIM: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Rows from their slots or, without one, from their table; zeros for ids that are none."""
    is_number = is_row[:, None] & (d < DIM)[None, :]
    table_ED = tl.load(address).to(tl.pointer_type(slots_SD.dtype.element_ty))
    if IS_ALIGNED:
        table_ED = tl.multiple_of(table_ED, [16])
    of_table = table_ED + (ids * DIM)[:, None] + d[None, :]
    if slot_of_row is None:
        return tl.load(of_table, is_number, 0)
    else:  # noqa: RET505  # Triton compiles one of both
        slots = tl.load(slot_of_row + first_row + ids, is_row, 0).to(tl.int64)
        is_here = (slots >= 0)[:, None]
        here = tl.load(slots_SD + (slots * DIM)[:, None] + d[None, :], is_number & is_here, 0)
        return tl.where(is_here, here, tl.load(of_table, is_number & (is_here == 0), 0))


@triton.jit
def bounds_of(offsets, bags, num_ids, num_offsets, length):
    """Where bags begin, as the input has it."""
    if offsets is None:
        return bags * length
    else:  # noqa: RET505  # Triton compiles one of both
        is_given = bags < num_offsets
        return tl.where(is_given, tl.load(offsets + bags, is_given, 0).to(tl.int64), num_ids)


@triton.jit
def _check(at, offsets, weights_N, record, kept, num_ids, num_bags, num_offsets, length):
    """Record an offset that is less than the one before it, or too large; and nan."""
    is_bound = at <= num_bags
    bounds = bounds_of(offsets, at, num_ids, num_offsets, length)
    before = bounds_of(offsets, tl.maximum(at - 1, 0), num_ids, num_offsets, length)
    if offsets is not None:
        is_bad = (bounds < before) | (bounds < 0) | (bounds > num_ids)
        is_bad |= (at == 0) & (bounds != 0) | (at == num_bags) & (bounds != num_ids)
        note(record, is_bad & is_bound, _BAD_OFFSETS, 0, bounds, at)
    bounds = tl.minimum(tl.maximum(bounds, 0), num_ids)
    tl.store(kept + num_ids + at, bounds.to(tl.int32), is_bound)
    if weights_N is not None:
        is_id = at < num_ids
        weights = tl.load(weights_N + at, is_id, 0)
        ids = tl.zeros_like(at)
        note(record, is_id & (weights != weights), _BAD_WEIGHT, 0, ids, at)
