"""Count how often each row of every table is looked up.

Counting is random access: a lookup increments a number somewhere in an array that is larger than
the caches. It is fast because lookups are independent, so the processor overlaps many of them, and
because popular rows, which get most lookups, stay in the caches. Two threads that write to one
cache line would be slow. So each table belongs to one thread: there are no locks and no second
counters, and a thread reads only the lookups of its own tables.

Letters: R rows of all tables, T tables, S segments (one feature's lookups in one table), N values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import prange

from recsys._support.jit import num_parts, parallel_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Segments", "count_rows", "worst_levels"]

# Lookups per block of a segment. The columns of a block of a store's samples fit the caches, so
# only the first segment reads them from memory.
_BLOCK = 4096
# With fewer lookups, as in a mini-batch, the calling thread needs about a millisecond. Then waking
# other threads gains little, and on busy cores the wait for them is much longer.
_MIN_SHARED_LOOKUPS = 1 << 20


class Segments(NamedTuple):
    """Which values are looked up in which table; arrays are (S,) int64.

    A segment is `num` values at positions `first`, `first + stride`, ... Value v is row v of its
    table, and row `bases + v` of all tables.

    Attributes:
        tables: Number of the table.
        bases: Number of the table's first row among the rows of all tables.
        sizes: Rows of the table.
        first: Position of the first value.
        num: How many values.
        first_bag: Position of the feature's first bag in the offsets.
        stride: Distance from one value to the next, for all segments.
    """

    tables: NDArray[np.int64]
    bases: NDArray[np.int64]
    sizes: NDArray[np.int64]
    first: NDArray[np.int64]
    num: NDArray[np.int64]
    first_bag: NDArray[np.int64]
    stride: int


def count_rows(
    counts: NDArray[Any], segments: Segments, values: NDArray[Any], step: int = 1
) -> int:
    """Add `step` to a row's count for each of its lookups.

    Args:
        counts: (R,) uint32 or int64. Sums wrap around, so a call with -1 undoes one with 1.
        segments: Which values are looked up in which table.
        values: (N,) int32 or int64, contiguous. Values that are not rows are skipped.
        step: The increment.

    Returns:
        The position of the first value that is not a row of its table; -1 if there is none.
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


def worst_levels(
    levels: NDArray[np.uint8],
    segments: Segments,
    values: NDArray[Any],
    offsets: NDArray[Any] | None,
    num_samples: int,
) -> NDArray[np.uint8]:
    """The highest level among the rows that each sample looks up; 0 for a sample without lookups.

    Args:
        levels: The level of each row.
        segments: Which values are looked up in which table.
        values: int32 or int64, all of them rows of their tables.
        offsets: Where each bag begins; None if every bag has one value.
        num_samples: B.

    Shape:
        levels (R,); values (N,); offsets (F * B + 1,); result (B,).
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
        np.empty(0, np.int64) if offsets is None else offsets,
        worst,
        1 if is_small else num_parts(),
    )
    return worst


def _owners(segments: Segments, parts: int) -> NDArray[np.int64]:
    """The part that counts each segment. Tables go to the least loaded part, the longest first."""
    if parts == 1:
        return np.zeros(len(segments.num), np.int64)
    # Lookups in larger tables take longer, because a smaller share of their rows is cached.
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
    """A part is all segments of some tables."""
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
                    if row < size:  # a negative value became a very large unsigned one
                        counts[base + row] += step
                    elif bad[part] < 0 or np.int64(at) < bad[part]:
                        bad[part] = np.int64(at)
                    at += apart
    of_all: Any = np.int64(-1)
    for of_part in bad:
        if of_part >= 0 and (of_all < 0 or of_part < of_all):
            of_all = of_part
    return of_all  # type: ignore[no-any-return]


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
    """A part is a range of samples."""
    num_samples = len(worst)
    for part in prange(num_parts):
        end = num_samples * (part + 1) // num_parts
        for begin in range(num_samples * part // num_parts, end, _BLOCK):
            for segment in range(len(bases)):
                base = np.uint64(bases[segment])
                for sample in range(begin, min(begin + _BLOCK, end)):
                    start = np.uint64(first[segment] + sample * stride)
                    stop = start + np.uint64(1)
                    if has_offsets:
                        bag = np.uint64(first_bag[segment] + sample)
                        start = np.uint64(offsets[bag])
                        stop = np.uint64(offsets[bag + np.uint64(1)])
                    level = worst[sample]
                    for at in range(start, stop):
                        level = max(level, levels[base + np.uint64(values[at])])
                    worst[sample] = level
