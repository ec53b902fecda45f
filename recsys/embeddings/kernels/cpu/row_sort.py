"""Sort the lookups of one table by row, for an update that goes row by row.

    number_rows     numbers the rows by first appearance with a hash table, and counts the lookups
                    of each row
    place_lookups   sorts the lookups by row number; a row's lookups stay in lookup order

`number_rows` prefetches each gradient as soon as it knows the address, long before gradients are
summed. Sorting works in the caches, so memory is idle otherwise. The caller can prefetch rows
between the two steps.

Indices are unsigned, for the reason given in `pooled_lookup`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys._support.hashing import GOLDEN
from recsys._support.jit import kernel_part
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import prefetch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.rows.ledger import Segments

__all__ = [
    "LOOKUPS_AHEAD",
    "NO_INTEGERS",
    "LookupValues",
    "SortedLookups",
    "by_width",
    "integer_at",
    "make_room",
    "number_rows",
    "place_lookups",
]

# Gradients are prefetched again this many lookups ahead, into the nearest cache. The sorted lookups
# end with as many zeros.
LOOKUPS_AHEAD = np.uint64(32)
_ONE = np.uint64(1)
# A kernel takes two arrays of ids, or of offsets, one of each width; one of them is empty. With one
# array of any dtype, numba would compile a large kernel for each combination of the dtypes of ids
# and offsets, for seconds each.
_NONE_32: NDArray[np.int32] = np.empty(0, np.int32)
_NONE_64: NDArray[np.int64] = np.empty(0, np.int64)
NO_INTEGERS = _NONE_32, _NONE_64


def by_width(integers: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The array in the place of its width, and an empty one in the other place.

    Args:
        integers: int32 or int64.
    """
    return (integers, _NONE_64) if integers.dtype == np.int32 else (_NONE_32, integers)


@kernel_part
def integer_at(
    narrow: NDArray[np.int32], wide: NDArray[np.int64], place: np.uint64 | int
) -> np.uint64:
    """In a kernel: a number of the array that is not empty; a negative one becomes very large."""
    return np.uint64(wide[place]) if len(wide) else np.uint64(narrow[place])


class LookupValues(NamedTuple):
    """The lookups of all tables: `Bags` with other arrays in place of None."""

    rows32: NDArray[np.int32]  # (N,), or empty: then `rows64` has them; see `by_width`
    rows64: NDArray[np.int64]
    offsets32: NDArray[np.int32]
    offsets64: NDArray[np.int64]
    weights: NDArray[Any]
    is_one_hot: bool
    has_weights: bool
    is_mean: bool


class SortedLookups(NamedTuple):
    """Buffers for the lookups of one table; large enough for the table with the most lookups."""

    numbers: NDArray[np.uint32]  # of each lookup: the number of its row
    sources: NDArray[np.uint64]  # of each lookup: where its gradient begins
    scales: NDArray[Any]  # of each lookup: its factor; empty if all are 1
    hash_table: NDArray[np.uint32]  # row number + 1; 0 if free
    rows: NDArray[np.uint64]  # of each number: the row
    ends: NDArray[np.uint32]  # of each number: where its lookups end in the arrays below
    sources_by_row: NDArray[np.uint64]  # sources sorted by row, and `LOOKUPS_AHEAD` zeros
    scales_by_row: NDArray[Any]  # scales sorted by row


@kernel_part
def make_room(most: np.int64, is_scaled: bool, gradient: NDArray[Any]) -> SortedLookups:
    """Allocate buffers for `most` lookups; the hash table is at most half full."""
    hash_size = 2
    while hash_size < 2 * most:
        hash_size *= 2
    num_scales = most if is_scaled else 0
    return SortedLookups(
        np.empty(most, np.uint32),
        np.empty(most, np.uint64),
        np.empty(num_scales, gradient.dtype),
        np.empty(hash_size, np.uint32),
        np.empty(most, np.uint64),
        np.empty(most, np.uint32),
        np.empty(most + LOOKUPS_AHEAD, np.uint64),
        np.empty(num_scales, gradient.dtype),
    )


@kernel_part
def number_rows(
    segments: Segments,
    values: LookupValues,
    first_segment: np.uint64,
    end_segment: np.uint64,
    share: np.uint64,
    num_shares: np.uint64,
    gradient: NDArray[Any],
    num_lines: np.uint64,
    line: np.uint64,
    found: SortedLookups,
) -> Any:
    """Number the rows that one table's lookups name, and count the lookups of each row.

    If threads share a table, each processes the rows of one share, chosen by a hash of the row.

    Args:
        segments: The segments of all tables.
        values: The lookups of all tables.
        first_segment: The table's first segment.
        end_segment: The segment after the table's last one.
        share: Number of the share, from 0.
        num_shares: 1 if the table is not shared.
        gradient: The gradients of all lookups, one-dimensional.
        num_lines: Cache lines of one lookup's gradient.
        line: Numbers per cache line.
        found: Buffers to fill; `ends` receives the number of lookups of each row.

    Returns:
        The number of rows and the number of lookups.
    """
    numbers, sources, scales = found.numbers, found.sources, found.scales
    hash_table, rows, ends = found.hash_table, found.rows, found.ends
    is_scaled = len(scales) > 0
    mask = np.uint64(len(hash_table)) - _ONE
    shift, size = np.uint64(64), np.uint64(1)
    while size <= mask:
        size += size
        shift -= _ONE
    hash_table[:] = 0
    num_rows = num_lookups = np.uint64(0)
    for segment in range(first_segment, end_segment):
        source = segments.first_gradients[segment]
        first_bag = segments.first_bags[segment]
        for bag in range(first_bag, first_bag + segments.num_bags[segment]):
            begin, end = np.uint64(bag), np.uint64(bag) + _ONE
            if not values.is_one_hot:
                begin = integer_at(values.offsets32, values.offsets64, bag)
                end = integer_at(values.offsets32, values.offsets64, bag + _ONE)
            for position in range(begin, end):
                row = integer_at(values.rows32, values.rows64, position)
                spread = row * GOLDEN
                # Not by the bits that give the place in the hash table.
                if num_shares > _ONE and (spread & np.uint64(0xFFFF)) % num_shares != share:
                    continue
                sources[num_lookups] = source
                for of_line in range(num_lines):
                    prefetch(gradient, source + of_line * line)
                if is_scaled:
                    scale = scales.dtype.type(1)
                    if values.has_weights:
                        scale = values.weights[position]
                    if values.is_mean:
                        scale /= scales.dtype.type(end - begin)
                    scales[num_lookups] = scale
                entry = spread >> shift
                number = np.uint64(hash_table[entry])
                while number != 0 and rows[number - _ONE] != row:
                    entry = (entry + _ONE) & mask
                    number = np.uint64(hash_table[entry])
                if number == 0:
                    rows[num_rows] = row
                    ends[num_rows] = 0
                    num_rows += _ONE
                    hash_table[entry] = num_rows
                    number = num_rows
                number -= _ONE
                numbers[num_lookups] = number
                ends[number] += np.uint32(1)
                num_lookups += _ONE
            source += segments.widths[segment]
    return num_rows, num_lookups


@kernel_part
def place_lookups(found: SortedLookups, num_rows: np.uint64, num_lookups: np.uint64) -> None:
    """Sort the lookups by row number, and set `ends` to where the lookups of each row end."""
    ends, is_scaled = found.ends, len(found.scales) > 0
    place = np.uint32(0)
    for row_number in range(num_rows):
        count = ends[row_number]
        ends[row_number] = place
        place += count
    for lookup in range(num_lookups):
        number = np.uint64(found.numbers[lookup])
        place = ends[number]
        found.sources_by_row[np.uint64(place)] = found.sources[lookup]
        if is_scaled:
            found.scales_by_row[np.uint64(place)] = found.scales[lookup]
        ends[number] = place + np.uint32(1)
    found.sources_by_row[num_lookups : num_lookups + LOOKUPS_AHEAD] = 0
