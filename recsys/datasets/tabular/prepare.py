"""Prepare a store from tables of any columns.

Two passes, in bounded memory:

    1. rows -> numbers, float64 and such -> `Spool`      values are numbered as they appear
    2. the training part is counted; values get rows; each part of the spool is written to the store

What grows with the data: the vocabularies, one byte a row for the split, and, for histories,
last-one-out, negatives and splits by time, the groups, times and labels of all rows.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from recsys._support.files import describe_taken, is_taken
from recsys.datasets.checks import findings_of
from recsys.datasets.loader import one_ahead
from recsys.datasets.store import Store
from recsys.datasets.store_writer import StoreWriter
from recsys.datasets.tabular.encode import PART, WEIGHT, RowEncoder, labels_of
from recsys.datasets.tabular.encoder import encoding_of, read_rules, read_schema
from recsys.datasets.tabular.numbering import new_numbers
from recsys.datasets.tabular.parts import PartWriter, learn_rows
from recsys.datasets.tabular.read import TableFiles
from recsys.datasets.tabular.schema import ColumnSplit
from recsys.datasets.tabular.split import TRAIN, SpooledRows
from recsys.datasets.tabular.spool import Spool
from recsys.errors import AlreadyExists, ConfigError, DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    import pyarrow as pa

    from recsys.datasets.tabular.encode import RowMaker
    from recsys.datasets.tabular.schema import Schema

__all__ = ["TableReport", "columns_for_split", "open_like", "prepare_table", "write_table"]


@dataclass(frozen=True)
class TableReport:
    """Result of preparing a table.

    Attributes:
        path: The store.
        num_rows: Rows of the table.
        num_samples: Samples of the store: the rows, and negatives.
        splits: Samples of each part.
        num_tables: Embedding tables.
        num_embeddings: Rows of all of them.
        unknown: For each part, how many values of each numbered column share row 0 because the
            training part has them too rarely or not at all; missing values aside.
        num_lacking: Negatives that could not be drawn: each item of the training part would be a
            positive.
        findings: Sentences on what makes a model of the store, or its metrics, doubtful.
    """

    path: Path
    num_rows: int
    num_samples: int
    splits: dict[str, int]
    num_tables: int
    num_embeddings: int
    unknown: dict[str, dict[str, int]]
    num_lacking: int
    findings: Sequence[str]


def prepare_table(
    files: Sequence[str | Path],
    store: str | Path,
    schema: Schema | None = None,
    *,
    like: str | Path | None = None,
    split: bool = False,
    num_threads: int | None = None,
    show_progress: bool = False,
) -> TableReport:
    """Read files, in the order given, and write a store.

    With `like`, values get the rows that they have in that store, unknown ones row 0; dense columns
    are treated by the statistics of its training part; and all rows are for test, or are divided as
    those of that store were. Histories and negatives know the rows of these files alone; for
    histories, a warning says so.

    Args:
        files: CSV, TSV (plain, .gz, .zst) or Parquet; folders of them.
        store: The store's folder, which must not exist.
        schema: What the columns mean; None with `like`.
        like: A store that was made from a table.
        split: With `like`: divide the rows by the `split` of its schema, to train on them.
        num_threads: Threads that encode columns; by default one per core.
        show_progress: Draw a progress bar over the rows.

    Returns:
        The store's path and counts.

    Raises:
        AlreadyExists: `store` exists.
        ConfigError: not exactly one of `schema` and `like` is given, `split` is given without
            `like`, or the schema has no column for an embedding table.
        DatasetFormatError: a file breaks its format or the schema, there is no row, or none for
            training.
        FileNotFoundError: a file does not exist.
        MissingDependency: pyarrow is not installed.
        StoreError: `like` is no store that was made from a table, or is damaged.
    """
    known = open_like(schema, like, split=split)
    schema = schema if known is None else read_schema(known)
    assert schema is not None
    if known is None:
        table = TableFiles(files, schema)
    else:
        way_out = f"store {known.path} was made of files with it; add it, or name other files"
        optional = () if split else columns_for_split(schema)
        table = TableFiles(files, schema, optional=optional, way_out=way_out)
    with closing(_counted(table.batches(), show_progress)) as batches:
        return write_table(
            batches,
            schema,
            Path(store),
            sources=lambda: table.sources,
            place=table.place,
            like=known,
            split=split,
            num_threads=num_threads,
        )


def open_like(schema: object, like: str | Path | None, *, split: bool) -> Store | None:
    """Open the store that a new one is like; None if the new one has a schema.

    Raises:
        ConfigError: not exactly one of `schema` and `like` is given, or `split` without `like`.
        StoreError: `like` is no store.
    """
    if (schema is None) == (like is None):
        raise ConfigError("a store needs either a schema or a store to be like; give one")
    if like is not None:
        return Store(like)
    if split:
        raise ConfigError(
            "split divides the rows of a store that is like another; a schema says by itself how "
            "rows are divided: leave it out"
        )
    return None


def columns_for_split(schema: Schema) -> tuple[str, ...]:
    """The column that only the split needs, which rows like those of a store may lack."""
    split = schema.split
    if not isinstance(split, ColumnSplit) or split.column in schema.value_columns:
        return ()
    return () if split.column == schema.group else (split.column,)


def write_table(
    batches: Iterator[pa.RecordBatch],
    schema: Schema,
    store: Path,
    *,
    sources: Callable[[], Sequence[Mapping[str, Any]]],
    place: Callable[[int], str],
    like: Store | None = None,
    split: bool = False,
    num_threads: int | None = None,
) -> TableReport:
    """Write a store from batches of rows.

    Args:
        batches: Columns that `conform` made.
        schema: What they mean.
        store: The store's folder, which must not exist.
        sources: The entry `sources` of meta.json; called after the last batch.
        place: Names a row in messages, by its number from 0 among all rows.
        like: A store whose vocabularies and dense rules are used. `schema` is its schema.
        split: With `like`: divide the rows by the schema; else all are for test.
        num_threads: Threads that encode columns; by default one per core.

    Raises:
        AlreadyExists: `store` exists.
        ConfigError: the schema has no categorical, multi or sequence column, or more columns than
            the process may open files.
        DatasetFormatError: the rows break the schema, or there is no row, or none for training.
        StoreError: `like` is damaged.
    """
    if not schema.features:
        raise ConfigError(
            "a store needs a column with values of an embedding table; name at least one in "
            "[categorical], [multi] or [sequence]"
        )
    if is_taken(store):
        raise AlreadyExists(f"{describe_taken(store)}; choose another folder for the store")
    if like is not None and schema.history:
        warnings.warn(
            "histories list rows of these files alone and begin empty; where groups come again, "
            f"name the files of store {like.path} too, before the new ones",
            stacklevel=2,
        )
    numbers, maker = (
        ({table.name: new_numbers(table) for table in schema.tables}, None)
        if like is None
        else read_rules(like)
    )
    are_for_test = like is not None and not split
    without = (PART,) if are_for_test else ()
    encoder = RowEncoder(
        schema,
        numbers,
        grow=like is None,
        without=without,
        num_threads=num_threads,
        place=place,
    )
    with (
        encoder,
        StoreWriter(
            store,
            dense_transform="none",
            features=schema.features,
            has_weights=bool(schema.weight),
            has_groups=bool(schema.group),
            has_times=bool(schema.timestamp),
            label_names=schema.labels,
        ) as writer,
        Spool(writer.folder, encoder.dtypes, [*schema.multi, *schema.sequence]) as spool,
    ):
        _fill(spool, encoder, batches)
        if not spool.num_rows:
            raise DatasetFormatError("a table must have at least one row, got none")
        groups = encoder.group_numbers.values() if encoder.group_numbers else None
        rows = SpooledRows(spool, schema, groups, are_for_test=are_for_test)
        if not are_for_test:
            _check_training_part(rows, like)
        if maker is None:
            maker = learn_rows(rows, numbers, writer.folder)
        else:
            assert like is not None
            shutil.copytree(like.path / "vocabulary", writer.folder / "vocabulary")
        return _write(rows, maker, writer, sources(), like)


def _counted(batches: Iterator[pa.RecordBatch], show: bool) -> Generator[pa.RecordBatch]:
    """The same batches; draws a progress bar meanwhile, so no warning stands in its line."""
    with tqdm(
        desc="prepare",
        unit=" rows",
        unit_scale=True,
        disable=not show,
        mininterval=0.1 if sys.stderr.isatty() else 10,  # few lines if stderr is a log file
    ) as progress:
        for batch in batches:
            yield batch
            progress.update(batch.num_rows)


def _fill(spool: Spool, encoder: RowEncoder, batches: Iterator[pa.RecordBatch]) -> None:
    """Encode all batches; a thread reads the next one meanwhile."""
    with closing(one_ahead(batches, "recsys-read")) as ready:
        for batch in ready:
            spool.append(batch.num_rows, encoder.encode(batch))
    spool.flush()


def _check_training_part(rows: SpooledRows, like: Store | None) -> None:
    """Refuse a training part without rows; warn if it has one label, or weights of 0 alone.

    Raises:
        DatasetFormatError: it has none.
    """
    is_train = rows.in_part(TRAIN)
    num_rows = int(np.count_nonzero(is_train))
    if not num_rows:
        fault = f"the training part has none of {len(rows.codes)} rows"
        if like is None:
            raise DatasetFormatError(f"{fault}; change [split] or [filter]")
        raise DatasetFormatError(
            f"{fault}, divided by [split] of store {like.path}; prepare that store with "
            "another [split], such as shares (test, validation), and first train on it again"
        )
    schema, spool = rows.schema, rows.spool
    for role, name in zip(labels_of(schema), schema.label_columns, strict=True):
        labels = np.unique(spool.column(role)[is_train])
        if len(labels) == 1 and num_rows > 1:
            warnings.warn(
                f"label {name!r} is {labels[0]} in all {num_rows:,} rows of the training part, and "
                "a model cannot learn from one value; check the column and the keys positive and "
                "split",
                stacklevel=2,
            )
    if schema.weight and not spool.column(WEIGHT)[is_train].any():
        warnings.warn(
            f"weight {schema.weight!r} is 0 in all rows of the training part, and rows with a "
            "weight of 0 train nothing; check the column, or leave out the key weight",
            stacklevel=2,
        )


def _write(
    rows: SpooledRows,
    maker: RowMaker,
    writer: StoreWriter,
    sources: Sequence[Mapping[str, Any]],
    like: Store | None,
) -> TableReport:
    """Write all parts, and what meta.json says about them."""
    schema, parts = rows.schema, PartWriter(rows, maker, writer)
    splits = parts.write()
    about: dict[str, Any] = {
        "convention": "table",
        "sources": list(sources),
        "schema": schema.as_dict(),
        "dense_rules": [asdict(rule) for rule in maker.dense.values()],
        "encoding": encoding_of(schema, maker.dense, writer.folder),
        "unknown": parts.unknown,
    }
    catalog = None
    if schema.negatives is not None:
        others = list(schema.negatives.item_columns)
        about["ranking"] = {
            "item": schema.negatives.item,
            "item_features": others,
            "repeats": schema.has_repeats,
        }
        if others:
            catalog = like.catalog if like is not None else parts.catalog_rows
    rows.spool.remove()  # it lies in the folder that becomes the store
    path = writer.finish(
        dense_names=list(schema.dense),
        splits=splits,
        about=about,
        table_sizes={name: table.num_rows for name, table in maker.tables.items()},
        catalog=catalog,
        findings=lambda folder: findings_of(Store(folder)),
    )
    return TableReport(
        path=path,
        num_rows=len(rows.codes),
        num_samples=writer.num_samples,
        splits={name: len(part) for name, part in splits.items()},
        num_tables=len(maker.tables),
        num_embeddings=sum(table.num_rows for table in maker.tables.values()),
        unknown=parts.unknown,
        num_lacking=parts.num_lacking,
        findings=Store(path).meta.get("findings", ()),
    )
