"""The lookups of one table sorted by row: what an update goes through, row by row.

    number_rows     a hash table numbers the rows as they appear; lookups are counted by number
    place_lookups   and put in their places in order: a row's lookups stand together then, in
                    lookup order

Gradients are asked for as soon as it is known where they lie, long before they are summed: what is
sorted lies in the caches, so memory has nothing else to do. Whoever calls may ask for rows between
the two.

Numbers that index are unsigned, for the reason given in `pooled_lookup`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys.embeddings.kernels.prefetch import prefetch
from recsys.jit import kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.kernels.ledger import Segments

__all__ = [
    "LOOKUPS_AHEAD",
    "LookupValues",
    "SortedLookups",
    "make_room",
    "number_rows",
    "place_lookups",
]

# So far ahead gradients are asked for once more, for the nearest cache; there are as many zeros
# behind the sorted lookups.
LOOKUPS_AHEAD = np.uint64(32)
# 2**64 / golden ratio: spreads neighbouring rows over the hash table.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)


class LookupValues(NamedTuple):
    """What was looked up: `Bags` with other arrays in place of None."""

    rows: NDArray[Any]  # (N,)
    offsets: NDArray[Any]
    weights: NDArray[Any]
    is_one_hot: bool
    has_weights: bool
    is_mean: bool


class SortedLookups(NamedTuple):
    """The lookups of one table; room for those of the table that has most."""

    numbers: NDArray[np.uint32]  # by lookup: the number of its row
    sources: NDArray[np.uint64]  # by lookup: where its gradient begins
    scales: NDArray[Any]  # by lookup: its factor; empty where all are 1
    hash_table: NDArray[np.uint32]  # by hash: the number of a row, plus 1; 0 for none
    rows: NDArray[np.uint64]  # by number
    ends: NDArray[np.uint32]  # by number: where the row's lookups end in the arrays below
    sources_by_row: NDArray[np.uint64]  # and as many zeros as are asked for ahead of time
    scales_by_row: NDArray[Any]


@kernel
def make_room(most: np.int64, is_scaled: bool, gradient: NDArray[Any]) -> SortedLookups:
    """For a table's lookups; the hash table stays at most half full."""
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


@kernel
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
    """Number the rows of one share that one table's lookups name, and count the lookups of each.

    Args:
        segments: Of all tables.
        values: What was looked up.
        first_segment: Of the table.
        end_segment: Behind its last one.
        share: Rows are shared out by a hash of theirs.
        num_shares: 1 where they are not.
        gradient: One-dimensional.
        num_lines: How many cache lines of it a lookup's gradient lies in.
        line: How many numbers of it a cache line holds.
        found: What is found, with the number of each row's lookups in `ends`.

    Returns:
        How many rows there are, and how many lookups.
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
                begin = np.uint64(values.offsets[bag])
                end = np.uint64(values.offsets[bag + _ONE])
            for position in range(begin, end):
                row = np.uint64(values.rows[position])
                spread = row * _GOLDEN
                # By other bits than the place in the hash table.
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


@kernel
def place_lookups(found: SortedLookups, num_rows: np.uint64, num_lookups: np.uint64) -> None:
    """Put lookups in their places, row by row; `ends` says where each row's end."""
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
