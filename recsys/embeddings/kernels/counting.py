"""Counting lookups: how often each row of every table is looked up.

Counting is random access: a lookup raises a number somewhere in an array that no cache holds. What
keeps it fast is that one lookup does not wait for another, so the processor has many under way, and
that popular rows, which most lookups go to, stay in the caches. What would slow it down is two
threads that raise numbers on one line. So a table belongs to one thread: nothing is locked, no
counter is kept twice, and every thread reads the lookups of its own tables alone.

Letters: R rows of all tables, T tables, S segments (one feature's lookups in one table), N values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import prange

from recsys.jit import num_parts, parallel_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Segments", "count_rows", "count_rows_reference", "worst_levels", "worst_reference"]

# Lookups of a segment at a time: the columns of as many samples of a store lie in the caches, where
# the segments after the first one find them.
_BLOCK = 4096
# Fewer lookups than these, a mini-batch's, take the calling thread about a millisecond. Waking
# others gains little there, and where the cores are busy one waits for them much longer.
_MIN_SHARED_LOOKUPS = 1 << 20


class Segments(NamedTuple):
    """What is looked up where; every field (S,) int64.

    A segment is `num` values, `stride` apart from `first` on; value v is row v of a table that has
    `sizes` rows and whose first row is row `bases` of all.

    Attributes:
        tables: Which table it is.
        bases: Where the table's rows begin.
        sizes: How many it has.
        first: Position of the first value.
        num: How many values.
        first_bag: Where the feature's bags begin in the offsets.
        stride: From one value to the next, of all segments.
    """

    tables: NDArray[np.int64]
    bases: NDArray[np.int64]
    sizes: NDArray[np.int64]
    first: NDArray[np.int64]
    num: NDArray[np.int64]
    first_bag: NDArray[np.int64]
    stride: int


def count_rows_reference(counts: NDArray[Any], segments: Segments, values: NDArray[Any]) -> None:
    """`count_rows` for values that are all rows of their tables."""
    for base, size, first, num in zip(
        segments.bases, segments.sizes, segments.first, segments.num, strict=True
    ):
        rows = values[first : first + num * segments.stride : segments.stride]
        counts[base : base + size] += np.bincount(rows, minlength=size).astype(counts.dtype)


def count_rows(
    counts: NDArray[Any], segments: Segments, values: NDArray[Any], step: int = 1
) -> int:
    """Add `step` to a row's count for every time it is looked up.

    Args:
        counts: (R,) uint32 or int64; sums wrap around, so -1 takes back what 1 has added.
        segments: Of the values.
        values: (N,) int32 or int64, contiguous; one that is no row is passed over.
        step: What to add.

    Returns:
        The first value that is no row of its table, by position; -1 where there is none.
    """
    is_small = int(segments.num.sum()) < _MIN_SHARED_LOOKUPS
    parts = 1 if is_small else num_parts()
    bad: int = (_count_kernel.alone if is_small else _count_kernel)(
        counts,
        segments.bases,
        segments.sizes,
        segments.first,
        segments.num,
        segments.stride,
        _owners(segments, parts),
        values,
        np.array(step).astype(counts.dtype)[()],
        parts,
    )
    return bad


def worst_reference(
    levels: NDArray[np.uint8],
    segments: Segments,
    values: NDArray[Any],
    offsets: NDArray[Any] | None,
    num_samples: int,
) -> NDArray[np.uint8]:
    """`worst_levels`, one sample after the other."""
    worst = np.zeros(num_samples, np.uint8)
    for base, first, first_bag in zip(
        segments.bases, segments.first, segments.first_bag, strict=True
    ):
        for sample in range(num_samples):
            at = first + sample * segments.stride
            bag = slice(at, at + 1)
            if offsets is not None:
                bag = slice(*offsets[first_bag + sample : first_bag + sample + 2])
            worst[sample] = levels[base + values[bag]].max(initial=worst[sample])
    return worst


def worst_levels(
    levels: NDArray[np.uint8],
    segments: Segments,
    values: NDArray[Any],
    offsets: NDArray[Any] | None,
    num_samples: int,
) -> NDArray[np.uint8]:
    """The highest level among the rows that a sample looks up; 0 for one that looks up none.

    Args:
        levels: One for each row, (R,).
        segments: Of the values.
        values: (N,) int32 or int64, all of them rows of their tables.
        offsets: Where each bag begins, (F * B + 1,); None where every bag has one value.
        num_samples: B.

    Returns:
        (B,).
    """
    worst = np.zeros(num_samples, np.uint8)
    is_small = int(segments.num.sum()) < _MIN_SHARED_LOOKUPS
    (_worst_kernel.alone if is_small else _worst_kernel)(
        levels,
        segments.bases,
        segments.first,
        segments.first_bag,
        segments.stride,
        values,
        offsets is not None,
        values[:0] if offsets is None else offsets,
        worst,
        1 if is_small else num_parts(),
    )
    return worst


def _owners(segments: Segments, parts: int) -> NDArray[np.int64]:
    """Which part counts each segment: all those of a table go to one, the longest table first."""
    if parts == 1:
        return np.zeros(len(segments.num), np.int64)
    # A lookup in a table of many rows takes longer, for fewer of its rows are in a cache.
    work_S = segments.num * (4 + np.log2(segments.sizes))
    work_T = np.bincount(segments.tables, work_S)
    owners, load = np.zeros(len(work_T), np.int64), np.zeros(parts)
    for table in np.argsort(-work_T, kind="stable"):
        owners[table] = load.argmin()
        load[owners[table]] += work_T[table]
    return owners[segments.tables]


@parallel_kernel
def _count_kernel(
    counts: NDArray[Any],
    bases: NDArray[np.int64],
    sizes: NDArray[np.int64],
    first: NDArray[np.int64],
    num: NDArray[np.int64],
    stride: int,
    owners: NDArray[np.int64],
    values: NDArray[Any],
    step: Any,
    num_parts: int,
) -> int:
    """A part is the segments of some tables."""
    bad = np.full(num_parts, -1)
    end = num.max() if len(num) else 0
    for part in prange(num_parts):
        apart = np.uint64(stride)
        for begin in range(0, end, _BLOCK):
            for segment in range(len(num)):
                if owners[segment] != part or begin >= num[segment]:
                    continue
                base, size = np.uint64(bases[segment]), np.uint64(sizes[segment])
                at = np.uint64(first[segment]) + np.uint64(begin) * apart
                for _ in range(min(_BLOCK, num[segment] - begin)):
                    row = np.uint64(values[at])
                    if row < size:  # a negative one is among the largest
                        counts[base + row] += step
                    elif bad[part] < 0 or np.int64(at) < bad[part]:
                        bad[part] = np.int64(at)
                    at += apart
    lowest = -1
    for place in bad:
        if place >= 0 and (lowest < 0 or place < lowest):
            lowest = place
    return lowest


@parallel_kernel
def _worst_kernel(
    levels: NDArray[np.uint8],
    bases: NDArray[np.int64],
    first: NDArray[np.int64],
    first_bag: NDArray[np.int64],
    stride: int,
    values: NDArray[Any],
    has_offsets: bool,
    offsets: NDArray[Any],
    worst: NDArray[np.uint8],
    num_parts: int,
) -> None:
    """A part is a run of samples."""
    num_samples = len(worst)
    for part in prange(num_parts):
        end = num_samples * (part + 1) // num_parts
        for begin in range(num_samples * part // num_parts, end, _BLOCK):
            for segment in range(len(bases)):
                base = np.uint64(bases[segment])
                for sample in range(begin, min(begin + _BLOCK, end)):
                    place = np.uint64(first[segment] + sample * stride)
                    stop = place + np.uint64(1)
                    if has_offsets:
                        bag = np.uint64(first_bag[segment] + sample)
                        place = np.uint64(offsets[bag])
                        stop = np.uint64(offsets[bag + np.uint64(1)])
                    level = worst[sample]
                    for at in range(place, stop):
                        level = max(level, levels[base + np.uint64(values[at])])
                    worst[sample] = level
