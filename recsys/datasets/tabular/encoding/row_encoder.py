"""Encodes blocks of rows by a schema: numbers for values, float64, seconds, 0/1 labels.

Values of embedding tables get provisional numbers by first appearance in a column, block by block;
their rows are known only after the training part was counted. Hashed values get their rows here.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from recsys._support.jit import kernel
from recsys._support.machine import num_cores
from recsys.datasets.tabular.encoding.numbering import (
    HashedRows,
    IntegerNumbers,
    Numbers,
    TextNumbers,
)
from recsys.datasets.tabular.schemas.schema_parts import ColumnSplit, MultiColumn, SequenceColumn
from recsys.errors import DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys.datasets.tabular.schemas.schema import Schema, Table

__all__ = [
    "GROUP",
    "LABEL",
    "NO_LABEL",
    "PART",
    "TIME",
    "WEIGHT",
    "Bags",
    "Columns",
    "RowEncoder",
    "new_numbers",
    "roles_of",
]

# Spooled columns that are no features; a feature's column has the feature's name.
LABEL, WEIGHT, GROUP, TIME, PART = "/label", "/weight", "/group", "/time", "/part"
# The label of a row whose label is missing, which only rows to predict may be.
NO_LABEL: Final = -1

_ROLE_DTYPES: dict[str, Any] = {
    LABEL: np.int8,
    WEIGHT: np.float32,
    GROUP: np.int32,
    TIME: np.int64,
    PART: np.uint8,
}
_MOST = float(np.finfo(np.float32).max)


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


def new_numbers(table: Table) -> Numbers | HashedRows:
    """An empty numbering for a table."""
    if table.numbering == "hash":
        return HashedRows(table.num_rows)
    return (IntegerNumbers if table.values == "integer" else TextNumbers)(table.name)


def roles_of(schema: Schema) -> dict[str, str]:
    """The column of each role that the schema has: label, weight, group, time, part."""
    columns = {
        LABEL: schema.label,
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
        without: Columns that the batches need not have: of label, weight, and so on.
        num_threads: Tables are numbered in parallel; by default on all cores.
        place: Names a row in messages, by its number from 0 among all rows.

    Attributes:
        group_numbers: The numbering of the groups; None before the first batch.
        num_rows: Rows encoded so far.
    """

    def __init__(
        self,
        schema: Schema,
        numbers: Mapping[str, Numbers | HashedRows],
        *,
        grow: bool = True,
        without: Collection[str] = (),
        num_threads: int | None = None,
        place: Callable[[int], str] = "row {} of the table (from 0)".format,
    ) -> None:
        self.schema = schema
        self.group_numbers: Numbers | None = None
        self.num_rows = 0
        self._place = place
        self._numbers = dict(numbers)
        self._grow = grow
        self._columns = schema.value_columns
        self._roles = {
            role: column for role, column in roles_of(schema).items() if role not in without
        }
        self._pool = ThreadPoolExecutor(num_threads or num_cores(), "recsys-encode")

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """The dtype of each encoded column, or of the values in its bags."""
        return {
            **{role: np.dtype(_ROLE_DTYPES[role]) for role in self._roles},
            **{name: np.dtype(np.float64) for name in self.schema.dense},
            **{name: np.dtype(np.int32) for name in self._columns},
            **{name: np.dtype(np.float32) for name in self.schema.weights_of},
        }

    @property
    def bags(self) -> list[str]:
        """The names of the encoded columns that hold bags."""
        return [*self.schema.multi, *self.schema.sequence, *self.schema.weights_of]

    def encode(self, batch: pa.RecordBatch) -> Columns:
        """Encode a block of rows.

        Args:
            batch: Columns that `conform` made.

        Returns:
            An array for each column: (n,) float64 for dense columns, NaN where a value is missing;
            (n,) int32 numbers, `MISSING` or `UNKNOWN`; bags of numbers, and of their weights; (n,)
            int8 labels, `NO_LABEL` where one is missing.

        Raises:
            DatasetFormatError: a dense value is too large, or the value of the split's column is
                not listed.
        """

        def encode_table(table: Table) -> Columns:
            numbers = self._numbers[table.name]
            return {name: self._values(batch.column(name), name, numbers) for name in table.columns}

        def encode_weights(name: str) -> Columns:
            lists = batch.column(name)
            weights = lists.flatten().to_numpy(zero_copy_only=False)
            return {name: self._bags(weights, lists, self.schema.weights_of[name])}

        def encode_dense(name: str) -> Columns:
            values = batch.column(name).to_numpy(zero_copy_only=False)
            is_good = np.isnan(values) | (np.abs(values) <= _MOST)
            rule = "must be a number of float32", 'correct it, or leave the column out of "dense"'
            return {name: self._require(values, is_good, name, rule)}

        def encode_role(role: str) -> Columns:
            name = self._roles[role]
            column = batch.column(name)
            if role == GROUP:
                return {role: self._group(column)}
            if role == PART:
                return {role: self._part(column)}
            if role == LABEL:
                column = column.fill_null(NO_LABEL)
            return {role: column.to_numpy(zero_copy_only=False)}

        work = [
            *(self._pool.submit(encode_table, table) for table in self.schema.tables),
            *(self._pool.submit(encode_weights, name) for name in self.schema.weights_of),
            *(self._pool.submit(encode_role, role) for role in self._roles),
            *(self._pool.submit(encode_dense, name) for name in self.schema.dense),
        ]
        encoded: Columns = {}
        for part in work:
            encoded |= part.result()
        self.num_rows += batch.num_rows
        return encoded

    def _values(
        self, column: pa.Array, name: str, numbers: Numbers | HashedRows
    ) -> NDArray[np.int32] | Bags:
        if not isinstance(self._columns[name], MultiColumn):
            return self._number(column, numbers)
        return self._bags(self._number(column.flatten(), numbers), column, name)

    def _bags(self, found: NDArray[Any], lists: pa.Array, name: str) -> Bags:
        """The bags of the lists of column `name`, or of their weights, cut to `max_length`."""
        rules, lengths = self._columns[name], _lengths_of(lists)
        assert isinstance(rules, MultiColumn)
        if not rules.max_length or not len(lengths) or lengths.max() <= rules.max_length:
            return Bags(found, lengths)
        kept = np.empty_like(found)
        keep_last = isinstance(rules, SequenceColumn)
        num_kept = _trim_kernel(found, lengths, rules.max_length, keep_last, kept)
        return Bags(kept[:num_kept], np.minimum(lengths, np.int32(rules.max_length)))

    def _number(self, values: pa.Array, numbers: Numbers | HashedRows) -> NDArray[np.int32]:
        if isinstance(numbers, HashedRows):
            return numbers.number(values)
        return numbers.number(values, grow=self._grow)

    def _group(self, column: pa.Array) -> NDArray[np.int32]:
        """Numbers of groups: of integers if the first batch has integers, else of texts."""
        import pyarrow as pa

        is_integer = pa.types.is_integer(column.type)
        if self.group_numbers is None:
            self.group_numbers = (IntegerNumbers if is_integer else TextNumbers)(self._roles[GROUP])
        if is_integer != isinstance(self.group_numbers, IntegerNumbers):
            mine, first = ("integers", "text") if is_integer else ("text", "integers")
            raise DatasetFormatError(
                f"{self._place(self.num_rows)}, column {self._roles[GROUP]!r}: groups must be of "
                f"one type, got {mine} here and {first} in {self._place(0)}; use one kind of file, "
                "or make the groups text in all of them (in CSV they are)"
            )
        return self.group_numbers.number(column)

    def _part(self, column: pa.Array) -> NDArray[np.uint8]:
        """The code of the part of each row: the place of its list in `ColumnSplit`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        split = self.schema.split
        assert isinstance(split, ColumnSplit)
        parts = (split.train, split.test, split.validation)
        values = column.cast(pa.string())
        known = pa.array([value for part in parts for value in part], pa.string())
        places = pc.fill_null(pc.index_in(values, known), -1).to_numpy(zero_copy_only=False)
        rule = f"must be one of {known.to_pylist()}", "list its value in [split]"
        self._require(values, places >= 0, split.column, rule)
        codes = np.repeat(np.arange(3, dtype=np.uint8), [len(part) for part in parts])
        found: NDArray[np.uint8] = codes[places]
        return found

    def _require(
        self, values: Any, is_good: NDArray[np.bool_], column: str, rule: tuple[str, str]
    ) -> Any:
        """The values, after a check of every row."""
        if not is_good.all():
            row = int(np.argmin(is_good))
            must, way_out = rule
            raise DatasetFormatError(
                f"{self._place(self.num_rows + row)}, column {column!r}: {must}, got "
                f"{str(values[row])[:80]}; {way_out}"
            )
        return values

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _lengths_of(lists: pa.Array) -> NDArray[np.int32]:
    """The length of each list, (n,); 0 for null."""
    import pyarrow.compute as pc

    lengths: NDArray[Any] = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(False)
    return lengths.astype(np.int32, copy=False)


@kernel
def _trim_kernel(
    values: NDArray[Any],
    lengths: NDArray[np.int32],
    max_length: int,
    keep_last: bool,
    kept: NDArray[Any],
) -> int:
    """Keep the first or the last values of each bag; returns how many are kept."""
    begin, num_kept = 0, 0
    for length in lengths:
        num_new = min(length, max_length)
        start = begin + length - num_new if keep_last else begin
        for place in range(start, start + num_new):
            kept[num_kept] = values[place]
            num_kept += 1
        begin += length
    return num_kept
