"""Columns of encoded rows in memory: an array, or bags of values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Bags", "Columns"]


class Bags(NamedTuple):
    """A bag of values for each of n rows.

    Attributes:
        values: Row by row: int32, or float32 if they are weights of another column.
        lengths: How many values each row has.
        weights: A weight for each value; None for 1.

    Shape:
        values, weights (v,); lengths (n,), with sum v.
    """

    values: NDArray[Any]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None

    def take(self, rows: NDArray[np.int64]) -> Bags:
        """The bags of the given rows, in the given order."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        lengths = self.lengths[rows]
        starts = ends[rows] - lengths
        first = np.cumsum(lengths, dtype=np.int64) - lengths
        places = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - first, lengths)
        weights = None if self.weights is None else self.weights[places]
        return Bags(self.values[places], lengths, weights)


Columns = dict[str, "NDArray[Any] | Bags"]
