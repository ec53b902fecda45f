"""Negatives for data that has positives only: the same row with another item.

For each positive of the training part, k items are drawn among those that the training part has: by
equal chances, or by training counts ** 0.75. A drawn item that is a training positive of the row's
owner is replaced by the next draw. Owners are chosen so that no feature tells negatives from
positives:

    the schema has                      owner of a row     never drawn
    ----------------------------------  -----------------  --------------------------------------
    no history of the item              its group          items of the group's training rows
    a history of the item               its own item       its own item

With a history, the second rule is needed: if items of the history were never negatives, "the item
is in the history" would mark positives. Rows of test and validation are not looked at: an answer
that is never drawn as a negative would be marked by that.

The draws of a row depend on the seed, its row number and the items alone:

    state(row, number) = mix64(mix64(mix64(seed) + row) + number)
    draw(row, number, d) = mix64(state(row, number) + (d + 1) * GOLDEN)        d = 0, 1, ...

The upper 53 bits of a draw, divided by 2**53, are uniform in [0, 1). If all `_MAX_DRAWS` draws find
positives of the owner, the next item in the table, after the last draw, that is none is taken. If
every item is one, there is no negative: `NO_ITEM`.

`ItemValues` finds columns that have one value for each item, such as its genre. A negative is its
positive with another item. A column that belongs to the item but stays as it was no longer fits the
item, and so tells the negatives from the positives. It must change with the item, or be left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys._support.jit import kernel, kernel_part
from recsys.datasets.tabular.encode import Bags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["NO_ITEM", "ItemCatalog", "ItemValues", "KnownPositives", "Sampler"]

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
    """The training positives of each owner.

    Args:
        owners: The owner of each row of the training part: its group, or its item.
        items: The item of each of them.

    Shape:
        owners, items (N,).
    """

    def __init__(self, owners: NDArray[np.int32], items: NDArray[np.int32]) -> None:
        pairs = (owners.astype(np.int64) << 32) | items
        pairs.sort()
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        num_owners = int(pairs[-1] >> 32) + 1 if len(pairs) else 0
        self.items = (pairs & 0xFFFFFFFF).astype(np.int32)
        self.starts = np.searchsorted(pairs, np.arange(num_owners + 1, dtype=np.int64) << 32)


class Sampler:
    """Draws negatives.

    Args:
        catalog: The training part.
        known: The training positives of each owner, which are not drawn for it.
        by: "uniform" or "popularity".
        per_positive: Negatives for each positive, k.
        seed: Of all draws.
        first_row: Rows before it are no items.

    Attributes:
        catalog: As given.
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
        self.catalog = catalog
        items = np.flatnonzero(catalog.counts)
        self._items = items[items >= first_row].astype(np.int32)
        counts = catalog.counts[self._items]
        chances = np.ones(len(counts)) if by == "uniform" else counts**_POWER
        self._ends = np.cumsum(chances)
        self._known = known
        self._per_positive = per_positive
        self._seed = mix64(np.array([seed], np.uint64))[0]

    def draw(self, rows: NDArray[np.int64], owners: NDArray[np.int32]) -> NDArray[np.int32]:
        """Draw the negatives of some positives.

        Args:
            rows: Their row numbers.
            owners: Their owners.

        Returns:
            Items, or `NO_ITEM` where each item is a positive of the owner.

        Shape:
            rows, owners (n,); result (n, k).
        """
        drawn = np.empty((len(rows), self._per_positive), np.int32)
        _draw_kernel(
            rows,
            owners,
            self._items,
            self._ends,
            self._known.starts,
            self._known.items,
            self._seed,
            drawn,
        )
        return drawn


class ItemValues:
    """Compares the values of columns in all rows of an item. Missing values are values.

    Args:
        names: The columns.
        num_items: Items are numbered below it.
    """

    def __init__(self, names: Sequence[str], num_items: int) -> None:
        self._is_seen = np.zeros(num_items, np.bool_)
        self._values = {name: np.zeros(num_items) for name in names}
        self._num_rows = 0

    def add(self, items: NDArray[Any], columns: Mapping[str, NDArray[Any] | Bags]) -> None:
        """Add rows: items (n,), and a value or a bag of each column for each of them.

        Rows whose item is negative are left out.
        """
        is_item = items >= 0
        items = items[is_item]
        is_new = ~self._is_seen[items]
        for name in list(self._values):
            values, kept = _as_numbers(columns[name])[is_item], self._values[name]
            kept[items[is_new]] = values[is_new]  # of several rows of an item, one
            if (kept[items] != values).any():
                del self._values[name]
        self._is_seen[items] = True
        self._num_rows += len(items)

    def found(self) -> list[str]:
        """The columns with one value for each item, and not the same one for all.

        Empty if no item came twice: then every column has one value for each item.
        """
        if self._num_rows <= np.count_nonzero(self._is_seen):
            return []
        values = {name: kept[self._is_seen] for name, kept in self._values.items()}
        return [name for name, kept in values.items() if (kept != kept[0]).any()]


def _as_numbers(column: NDArray[Any] | Bags) -> NDArray[np.float64]:
    """A number for each row; equal values and equal bags have equal ones."""
    if isinstance(column, Bags):
        hashes = mix64(column.values.astype(np.uint64) + GOLDEN)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes)])
        ends = np.cumsum(column.lengths, dtype=np.int64)
        of_bags: NDArray[np.uint64] = sums[ends] - sums[ends - column.lengths]
        return of_bags.astype(np.float64)
    numbers = column.astype(np.float64)
    return np.where(np.isnan(numbers), np.inf, numbers)  # nan would differ from itself


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


_mix64: Any = kernel(mix64)  # of one number


@kernel_part
def _is_known(items: NDArray[np.int32], begin: int, end: int, item: int) -> bool:
    place = begin + np.searchsorted(items[begin:end], item)
    return bool(place < end and items[place] == item)


@kernel
def _draw_kernel(
    rows: NDArray[np.int64],
    owners: NDArray[np.int32],
    items: NDArray[np.int32],
    ends: NDArray[np.float64],
    starts: NDArray[np.int64],
    known: NDArray[np.int32],
    seed: np.uint64,
    drawn: NDArray[np.int32],
) -> None:
    for position in range(len(rows)):
        begin, end = starts[owners[position]], starts[owners[position] + 1]
        for number in range(drawn.shape[1]):
            state = _mix64(_mix64(seed + np.uint64(rows[position])) + np.uint64(number))
            item, place = NO_ITEM, np.int64(0)
            for _ in range(_MAX_DRAWS if len(items) else 0):
                state += GOLDEN
                uniform = np.float64(_mix64(state) >> np.uint64(11)) * 2.0**-53
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
