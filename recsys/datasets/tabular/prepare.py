"""Prepare a store from tables of any columns.

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
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from recsys._support.files import describe_taken, is_taken
from recsys.datasets.checks import findings_of
from recsys.datasets.loader import one_ahead
from recsys.datasets.splits import SPLITS
from recsys.datasets.store import Store
from recsys.datasets.store_writer import StoreWriter
from recsys.datasets.tabular.encode import (
    PART,
    TIME,
    Bags,
    DenseRule,
    Moments,
    RowEncoder,
    RowMaker,
    TableRows,
    labels_of,
    woven,
)
from recsys.datasets.tabular.encoder import encoding_of, read_rules, read_schema
from recsys.datasets.tabular.history import Histories
from recsys.datasets.tabular.negatives import NO_ITEM, Sampler, belongs_to_items, numbers_of
from recsys.datasets.tabular.numbering import (
    Numbers,
    ValueCounts,
    new_numbers,
    vocabulary_file,
    write_vocabulary,
)
from recsys.datasets.tabular.read import TableFiles
from recsys.datasets.tabular.schema import ALL_FOR_TEST
from recsys.datasets.tabular.split import TRAIN, SpooledRows
from recsys.datasets.tabular.spool import Spool
from recsys.errors import AlreadyExists, ConfigError, DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys.datasets.tabular.encode import Columns, StoreRows
    from recsys.datasets.tabular.numbering import HashedRows
    from recsys.datasets.tabular.schema import Negatives, Schema, Table
    from recsys.datasets.tabular.spool import Block

__all__ = ["TableReport", "open_schema", "prepare_table", "write_table"]


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
    schema, known = open_schema(schema, like, split=split)
    if known is None:
        table = TableFiles(files, schema)
    else:
        way_out = f"store {known.path} was made of files with it; add it, or name other files"
        table = TableFiles(files, schema, way_out=way_out)
    with closing(_counted(table.batches(), show_progress)) as batches:
        return write_table(
            batches,
            schema,
            Path(store),
            sources=lambda: table.sources,
            like=known,
            num_threads=num_threads,
        )


def open_schema(
    schema: Schema | None, like: str | Path | None, *, split: bool
) -> tuple[Schema, Store | None]:
    """The schema of a new store, and the store that it is like, if it is like one.

    Raises:
        ConfigError: not exactly one of `schema` and `like` is given, or `split` without `like`.
        StoreError: `like` is no store that was made from a table.
    """
    if (schema is None) == (like is None):
        raise ConfigError("a store needs either a schema or a store to be like; give one")
    if schema is not None:
        if split:
            raise ConfigError(
                "split divides the rows of a store that is like another; a schema says by itself "
                "how rows are divided: leave it out"
            )
        return schema, None
    assert like is not None
    known = Store(like)
    schema = read_schema(known)
    return schema if split else schema.model_copy(update={"split": ALL_FOR_TEST}), known


def write_table(
    batches: Iterator[pa.RecordBatch],
    schema: Schema,
    store: Path,
    *,
    sources: Callable[[], Sequence[Mapping[str, Any]]],
    like: Store | None = None,
    num_threads: int | None = None,
) -> TableReport:
    """Write a store from batches of rows.

    Args:
        batches: Columns that `conform` made.
        schema: What they mean, and how rows are divided.
        store: The store's folder, which must not exist.
        sources: The entry `sources` of meta.json; called after the last batch.
        like: A store whose vocabularies and dense rules are used. `schema` is its schema, but for
            the split.
        num_threads: Threads that encode columns; by default one per core.

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
    if is_taken(store):
        raise AlreadyExists(f"{describe_taken(store)}; choose another folder for the store")
    if like is not None and schema.history:
        warnings.warn(
            "histories list rows of these files alone and begin empty; where groups come again, "
            f"name the files of store {like.path} too, before the new ones",
            stacklevel=2,
        )
    maker = None
    if like is None:
        numbers = {table.name: new_numbers(table) for table in schema.tables}
    else:
        numbers, maker = read_rules(like)
    with (
        RowEncoder(schema, numbers, grow=like is None, num_threads=num_threads) as encoder,
        StoreWriter(
            store,
            dense_transform="none",
            features=schema.features,
            has_weights=bool(schema.weight),
            has_groups=bool(schema.group),
            has_times=bool(schema.timestamp),
            label_names=schema.labels,
        ) as writer,
        Spool(writer.folder) as spool,
    ):
        with closing(one_ahead(batches, "recsys-read")) as ready:
            for batch in ready:
                spool.append(batch.num_rows, encoder.encode(batch))
        if not spool.num_rows:
            raise DatasetFormatError("a table must have at least one row, got none")
        groups = encoder.group_numbers.values() if encoder.group_numbers else None
        rows = SpooledRows(spool, schema, groups)
        if schema.split is not ALL_FOR_TEST:
            _check_training_part(rows, like)
        if like is not None:
            shutil.copytree(like.path / "vocabulary", writer.folder / "vocabulary")
        maker = maker or _learn_rows(rows, numbers, writer.folder)
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


def _check_training_part(rows: SpooledRows, like: Store | None) -> None:
    """Refuse a training part without rows; warn if it has one label.

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
    counts = {
        table.name: ValueCounts(found.num_values)
        for table in schema.tables
        if isinstance(found := numbers[table.name], Numbers)
    }
    moments = {name: Moments() for name in schema.dense}
    counted = [table for table in schema.tables if table.name in counts]
    names = [*moments, *(column for table in counted for column in table.columns)]
    for block in rows.blocks(TRAIN, names):
        for name, column in moments.items():
            column.add(np.asarray(block.columns[name]))
        for table in counted:
            counts[table.name].add(_values_in_order(block.columns, table))
    for name, history in schema.history.items():
        table_name = schema.categorical[history.of].table or history.of
        if history.where and table_name in counts:  # it may list rows that are no samples
            is_listed = rows.listed(name) & (rows.codes == TRAIN) & ~rows.is_sample
            counts[table_name].add(rows.spool.column(history.of)[is_listed])
    (folder / "vocabulary").mkdir()
    tables = {}
    for number, table in enumerate(schema.tables):
        values, rules = numbers[table.name], table.rules
        if not isinstance(values, Numbers):
            tables[table.name] = TableRows(rules.num_rows, None)
            continue
        chosen = counts.pop(table.name).chosen(rules.min_count, rules.max_rows, table.first_row)
        write_vocabulary(vocabulary_file(folder, number), values.values(), chosen, table.first_row)
        num_rows = table.first_row + len(chosen)
        row_of = np.zeros(values.num_values + 2, np.int32)
        row_of[chosen] = np.arange(table.first_row, num_rows, dtype=np.int32)
        tables[table.name] = TableRows(num_rows, row_of)
    dense = {
        name: DenseRule.of(name, column.transform, column.missing, moments[name])
        for name, column in schema.dense.items()
    }
    return RowMaker(schema, tables, dense)


class _PartWriter:
    """Writes rows to a store, part by part, with their histories and negatives.

    Warns if a column has one value for each item, and would tell the negatives.

    Args:
        rows: All rows, spooled.
        maker: Makes rows of the store.
        writer: The store.

    Attributes:
        catalog: What the item_columns of each item of the training part look up, (E, C); 0 for
            other items; None without negatives, or without such a part.
        num_lacking: Negatives that could not be drawn: each item of the training part would be a
            positive.
        unknown: For each part, how many values of each column have no row of their own.
    """

    def __init__(self, rows: SpooledRows, maker: RowMaker, writer: StoreWriter) -> None:
        self.catalog: NDArray[np.int32] | None = None
        self.num_lacking = 0
        self.unknown: dict[str, dict[str, int]] = {}
        self._rows, self._maker, self._writer = rows, maker, writer
        self._schema = rows.schema
        self._sampler: Sampler | None = None
        if self._schema.negatives is not None and self._schema.split is not ALL_FOR_TEST:
            self._sampler = self._new_sampler(self._schema.negatives)

    def write(self) -> dict[str, range]:
        """Write all parts; returns their sample numbers."""
        rows, splits = self._rows, {}
        left_out = {PART, *self._schema.conditions}
        names = [name for name in rows.spool.names if name not in left_out]
        for part in ("train", "validation", "test"):  # in order of time
            code, start = SPLITS.index(part), self._writer.num_samples
            self._maker.unknown = self.unknown[part] = {}
            histories = self._histories(code)
            for block in rows.blocks(code, names):
                bags = {name: found.of_rows(block.rows) for name, found in histories.items()}
                made = self._maker.make(block.columns, bags)
                made.others.setdefault("labels", np.ones(len(block.rows), np.int8))
                if code == TRAIN and self._sampler is not None:
                    made = self._with_negatives(made, block, self._sampler)
                self._writer.append(**made.as_arrays())
            splits[part] = range(start, self._writer.num_samples)
        return {part: splits[part] for part in SPLITS}

    def _histories(self, code: int) -> dict[str, Histories]:
        """Each history, for the rows of a part; those of training rows list training rows alone."""
        rows, schema = self._rows, self._schema
        has_both = schema.label_columns and schema.timestamp
        times = rows.spool.column(TIME) if has_both else None
        found: dict[str, Histories] = {}
        for name, history in schema.history.items():
            is_listed = rows.listed(name)
            if code == TRAIN:
                is_listed = is_listed & (rows.codes == TRAIN)
            values = rows.spool.column(history.of)
            found[name] = Histories(
                rows.in_group_order, rows.groups, is_listed, times, values, history.max_length
            )
        return found

    def _new_sampler(self, negatives: Negatives) -> Sampler:
        """What draws negatives; warns of columns with one value for each item."""
        rows, schema, maker = self._rows, self._schema, self._maker
        is_train = rows.in_part(TRAIN)

        def train_rows(name: str) -> NDArray[np.int32]:
            return maker.rows_of(rows.spool.column(name)[is_train], name)

        items = train_rows(negatives.item)
        table = next(table for table in schema.tables if negatives.item in table.columns)
        size = maker.tables[table.name].num_rows, len(negatives.item_columns)
        self.catalog = np.zeros(size, np.int32)
        for place, name in enumerate(negatives.item_columns):
            self.catalog[items, place] = train_rows(name)  # of several rows of an item, the last
        is_item, found = items >= table.first_row, []
        for name in (*schema.dense, *schema.categorical, *schema.multi):
            if name not in (negatives.item, *negatives.item_columns, schema.group):
                blocks = rows.blocks(TRAIN, [name])
                numbers = np.concatenate([numbers_of(block.columns[name]) for block in blocks])
                if belongs_to_items(items[is_item], numbers[is_item]):
                    found.append(name)
        if found:
            _warn_of_item_columns(negatives.item, found)
        # Where items come again, the positive's own item is the only one that is not drawn.
        owners = items if schema.has_repeats else rows.groups[is_train]
        return Sampler(items, owners, negatives, table.first_row)

    def _with_negatives(self, made: StoreRows, block: Block, sampler: Sampler) -> StoreRows:
        """Each row, followed by its negatives."""
        negatives = self._schema.negatives
        assert negatives is not None
        assert self.catalog is not None
        positives = np.asarray(made.features[negatives.item])
        drawn = sampler.draw(
            block.rows, positives if self._schema.has_repeats else made.others["groups"]
        )
        is_negative = np.zeros((len(drawn), 1 + drawn.shape[1]), np.bool_)
        is_negative[:, 1:] = True
        is_kept = np.ones_like(is_negative)
        is_kept[:, 1:] = drawn != NO_ITEM
        copies = np.nonzero(is_kept)[0]
        is_negative, items = is_negative[is_kept], drawn[drawn != NO_ITEM]
        self.num_lacking += drawn.size - len(items)
        result = made.take(copies)
        for place, name in enumerate([negatives.item, *negatives.item_columns]):
            rows = items if not place else self.catalog[items, place - 1]
            np.asarray(result.features[name])[is_negative] = rows
        result.others["labels"] = np.where(is_negative, np.int8(0), np.int8(1))
        return result


def _warn_of_item_columns(item: str, found: list[str]) -> None:
    is_one = len(found) == 1
    warnings.warn(
        f"negatives: column{'' if is_one else 's'} {', '.join(map(repr, found))} "
        f"{'has' if is_one else 'have'} one value for each {item!r}; a negative would keep that of "
        "its positive, which tells them apart; name a categorical column in item_columns, leave a "
        "dense or multi column out of the schema",
        stacklevel=2,
    )


def _values_in_order(columns: Columns, table: Table) -> NDArray[np.int32]:
    """The values of the columns of a table: row by row, in a row column by column."""
    bags = [Bags.of(columns[name]) for name in table.columns]
    return bags[0].values if len(bags) == 1 else woven(bags)[0]


def _write(
    rows: SpooledRows,
    maker: RowMaker,
    writer: StoreWriter,
    sources: Sequence[Mapping[str, Any]],
    like: Store | None,
) -> TableReport:
    """Write all parts, and what meta.json says about them."""
    schema, parts = rows.schema, _PartWriter(rows, maker, writer)
    splits = parts.write()
    about: dict[str, Any] = {
        "convention": "table",
        "sources": list(sources),
        "schema": schema.as_dict() if like is None else like.meta["schema"],
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
            catalog = like.catalog if like is not None else parts.catalog
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
