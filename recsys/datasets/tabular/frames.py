"""Prepare a store from data frames."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys.datasets.tabular.prepare import open_schema, write_table
from recsys.datasets.tabular.read import import_pyarrow
from recsys.datasets.tabular.schema import Schema, find_schema
from recsys.errors import DatasetFormatError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from recsys.datasets.tabular.prepare import TableReport

__all__ = ["write_store"]

_BATCH_ROWS = 65_536


def write_store(
    frames: pd.DataFrame | pa.Table | Iterable[pd.DataFrame | pa.Table],
    schema: Schema | str | Path | None,
    out: str | Path,
    *,
    like: str | Path | None = None,
    split: bool = False,
    num_threads: int | None = None,
) -> TableReport:
    """Write a store from a data frame, or from the chunks of one.

    Args:
        frames: A frame of pandas or a table of pyarrow, or any number of them, whose rows follow
            each other. The index of a frame is not read.
        schema: What the columns mean, the TOML file that says so, or the name of a schema that
            recsys knows; None with `like`.
        out: The store's folder, which must not exist.
        like: A store that was made from a table; see `prepare_table`.
        split: With `like`: divide the rows by the `split` of its schema; else all are for test.
        num_threads: Threads that encode columns; by default one per core.

    Returns:
        The store's path and counts.

    Raises:
        AlreadyExists: `out` exists.
        ConfigError: not exactly one of `schema` and `like` is given, `split` is given without
            `like`, the schema cannot be read, or it has no column for an embedding table.
        DatasetFormatError: the rows break the schema, there is no row, or none for training.
        MissingDependency: pyarrow is not installed.
        TypeError: `schema` is of another type, or a frame is none.
        StoreError: `like` is no store that was made from a table, or is damaged.
    """
    import_pyarrow()
    if isinstance(schema, str | Path):
        schema = find_schema(str(schema))
    if schema is not None and not isinstance(schema, Schema):
        raise TypeError(
            f"schema must be a Schema, a name or a path, got {type(schema).__name__}; "
            "Schema.from_dict makes one of a dictionary"
        )
    schema, known = open_schema(schema, like, split=split)
    batches = _FrameBatches(frames, schema)
    return write_table(
        iter(batches),
        schema,
        Path(out),
        sources=batches.describe,
        like=known,
        num_threads=num_threads,
    )


class _FrameBatches:
    """The rows of frames as batches that `conform` made."""

    def __init__(self, frames: Any, schema: Schema) -> None:
        is_one = hasattr(frames, "columns") or not isinstance(frames, Iterable)
        self._frames: Iterable[Any] = [frames] if is_one else frames
        self._schema = schema
        self._digest = hashlib.sha256()
        self._starts: list[int] = []  # the first row of each frame
        self._num_rows = 0
        self._first_types: dict[str, tuple[bool, str]] = {}  # are they integers, and from where on

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        from recsys.datasets.tabular.convert import conform, plain

        arrow = import_pyarrow()
        for number, frame in enumerate(self._frames):
            self._starts.append(self._num_rows)
            for given in self._blocks_of(frame, number):
                batch = conform(given, self._schema, lambda row: self.place(self._num_rows + row))
                self._require_one_type(given, self.place(self._num_rows))
                values = [plain(column) for column in batch.columns]  # without dictionaries
                whole = arrow.RecordBatch.from_arrays(values, batch.schema.names)
                self._digest.update(whole.serialize())
                self._num_rows += batch.num_rows
                yield batch

    def place(self, row: int) -> str:
        """Words for a row that was read, by its number from 0 among the rows of all frames."""
        number = bisect.bisect_right(self._starts, row) - 1
        return f"frame {number}, row {row - self._starts[number]} (from 0)"

    def describe(self) -> list[dict[str, Any]]:
        """The entry `sources` of meta.json."""
        digest = self._digest.hexdigest()
        return [{"name": "frames", "num_rows": self._num_rows, "sha256": digest}]

    def _require_one_type(self, batch: pa.RecordBatch, place: str) -> None:
        """Refuse a column of text that has integers in some batches.

        pandas guesses the types of a CSV chunk by chunk. Its integers have lost leading zeros, so a
        value such as 007 would have another row in each kind of chunk.
        """
        types = import_pyarrow().types
        for column, rules in self._schema.categorical.items():
            values = batch.column(column)
            if rules.values != "string" or values.null_count == len(values):
                continue
            kind = values.type.value_type if types.is_dictionary(values.type) else values.type
            is_integer = types.is_integer(kind) or types.is_decimal(kind)
            was_integer, before = self._first_types.setdefault(column, (is_integer, place))
            if is_integer != was_integer:
                mine, first = ("integers", "text") if is_integer else ("text", "integers")
                raise DatasetFormatError(
                    f"{place}, column {column!r}: values must be of one type in all frames, got "
                    f"{mine} here and {first} in {before}; integers may have lost leading zeros: "
                    f"read the column as text, such as by dtype={{{column!r}: str}} of pandas"
                )

    def _blocks_of(self, frame: Any, number: int) -> Iterator[pa.RecordBatch]:
        """The schema's columns of a frame, a block of rows at a time."""
        arrow = import_pyarrow()
        is_arrow = isinstance(frame, arrow.Table)
        if not (is_arrow or hasattr(frame, "iloc")):
            raise TypeError(
                f"frame {number} must be a pandas.DataFrame or a pyarrow.Table, got "
                f"{type(frame).__name__}; pandas.DataFrame(rows) makes one"
            )
        found = frame.column_names if is_arrow else list(frame.columns)
        missing = [name for name in self._schema.columns if found.count(name) != 1]
        if missing:
            raise DatasetFormatError(
                f"frame {number}: must have column {missing[0]!r} once, has columns {found[:30]}; "
                "correct the schema or the frame"
            )
        if is_arrow:
            yield from frame.select(list(self._schema.columns)).to_batches(_BATCH_ROWS)
            return
        for start in range(0, len(frame), _BATCH_ROWS):
            block = frame.iloc[start : start + _BATCH_ROWS][list(self._schema.columns)]
            arrays = {}
            for name in self._schema.columns:
                try:
                    array = arrow.array(block[name], from_pandas=True)
                except (arrow.ArrowException, OverflowError, UnicodeEncodeError) as error:
                    raise DatasetFormatError(
                        f"{self.place(self._num_rows)}, column {name!r}: from here on, must have "
                        f"values of one type that Arrow has: {str(error)[:200]}; convert the column"
                    ) from error
                is_chunked = isinstance(array, arrow.ChunkedArray)  # of a column of Arrow's
                arrays[name] = array.combine_chunks() if is_chunked else array
            yield arrow.RecordBatch.from_pydict(arrays)
