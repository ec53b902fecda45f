"""Prepare a store from tables of any columns, in files or frames.

Two passes, in bounded memory:

    1. rows -> numbers, float64 and such -> `Spool`      values are numbered as they appear
    2. the training part is counted; values get rows; each part of the spool is written to the store

What grows with the data: the vocabularies, two bytes a row for the split, and, for histories,
last-one-out, negatives and splits by time, the groups, times and labels of all rows.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tqdm import tqdm

from recsys._support.files import require_free
from recsys.datasets.checks import findings_of
from recsys.datasets.loader import one_ahead
from recsys.datasets.numbering import (
    Numbers,
    ValueCounts,
    vocabulary_file,
    write_vocabulary,
)
from recsys.datasets.store import GROUPS, Store
from recsys.datasets.store_writer import SPLITS, StoreWriter
from recsys.datasets.tabular.encode import (
    Bags,
    DenseRule,
    Moments,
    RowEncoder,
    RowMaker,
    TableRows,
    encoding_of,
    new_numbers,
    read_rules,
    read_schema,
    woven,
)
from recsys.datasets.tabular.negatives import NO_ITEM, Sampler, belongs_to_items, numbers_of
from recsys.datasets.tabular.read import Frames, TableFiles
from recsys.datasets.tabular.schema import ALL_FOR_TEST, PART, Schema, find_schema
from recsys.datasets.tabular.split import TRAIN, Spool, SpooledRows
from recsys.errors import ConfigError, DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys.datasets.numbering import HashedRows
    from recsys.datasets.tabular.encode import StoreRows
    from recsys.datasets.tabular.schema import Negatives

__all__ = ["TableReport", "prepare_table", "write_store"]


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
        StoreError: `like` is no store that was made from a table, or is damaged.
    """
    schema, known = _open_schema(schema, like, split=split)
    rows = TableFiles(files, schema)
    return _write_table(rows, schema, Path(store), known, num_threads, show=show_progress)


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
        TypeError: `schema` is of another type, or a frame is none.
        StoreError: `like` is no store that was made from a table, or is damaged.
    """
    if isinstance(schema, str | Path):
        schema = find_schema(str(schema))
    if schema is not None and not isinstance(schema, Schema):
        raise TypeError(
            f"schema must be a Schema, a name or a path, got {type(schema).__name__}; "
            "Schema.from_dict makes one of a dictionary"
        )
    schema, known = _open_schema(schema, like, split=split)
    return _write_table(Frames(frames, schema), schema, Path(out), known, num_threads)


def _open_schema(
    schema: Schema | None, like: str | Path | None, *, split: bool
) -> tuple[Schema, Store | None]:
    """The schema of a new store, and the store that it is like, if it is like one.

    Raises:
        ConfigError: not exactly one of `schema` and `like` is given, or `split` without `like`.
        StoreError: `like` is no store that was made from a table.
    """
    if (schema is None) == (like is None) or (split and like is None):
        raise ConfigError(
            "a store needs either a schema or a store to be like, and split is for the latter, as "
            "a schema says by itself how rows are divided; give one"
        )
    if like is None:
        return cast("Schema", schema), None
    known = Store(like)
    schema = read_schema(known)
    return schema if split else schema.model_copy(update={"split": ALL_FOR_TEST}), known


def _write_table(
    table: TableFiles | Frames,
    schema: Schema,
    store: Path,
    like: Store | None,
    num_threads: int | None,
    *,
    show: bool = False,
) -> TableReport:
    """Write a store.

    Args:
        table: The rows.
        schema: What their columns mean, and how they are divided.
        store: The store's folder, which must not exist.
        like: A store whose vocabularies and dense rules are used. `schema` is its schema, but for
            the split.
        num_threads: Threads that encode columns; by default one per core.
        show: Draw a progress bar over the rows.

    Raises:
        AlreadyExists: `store` exists.
        ConfigError: the schema has no categorical, multi or sequence column.
        DatasetFormatError: the rows break the schema, or there is no row, or none for training.
        StoreError: `like` is damaged.
    """
    if not schema.features:
        raise ConfigError(
            "a store needs a column with values of an embedding table; name at least one in "
            "[categorical], [multi] or [sequence]"
        )
    require_free(store)
    if like is not None and schema.history:
        warnings.warn(
            "histories list rows of these files alone and begin empty; where groups come again, "
            f"name the files of store {like.path} too, before the new ones",
            stacklevel=3,
        )
    new = {table.name: new_numbers(table) for table in schema.tables}
    numbers, maker = (new, None) if like is None else read_rules(like)
    encoder = RowEncoder(schema, numbers, grow=like is None, num_threads=num_threads)
    with StoreWriter(
        store,
        dense_transform="none",
        features=schema.features,
        has_weights=bool(schema.weight),
        has_groups=bool(schema.group),
        has_times=bool(schema.timestamp),
        label_names=schema.labels,
    ) as writer:
        with Spool(writer.folder) as spool:
            with (
                tqdm(
                    desc="prepare",
                    unit=" rows",
                    unit_scale=True,
                    disable=not show,
                    mininterval=0.1 if sys.stderr.isatty() else 10,  # few lines in a log file
                ) as progress,
                closing(one_ahead(table.batches(), "recsys-read")) as batches,
            ):
                for batch in batches:
                    spool.append(batch.num_rows, encoder.encode(batch))
                    progress.update(batch.num_rows)
            if not spool.num_rows:
                raise DatasetFormatError("a table must have at least one row, got none")
            rows = SpooledRows(spool, schema, encoder.groups.values() if encoder.groups else None)
            if schema.split is not ALL_FOR_TEST and not rows.in_part(TRAIN).any():
                raise DatasetFormatError(
                    f"the training part has none of {spool.num_rows} rows; change [split] of the "
                    "schema, as to shares (test, validation), or [filter]"
                )
            maker = maker or _learn_rows(rows, numbers, writer.folder)
            if like is not None:
                shutil.copytree(like.path / "vocabulary", writer.folder / "vocabulary")
            keys = None if schema.split is ALL_FOR_TEST else schema.negatives
            negatives = None if keys is None else _Negatives(rows, maker, keys)
            splits, unknown = _write_rows(rows, maker, writer, negatives)
        if encoder.groups is not None:
            everything = np.arange(encoder.groups.num_values, dtype=np.int32)
            write_vocabulary(writer.folder / GROUPS, encoder.groups.values(), everything, 0)
        about: dict[str, Any] = {
            "convention": "table",
            "sources": table.sources,
            "schema": schema.as_dict() if like is None else like.meta["schema"],
            "dense_rules": [asdict(rule) for rule in maker.dense.values()],
            "encoding": encoding_of(schema, maker.dense, writer.folder),
            "unknown": unknown,
        }
        catalog = negatives.catalog if negatives is not None and negatives.catalog.size else None
        if schema.negatives is not None:
            about["ranking"] = {
                "item": schema.negatives.item,
                "item_features": list(schema.negatives.item_columns),
                "repeats": schema.has_repeats,
            }
        path = writer.finish(
            dense_names=list(schema.dense),
            splits=splits,
            about=about,
            table_sizes={name: table.num_rows for name, table in maker.tables.items()},
            catalog=catalog if like is None else like.catalog,
            findings=lambda folder: findings_of(Store(folder)),
        )
    return TableReport(
        path=path,
        num_rows=spool.num_rows,
        num_samples=writer.num_samples,
        splits={name: len(part) for name, part in splits.items()},
        num_tables=len(maker.tables),
        num_embeddings=sum(table.num_rows for table in maker.tables.values()),
        unknown=unknown,
        num_lacking=0 if negatives is None else negatives.num_lacking,
        findings=Store(path).meta.get("findings", ()),
    )


def _learn_rows(
    rows: SpooledRows, numbers: Mapping[str, Numbers | HashedRows], folder: Path
) -> RowMaker:
    """Count the training part, give values rows, and write the vocabularies.

    Args:
        rows: All rows.
        numbers: The numbering of each table.
        folder: The store's folder.

    Raises:
        DatasetFormatError: the mean of a dense column is needed, and it has no value.
    """
    schema = rows.schema
    moments = {name: Moments() for name in schema.dense}
    counted = {
        table: ValueCounts(found.num_values)
        for table in schema.tables
        if isinstance(found := numbers[table.name], Numbers)
    }
    names = [*moments, *(column for table in counted for column in table.columns)]
    for block in rows.blocks(TRAIN, names):
        for name, column in moments.items():
            column.add(np.asarray(block.columns[name]))
        for table, counts in counted.items():
            bags = [Bags.of(block.columns[name]) for name in table.columns]
            counts.add(bags[0].values if len(bags) == 1 else woven(bags)[0])
    for name, history in schema.history.items():
        for table, counts in counted.items():
            if history.where and history.of in table.columns:  # lists rows that are no samples
                is_listed = rows.listed(name) & (rows.codes == TRAIN) & ~rows.is_sample
                counts.add(rows.spool.column(history.of)[is_listed])
    (folder / "vocabulary").mkdir()
    tables = {}
    for number, table in enumerate(schema.tables):
        values, rules, first_row = numbers[table.name], table.rules, table.first_row
        if not isinstance(values, Numbers):
            tables[table.name] = TableRows(rules.num_rows, None)
            continue
        chosen = counted.pop(table).chosen(rules.min_count, rules.max_rows, first_row)
        write_vocabulary(vocabulary_file(folder, number), values.values(), chosen, first_row)
        row_of = np.zeros(values.num_values + 2, np.int32)
        row_of[chosen] = np.arange(first_row, first_row + len(chosen), dtype=np.int32)
        tables[table.name] = TableRows(first_row + len(chosen), row_of)
    dense = {
        name: DenseRule.of(name, column.transform, column.missing, moments[name])
        for name, column in schema.dense.items()
    }
    return RowMaker(schema, tables, dense)


def _write_rows(
    rows: SpooledRows, maker: RowMaker, writer: StoreWriter, negatives: _Negatives | None
) -> tuple[dict[str, range], dict[str, dict[str, int]]]:
    """Write all rows to a store, part by part, with their histories and negatives.

    Returns:
        The sample numbers of each part, and how many values of each column have no row of their
        own there.
    """
    splits: dict[str, range] = {}
    unknown: dict[str, dict[str, int]] = {}
    names = [name for name in rows.spool.names if name not in {PART, *rows.schema.conditions}]
    for part in ("train", "validation", "test"):  # in order of time
        code, start = SPLITS.index(part), writer.num_samples
        maker.unknown = unknown[part] = {}
        histories = rows.histories(code)
        for block in rows.blocks(code, names):
            bags = {name: found.of_rows(block.rows) for name, found in histories.items()}
            made = maker.make(block.columns, bags)
            made.others.setdefault("labels", np.ones(len(block.rows), np.int8))
            if code == TRAIN and negatives is not None:
                made = negatives.beside(made, block.rows)
            writer.append(**made.as_arrays())
        splits[part] = range(start, writer.num_samples)
    return {part: splits[part] for part in SPLITS}, unknown


class _Negatives:
    """Puts negatives beside the positives of the training part.

    Warns if a column has one value for each item, and would tell the negatives.

    Attributes:
        catalog: What the item_columns of each item of the training part look up, (E, C); 0 for
            other items.
        num_lacking: Negatives that could not be drawn: each item of the training part would be a
            positive.
    """

    def __init__(self, rows: SpooledRows, maker: RowMaker, keys: Negatives) -> None:
        self.num_lacking = 0
        self._has_repeats, self._names = rows.schema.has_repeats, (keys.item, *keys.item_columns)
        is_train = rows.in_part(TRAIN)
        items, *others = (
            maker.rows_of(rows.spool.column(name)[is_train], name) for name in self._names
        )
        table = next(table for table in rows.schema.tables if keys.item in table.columns)
        size = maker.tables[table.name].num_rows, len(others)
        self.catalog = np.zeros(size, np.int32)
        for position, found in enumerate(others):
            self.catalog[items, position] = found  # of several rows of an item, the last
        _warn_of_item_columns(rows, self._names, items, table.first_row)
        # Where items come again, the positive's own item is the only one that is not drawn.
        owners = items if self._has_repeats else rows.groups[is_train]
        self._sampler = Sampler(items, owners, keys, table.first_row)

    def beside(self, made: StoreRows, rows: NDArray[np.int64]) -> StoreRows:
        """Each row, followed by its negatives.

        Args:
            made: Rows of the training part.
            rows: Their numbers in the table.
        """
        positives = np.asarray(made.features[self._names[0]])
        owners = positives if self._has_repeats else made.others["groups"]
        drawn = np.column_stack([positives, self._sampler.draw(rows, owners)])
        is_kept = drawn != NO_ITEM
        is_kept[:, 0] = True
        self.num_lacking += int(np.count_nonzero(~is_kept))
        result = made.take(np.nonzero(is_kept)[0])
        is_negative = np.broadcast_to(np.arange(drawn.shape[1]) > 0, drawn.shape)[is_kept]
        items = drawn[is_kept][is_negative]
        for position, name in enumerate(self._names):
            found = items if not position else self.catalog[items, position - 1]
            np.asarray(result.features[name])[is_negative] = found
        result.others["labels"] = np.where(is_negative, np.int8(0), np.int8(1))
        return result


def _warn_of_item_columns(
    rows: SpooledRows, names: Sequence[str], items: NDArray[np.int32], first_row: int
) -> None:
    """Warn of columns with one value for each item, which do not change with it."""
    schema, is_item = rows.schema, items >= first_row
    found = []
    for name in (*schema.dense, *schema.categorical, *schema.multi):
        if name not in (*names, schema.group):
            blocks = rows.blocks(TRAIN, [name])
            numbers = np.concatenate([numbers_of(block.columns[name]) for block in blocks])
            if belongs_to_items(items[is_item], numbers[is_item]):
                found.append(repr(name))
    if found:
        warnings.warn(
            f"negatives: {', '.join(found)} have one value for each {names[0]!r}; a negative would "
            "keep that of its positive, which tells them apart; name a categorical column in "
            "item_columns, leave a dense or multi column out of the schema",
            stacklevel=5,
        )
