"""Encodes raw rows by the vocabularies of a store, as the store's own rows were.

Values that the store's training part did not have, or had too rarely, get row 0 of their table and
are counted.
"""

from __future__ import annotations

import hashlib
import json
from copy import copy
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from recsys._support.files import as_argument
from recsys._support.untrusted import is_finite_number, is_text
from recsys.datasets.store import Store
from recsys.datasets.tabular.encoding.dense import DenseRule
from recsys.datasets.tabular.encoding.numbering import Numbers
from recsys.datasets.tabular.encoding.row_encoder import RowEncoder, new_numbers, roles_of
from recsys.datasets.tabular.encoding.store_rows import RowMaker, TableRows
from recsys.datasets.tabular.encoding.vocabulary import read_vocabulary, vocabulary_file
from recsys.datasets.tabular.read import TableFiles
from recsys.datasets.tabular.schemas.schema import Schema
from recsys.datasets.tabular.schemas.schema_parts import FractionSplit
from recsys.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys.datasets.tabular.encoding.numbering import HashedRows
    from recsys.datasets.tabular.encoding.store_rows import StoreRows
    from recsys.datasets.tabular.schemas.schema import Table

__all__ = [
    "Encoder",
    "StoreRules",
    "encoding_of",
    "read_rules",
    "read_schema",
]

_VALUE_KINDS = ("categorical", "multi", "sequence", "history")


class StoreRules(NamedTuple):
    """How a store's rows were made.

    Attributes:
        schema: What the columns mean.
        numbers: The numbering of each table, filled with the vocabulary of the store.
        maker: From numbers to rows.
    """

    schema: Schema
    numbers: dict[str, Numbers | HashedRows]
    maker: RowMaker


class Encoder:
    """Encodes raw rows as a store encoded its own, to predict them; use it as a context manager.

        with Encoder(store) as encoder:
            for batch in encoder.open_files(paths).batches():
                scores = model(encoder.encode(batch).as_batch())

    Features are read with their weights, and the label where the files have it. Groups, times,
    weights of rows and the column of the split are not read.

    Args:
        store: A store that `recsys prepare table` made, or its folder.
        num_threads: Threads that number columns; by default one per core.

    Attributes:
        schema: The store's schema without group, times, weights, split and negatives.
        num_rows: Rows encoded so far.
        unknown: How many values of each numbered column had no row of their own so far; missing
            values are not among them.

    Raises:
        StoreError: the store has no schema, or its vocabularies are damaged.
        ConfigError: the schema has histories, which are made from the rows before.
    """

    def __init__(self, store: Store | str | Path, *, num_threads: int | None = None) -> None:
        store = store if isinstance(store, Store) else Store(store)
        schema = read_schema(store)
        if schema.history:
            labelled, others = "", ""
            if schema.label:
                labelled, others = "labelled ", "; rows without labels cannot be predicted"
            raise ConfigError(
                f"store {store.path}: a history is made from earlier positive rows, so a model "
                f"with histories predicts stores alone; make one of {labelled}rows with `recsys "
                f"prepare table FILES --like {as_argument(store.path)} --out STORE`{others}"
            )
        _, self._numbers, self._maker = read_rules(store)
        self.schema = _of_features(schema)
        self.num_rows = 0
        self._num_threads = num_threads
        self._place: Callable[[int], str] = "row {} (from 0)".format
        self._encoder: RowEncoder | None = None

    @property
    def unknown(self) -> dict[str, int]:  # noqa: D102
        return self._maker.unknown

    def open_files(self, paths: Sequence[str | Path]) -> TableFiles:
        """Open files for `encode`, which takes their rows from the first one on and names them.

        The files may lack the label, and labels may be missing.

        Raises:
            ConfigError, DatasetFormatError, FileNotFoundError: see `TableFiles`.
        """
        optional = [self.schema.label] if self.schema.label else []
        way_out = "the model has it as a feature; add it, or name other files"
        files = TableFiles(paths, self.schema, optional=optional, with_hash=False, way_out=way_out)
        self._place = files.place
        return files

    def encode(self, batch: pa.RecordBatch) -> StoreRows:
        """Encode a block of rows.

        Labels are None if the first batch lacks their column, and `NO_LABEL` where they are
        missing. Weights, groups and times are None.

        Args:
            batch: Columns that `conform` made by the schema, such as a batch of `open_files`.

        Raises:
            DatasetFormatError: a dense value is too large for float32.
        """
        if self._encoder is None:
            names = batch.schema.names
            roles = roles_of(self.schema)
            self._encoder = RowEncoder(
                self.schema,
                self._numbers,
                grow=False,
                without=[role for role, column in roles.items() if column not in names],
                num_threads=self._num_threads,
                place=self._place,
            )
        first = self.num_rows
        columns = self._encoder.encode(batch)
        rows = self._maker.make(columns, place=lambda row: self._place(first + row))
        self.num_rows += batch.num_rows
        return rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._encoder is not None:
            self._encoder.__exit__(*error)


def read_schema(store: Store) -> Schema:
    """The schema of a store, from its `meta.json`.

    Raises:
        StoreError: the store was not made from a table, or is damaged.
    """
    if "schema" not in store.meta:
        raise StoreError(
            f"store {store.path} has no schema; name one that `recsys prepare table` made"
        )
    try:
        schema = Schema.from_dict(store.meta["schema"])
    except ConfigError as error:
        raise _damaged(store, f"schema: {error}") from error
    if [table.name for table in schema.tables] != list(store.table_sizes):
        raise _damaged(store, "num_embeddings and schema name different tables")
    return schema


def read_rules(store: Store) -> StoreRules:
    """How the rows of a store were made, from its `meta.json` and vocabularies.

    Raises:
        StoreError: the store was not made from a table, or is damaged.
    """
    schema = read_schema(store)
    numbers: dict[str, Numbers | HashedRows] = {}
    tables: dict[str, TableRows] = {}
    for number, table in enumerate(schema.tables):
        numbers[table.name] = new_numbers(table)
        size = store.table_sizes[table.name]
        tables[table.name] = TableRows(size, _read_rows(store, number, table, numbers[table.name]))
    return StoreRules(schema, numbers, RowMaker(schema, tables, _read_dense_rules(store, schema)))


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
        if table.numbering != "hash":
            with vocabulary_file(folder, number).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _of_features(schema: Schema) -> Schema:
    """The schema without what decides neither features nor labels.

    It may have neither a label nor negatives, which is right for rows to predict alone. So its
    rules are not checked.
    """
    found = copy(schema)
    others = {
        "group": "",
        "timestamp": "",
        "timestamp_format": "",
        "weight": "",
        "split": FractionSplit(),
        "negatives": None,
    }
    for key, value in others.items():
        object.__setattr__(found, key, value)
    return found


def _read_rows(
    store: Store, number: int, table: Table, numbers: Numbers | HashedRows
) -> NDArray[np.int32] | None:
    """The row of each number of a table, after its vocabulary was read into `numbers`."""
    size = store.table_sizes[table.name]
    if not isinstance(numbers, Numbers):
        return None
    first_row = table.first_row
    num_rows = read_vocabulary(vocabulary_file(store.path, number), numbers, first_row)
    if num_rows != size:
        raise _damaged(store, f"table {table.name!r} has {size} rows, its vocabulary {num_rows}")
    return np.arange(first_row, size, dtype=np.int32)


def _read_dense_rules(store: Store, schema: Schema) -> dict[str, DenseRule]:
    found = store.meta.get("dense_rules")
    keys = set(DenseRule.__dataclass_fields__)
    is_good = (
        isinstance(found, list)
        and len(found) == len(schema.dense)
        and all(
            isinstance(each, dict)
            and each.keys() == keys
            and is_text(each["transform"])
            and all(is_finite_number(each[key]) for key in keys - {"transform"})
            for each in found
        )
    )
    if not is_good or list(schema.dense) != store.meta["dense_names"]:
        raise _damaged(store, "dense_rules must have the rule of each dense column of the schema")
    assert isinstance(found, list)
    return {name: DenseRule(**each) for name, each in zip(schema.dense, found, strict=True)}


def _damaged(store: Store, reason: str) -> StoreError:
    return StoreError(f"{store.path / 'meta.json'}: {reason}; prepare the store again")
