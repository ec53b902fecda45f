"""Pooled lookup: sum or average the rows of every bag, wherever each row is.

The kernel takes addresses: making numpy arrays of new tensors takes as long as a small lookup. It
checks the input and copies it to `kept` as int32, for the update, so the caller may change ids
after the lookup. Then it finds the location of each row by the row map, and adds rows in lookup
order. Results depend neither on threads nor on where rows are.

Letters: B samples, L lookups (pairs of feature and table), N ids, D dim, W columns of the result.
Indices are unsigned: numba checks signed ones, and a loop with a check is not vectorised.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import prange

from recsys._support.jit import (
    ParallelKernel,
    inlined_part,
    kernel,
    kernel_part,
    num_parts,
    parallel_kernel,
)
from recsys.embeddings.kernels.cpu.intrinsics.addresses import array_at
from recsys.embeddings.kernels.cpu.intrinsics.copying import copy_run
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import LINE_BYTES, prefetch, prefetch_run
from recsys.embeddings.kernels.cpu.intrinsics.summing import add_bag
from recsys.embeddings.kernels.cpu.rounding import widen
from recsys.embeddings.kernels.cpu.row_map import BAD_OFFSETS, IN_FLIGHT, NOWHERE, OK, ONE_HOT

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "INT32",
    "INT64",
    "MIN_SHARED_BYTES",
    "Input",
    "leave_out",
    "lookup_kernel",
    "pool",
    "weight_gradients",
]

# Smaller copies end before a second thread wakes up.
MIN_SHARED_BYTES = 2**17
INT32: NDArray[np.int32] = np.empty(0, np.int32)  # only their dtypes are used
INT64: NDArray[np.int64] = np.empty(0, np.int64)
# How many lookups before it is read an entry of the row map is prefetched, and a row.
_MAP_AHEAD, _AHEAD = np.uint64(16), np.uint64(8)
# One-hot lookups have a kernel for each of these dims, which copies a row without a loop.
_COMPILED_DIMS = range(8, 257, 8)
_ZERO, _ONE = np.uint64(0), np.uint64(1)


class Input(NamedTuple):
    """The input of a lookup by addresses; the tensors must be kept alive.

    Attributes:
        ids_at: Address of N ids.
        num_ids: N.
        is_wide: 1 if ids and offsets are int64, 0 if int32.
        offsets_at: Address of where bags begin.
        num_offsets: How many, with or without the end of the last bag; 0 if all bags are equal.
        kept_at: Address of room for N + bags + 1 int32: a copy of ids, then of where bags begin.
        num_samples: B.
        num_bags: Bags of all features.
        is_mean: 1 if bags are averaged.
        weights_at: Address of a factor for each id, in the dtype of the result; 0 for 1.
    """

    ids_at: int
    num_ids: int
    is_wide: int
    offsets_at: int
    num_offsets: int
    kept_at: int
    num_samples: int
    num_bags: int
    is_mean: int
    weights_at: int


def lookup_kernel(
    dim: int, dtype: np.dtype[Any], result_dtype: np.dtype[Any], *, is_tiered: bool
) -> ParallelKernel[..., int]:
    """The kernel for rows of this dim.

    Args:
        dim: D.
        dtype: Of the rows; uint16 for bfloat16.
        result_dtype: Of the result.
        is_tiered: Whether there is a row map.
    """
    is_narrow = dtype != result_dtype
    compiled = dim if dim in _COMPILED_DIMS and not is_narrow else 0
    return _kernel(compiled, LINE_BYTES // dtype.itemsize, is_narrow, is_tiered, result_dtype.name)


def pool(
    kernel: ParallelKernel[..., int],
    rows: tuple[NDArray[Any], int, NDArray[np.int32], int],
    lookups_5L: NDArray[np.uint64],
    given: Input,
    result_at: int,
    width: int,
) -> int:
    """Pool the rows of all lookups into their columns of the result.

    Args:
        kernel: Of `lookup_kernel`.
        rows: The memory of tables and slots as one array; D; the row map, empty if all rows are in
            their tables; where slots begin in the memory.
        lookups_5L: For each lookup: where its table begins in the memory, the table's rows, the
            feature's position in the input, the first column, and the number of the table's row 0.
        given: The input.
        result_at: Address of the result, (B, W).
        width: W.

    Returns:
        OK; ONE_HOT if it is also true that bag i is id i, and only ids are kept; IN_FLIGHT if a row
        is on its way; BAD_OFFSETS; or the position of the first id that is not a row. The result is
        undefined if there is an error.
    """
    is_small = given.num_ids * rows[1] * rows[0].itemsize < MIN_SHARED_BYTES
    return (kernel.alone if is_small else kernel)(
        *rows, lookups_5L, *given, result_at, width, 1 if is_small else num_parts()
    )


@kernel
def leave_out(row: int, num_ids: int, kept: NDArray[np.int32]) -> int:
    """Leave a row out of bags of one id, after their lookup.

    Args:
        row: The row.
        num_ids: N.
        kept: The ids, and room for where N bags begin, (2 N + 1,).

    Returns:
        How many ids are left. They and where their bags begin are then at the end of `kept`.
    """
    num_left = 0
    for bag in range(num_ids):
        kept[num_ids + bag] = num_left
        num_left += kept[bag] != row
    kept[2 * num_ids] = num_left
    begin = num_ids
    for bag in range(num_ids - 1, -1, -1):
        if kept[bag] != row:
            begin -= 1
            kept[begin] = kept[bag]
    return num_left


@inlined_part
def _keep_ids(
    kept: NDArray[np.int32], ids: NDArray[Any], size: np.uint64, first: np.uint64, last: np.uint64
) -> np.int64:
    """Copy ids; returns the position of the first that is not a row, or -1."""
    is_bad: Any = False
    for n in range(first, last):
        row = np.uint64(ids[n])  # a negative id becomes a very large number
        is_bad |= row >= size
        kept[n] = np.int32(row)
    if is_bad:
        for n in range(first, last):
            if np.uint64(ids[n]) >= size:
                return np.int64(n)
    return np.int64(-1)


@inlined_part
def _count_up(offsets: NDArray[Any]) -> bool:
    """Whether offsets are 0, 1, 2, ..."""
    differing = _ZERO
    for bag in range(np.uint64(len(offsets))):
        differing |= np.uint64(offsets[bag]) ^ bag
    return bool(differing == _ZERO)


@inlined_part
def _keep_offsets(
    kept: NDArray[np.int32],
    num_ids: int,
    offsets: NDArray[Any],
    length: int,
    first: np.uint64,
    last: np.uint64,
) -> bool:
    """Copy where bags `first` to `last` begin and end, after the ids; whether they ascend."""
    end = np.uint64(num_ids)
    are_good: Any = True
    if len(offsets) == 0:
        for bag in range(first, last):
            kept[end + bag] = np.int32(bag * np.uint64(length))
            kept[end + bag + _ONE] = np.int32((bag + _ONE) * np.uint64(length))
        return True
    for bag in range(first, last):
        begin, until = np.uint64(offsets[bag]), end
        if bag + _ONE < np.uint64(len(offsets)):
            until = np.uint64(offsets[bag + _ONE])
        are_good &= begin <= until and until <= end
        kept[end + bag] = np.int32(begin)
        kept[end + bag + _ONE] = np.int32(until)
    return bool(are_good)


@inlined_part
def _find(
    starts: NDArray[np.uint64],
    slot_of_row: NDArray[np.int32],
    first_row: np.uint64,
    base: np.uint64,
    slots_base: np.uint64,
    dim: np.uint64,
    kept: NDArray[np.int32],
    first: np.uint64,
    last: np.uint64,
) -> Any:
    """Write where the rows `kept[first:last]` of a table begin; whether one is on its way."""
    is_in_flight: Any = False
    for n in range(first, last):
        if n + _MAP_AHEAD < last:
            prefetch(slot_of_row, first_row + np.uint64(kept[n + _MAP_AHEAD]))
        row = np.uint64(kept[n])
        slot = slot_of_row[first_row + row]
        start = base + row * dim
        if slot >= 0:
            start = slots_base + np.uint64(slot) * dim
        is_in_flight |= slot < NOWHERE
        starts[n - first] = start
    return is_in_flight


@cache
def _kernel(
    compiled_dim: int, line: int, is_narrow: bool, is_tiered: bool, result_dtype: str
) -> ParallelKernel[..., int]:
    like_result = np.empty(0, result_dtype)

    @parallel_kernel
    def pool_bags(
        flat: NDArray[Any],
        any_dim: int,
        slot_of_row: NDArray[np.int32],
        slots_base: int,
        lookups_5L: NDArray[np.uint64],
        ids_at: int,
        num_ids: int,
        is_wide: int,
        offsets_at: int,
        num_offsets: int,
        kept_at: int,
        num_samples: int,
        num_bags: int,
        is_mean: int,
        weights_at: int,
        result_at: int,
        width: int,
        num_parts: int,
    ) -> int:
        """A part is a range of samples."""
        ids32, ids64 = array_at(ids_at, num_ids, INT32), array_at(ids_at, num_ids, INT64)
        offsets32 = array_at(offsets_at, num_offsets, INT32)
        offsets64 = array_at(offsets_at, num_offsets, INT64)
        kept = array_at(kept_at, num_ids + num_bags + 1, INT32)
        result = array_at(result_at, num_samples * width, like_result)
        has_weights = weights_at != 0
        weights_N = array_at(weights_at, num_ids if has_weights else 0, like_result)
        is_one_hot = (
            num_ids == num_bags
            and not has_weights
            and (_count_up(offsets64) if is_wide else _count_up(offsets32))
        )
        codes = np.full(num_parts, OK)
        if not is_one_hot:
            if num_offsets:
                start = offsets64[0] if is_wide else np.int64(offsets32[0])
                until = np.int64(num_ids)
                if num_offsets > num_bags:
                    until = offsets64[num_bags] if is_wide else np.int64(offsets32[num_bags])
                if start != 0 or until != num_ids:
                    return BAD_OFFSETS
            length = num_ids // num_bags if num_bags else 0
            for part in prange(num_parts):
                begin = np.uint64(part * num_bags // num_parts)
                end = np.uint64((part + 1) * num_bags // num_parts)
                if is_wide:
                    are_good = _keep_offsets(kept, num_ids, offsets64, length, begin, end)
                else:
                    are_good = _keep_offsets(kept, num_ids, offsets32, length, begin, end)
                codes[part] = OK if are_good else BAD_OFFSETS
            if (codes != OK).any():
                return BAD_OFFSETS
        for part in prange(num_parts):
            # Inside the loop: numba would pass a constant from outside as a variable.
            dim = np.uint64(compiled_dim) if compiled_dim else np.uint64(any_dim)
            begin = np.uint64(part * num_samples // num_parts)
            end = np.uint64((part + 1) * num_samples // num_parts)
            slots, of_bags = np.uint64(slots_base), np.uint64(num_ids)
            for lookup in range(lookups_5L.shape[1]):
                base, size, position, column, first_row = lookups_5L[:, lookup]
                first_bag = position * np.uint64(num_samples) + begin
                end_bag = first_bag + end - begin
                first, last = first_bag, end_bag
                if not is_one_hot:
                    first = np.uint64(kept[of_bags + first_bag])
                    last = np.uint64(kept[of_bags + end_bag])
                if is_wide:
                    bad = _keep_ids(kept, ids64, size, first, last)
                else:
                    bad = _keep_ids(kept, ids32, size, first, last)
                if bad >= 0:
                    if codes[part] < 0 or bad < codes[part]:
                        codes[part] = bad
                    continue
                target = begin * np.uint64(width) + column
                starts = np.empty(last - first if is_tiered else _ZERO, np.uint64)
                if is_tiered and _find(
                    starts, slot_of_row, first_row, base, slots, dim, kept, first, last
                ):
                    if codes[part] == OK:
                        codes[part] = IN_FLIGHT
                    continue
                if is_one_hot:
                    for n in range(first, last):
                        if n + _AHEAD < last:
                            ahead = base + np.uint64(kept[n + _AHEAD]) * dim
                            if is_tiered:
                                ahead = starts[n + _AHEAD - first]
                            prefetch_run(flat, ahead, dim, np.uint64(line))
                        source = base + np.uint64(kept[n]) * dim
                        if is_tiered:
                            source = starts[n - first]
                        if is_narrow:  # a constant when the kernel is compiled
                            for d in range(dim):
                                result[target + d] = widen(flat[source + d])
                        else:
                            copy_run(result, target, flat, source, dim)
                        target += np.uint64(width)
                    continue
                for bag in range(first_bag, end_bag):
                    for d in range(dim):
                        result[target + d] = 0
                    of_bag = np.uint64(kept[of_bags + bag])
                    end_of_bag = np.uint64(kept[of_bags + bag + _ONE])
                    if is_narrow:
                        for n in range(of_bag, end_of_bag):
                            source = base + np.uint64(kept[n]) * dim
                            if is_tiered:
                                source = starts[n - first]
                            elif n + _AHEAD < last:
                                ahead = base + np.uint64(kept[n + _AHEAD]) * dim
                                prefetch_run(flat, ahead, dim, np.uint64(line))
                            for d in range(dim):
                                added = widen(flat[source + d])
                                result[target + d] += weights_N[n] * added if has_weights else added
                    elif is_tiered:
                        memory = result, target, flat, _ZERO, dim, _ONE, np.uint64(line)
                        run = of_bag - first, end_of_bag - first, last - first
                        if has_weights:
                            add_bag(*memory, starts, weights_N[first:], *run)
                        else:
                            add_bag(*memory, starts, None, *run)
                    else:
                        memory = result, target, flat, base, dim, dim, np.uint64(line)
                        if has_weights:
                            add_bag(*memory, kept, weights_N, of_bag, end_of_bag, last)
                        else:
                            add_bag(*memory, kept, None, of_bag, end_of_bag, last)
                    if is_mean and end_of_bag > of_bag:
                        count = like_result.dtype.type(end_of_bag - of_bag)
                        for d in range(dim):
                            result[target + d] /= count
                    target += np.uint64(width)
        found: int = _first_code(codes)
        return ONE_HOT if is_one_hot and found == OK else found

    return pool_bags


@kernel_part
def _first_code(codes: NDArray[np.int64]) -> Any:
    """The first bad position that any part found; else IN_FLIGHT if any part met a moving row."""
    found = np.int64(OK)
    for code in codes:
        is_earlier = code >= 0 and (found < 0 or code < found)
        if is_earlier or (code == IN_FLIGHT and found == OK):
            found = code
    return found


def weight_gradients(
    rows: tuple[NDArray[Any], int, NDArray[np.int32], int],
    lookups_5L: NDArray[np.uint64],
    given: Input,
    gradient_BW: NDArray[Any],
    result_N: NDArray[Any],
) -> None:
    """Add the gradient of every id's weight: the dot product of its row and its bag's gradient.

    If bags are averaged, it is divided by the length of the bag.

    Args:
        rows: As for `pool`, after a lookup that returned OK; no row may be on its way.
        lookups_5L: As for `pool`.
        given: As for `pool`; only what was kept is read.
        gradient_BW: Gradient of the pooled rows, (B, W).
        result_N: (N,); is added to, because a feature may be looked up in several tables.
    """
    _dots_kernel(
        *rows,
        lookups_5L,
        given.num_ids,
        given.kept_at,
        given.num_samples,
        given.num_bags,
        given.is_mean,
        gradient_BW.reshape(-1),
        gradient_BW.shape[1],
        result_N,
        num_parts(),
    )


@parallel_kernel
def _dots_kernel(
    flat: NDArray[Any],
    any_dim: int,
    slot_of_row: NDArray[np.int32],
    slots_base: int,
    lookups_5L: NDArray[np.uint64],
    num_ids: int,
    kept_at: int,
    num_samples: int,
    num_bags: int,
    is_mean: int,
    gradient: NDArray[Any],
    width: int,
    result_N: NDArray[Any],
    num_parts: int,
) -> None:
    """A part is a range of samples."""
    kept = array_at(kept_at, num_ids + num_bags + 1, INT32)
    dim, of_bags = np.uint64(any_dim), np.uint64(num_ids)
    for part in prange(num_parts):
        begin = np.uint64(part * num_samples // num_parts)
        end = np.uint64((part + 1) * num_samples // num_parts)
        for lookup in range(lookups_5L.shape[1]):
            base, _, position, column, first_row = lookups_5L[:, lookup]
            first_bag = position * np.uint64(num_samples) + begin
            of_bag = begin * np.uint64(width) + column
            for bag in range(first_bag, first_bag + end - begin):
                first, last = np.uint64(kept[of_bags + bag]), np.uint64(kept[of_bags + bag + _ONE])
                for n in range(first, last):
                    row = np.uint64(kept[n])
                    start = base + row * dim
                    if len(slot_of_row) and slot_of_row[first_row + row] >= 0:
                        slot = np.uint64(slot_of_row[first_row + row])
                        start = np.uint64(slots_base) + slot * dim
                    dot = result_N.dtype.type(0)
                    for d in range(dim):
                        dot += widen(flat[start + d]) * gradient[of_bag + d]
                    if is_mean:
                        dot /= result_N.dtype.type(last - first)
                    result_N[n] += dot
                of_bag += np.uint64(width)
