"""Sort the lookups of one table by row, for an update that goes row by row.

    number_rows     numbers the rows by first appearance with a hash table, and counts the lookups
                    of each row
    place_lookups   sorts the lookups by row number; a row's lookups stay in lookup order

`number_rows` prefetches each gradient as soon as it knows the address, long before gradients are
summed. Sorting works in the caches, so memory is idle otherwise.

Letters: T tables, S segments (a lookup of a ledger entry), E entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys._support.hashing import GOLDEN
from recsys._support.jit import inlined_part, kernel_part
from recsys.embeddings.kernels.cpu.intrinsics.addresses import array_at
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import prefetch
from recsys.embeddings.kernels.cpu.lookup import INT32

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "LOOKUPS_AHEAD",
    "Segments",
    "SortedLookups",
    "ids_of",
    "make_room",
    "number_rows",
    "place_lookups",
]

# Gradients are prefetched again this many lookups ahead, into the nearest cache. The sorted lookups
# end with as many zeros.
LOOKUPS_AHEAD = np.uint64(32)
_ONE = np.uint64(1)


class Segments(NamedTuple):
    """What the ledger has of each table.

    Attributes:
        entries_8E: Of each entry: the address of its ids, N, B, bags (0 if bag i is id i), where
            its gradient begins, the gradient's stride, 1 if bags are averaged, and the address of
            its weights or 0.
        parts_3S: Of each lookup in an entry, by table: the entry, the feature's position, and the
            first column. A table's lookups are in the order of the entries.
        of_table: Where each table's lookups begin, (T + 1,).
    """

    entries_8E: NDArray[np.uint64]
    parts_3S: NDArray[np.uint64]
    of_table: NDArray[np.uint64]


class SortedLookups(NamedTuple):
    """Buffers for the lookups of one table; large enough for the table with the most lookups."""

    numbers: NDArray[np.uint32]  # of each lookup: the number of its row
    sources: NDArray[np.uint64]  # of each lookup: where its gradient begins
    scales: NDArray[Any]  # of each lookup: its factor; empty if all are 1
    hash_table: NDArray[np.uint32]  # row number + 1; 0 if free
    rows: NDArray[np.uint64]  # of each number: the row
    slots: NDArray[np.int32]  # of each number: the row's slot, or negative; empty without a row map
    ends: NDArray[np.uint32]  # of each number: where its lookups end in the arrays below
    sources_by_row: NDArray[np.uint64]  # sources sorted by row, and `LOOKUPS_AHEAD` zeros
    scales_by_row: NDArray[Any]  # scales sorted by row


@kernel_part
def make_room(
    most: np.int64, is_scaled: bool, is_tiered: bool, gradient: NDArray[Any]
) -> SortedLookups:
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
        np.empty(most if is_tiered else 0, np.int32),
        np.empty(most, np.uint32),
        np.empty(most + LOOKUPS_AHEAD, np.uint64),
        np.empty(num_scales, gradient.dtype),
    )


@inlined_part
def ids_of(segments: Segments, entry: np.uint64) -> Any:
    """The ids of an entry and, after them, where its bags begin."""
    size: Any = segments.entries_8E[1, entry] + segments.entries_8E[3, entry] + _ONE
    address: Any = segments.entries_8E[0, entry]
    return array_at(np.int64(address), np.int64(size), INT32)  # type: ignore[arg-type]


@inlined_part
def number_rows(
    segments: Segments,
    table: np.uint64,
    share: np.uint64,
    num_shares: np.uint64,
    gradient: NDArray[Any],
    num_lines: np.uint64,
    line: np.uint64,
    found: SortedLookups,
) -> tuple[np.uint64, np.uint64]:
    """Number the rows that one table's lookups name, and count the lookups of each row.

    If threads share a table, each processes the rows of one share, chosen by a hash of the row.
    Inlined, so that `num_lines` is a constant: a prefetch loop of unknown length is unrolled 32
    times.

    Args:
        segments: The lookups of all tables.
        table: The table.
        share: Number of the share, from 0.
        num_shares: 1 if the table is not shared.
        gradient: The gradients of all entries, one-dimensional.
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
    for segment in range(segments.of_table[table], segments.of_table[table + _ONE]):
        entry, position, column = segments.parts_3S[:, segment]
        _, num_ids, num_samples, num_bags, source, stride, is_mean, weights_at = (
            segments.entries_8E[:, entry]
        )
        kept = ids_of(segments, entry)
        address: Any = np.int64(weights_at)
        weights = array_at(address, np.int64(num_ids) if weights_at else np.int64(0), gradient)  # type: ignore[arg-type]
        is_one_hot = num_bags == 0
        source += column
        first_bag = position * num_samples
        for bag in range(first_bag, first_bag + num_samples):
            begin, end = np.uint64(bag), np.uint64(bag + _ONE)
            if not is_one_hot:
                begin = np.uint64(kept[num_ids + bag])
                end = np.uint64(kept[num_ids + bag + _ONE])
            for n in range(begin, end):
                row = np.uint64(kept[n])
                spread = row * GOLDEN
                # Not by the bits that give the location in the hash table.
                if num_shares > _ONE and (spread & np.uint64(0xFFFF)) % num_shares != share:
                    continue
                sources[num_lookups] = source
                for of_line in range(num_lines):
                    prefetch(gradient, source + of_line * line)
                if is_scaled:
                    scale = scales.dtype.type(1)
                    if len(weights):
                        scale = weights[n]
                    if is_mean:
                        scale /= scales.dtype.type(end - begin)
                    scales[num_lookups] = scale
                slot = spread >> shift
                number = np.uint64(hash_table[slot])
                while number != 0 and rows[number - _ONE] != row:
                    slot = (slot + _ONE) & mask
                    number = np.uint64(hash_table[slot])
                if number == 0:
                    rows[num_rows] = row
                    ends[num_rows] = 0
                    num_rows += _ONE
                    hash_table[slot] = num_rows
                    number = num_rows
                number -= _ONE
                numbers[num_lookups] = number
                ends[number] += np.uint32(1)
                num_lookups += _ONE
            source += stride
    return num_rows, num_lookups


@kernel_part
def place_lookups(found: SortedLookups, num_rows: np.uint64, num_lookups: np.uint64) -> None:
    """Sort the lookups by row number, and set `ends` to where the lookups of each row end."""
    ends, is_scaled = found.ends, len(found.scales) > 0
    position = np.uint32(0)
    for row_number in range(num_rows):
        count = ends[row_number]
        ends[row_number] = position
        position += count
    for lookup in range(num_lookups):
        number = np.uint64(found.numbers[lookup])
        position = ends[number]
        found.sources_by_row[np.uint64(position)] = found.sources[lookup]
        if is_scaled:
            found.scales_by_row[np.uint64(position)] = found.scales[lookup]
        ends[number] = position + np.uint32(1)
    found.sources_by_row[num_lookups : num_lookups + LOOKUPS_AHEAD] = 0
