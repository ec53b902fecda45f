"""Encodes raw rows by the vocabularies of a store, as the store's own rows were.

Values that the store's training part did not have, or had too rarely, get row 0 of their table and
are counted.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Self

import numpy as np
from pydantic import TypeAdapter

from recsys._support.files import as_argument
from recsys.datasets.tabular.encode import DenseRule, RowEncoder, RowMaker, TableRows, roles_of
from recsys.datasets.tabular.numbering import (
    Numbers,
    new_numbers,
    read_vocabulary,
    vocabulary_file,
)
from recsys.datasets.tabular.read import TableFiles
from recsys.datasets.tabular.schema import FractionSplit, Schema
from recsys.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from recsys.datasets.store import Store
    from recsys.datasets.tabular.encode import StoreRows
    from recsys.datasets.tabular.numbering import HashedRows

__all__ = ["Encoder", "encoding_of", "read_rules", "read_schema"]

_VALUE_KINDS = ("categorical", "multi", "sequence", "history")


class Encoder:
    """Encodes raw rows as a store encoded its own, to predict them; use it as a context manager.

        with Encoder(store, paths) as encoder:
            for batch in encoder.files.batches():
                scores = model(encoder.encode(batch).as_batch())

    Features are read, and labels where the files have them. Groups, times, weights, the column of
    the split and those of the filter are not. The files may lack the label, and labels may be
    missing.

    Args:
        store: A store that `recsys prepare table` made.
        paths: The files.

    Attributes:
        files: The files; `encode` takes their rows from the first one on.
        schema: The store's schema without group, times, weight, filter, split and negatives.
        unknown: How many values of each numbered column had no row of their own so far; missing
            values are not among them.

    Raises:
        StoreError: the store has no schema, or its vocabularies are damaged.
        ConfigError: the schema has histories, which are made from the rows before.
        ConfigError, DatasetFormatError, FileNotFoundError: see `TableFiles`.
    """

    def __init__(self, store: Store, paths: Sequence[str | Path]) -> None:
        schema = read_schema(store)
        if schema.history:
            labelled, others = "", ""
            if schema.label_columns:
                labelled, others = "labelled ", "; rows without labels cannot be predicted"
            raise ConfigError(
                f"store {store.path}: a history is made from earlier positive rows, so a model "
                f"with histories predicts stores alone; make one of {labelled}rows with `recsys "
                f"prepare table FILES --like {as_argument(store.path)} --out STORE`{others}"
            )
        numbers, self._maker = read_rules(store)
        self.unknown = self._maker.unknown
        unused = ("group", "timestamp", "timestamp_format", "weight", "filter", "negatives")
        defaults = {name: Schema.model_fields[name].default for name in unused}
        # Not checked again: rows to predict may have neither a label nor negatives.
        self.schema = schema.model_copy(update={**defaults, "split": FractionSplit()})
        way_out = "the model has it as a feature; add it, or name other files"
        optional = self.schema.label_columns
        self.files = TableFiles(
            paths, self.schema, optional=optional, with_hash=False, way_out=way_out
        )
        roles = roles_of(self.schema)
        without = [role for role, column in roles.items() if column not in self.files.columns]
        self._encoder = RowEncoder(self.schema, numbers, grow=False, without=without)

    def encode(self, batch: pa.RecordBatch) -> StoreRows:
        """Encode a block of rows.

        Labels are None if the files lack their column, and `NO_LABEL` where they are missing.
        Weights, groups and times are None.

        Args:
            batch: The next batch of the files.
        """
        return self._maker.make(self._encoder.encode(batch), {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
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


def read_rules(store: Store) -> tuple[dict[str, Numbers | HashedRows], RowMaker]:
    """How the rows of a store were made, from its `meta.json` and vocabularies.

    Returns:
        The numbering of each table, filled with its vocabulary; and what makes rows of numbers.

    Raises:
        StoreError: the store was not made from a table, or is damaged.
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
    try:
        rules = TypeAdapter(list[DenseRule]).validate_python(store.meta["dense_rules"])
        dense = dict(zip(schema.dense, rules, strict=True))
    except (KeyError, ValueError) as error:
        raise _damaged(store, f"dense_rules: {error}") from error
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


def _damaged(store: Store, reason: str) -> StoreError:
    return StoreError(f"{store.path / 'meta.json'}: {reason}; prepare the store again")
