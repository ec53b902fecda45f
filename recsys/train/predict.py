"""Predictions of a saved model: for the rows of frames, of files, or for the samples of a store.

    FILE.parquet    row        int64, the number of the sample in the store, or of the row in the
                               files, from 0 up
                    <group>    as in the column of the schema's key group, where there is one
                    <item>     as in the column of the schema's [negatives], where there is one;
                               null for a store's items that share row 0 of their table
                    score      float32, the probability of a positive
                    label      int8, 0 or 1, null where it is missing; only where labels are known

Negatives that `recsys prepare` has drawn are left out: they are no rows of the user's.

Memory is bounded: data is read, predicted and written block by block. On the CPU, tables are mapped
from the saved model, which may be larger than memory.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from functools import cached_property
from itertools import chain, islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from recsys._support.files import appearing_whole, require_new, require_place
from recsys.datasets.loader import num_read_ahead, one_ahead, read_ahead
from recsys.datasets.numbering import vocabulary_file
from recsys.datasets.store import GROUPS, Store
from recsys.datasets.store_writer import is_store
from recsys.datasets.tabular.convert import plain
from recsys.datasets.tabular.encode import Encoder, read_schema
from recsys.datasets.tabular.read import Frames
from recsys.datasets.tabular.schema import GROUP, NO_LABEL
from recsys.embeddings.tables_module import check_input
from recsys.errors import ConfigError, DatasetFormatError, StoreError
from recsys.train.build import autocast
from recsys.train.evaluate import open_saved_model, scores_of
from recsys.train.ranking import Items
from recsys.train.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pandas as pd
    from numpy.typing import NDArray

    from recsys.batch import Batch

__all__ = [
    "Predictor",
    "Written",
    "new_parquet",
    "predict_run",
    "values_in",
    "values_of_rows",
    "write_parquet",
]

_PREFETCH = 4
_WRITTEN_ROWS = 1 << 17  # of a row group, at least


class Predictor:
    """The model of a run, ready to predict.

    Args:
        run_dir: A run that saved its model.
        store: Where the store of the run is now; default: where it was in training.
        batch_size: Samples per forward pass.

    Attributes:
        source: The data.
        meta: What `meta.json` of a store holds; empty for synthetic data.
        group: The column of groups in the data of a store; empty without one.
        item: The column of the item of drawn negatives; empty where none are drawn.

    Raises:
        ConfigError: there is no saved model, it does not fit the data, or `batch_size` is less than
            1.
        StoreError: the store does not exist, or is damaged.
    """

    def __init__(
        self, run_dir: str | Path, *, store: str | Path | None = None, batch_size: int = 8192
    ) -> None:
        self._run_dir = run_dir
        self._config, self.source, self._model = open_saved_model(
            run_dir, store, batch_size=batch_size
        )
        self.meta = self.source.meta if isinstance(self.source, Store) else {}
        schema = self.meta.get("schema", {})
        self.group: str = schema.get("group", "")
        self.item: str = schema.get("negatives", {}).get("item", "")

    def predict(self, frame: pd.DataFrame | pa.Table) -> NDArray[np.float32]:
        """The probability of a positive for each row of a frame.

        Args:
            frame: Has the columns of the run's store that are features; other columns, such as the
                label, are not read. Values get the rows of their tables by the vocabularies of the
                store, and those that training did not have share row 0.

        Shape:
            result (N,), for N rows in their order.

        Raises:
            ConfigError: the run's store is not the one of training, or has histories, which rows
                alone do not give.
            DatasetFormatError: the frame lacks a column, a row breaks the schema, or the model
                gives it no finite score.
            StoreError: the run's store was not made from a table.
            TypeError: it is no frame.
        """
        schema = self.encoder.schema
        blocks = Frames(frame, schema, without=schema.label_columns).batches()
        scored = self.scored(self.encoded(blocks), lambda row: f"row {row} (from 0)")
        found = [table["score"].to_numpy() for table in scored]
        return np.concatenate(found) if found else np.empty(0, np.float32)

    @cached_property
    def encoder(self) -> Encoder:
        """Encodes rows by the vocabularies of the run's store.

        Raises:
            ConfigError: it is no store, another one than in training, or it has histories.
            StoreError: it was not made from a table.
        """
        store = self.source
        if not isinstance(store, Store):
            raise ConfigError(
                f"{self._run_dir} was trained on {self._config.data}, which has no vocabularies to "
                "encode rows by; predict the samples of a store"
            )
        record = RunFolder.open(self._run_dir).read_record()
        if record["data"].get("fingerprint") != store.fingerprint:
            raise ConfigError(
                f"store {store.path} is not the one that {self._run_dir} was trained on: it was "
                "prepared again; train again, or restore the store"
            )
        return Encoder(store)

    def samples(self) -> Iterator[tuple[Batch, pa.Table]]:
        """The samples of the store but drawn negatives, in their order; some are read ahead.

        Beside each mini-batch stand the columns that its rows of the file begin with.
        """
        store = self.source
        assert isinstance(store, Store)
        parts = self._parts(store.num_samples)
        columns: dict[str, Callable[[NDArray[np.int64]], Any]] = {"row": lambda part: part}
        if self.group and store.groups is not None and (store.path / GROUPS).is_file():
            groups, of_groups = store.groups, values_in(store.path / GROUPS)
            columns[self.group] = lambda part: of_groups.take(pa.array(groups[part]))
        if self.item:
            items, of_items = Items(store), values_of_rows(store, self.item)
            columns[self.item] = lambda part: of_items.take(pa.array(items.of_samples(part)))
            parts = (part[store.labels[part] == 1] for part in parts)  # others are drawn
        parts, again = tee(part for part in parts if len(part))
        ahead = num_read_ahead(_PREFETCH, self._config.batch_size)
        with closing(read_ahead(store, parts, ahead)) as found:
            for batch, part in zip(found, again, strict=True):
                yield batch, pa.table({name: of(part) for name, of in columns.items()})

    def encoded(self, blocks: Iterator[pa.RecordBatch]) -> Iterator[tuple[Batch, pa.Table]]:
        """Rows as mini-batches, as of `samples`; a thread reads and encodes the next block.

        Args:
            blocks: Batches of the store's schema.
        """
        names = {GROUP: self.group, self.item: self.item}

        def encode() -> Iterator[list[tuple[Batch, pa.Table]]]:
            num_rows = 0
            for block in blocks:
                rows = self.encoder.encode(block)
                columns = {
                    name: plain(block.column(column))
                    for column, name in names.items()
                    if column in block.schema.names
                }
                numbers = np.arange(num_rows, num_rows + block.num_rows)
                table = pa.table({"row": numbers, **columns})
                num_rows += block.num_rows
                yield [
                    (rows.take(part).as_batch(), table.slice(part[0], len(part)))
                    for part in self._parts(block.num_rows)
                ]

        with closing(one_ahead(encode(), "recsys-load")) as found:
            for batches in found:
                yield from batches

    def scored(
        self, batches: Iterator[tuple[Batch, pa.Table]], place: Callable[[int], str]
    ) -> Iterator[pa.Table]:
        """The columns of each mini-batch, then the probabilities `score`, and `label`.

        Args:
            batches: Mini-batches, and the columns before the scores; the first is `row`.
            place: Words for a row, by its number.

        Raises:
            DatasetFormatError: the model gives a row no finite score.
            IdOutOfRange: a row is not one of its table.
        """
        for batch, columns in batches:
            with torch.no_grad(), autocast(self._config):
                logits, labels = scores_of(self._model, batch)
            is_bad = ~np.isfinite(logits)
            if is_bad.any():
                raise DatasetFormatError(
                    f"{place(columns['row'][np.argmax(is_bad)].as_py())}: a score must be finite, "
                    "and the model gives none for this row; correct its dense features, or leave "
                    "it out"
                )
            scores = pa.array(torch.sigmoid(torch.from_numpy(logits)).numpy())
            known = pa.array(labels.astype(np.int8), mask=labels == NO_LABEL)
            yield columns.append_column("score", scores).append_column("label", known)
        check_input(self._model)

    def _parts(self, num_samples: int) -> Iterator[NDArray[np.int64]]:
        """Numbers of samples, by mini-batch."""
        for begin in range(0, num_samples, self._config.batch_size):
            yield np.arange(begin, min(begin + self._config.batch_size, num_samples))


def predict_run(
    run_dir: str | Path,
    data: Sequence[str | Path],
    out: str | Path,
    *,
    batch_size: int = 8192,
    store: str | Path | None = None,
) -> tuple[Written, dict[str, int]]:
    """Predict samples with the model of a run, and write a Parquet file.

    Args:
        run_dir: A run that saved its model.
        data: One store; or files with the columns of the run's store that are features, in order,
            with or without those of label and group. Other columns are not read. Files are encoded
            by the vocabularies of the run's store.
        out: A new file, with a name that ends in .parquet.
        batch_size: Samples per forward pass.
        store: For files: where the run's store is now; default: where it was in training.

    Returns:
        What was written; and how many values of each column share row 0 of their table, because
        training has them too rarely or not at all. Columns without such values are left out.

    Raises:
        AlreadyExists: `out` exists.
        ConfigError: there is no saved model, it does not fit the data, the run's store has changed
            or has histories, which files alone do not give, `store` is given for samples of a
            store, or `batch_size` is less than 1.
        DatasetFormatError: a file cannot be read, a row breaks the schema, or the model gives a row
            no finite score.
        FileNotFoundError: a file does not exist.
        IdOutOfRange: a row is not one of its table.
        StoreError: the store is damaged, or files are given and the run's store was not made from a
            table.
    """
    out = new_parquet(out)
    from_store = len(data) == 1 and is_store(Path(data[0]))
    if from_store and store is not None:
        raise ConfigError(f"--store is for files, and {data[0]} is a store; leave --store out")
    source = data[0] if from_store else store
    predictor = Predictor(run_dir, store=source, batch_size=batch_size)
    if from_store:
        has_labels = not predictor.item  # else what is left has label 1
        scored = predictor.scored(predictor.samples(), lambda row: f"store {source}, sample {row}")
        unknown = list(predictor.meta.get("unknown", {}).values())  # of each part
    else:
        encoder = predictor.encoder
        unknown = [encoder.unknown]  # counts on
        files = encoder.files(data)
        has_labels = encoder.schema.label in files.columns
        scored = predictor.scored(predictor.encoded(files.batches()), files.place)
    tables = (table if has_labels else table.drop_columns("label") for table in scored)
    empty = pa.table({"row": np.empty(0, np.int64), "score": np.empty(0, np.float32)})
    written = write_parquet(out, tables, empty, -(-_WRITTEN_ROWS // batch_size))
    return written, dict(sum(map(Counter, unknown), Counter()))  # leaves out what is 0


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
