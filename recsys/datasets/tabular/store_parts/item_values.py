"""Finds columns that have one value for each item, such as its genre.

A negative is its positive with another item. A column that belongs to the item but stays as it was
no longer fits the item, and so tells the negatives from the positives. It must change with the
item, or be left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys.datasets.tabular.encoding.row_encoder import Bags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["ItemValues"]


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
        return [name for name, each in values.items() if (each != each[0]).any()]


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
