"""What predictions and recommendations are written to: Parquet, with values of the user's data."""

from __future__ import annotations

import time
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyarrow import parquet

from recsys._support.files import appearing_whole, require_new, require_place
from recsys.datasets.numbering import vocabulary_file
from recsys.datasets.tabular.encode import read_schema
from recsys.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from recsys.datasets.store import Store

__all__ = ["Written", "new_parquet", "values_in", "values_of_rows", "write_parquet"]


def values_of_rows(store: Store, feature: str) -> pa.Array:
    """The value of each row of the table of a feature; null for rows that have none."""
    tables = [table.name for table in read_schema(store).tables]
    return values_in(vocabulary_file(store.path, tables.index(store.feature_tables[feature])))


def values_in(file: Path) -> pa.Array:
    """The column of a vocabulary, or of a store's groups by their numbers, mapped from its file.

    Raises:
        StoreError: it is missing or damaged.
    """
    try:
        with pa.memory_map(str(file)) as source:
            return pa.ipc.open_file(source).read_all().column("value").combine_chunks()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise StoreError(f"{file} is damaged ({error}); prepare the store again") from error


def new_parquet(file: str | Path) -> Path:
    """The path of a Parquet file, once it is known that it can be written.

    Raises:
        AlreadyExists: the file exists.
        ConfigError: its name does not end in .parquet, or it cannot be written.
    """
    file = Path(file)
    if file.suffix != ".parquet":
        raise ConfigError(f"the result is a Parquet file; give a name in .parquet, got {file}")
    require_place(file)
    require_new(file)
    return file


class Written(NamedTuple):
    """A Parquet file.

    Attributes:
        columns: Their names.
        num_rows: How many rows.
        seconds: Time for reading, computing and writing them.
    """

    columns: list[str]
    num_rows: int
    seconds: float


def write_parquet(
    file: Path, tables: Iterator[pa.Table], empty: pa.Table, num_at_once: int = 1
) -> Written:
    """Write a Parquet file, so many tables as a row group.

    Args:
        file: As `new_parquet` returns it.
        tables: Those after the first get its types.
        empty: What is written if there are none.
        num_at_once: How many tables are a row group.
    """
    begun, num_rows = time.perf_counter(), 0
    first = next(tables, empty)
    tables = chain([first], tables)
    with appearing_whole(file) as partial, parquet.ParquetWriter(partial, first.schema) as writer:
        while group := list(islice(tables, num_at_once)):
            table = pa.concat_tables(part.cast(first.schema) for part in group)
            writer.write_table(table)
            num_rows += table.num_rows
    return Written(first.column_names, num_rows, time.perf_counter() - begun)
