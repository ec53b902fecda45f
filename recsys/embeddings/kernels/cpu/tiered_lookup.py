"""Pooled lookup for evaluation: reads each row from its slot, or from its table if it has no slot.

Training gives every row a slot before it looks the row up. Evaluation claims no slots: the row map
tells where the current copy of a row is. The kernel sees the tables and the slots as one array.

A part is a run of samples. Letters as in `pooled_lookup`; R rows of all tables, S slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import prange

from recsys._support.jit import kernel_part, num_parts, parallel_kernel
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import LINE_BYTES, prefetch, prefetch_run
from recsys.embeddings.kernels.cpu.pooled_lookup import MIN_SHARED_BYTES, pooled_lookup_reference
from recsys.embeddings.kernels.cpu.rounding import widen
from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED
from recsys.embeddings.rows.lookups import NO_OFFSETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.lookups import Bags, Lookups
    from recsys.embeddings.rows.row_space import RowSpace

__all__ = ["tiered_lookup", "tiered_lookup_reference"]

_ONE = np.uint64(1)
# How many lookups before it is read an entry of the row map is prefetched, and a row.
_MAP_AHEAD, _AHEAD = np.uint64(16), np.uint64(8)


def tiered_lookup_reference(
    weights: Sequence[Tensor],
    slot_rows: Tensor,
    slot_of_row: NDArray[np.int32],
    first_rows: NDArray[np.uint64],
    lookups: Lookups,
    values: Tensor,
    offsets: Tensor,
    bag_weights: Tensor | None,
    batch_size: int,
    *,
    is_mean: bool,
) -> Tensor:
    """`pooled_lookup_reference` on copies of the tables, after the slots were written back."""
    newest = [weight.clone() for weight in weights]
    for weight, first_row in zip(newest, first_rows.tolist(), strict=False):
        for row in range(len(weight)):
            slot = int(slot_of_row[first_row + row])
            if 0 <= slot < AWAITED:
                weight[row] = slot_rows[slot]
    return pooled_lookup_reference(
        newest, lookups, values, offsets, bag_weights, batch_size, is_mean=is_mean
    )


def tiered_lookup(
    both: RowSpace,
    slot_of_row: NDArray[np.int32],
    first_rows: NDArray[np.uint64],
    lookups: Lookups,
    bags: Bags,
    result: Tensor,
) -> int:
    """Write the pooled rows of every lookup into its columns; bit-equal to `pooled_lookup`.

    Args:
        both: The tables, followed by the slots as one more table.
        slot_of_row: The slot of each row, (R,). A row that is awaited is read from its table.
        first_rows: Where each table's rows begin among the rows of all tables, (T + 1,).
        lookups: Which features are looked up in which tables.
        bags: The input; its values are rows.
        result: (B, W), contiguous, in the compute dtype. Columns without a lookup do not change.

    Returns:
        The position of the first value that is not a row of its table, or -1.
    """
    is_small = len(bags.values) * both.dim * both.dtype.itemsize < MIN_SHARED_BYTES
    is_one_hot = bags.offsets is None
    return (_tiered_kernel.alone if is_small else _tiered_kernel)(
        both.flat,
        both.dim,
        LINE_BYTES // both.dtype.itemsize,
        slot_of_row,
        first_rows[lookups.tables],
        both.bases[-1],
        lookups.placed_in(both),
        bags.values,
        NO_OFFSETS if bags.offsets is None else bags.offsets,
        is_one_hot,
        bags.weights is not None,
        both.nothing if bags.weights is None else bags.weights,
        bags.is_mean,
        bags.batch_size,
        lookups.width,
        1 if is_small else num_parts(),
        result.numpy(),
    )


@kernel_part
def _source_of(
    row: np.uint64,
    first_row: np.uint64,
    slot_of_row: NDArray[np.int32],
    base: np.uint64,
    slots_base: np.uint64,
    dim: np.uint64,
) -> np.uint64:
    """Where the current copy of a row begins."""
    slot = slot_of_row[first_row + row]
    if 0 <= slot < AWAITED:
        return slots_base + np.uint64(slot) * dim
    return base + row * dim


@parallel_kernel
def _tiered_kernel(
    flat: NDArray[Any],
    any_dim: int,
    line: int,
    slot_of_row: NDArray[np.int32],
    first_rows_L: NDArray[np.uint64],
    slots_base: np.uint64,
    lookups_4L: NDArray[np.uint64],
    values_N: NDArray[Any],
    offsets: NDArray[Any],
    is_one_hot: bool,
    has_weights: bool,
    weights_N: NDArray[Any],
    is_mean: bool,
    num_samples: int,
    width: int,
    num_parts: int,
    result_BW: NDArray[Any],
) -> int:
    dim = np.uint64(any_dim)
    result = result_BW.reshape(-1)
    bad = np.full(num_parts, -1)
    for part in prange(num_parts):
        begin = np.uint64(part * num_samples // num_parts)
        end = np.uint64((part + 1) * num_samples // num_parts)
        for lookup in range(lookups_4L.shape[1]):
            base, size, position, column = lookups_4L[:, lookup]
            first_row = first_rows_L[lookup]
            first = position * np.uint64(num_samples)
            last_place = first + end if is_one_hot else np.uint64(offsets[first + end])
            target = begin * np.uint64(width) + column
            for bag in range(first + begin, first + end):
                first_place = bag if is_one_hot else np.uint64(offsets[bag])
                end_place = bag + _ONE if is_one_hot else np.uint64(offsets[bag + _ONE])
                is_copied = is_one_hot and not has_weights  # a zero keeps its sign
                if not is_copied:
                    for d in range(dim):
                        result[target + d] = 0
                for place in range(first_place, end_place):
                    if place + _MAP_AHEAD < last_place:
                        prefetch(slot_of_row, first_row + np.uint64(values_N[place + _MAP_AHEAD]))
                    if place + _AHEAD < last_place:
                        ahead = np.uint64(values_N[place + _AHEAD])
                        if ahead < size:
                            source = _source_of(
                                ahead, first_row, slot_of_row, base, slots_base, dim
                            )
                            prefetch_run(flat, source, dim, np.uint64(line))
                    row = np.uint64(values_N[place])
                    if row >= size:  # a negative id becomes a very large number
                        if bad[part] < 0 or np.int64(place) < bad[part]:
                            bad[part] = np.int64(place)
                        continue
                    source = _source_of(row, first_row, slot_of_row, base, slots_base, dim)
                    if is_copied:
                        for d in range(dim):
                            result[target + d] = widen(flat[source + d])
                    elif has_weights:
                        weight = weights_N[place]
                        for d in range(dim):
                            result[target + d] += weight * widen(flat[source + d])
                    else:
                        for d in range(dim):
                            result[target + d] += widen(flat[source + d])
                if is_mean and end_place > first_place:
                    count = result.dtype.type(end_place - first_place)
                    for d in range(dim):
                        result[target + d] /= count
                target += np.uint64(width)
    first_bad = -1
    for found in bad:
        if found >= 0 and (first_bad < 0 or found < first_bad):
            first_bad = found
    return first_bad
