"""Encodes rows of a table by a schema, and makes rows of a store of them.

    `RowEncoder`   a batch  ->  numbers for values, float64, seconds, 0/1 labels: what is spooled
    `RowMaker`     those    ->  rows of embedding tables, float32 features: what a store holds
    `Encoder`      a batch  ->  rows of a store that exists: both steps, by its vocabularies

Values of embedding tables get provisional numbers by first appearance in a column, block by block;
their rows are known only after the training part was counted. Hashed values get their rows at once.

Statistics of dense columns are those of the training part: the mean of the values that are there,
and, after missing values are filled in, the mean and the deviation of all. They are computed in
float64, block by block, by the update of Chan, Golub and LeVeque, and kept in the store's
`meta.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from recsys._support.files import as_argument
from recsys._support.machine import num_cores
from recsys.batch import Batch, JaggedIds
from recsys.datasets.numbering import (
    MISSING,
    HashedRows,
    Numbers,
    read_vocabulary,
    vocabulary_file,
)
from recsys.datasets.tabular.read import TableFiles
from recsys.datasets.tabular.schema import (
    GROUP,
    NO_LABEL,
    TIME,
    WEIGHT,
    FractionSplit,
    MultiColumn,
    Schema,
    SequenceColumn,
)
from recsys.errors import ConfigError, DatasetFormatError, StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from recsys.datasets.store import Store
    from recsys.datasets.tabular.schema import Table

__all__ = [
    "Bags",
    "Columns",
    "DenseRule",
    "Encoder",
    "Moments",
    "RowEncoder",
    "RowMaker",
    "StoreRows",
    "TableRows",
    "encoding_of",
    "new_numbers",
    "places_of",
    "read_rules",
    "read_schema",
    "woven",
]

_VALUE_KINDS = ("categorical", "multi", "sequence", "history")
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
    """The positions of all values of bags: of each from its begin on, bag after bag.

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


class RowEncoder:
    """Encodes record batches.

    Args:
        schema: What the columns mean.
        numbers: The numbering of each table.
        grow: New values get new numbers; otherwise they are `UNKNOWN`.
        num_threads: Tables are numbered in parallel; by default on all cores.

    Attributes:
        groups: The numbering of the groups; None before the first batch.
    """

    def __init__(
        self,
        schema: Schema,
        numbers: Mapping[str, Numbers | HashedRows],
        *,
        grow: bool = True,
        num_threads: int | None = None,
    ) -> None:
        self.groups: Numbers | None = None
        self._schema, self._numbers, self._grow = schema, dict(numbers), grow
        self._num_threads = num_threads or num_cores()

    def encode(self, batch: pa.RecordBatch) -> Columns:
        """Encode a block of rows.

        Args:
            batch: Columns that `conform` made.

        Returns:
            For each column of an embedding table: (n,) int32 numbers, `MISSING` or `UNKNOWN`, or
            bags of them; for `GROUP`: (n,) int32 numbers. Other columns as they are, NaN where a
            dense value is missing.
        """
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        with ThreadPoolExecutor(self._num_threads, "recsys-encode") as pool:
            tables = pool.map(lambda table: self._encode_table(table, columns), self._schema.tables)
            encoded: Columns = {
                name: column.to_numpy(zero_copy_only=False)
                for name, column in columns.items()
                if name not in {GROUP, *self._schema.value_columns}
            }
            if GROUP in columns:
                encoded[GROUP] = self._group(columns[GROUP])
            for found in tables:
                encoded |= found
        return encoded

    def _encode_table(self, table: Table, columns: Mapping[str, pa.Array]) -> Columns:
        numbers = self._numbers[table.name]
        encoded: Columns = {}
        for name in table.columns:
            rules, column = self._schema.value_columns[name], columns[name]
            if isinstance(rules, MultiColumn):
                encoded[name] = _bags(self._number(column.flatten(), numbers), column, rules)
            else:
                encoded[name] = self._number(column, numbers)
        return encoded

    def _number(self, values: pa.Array, numbers: Numbers | HashedRows) -> NDArray[np.int32]:
        if isinstance(values, pa.DictionaryArray):  # each text is numbered once
            texts = pa.concat_arrays([values.dictionary, pa.nulls(1, pa.string())])
            indices: NDArray[Any] = values.indices.fill_null(len(texts) - 1).to_numpy()
            return np.take(self._number(texts, numbers), indices)
        return numbers.number(values, grow=self._grow)

    def _group(self, column: pa.Array) -> NDArray[np.int32]:
        """Numbers of groups: of integers if the first batch has integers, else of texts."""
        if self.groups is None:
            self.groups = Numbers(
                "group", np.int64 if pa.types.is_integer(column.type) else np.uint8
            )
        kind = pa.int64() if self.groups.is_integer else pa.string()
        return self.groups.number(column.cast(kind))


def _bags(found: NDArray[np.int32], lists: pa.Array, rules: MultiColumn) -> Bags:
    """The bags of a column of lists, cut to `max_length`."""
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
        mean = float(there.mean()) if len(there) else 0.0
        self.merge(len(there), mean, float(np.square(there - mean).sum()))

    def merge(self, count: int, mean: float, squares: float) -> None:
        """Add the moments of other values."""
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
        filled = replace(moments)
        filled.merge(moments.num_missing, fill, 0.0)
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
            {name: found.take(rows) for name, found in self.features.items()},
            {name: array[rows] for name, array in self.others.items()},
        )

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """The arguments of `StoreWriter.append`."""
        ones = [found for found in self.features.values() if not isinstance(found, Bags)]
        bags = [found for found in self.features.values() if isinstance(found, Bags)]
        sparse = np.stack(ones, axis=1) if ones else np.empty((len(self.dense), 0), np.int32)
        arrays = {"dense": self.dense, "sparse": sparse, **self.others}
        if bags:
            arrays["bag_values"], arrays["bag_lengths"] = woven(bags)
        return arrays

    def as_batch(self) -> Batch:
        """A mini-batch with the features in the order of the store, and `NO_LABEL` for no label."""
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
        dense = [rule.apply(np.asarray(columns[name])) for name, rule in self.dense.items()]
        dense_NI = np.stack(dense, axis=1) if dense else np.empty((num_rows, 0), np.float32)
        features: dict[str, NDArray[np.int32] | Bags] = {}
        for feature in self.schema.features:
            name, history = feature.name, self.schema.history.get(feature.name)
            found = columns[name] if history is None else histories[name]
            numbers = found.values if isinstance(found, Bags) else found
            rows = self.rows_of(numbers, name if history is None else history.of)
            if history is None and self.schema.value_columns[name].numbering == "first":
                num_unknown = int(np.count_nonzero((rows == 0) & (numbers != MISSING)))
                self.unknown[name] = self.unknown.get(name, 0) + num_unknown
            features[name] = Bags(rows, found.lengths) if isinstance(found, Bags) else rows
        roles = {"weights": WEIGHT, "groups": GROUP, "times": TIME}
        others: dict[str, Any] = {name: columns[r] for name, r in roles.items() if r in columns}
        labels = [column for name, column in columns.items() if name.startswith("/label/")]
        if labels:
            others["labels"] = np.stack(labels, axis=1) if self.schema.labels else labels[0]
        return StoreRows(dense_NI, features, others)

    def rows_of(self, numbers: NDArray[np.int32], column: str) -> NDArray[np.int32]:
        """The rows of the values of a column, of the same shape."""
        rules = self.schema.value_columns[column]
        row_of = self.tables[rules.table or column].row_of
        if row_of is None:
            return numbers
        rows = row_of[numbers]
        if rules.has_missing_row:
            rows[numbers == MISSING] = 1
        return rows


class Encoder:
    """Encodes raw rows by the vocabularies of a store, as its own rows were, to predict them.

        encoder = Encoder(store)
        for batch in encoder.files(paths).batches():
            scores = model(encoder.encode(batch).as_batch())

    Values that the store's training part did not have, or had too rarely, get row 0 of their table
    and are counted.

    Features are read, and labels and groups where the files have them; values of both may be
    missing. Groups are not encoded. Times, weights, the column of the split and those of the filter
    are not read.

    Args:
        store: A store that `recsys prepare table` made.

    Attributes:
        schema: The store's schema without group, times, weight, filter, split and negatives.
        unknown: How many values of each numbered column had no row of their own so far; missing
            values are not among them.

    Raises:
        StoreError: the store has no schema, or its vocabularies are damaged.
        ConfigError: the schema has histories, which are made from the rows before.
    """

    def __init__(self, store: Store) -> None:
        schema = read_schema(store)
        if schema.history:
            raise ConfigError(
                f"store {store.path}: a history is made from earlier positive rows, so a model "
                "with histories predicts stores alone; make one of rows with the columns of that "
                "store, labels included, with `recsys prepare table FILES --like "
                f"{as_argument(store.path)} --out STORE`"
            )
        numbers, self._maker = read_rules(store)
        self._group = schema.group
        self.unknown = self._maker.unknown
        defaults = {
            name: Schema.model_fields[name].default
            for name in ("group", "timestamp", "timestamp_format", "weight", "filter", "negatives")
        }
        # Not checked again: rows to predict may have neither a label nor negatives.
        self.schema = schema.model_copy(update={**defaults, "split": FractionSplit()})
        self._encoder = RowEncoder(self.schema, numbers, grow=False)

    def files(self, paths: Sequence[str | Path]) -> TableFiles:
        """Files whose rows `encode` takes.

        Raises:
            ConfigError, DatasetFormatError, FileNotFoundError: see `TableFiles`.
        """
        schema = self.schema.model_copy(update={"group": self._group})
        optional = {*schema.label_columns, schema.group}
        return TableFiles(paths, schema, optional=optional, with_hash=False)

    def encode(self, batch: pa.RecordBatch) -> StoreRows:
        """Encode a block of rows.

        There are no labels if the files lack their column, and `NO_LABEL` where one is missing;
        and no weights, groups and times.

        Args:
            batch: A batch of `files`, or of `Frames` of the schema.
        """
        features = batch.select([name for name in batch.schema.names if name != GROUP])
        return self._maker.make(self._encoder.encode(features), {})


def new_numbers(table: Table) -> Numbers | HashedRows:
    """An empty numbering for a table."""
    if table.rules.numbering == "hash":
        return HashedRows(table.rules.num_rows)
    return Numbers(table.name, np.int64 if table.rules.values == "integer" else np.uint8)


def read_schema(store: Store) -> Schema:
    """The schema of a store, from its `meta.json`.

    Raises:
        StoreError: the store was not made from a table.
    """
    if "schema" not in store.meta:
        raise StoreError(
            f"store {store.path} has no schema; name one that `recsys prepare table` made"
        )
    return Schema.from_dict(store.meta["schema"])


def read_rules(store: Store) -> tuple[dict[str, Numbers | HashedRows], RowMaker]:
    """How the rows of a store were made, from its `meta.json` and vocabularies.

    Returns:
        The numbering of each table, filled with its vocabulary; and what makes rows of numbers.

    Raises:
        StoreError: the store was not made from a table, or a vocabulary is damaged.
    """
    schema = read_schema(store)
    numbers = {table.name: new_numbers(table) for table in schema.tables}
    tables: dict[str, TableRows] = {}
    for number, table in enumerate(schema.tables):
        size, values = store.table_sizes[table.name], numbers[table.name]
        row_of = None
        if isinstance(values, Numbers):
            read_vocabulary(vocabulary_file(store.path, number), values, table.first_row, size)
            row_of = np.zeros(values.num_values + 2, np.int32)
            row_of[:-2] = np.arange(table.first_row, size)
        tables[table.name] = TableRows(size, row_of)
    rules = (DenseRule(**rule) for rule in store.meta["dense_rules"])
    dense = dict(zip(schema.dense, rules, strict=True))
    return numbers, RowMaker(schema, tables, dense)


def encoding_of(schema: Schema, dense: Mapping[str, DenseRule], folder: Path) -> str:
    """The entry `encoding` of `meta.json`: SHA-256, in hex, of all that decides a row's features.

    Stores with equal entries look up the same row of a table for the same value, and have the same
    dense features in the same order. Labels, splits and the like do not count.

    Args:
        schema: The store's schema.
        dense: The rule of each dense column, in order.
        folder: The store's folder, with its vocabularies.
    """
    tree = schema.as_dict()
    about = {kind: tree.get(kind, {}) for kind in _VALUE_KINDS}
    about["dense"] = {name: asdict(rule) for name, rule in dense.items()}
    digest = hashlib.sha256(json.dumps(about).encode())  # the order of columns counts
    for number, table in enumerate(schema.tables):
        if table.rules.numbering != "hash":
            with vocabulary_file(folder, number).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
