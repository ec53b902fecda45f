"""From encoded rows to what a store holds: rows of tables, and float32 dense features."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.jit import kernel
from recsys.datasets.tabular.encoding.numbering import MISSING
from recsys.datasets.tabular.encoding.row_encoder import GROUP, LABEL, NO_LABEL, TIME, WEIGHT, Bags
from recsys.datasets.tabular.schemas.schema_parts import CategoricalColumn
from recsys.errors import DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from recsys.batch import Batch
    from recsys.datasets.tabular.encoding.dense import DenseRule
    from recsys.datasets.tabular.encoding.row_encoder import Columns
    from recsys.datasets.tabular.schemas.schema import Schema

__all__ = ["RowMaker", "StoreRows", "TableRows"]


@dataclass(frozen=True)
class TableRows:
    """The rows of a table.

    Attributes:
        num_rows: How many.
        row_of: The row of each number, 0 for rare values, (num_values,); None for a hashed table,
            whose numbers are rows.
    """

    num_rows: int
    row_of: NDArray[np.int32] | None


@dataclass(frozen=True)
class StoreRows:
    """n rows of a store.

    Attributes:
        dense: Dense features, (n, I) float32.
        features: For each feature, in the order of the store: its rows (n,) int32, or bags.
        labels: 0 or 1, (n,) int8, and `NO_LABEL` for rows to predict that have none; None if no
            row has one.
        weights: Of each row, (n,) float32; None if the schema has none.
        groups: Of each row, (n,) int32; None if the schema has none.
        times: Seconds since 1970, (n,) int64; None if the schema has none.
    """

    dense: NDArray[np.float32]
    features: dict[str, NDArray[np.int32] | Bags]
    labels: NDArray[np.int8] | None
    weights: NDArray[np.float32] | None = None
    groups: NDArray[np.int32] | None = None
    times: NDArray[np.int64] | None = None

    def take(self, rows: NDArray[np.int64]) -> StoreRows:
        """The given rows, in the given order; a row may be given several times."""

        def taken(array: NDArray[Any] | None) -> NDArray[Any] | None:
            return None if array is None else array[rows]

        return StoreRows(
            self.dense[rows],
            {
                name: each.take(rows) if isinstance(each, Bags) else each[rows]
                for name, each in self.features.items()
            },
            *map(taken, (self.labels, self.weights, self.groups, self.times)),
        )

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """The arguments of `StoreWriter.append`."""
        num_rows = len(self.dense)
        ones = [each for each in self.features.values() if not isinstance(each, Bags)]
        bags = [each for each in self.features.values() if isinstance(each, Bags)]
        sparse = np.empty((num_rows, len(ones)), np.int32)
        for column, rows in enumerate(ones):
            sparse[:, column] = rows
        arrays: dict[str, NDArray[Any] | None] = {
            "labels": self.labels,
            "dense": self.dense,
            "sparse": sparse,
            "weights": self.weights,
            "groups": self.groups,
            "times": self.times,
        }
        if bags:
            lengths = np.stack([each.lengths for each in bags], axis=1)
            starts = (np.cumsum(lengths, dtype=np.int64) - lengths.ravel()).reshape(lengths.shape)

            def woven(parts: list[NDArray[Any]]) -> NDArray[Any]:
                whole = np.empty(int(lengths.sum()), parts[0].dtype)
                for column, (part, each) in enumerate(zip(parts, bags, strict=True)):
                    _weave_kernel(part, each.lengths, starts[:, column].copy(), whole)
                return whole

            arrays |= {"bag_values": woven([each.values for each in bags]), "bag_lengths": lengths}
            if self._has_bag_weights:
                arrays["bag_weights"] = woven([_weights_of(each) for each in bags])
        return {name: array for name, array in arrays.items() if array is not None}

    def as_batch(self) -> Batch:
        """A mini-batch with the features in the order of the store, and `NO_LABEL` for no label."""
        import torch

        from recsys.batch import Batch, JaggedIds

        num_rows = len(self.dense)
        values = [
            each.values if isinstance(each, Bags) else each for each in self.features.values()
        ]
        lengths = [
            each.lengths if isinstance(each, Bags) else np.ones(num_rows, np.int32)
            for each in self.features.values()
        ]
        offsets = np.zeros(len(lengths) * num_rows + 1, np.int64)
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
        weights: torch.Tensor | None = None
        if self._has_bag_weights:
            of_features = [_weights_of(each) for each in self.features.values()]
            weights = torch.from_numpy(np.concatenate(of_features))
        labels = np.full(num_rows, NO_LABEL, np.int8) if self.labels is None else self.labels
        return Batch(
            torch.from_numpy(self.dense),
            JaggedIds(
                list(self.features),
                torch.from_numpy(np.concatenate(values).astype(np.int64)),
                torch.from_numpy(offsets),
                weights,
            ),
            torch.from_numpy(labels.astype(np.float32)),
            None if self.weights is None else torch.from_numpy(self.weights),
        )

    @property
    def _has_bag_weights(self) -> bool:
        return any(
            isinstance(each, Bags) and each.weights is not None for each in self.features.values()
        )


def _weights_of(feature: NDArray[np.int32] | Bags) -> NDArray[np.float32]:
    """The weight of each row that a feature looks up."""
    if not isinstance(feature, Bags):
        return np.ones(len(feature), np.float32)
    if feature.weights is None:
        return np.ones(len(feature.values), np.float32)
    return feature.weights


@dataclass
class RowMaker:
    """Turns encoded columns into rows of a store.

    Attributes:
        schema: What the columns mean.
        tables: The rows of each table.
        dense: The rule of each dense column.
        unknown: How many values of each column shared row 0 so far, missing ones aside; of numbered
            columns only.
    """

    schema: Schema
    tables: Mapping[str, TableRows]
    dense: Mapping[str, DenseRule]
    unknown: dict[str, int] = field(default_factory=dict)

    def make(
        self,
        columns: Columns,
        histories: Mapping[str, Bags] | None = None,
        *,
        place: Callable[[int], str],
    ) -> StoreRows:
        """The rows of a store.

        Args:
            columns: Encoded columns.
            histories: The encoded bag of each history.
            place: Names a row of these, by its number from 0, in messages, such as "a.csv, line
                7".

        Raises:
            DatasetFormatError: a dense feature is too large for float32.
        """
        first = next(iter(columns.values()))
        num_rows = len(first.lengths if isinstance(first, Bags) else first)
        dense = np.empty((num_rows, len(self.dense)), np.float32)
        for column, (name, rule) in enumerate(self.dense.items()):
            values = columns[name]
            assert not isinstance(values, Bags)
            dense[:, column] = rule.apply(values)
            if not np.isfinite(dense[:, column]).all():
                row = int(np.argmin(np.isfinite(dense[:, column])))
                raise DatasetFormatError(
                    f"{place(row)}, column {name!r}: dense features are float32, and transform "
                    f"{rule.transform!r} makes a larger number of {values[row]}; correct it, or "
                    'set transform = "log"'
                )
        features: dict[str, NDArray[np.int32] | Bags] = {}
        for feature in self.schema.features:
            history = self.schema.history.get(feature.name)
            if history is not None:
                assert histories is not None
                features[feature.name] = self._rows(
                    histories[feature.name], history.of, count=False
                )
            else:
                features[feature.name] = self._rows(columns[feature.name], feature.name)
        for name, weighted in self.schema.weights_of.items():
            rows, weights = features[weighted], columns[name]
            assert isinstance(rows, Bags)
            assert isinstance(weights, Bags)
            features[weighted] = rows._replace(weights=weights.values)
        return StoreRows(
            dense,
            features,
            *(columns.get(role) for role in (LABEL, WEIGHT, GROUP, TIME)),  # type: ignore[arg-type]
        )

    def rows_of(self, numbers: NDArray[np.int32], column: str) -> NDArray[np.int32]:
        """The rows of the values of a column, without counting unknown ones; of the same shape."""
        rows = self._rows(numbers, column, count=False)
        assert not isinstance(rows, Bags)
        return rows

    def _rows(
        self, numbers: NDArray[np.int32] | Bags, column: str, *, count: bool = True
    ) -> NDArray[np.int32] | Bags:
        rules = self.schema.value_columns[column]
        row_of = self.tables[rules.table or column].row_of
        if row_of is None:
            return numbers
        flat = numbers.values if isinstance(numbers, Bags) else numbers
        rows = np.empty(len(flat), np.int32)
        has_own = isinstance(rules, CategoricalColumn) and rules.missing == "own"
        num_unknown = _rows_kernel(flat, row_of, 1 if has_own else 0, rows)
        if count:
            self.unknown[column] = self.unknown.get(column, 0) + num_unknown
        return Bags(rows, numbers.lengths) if isinstance(numbers, Bags) else rows


@kernel
def _rows_kernel(
    numbers: NDArray[np.int32],
    row_of: NDArray[np.int32],
    missing_row: int,
    rows: NDArray[np.int32],
) -> int:
    """Replace numbers by rows; returns how many values that are not missing have row 0."""
    num_unknown = 0
    for position, number in enumerate(numbers):
        row = np.int32(0)
        if number >= 0:
            row = row_of[number]
        elif number == MISSING:
            rows[position] = missing_row
            continue
        num_unknown += row == 0
        rows[position] = row
    return num_unknown


@kernel
def _weave_kernel(
    values: NDArray[Any],
    lengths: NDArray[np.int32],
    starts: NDArray[np.int64],
    woven: NDArray[Any],
) -> None:
    """Copy the bag of each row to its start."""
    begin = 0
    for row in range(len(lengths)):
        for place in range(lengths[row]):
            woven[starts[row] + place] = values[begin + place]
        begin += lengths[row]
