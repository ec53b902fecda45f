"""Encodes rows of a table by a schema, and makes rows of a store of them.

    `RowEncoder`   a batch  ->  numbers for values, float64, seconds, 0/1 labels: what is spooled
    `RowMaker`     those    ->  rows of embedding tables, float32 features: what a store holds

Values of embedding tables get provisional numbers by first appearance in a column, block by block;
their rows are known only after the training part was counted. Hashed values get their rows at once.

Statistics of dense columns are those of the training part: the mean of the values that are there,
and, after missing values are filled in, the mean and the deviation of all. They are computed in
float64, block by block, by the update of Chan, Golub and LeVeque, and kept in the store's
`meta.json`.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from recsys._support.machine import num_cores
from recsys.datasets.tabular.numbering import (
    MISSING,
    HashedRows,
    Numbers,
)
from recsys.datasets.tabular.schema import ColumnSplit, MultiColumn, SequenceColumn
from recsys.errors import DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys.batch import Batch
    from recsys.datasets.tabular.schema import Schema, Table

__all__ = [
    "GROUP",
    "NO_LABEL",
    "PART",
    "TIME",
    "WEIGHT",
    "Bags",
    "Columns",
    "DenseRule",
    "Moments",
    "RowEncoder",
    "RowMaker",
    "StoreRows",
    "TableRows",
    "labels_of",
    "places_of",
    "roles_of",
    "woven",
]

# Spooled columns that are no features; a feature's column has the feature's name.
WEIGHT, GROUP, TIME, PART = "/weight", "/group", "/time", "/part"
# The label of a row whose label is missing, which only rows to predict may be.
NO_LABEL: Final = -1

_ROUNDING = 1e-13


class Bags(NamedTuple):
    """A bag of values for each of n rows.

    Attributes:
        values: Row by row.
        lengths: How many values each row has.

    Shape:
        values (v,); lengths (n,), with sum v.
    """

    values: NDArray[np.int32]
    lengths: NDArray[np.int32]

    @classmethod
    def of(cls, column: NDArray[Any] | Bags) -> Bags:
        """The bags of a column; one of one value each has (n,) values."""
        return column if isinstance(column, Bags) else cls(column, np.ones(len(column), np.int32))

    def take(self, rows: NDArray[np.int64]) -> Bags:
        """The bags of the given rows, in the given order."""
        begins, lengths = np.cumsum(self.lengths, dtype=np.int64) - self.lengths, self.lengths[rows]
        return Bags(self.values[places_of(begins[rows], lengths)], lengths)


Columns = dict[str, "NDArray[Any] | Bags"]


def places_of(begins: NDArray[np.int64], lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """The places of all values of bags: of each from its begin on, bag after bag.

    Shape:
        begins, lengths (n,); result (v,), v the sum of the lengths.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(
        begins - ends + lengths, lengths
    )


def woven(bags: Sequence[Bags]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The values of F columns, row by row, in a row column by column, and the lengths, (n, F)."""
    lengths = np.stack([bag.lengths for bag in bags], axis=1)
    begins = (np.cumsum(lengths, dtype=np.int64) - lengths.ravel()).reshape(lengths.shape)
    values = np.empty(int(lengths.sum()), np.int32)
    for column, bag in enumerate(bags):
        values[places_of(begins[:, column], bag.lengths)] = bag.values
    return values, lengths


def labels_of(schema: Schema) -> list[str]:
    """The encoded columns of labels."""
    return [f"/label/{number}" for number in range(len(schema.label_columns))]


def roles_of(schema: Schema) -> dict[str, str]:
    """The column of each role that the schema has: labels, weight, group, time, part."""
    columns = {
        **dict(zip(labels_of(schema), schema.label_columns, strict=True)),
        WEIGHT: schema.weight,
        GROUP: schema.group,
        TIME: schema.timestamp,
        PART: schema.split.column if isinstance(schema.split, ColumnSplit) else "",
    }
    return {role: column for role, column in columns.items() if column}


class RowEncoder:
    """Encodes record batches; use it as a context manager.

    Args:
        schema: What the columns mean.
        numbers: The numbering of each table.
        grow: New values get new numbers; otherwise they are `UNKNOWN`.
        without: Columns that the batches need not have: of a label, weight, and so on.
        num_threads: Tables are numbered in parallel; by default on all cores.

    Attributes:
        group_numbers: The numbering of the groups; None before the first batch.
    """

    def __init__(
        self,
        schema: Schema,
        numbers: Mapping[str, Numbers | HashedRows],
        *,
        grow: bool = True,
        without: Collection[str] = (),
        num_threads: int | None = None,
    ) -> None:
        self.schema = schema
        self.group_numbers: Numbers | None = None
        self._numbers = dict(numbers)
        self._grow = grow
        self._roles = {
            role: column for role, column in roles_of(schema).items() if role not in without
        }
        self._pool = ThreadPoolExecutor(num_threads or num_cores(), "recsys-encode")

    def encode(self, batch: pa.RecordBatch) -> Columns:
        """Encode a block of rows.

        Args:
            batch: Columns that `conform` made.

        Returns:
            An array for each column: (n,) float64 for dense columns, NaN where a value is missing;
            (n,) int32 numbers, `MISSING` or `UNKNOWN`, or bags of them; (n,) int8 labels,
            `NO_LABEL` where one is missing; (n,) bool for each condition of the schema.
        """
        tables = self._pool.map(lambda table: self._encode_table(table, batch), self.schema.tables)
        encoded: Columns = {role: self._role(role, batch) for role in self._roles}
        for name in self.schema.dense:
            encoded[name] = batch.column(name).to_numpy(zero_copy_only=False)
        for name in self.schema.conditions:
            encoded[name] = batch.column(name).to_numpy(zero_copy_only=False).astype(np.bool_)
        for columns in tables:
            encoded |= columns
        return encoded

    def _encode_table(self, table: Table, batch: pa.RecordBatch) -> Columns:
        numbers, encoded = self._numbers[table.name], {}
        for name in table.columns:
            rules, column = self.schema.value_columns[name], batch.column(name)
            values = column.flatten() if isinstance(rules, MultiColumn) else column
            found = self._number(values, numbers)
            encoded[name] = _bags(found, column, rules) if isinstance(rules, MultiColumn) else found
        return encoded

    def _number(self, values: pa.Array, numbers: Numbers | HashedRows) -> NDArray[np.int32]:
        import pyarrow as pa

        if isinstance(values, pa.DictionaryArray):  # each text is numbered once
            texts = pa.concat_arrays([values.dictionary, pa.nulls(1, pa.string())])
            places: NDArray[Any] = values.indices.fill_null(len(texts) - 1).to_numpy()
            return np.take(self._number(texts, numbers), places)
        if isinstance(numbers, HashedRows):
            return numbers.number(values)
        return numbers.number(values, grow=self._grow)

    def _role(self, role: str, batch: pa.RecordBatch) -> NDArray[Any]:
        column = batch.column(self._roles[role])
        if role == GROUP:
            return self._group(column)
        if role == PART:
            return self._part(column)
        if role.startswith("/label"):
            column = column.fill_null(NO_LABEL)
        found: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return found

    def _group(self, column: pa.Array) -> NDArray[np.int32]:
        """Numbers of groups: of integers if the first batch has integers, else of texts."""
        import pyarrow as pa

        if self.group_numbers is None:
            is_integer = pa.types.is_integer(column.type)
            self.group_numbers = Numbers(self._roles[GROUP], is_integer=is_integer)
        kind = pa.int64() if self.group_numbers.is_integer else pa.string()
        return self.group_numbers.number(column.cast(kind))

    def _part(self, column: pa.Array) -> NDArray[np.uint8]:
        """The code of the part of each row: the place of its list in `ColumnSplit`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        split = self.schema.split
        assert isinstance(split, ColumnSplit)
        known = pa.array([value for part in split.parts for value in part], pa.string())
        places = pc.index_in(column.cast(pa.string()), known).to_numpy(zero_copy_only=False)
        codes = np.repeat(np.arange(3, dtype=np.uint8), [len(part) for part in split.parts])
        found: NDArray[np.uint8] = codes[places]
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _bags(found: NDArray[np.int32], lists: pa.Array, rules: MultiColumn) -> Bags:
    """The bags of a column of lists, cut to `max_length`."""
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(False)
    lengths = lengths.astype(np.int32, copy=False)
    if not rules.max_length:
        return Bags(found, lengths)
    kept = np.minimum(lengths, np.int32(rules.max_length))
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - (kept if isinstance(rules, SequenceColumn) else lengths)
    return Bags(found[places_of(begins, kept)], kept)


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
        with np.errstate(over="ignore"):  # an infinite feature has no finite score
            return filled.astype(np.float32)


@dataclass(frozen=True)
class StoreRows:
    """n rows of a store.

    Attributes:
        dense: Dense features, (n, I) float32.
        features: For each feature, in the order of the store: its rows (n,) int32, or bags.
        others: Those that the rows have of "labels": 0 or 1, (n,) int8, or (n, K) with several
            labels, and `NO_LABEL` for rows to predict that have none; "weights", (n,) float32;
            "groups", (n,) int32; "times", seconds since 1970, (n,) int64.
    """

    dense: NDArray[np.float32]
    features: dict[str, NDArray[np.int32] | Bags]
    others: dict[str, NDArray[Any]]

    def take(self, rows: NDArray[np.int64]) -> StoreRows:
        """The given rows, in the given order; a row may be given several times."""
        return StoreRows(
            self.dense[rows],
            {
                name: found.take(rows) if isinstance(found, Bags) else found[rows]
                for name, found in self.features.items()
            },
            {name: array[rows] for name, array in self.others.items()},
        )

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """The arguments of `StoreWriter.append`."""
        ones = [found for found in self.features.values() if not isinstance(found, Bags)]
        bags = [found for found in self.features.values() if isinstance(found, Bags)]
        sparse = np.empty((len(self.dense), len(ones)), np.int32)
        for column, rows in enumerate(ones):
            sparse[:, column] = rows
        arrays = {"dense": self.dense, "sparse": sparse, **self.others}
        if bags:
            arrays["bag_values"], arrays["bag_lengths"] = woven(bags)
        return arrays

    def as_batch(self) -> Batch:
        """A mini-batch with the features in the order of the store, and `NO_LABEL` for no label."""
        import torch

        from recsys.batch import Batch, JaggedIds

        num_rows = len(self.dense)
        bags = [Bags.of(found) for found in self.features.values()]
        offsets = np.zeros(len(bags) * num_rows + 1, np.int64)
        np.cumsum(np.concatenate([bag.lengths for bag in bags]), out=offsets[1:])
        values = np.concatenate([bag.values for bag in bags]).astype(np.int64)
        labels = self.others.get("labels", np.full(num_rows, NO_LABEL, np.int8))
        return Batch(
            torch.from_numpy(self.dense),
            JaggedIds(list(self.features), torch.from_numpy(values), torch.from_numpy(offsets)),
            torch.from_numpy(labels.astype(np.float32)),
        )


class TableRows(NamedTuple):
    """The rows of a table.

    Attributes:
        num_rows: How many.
        row_of: The row of each number, 0 for rare values, and 0 for `UNKNOWN` and `MISSING` at the
            end, (num_values + 2,); None for a hashed table, whose numbers are rows.
    """

    num_rows: int
    row_of: NDArray[np.int32] | None


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

    def make(self, columns: Columns, histories: Mapping[str, Bags]) -> StoreRows:
        """The rows of a store.

        Args:
            columns: Encoded columns.
            histories: The encoded bag of each history.
        """
        num_rows = len(Bags.of(next(iter(columns.values()))).lengths)
        dense = np.empty((num_rows, len(self.dense)), np.float32)
        for column, (name, rule) in enumerate(self.dense.items()):
            dense[:, column] = rule.apply(np.asarray(columns[name]))
        features: dict[str, NDArray[np.int32] | Bags] = {}
        for feature in self.schema.features:
            history = self.schema.history.get(feature.name)
            if history is None:
                features[feature.name] = self._rows(columns[feature.name], feature.name)
                continue
            values, lengths = histories[feature.name]
            features[feature.name] = Bags(self.rows_of(values, history.of), lengths)
        roles = {"weights": WEIGHT, "groups": GROUP, "times": TIME}
        others: dict[str, Any] = {
            name: columns[role] for name, role in roles.items() if role in columns
        }
        labels = [columns[role] for role in labels_of(self.schema) if role in columns]
        if labels:
            others["labels"] = np.stack(labels, axis=1) if self.schema.labels else labels[0]
        return StoreRows(dense, features, others)

    def rows_of(self, numbers: NDArray[np.int32], column: str) -> NDArray[np.int32]:
        """The rows of the values of a column, without counting unknown ones; of the same shape."""
        return np.asarray(self._rows(numbers, column, count=False))

    def _rows(
        self, numbers: NDArray[np.int32] | Bags, column: str, *, count: bool = True
    ) -> NDArray[np.int32] | Bags:
        rules = self.schema.value_columns[column]
        row_of = self.tables[rules.table or column].row_of
        if row_of is None:
            return numbers
        flat = numbers.values if isinstance(numbers, Bags) else numbers
        rows, is_missing = row_of[flat], flat == MISSING
        if count:
            num_unknown = int(np.count_nonzero((rows == 0) & ~is_missing))
            self.unknown[column] = self.unknown.get(column, 0) + num_unknown
        if rules.has_missing_row:
            rows[is_missing] = 1
        return Bags(rows, numbers.lengths) if isinstance(numbers, Bags) else rows
