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

`belongs_to_items` finds a column that has one value for each item, such as its genre. A negative
is its positive with another item. A column that belongs to the item but stays as it was no longer
fits the item, and so tells the negatives from the positives. It must change with the item, or be
left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys._support.jit import kernel, kernel_part
from recsys.datasets.tabular.encode import Bags

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.datasets.tabular.schema import Negatives

__all__ = ["NO_ITEM", "Sampler", "belongs_to_items", "numbers_of"]

_MAX_DRAWS: Final = 256
_POWER: Final = 0.75
NO_ITEM: Final = -1


class Sampler:
    """Draws negatives.

    Args:
        items: The item of each row of the training part.
        owners: The owner of each of them: its group, or its item.
        keys: How many are drawn, and by which chances.
        first_row: Rows of the items' table before it are no items.

    Shape:
        items, owners (N,).
    """

    def __init__(
        self,
        items: NDArray[np.int32],
        owners: NDArray[np.int32],
        keys: Negatives,
        first_row: int,
    ) -> None:
        counts = np.bincount(items)
        drawn = np.flatnonzero(counts)
        self._items = drawn[drawn >= first_row].astype(np.int32)
        self._ends = np.cumsum(counts[self._items] ** (0.0 if keys.by == "uniform" else _POWER))
        pairs = (owners.astype(np.int64) << 32) | items
        pairs.sort()
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        num_owners = int(pairs[-1] >> 32) + 1 if len(pairs) else 0
        self._known = (pairs & 0xFFFFFFFF).astype(np.int32)  # owner by owner
        self._starts = np.searchsorted(pairs, np.arange(num_owners + 1, dtype=np.int64) << 32)
        self._per_positive = keys.per_positive
        self._seed = mix64(np.array([keys.seed], np.uint64))[0]

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
        of_items = self._items, self._ends, self._starts, self._known
        _draw_kernel(rows, owners, *of_items, self._seed, drawn)
        return drawn


def belongs_to_items(items: NDArray[np.int32], values: NDArray[np.float64]) -> bool:
    """Whether a column has one value for each item, and not the same one for all.

    False if no item comes twice: then every column has one value for each item.

    Args:
        items: The item of each row.
        values: The value of each row, a number.

    Shape:
        items, values (n,).
    """
    if not len(items) or np.bincount(items).max() == 1:
        return False
    of_items = np.zeros(items.max() + 1)
    of_items[items] = values  # of several rows of an item, one
    return bool((of_items[items] == values).all() and (values != values[0]).any())


def numbers_of(column: NDArray[Any] | Bags) -> NDArray[np.float64]:
    """A number for each row; equal values and equal bags have equal ones. So have missing ones."""
    if isinstance(column, Bags):
        hashes = mix64(column.values.astype(np.uint64) + GOLDEN)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes)])
        ends = np.cumsum(column.lengths, dtype=np.int64)
        of_bags: NDArray[np.uint64] = sums[ends] - sums[ends - column.lengths]
        return of_bags.astype(np.float64)
    return np.nan_to_num(column.astype(np.float64), nan=np.inf)  # nan would differ from itself


_mix64: Any = kernel(mix64)  # of one number


@kernel_part
def _is_known(items: NDArray[np.int32], begin: int, end: int, item: int) -> bool:
    index = begin + np.searchsorted(items[begin:end], item)
    return bool(index < end and items[index] == item)


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
            item, index = NO_ITEM, np.int64(0)
            for _ in range(_MAX_DRAWS if len(items) else 0):
                state += GOLDEN
                uniform = np.float64(_mix64(state) >> np.uint64(11)) * 2.0**-53
                index = np.searchsorted(ends, uniform * ends[-1], side="right")
                index = min(index, np.int64(len(items) - 1))
                if not _is_known(known, begin, end, items[index]):
                    item = items[index]
                    break
            if item == NO_ITEM:
                for step in range(len(items)):
                    candidate = items[(index + step) % len(items)]
                    if not _is_known(known, begin, end, candidate):
                        item = candidate
                        break
            drawn[position, number] = item
