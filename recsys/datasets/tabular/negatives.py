"""Negatives for data that has positives only: the same row with another item.

For each positive of the training part, k items are drawn among those that the training part has: by
equal chances, or by training counts ** 0.75. An item that the positive's group has in any part is
drawn again. The draws of a row depend on the seed, its row number and the items alone:

    state(row, number) = mix64(mix64(mix64(seed) + row) + number)
    draw(row, number, d) = mix64(state(row, number) + (d + 1) * GOLDEN)        d = 0, 1, ...

The upper 53 bits of a draw, divided by 2**53, are uniform in [0, 1). If all of `_MAX_DRAWS` draws
find items of the group, the next item in the table that the group lacks is taken. A group that has
all items gets `NO_ITEM`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys._support.jit import kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NO_ITEM", "ItemCatalog", "KnownPositives", "Sampler"]

_MAX_DRAWS: Final = 256
_POWER: Final = 0.75
NO_ITEM: Final = -1


class ItemCatalog:
    """Training counts of each item, and the rows of the columns that belong to it.

    Args:
        num_rows: Rows of the item's table, E.
        num_columns: Columns that change with the item, C.

    Attributes:
        counts: How often each item appears in the training part, (E,).
        rows: What each item's columns look up, as last seen there, (E, C); 0 for other items.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.counts = np.zeros(num_rows, np.int64)
        self.rows = np.zeros((num_rows, num_columns), np.int32)

    def add(self, items: NDArray[np.int32], columns: NDArray[np.int32]) -> None:
        """Add training rows, in file order: items (n,); columns (n, C)."""
        _catalog_kernel(items, columns, self.counts, self.rows)


class KnownPositives:
    """The items of each group, in any part.

    Args:
        groups: The group of each row.
        items: The item of each row.

    Shape:
        groups, items (N,).
    """

    def __init__(self, groups: NDArray[np.int32], items: NDArray[np.int32]) -> None:
        pairs = (groups.astype(np.int64) << 32) | items
        pairs.sort()
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        num_groups = int(pairs[-1] >> 32) + 1 if len(pairs) else 0
        self.items = (pairs & 0xFFFFFFFF).astype(np.int32)
        self.starts = np.searchsorted(pairs, np.arange(num_groups + 1, dtype=np.int64) << 32)


class Sampler:
    """Draws negatives.

    Args:
        catalog: The training part.
        known: The items of each group.
        by: "uniform" or "popularity".
        per_positive: Negatives for each positive, k.
        seed: Of all draws.
        first_row: Rows before it are no items.
    """

    def __init__(
        self,
        catalog: ItemCatalog,
        known: KnownPositives,
        *,
        by: str,
        per_positive: int,
        seed: int,
        first_row: int,
    ) -> None:
        items = np.flatnonzero(catalog.counts)
        self._items = items[items >= first_row].astype(np.int32)
        counts = catalog.counts[self._items]
        chances = np.ones(len(counts)) if by == "uniform" else counts**_POWER
        self._ends = np.cumsum(chances)
        self._known = known
        self._per_positive = per_positive
        self._seed = mix64(np.array([seed], np.uint64))[0]

    def draw(self, rows: NDArray[np.int64], groups: NDArray[np.int32]) -> NDArray[np.int32]:
        """Draw the negatives of some positives.

        Args:
            rows: Their row numbers.
            groups: Their groups.

        Returns:
            Items, or `NO_ITEM` where the group has all items.

        Shape:
            rows, groups (n,); result (n, k).
        """
        drawn = np.empty((len(rows), self._per_positive), np.int32)
        _draw_kernel(
            rows,
            groups,
            self._items,
            self._ends,
            self._known.starts,
            self._known.items,
            self._seed,
            drawn,
        )
        return drawn


@kernel
def _catalog_kernel(
    items: NDArray[np.int32],
    columns: NDArray[np.int32],
    counts: NDArray[np.int64],
    rows: NDArray[np.int32],
) -> None:
    for position, item in enumerate(items):
        counts[item] += 1
        for column in range(columns.shape[1]):
            rows[item, column] = columns[position, column]


@kernel
def _mixed(bits: np.uint64) -> np.uint64:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@kernel
def _is_known(items: NDArray[np.int32], begin: int, end: int, item: int) -> bool:
    place = begin + np.searchsorted(items[begin:end], item)
    return bool(place < end and items[place] == item)


@kernel
def _draw_kernel(
    rows: NDArray[np.int64],
    groups: NDArray[np.int32],
    items: NDArray[np.int32],
    ends: NDArray[np.float64],
    starts: NDArray[np.int64],
    known: NDArray[np.int32],
    seed: np.uint64,
    drawn: NDArray[np.int32],
) -> None:
    for position in range(len(rows)):
        begin, end = starts[groups[position]], starts[groups[position] + 1]
        for number in range(drawn.shape[1]):
            state = _mixed(_mixed(seed + np.uint64(rows[position])) + np.uint64(number))
            item, place = NO_ITEM, np.int64(0)
            for _ in range(_MAX_DRAWS if len(items) else 0):
                state += GOLDEN
                uniform = np.float64(_mixed(state) >> np.uint64(11)) * 2.0**-53
                place = np.searchsorted(ends, uniform * ends[-1], side="right")
                place = min(place, np.int64(len(items) - 1))
                if not _is_known(known, begin, end, items[place]):
                    item = items[place]
                    break
            if item == NO_ITEM:
                for step in range(len(items)):
                    candidate = items[(place + step) % len(items)]
                    if not _is_known(known, begin, end, candidate):
                        item = candidate
                        break
            drawn[position, number] = item
