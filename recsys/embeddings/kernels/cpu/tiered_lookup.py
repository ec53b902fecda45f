"""Pooled lookup for evaluation: reads each row from its slot, or from its table if it has no slot.

Training gives every row a slot before it looks the row up. Evaluation claims no slots: the row map
tells where the current copy of a row is. The kernel sees the tables and the slots as one array. It
first notes where in this array each row begins, then pools the rows.

A part is a run of samples. Letters as in `pooled_lookup`; R rows of all tables, S slots.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import prange

from recsys._support.jit import ParallelKernel, inlined_part, num_parts, parallel_kernel
from recsys.embeddings.kernels.cpu.intrinsics.addresses import array_at
from recsys.embeddings.kernels.cpu.intrinsics.copying import copy_run
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import LINE_BYTES, prefetch, prefetch_run
from recsys.embeddings.kernels.cpu.intrinsics.summing import add_bag
from recsys.embeddings.kernels.cpu.pooled_lookup import (
    MIN_SHARED_BYTES,
    first_bad,
    offsets_of,
    samples_of,
)
from recsys.embeddings.kernels.cpu.rounding import widen
from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED
from recsys.embeddings.rows.lookups import NO_OFFSETS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.lookups import Bags, Lookups
    from recsys.embeddings.rows.row_space import RowSpace

__all__ = ["tiered_lookup"]

_ZERO, _ONE, _ALL = np.uint64(0), np.uint64(1), np.uint64(2**64 - 1)
# How many lookups before it is read an entry of the row map is prefetched, and a row.
_MAP_AHEAD, _AHEAD = np.uint64(16), np.uint64(8)


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
    tiered, has_weights = _kernel(both.is_narrow), bags.weights is not None
    return (tiered.alone if is_small else tiered)(
        both.flat,
        both.dim,
        LINE_BYTES // both.dtype.itemsize,
        slot_of_row,
        first_rows[lookups.tables],
        both.bases[-1],
        lookups.placed_in(both),
        bags.values,
        offsets_of(bags) if has_weights or bags.offsets is not None else NO_OFFSETS,
        has_weights,
        both.nothing if bags.weights is None else bags.weights,
        bags.is_mean,
        bags.batch_size,
        lookups.width,
        1 if is_small else num_parts(),
        result.data_ptr(),
        both.nothing,
    )


@inlined_part
def _locate(
    places_N: NDArray[np.uint64],
    slot_of_row: NDArray[np.int32],
    first_row: np.uint64,
    base: np.uint64,
    size: np.uint64,
    slots_base: np.uint64,
    dim: np.uint64,
    values_N: NDArray[Any],
    first: np.uint64,
    end: np.uint64,
) -> np.int64:
    """Write where the current copies of the rows `values_N[first:end]` of a table begin.

    Returns:
        The position of the first value that is not a row, or -1.
    """
    for n in range(first, end):
        if n + _MAP_AHEAD < end:
            prefetch(slot_of_row, first_row + np.uint64(values_N[n + _MAP_AHEAD]))
        row = np.uint64(values_N[n])
        if row >= size:  # a negative id becomes a very large number
            return np.int64(n)
        slot = slot_of_row[first_row + row]
        if 0 <= slot < AWAITED:
            places_N[n] = slots_base + np.uint64(slot) * dim
        else:
            places_N[n] = base + row * dim
    return np.int64(-1)


@cache
def _kernel(is_narrow: bool) -> ParallelKernel[..., int]:
    """The kernel for rows that are stored in 16 bits, or for others."""

    @parallel_kernel
    def tiered(
        flat: NDArray[Any],
        any_dim: int,
        line: int,
        slot_of_row: NDArray[np.int32],
        first_rows_L: NDArray[np.uint64],
        slots_base: np.uint64,
        lookups_4L: NDArray[np.uint64],
        values_N: NDArray[Any],
        offsets: NDArray[Any],
        has_weights: bool,
        weights_N: NDArray[Any],
        is_mean: bool,
        num_samples: int,
        width: int,
        num_parts: int,
        result_at: int,
        like_result: NDArray[Any],
    ) -> int:
        """A part is a range of samples."""
        dim = np.uint64(any_dim)
        result = array_at(result_at, num_samples * width, like_result)
        is_one_hot = len(offsets) == 0
        places_N = np.empty(len(values_N), np.uint64)  # where in `flat` each value's row begins
        bad = np.full(num_parts, -1)
        for part in prange(num_parts):
            begin, end = samples_of(part, num_parts, num_samples)
            for lookup in range(lookups_4L.shape[1]):
                base, size, position, column = lookups_4L[:, lookup]
                first_bag = position * np.uint64(num_samples) + begin
                end_bag = first_bag + end - begin
                first = first_bag if is_one_hot else np.uint64(offsets[first_bag])
                last = end_bag if is_one_hot else np.uint64(offsets[end_bag])
                table = first_rows_L[lookup], base, size, slots_base, dim
                found = _locate(places_N, slot_of_row, *table, values_N, first, last)
                if found >= 0:
                    if bad[part] < 0 or found < bad[part]:
                        bad[part] = found
                    continue
                target = begin * np.uint64(width) + column
                if is_one_hot:  # copied, so a zero keeps its sign
                    for n in range(first, last):
                        if n + _AHEAD < last:
                            prefetch_run(flat, places_N[n + _AHEAD], dim, np.uint64(line))
                        if is_narrow:  # a constant when the kernel is compiled
                            for d in range(dim):
                                result[target + d] = widen(flat[places_N[n] + d])
                        else:
                            copy_run(result, target, flat, places_N[n], dim)
                        target += np.uint64(width)
                    continue
                for bag in range(first_bag, end_bag):
                    for d in range(dim):
                        result[target + d] = 0
                    of_bag, end_of_bag = np.uint64(offsets[bag]), np.uint64(offsets[bag + _ONE])
                    if is_narrow:
                        for n in range(of_bag, end_of_bag):
                            if n + _AHEAD < last:
                                prefetch_run(flat, places_N[n + _AHEAD], dim, np.uint64(line))
                            for d in range(dim):
                                added = widen(flat[places_N[n] + d])
                                result[target + d] += weights_N[n] * added if has_weights else added
                    else:
                        where = result, target, flat, _ZERO, _ALL, dim, _ONE, np.uint64(line)
                        if has_weights:
                            add_bag(*where, places_N, weights_N, of_bag, end_of_bag, last)
                        else:
                            add_bag(*where, places_N, None, of_bag, end_of_bag, last)
                    if is_mean and end_of_bag > of_bag:
                        count = result.dtype.type(end_of_bag - of_bag)
                        for d in range(dim):
                            result[target + d] /= count
                    target += np.uint64(width)
        return first_bad(bad)

    return tiered
