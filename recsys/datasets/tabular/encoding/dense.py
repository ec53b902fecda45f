"""Dense columns: missing values are filled in, then the column is transformed.

Statistics are those of the training part: the mean of the values that are there, and, after missing
values are filled in, the mean and the deviation of all. They are computed in float64, block by
block, by the update of Chan, Golub and LeVeque, and kept in the store's `meta.json`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from recsys.errors import DatasetFormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DenseRule", "Moments"]

_ROUNDING = 1e-13


@dataclass
class Moments:
    """Count, mean and summed squared distance from the mean of the values so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    num_missing: int = 0

    def add(self, values: NDArray[np.float64]) -> None:
        """Add a block of values; missing ones are NaN."""
        there = values[~np.isnan(values)]
        self.num_missing += len(values) - len(there)
        if len(there):
            mean = float(there.mean())
            self._merge(len(there), mean, float(np.square(there - mean).sum()))

    def filled(self, fill: float) -> Moments:
        """The moments of all values, each missing one being `fill`."""
        whole = Moments(self.count, self.mean, self.squares)
        whole._merge(self.num_missing, fill, 0.0)
        return whole

    def _merge(self, count: int, mean: float, squares: float) -> None:
        if count:
            total = self.count + count
            step = mean - self.mean
            self.squares += squares + step * step * (self.count / total) * count
            self.mean += step * (count / total)
            self.count = total


@dataclass(frozen=True)
class DenseRule:
    """What happens to the values of a column.

    Attributes:
        transform: "none"; "log": log(1 + max(x, 0)); "standardize": (x - mean) / deviation, and
            x - mean if the deviation is 0.
        fill: Replaces a missing value, before the transform.
        mean: Of the filled training part; used by "standardize".
        deviation: Of the filled training part (divided by the count, not by one less).
    """

    transform: str
    fill: float
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, name: str, transform: str, missing: float | str, moments: Moments) -> DenseRule:
        """The rule of a column.

        Args:
            name: The column, for messages.
            transform: See the attribute.
            missing: A number, or "mean" or "error".
            moments: Of the training part.

        Raises:
            DatasetFormatError: the mean is needed, and the training part has no value.
        """
        if missing == "mean" and not moments.count:
            raise DatasetFormatError(
                f"column {name!r}: missing values take the mean of the training part, which has "
                "no value in this column; set missing to a number, or ignore the column"
            )
        fill = moments.mean if missing == "mean" else 0.0 if missing == "error" else float(missing)
        filled = moments.filled(fill)
        deviation = math.sqrt(filled.squares / filled.count) if filled.count else 0.0
        if deviation <= _ROUNDING * abs(filled.mean):  # equal values, and rounding
            deviation = 0.0
        return cls(transform, fill, filled.mean, deviation)

    def apply(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """The features of the given values, of the same shape; missing ones are NaN."""
        filled = np.where(np.isnan(values), self.fill, values)
        if self.transform == "log":
            filled = np.log1p(np.maximum(filled, 0.0))
        elif self.transform == "standardize":
            filled = (filled - self.mean) / (self.deviation or 1.0)
        with np.errstate(over="ignore"):  # the caller refuses infinite features, by name
            return filled.astype(np.float32)
