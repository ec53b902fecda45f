"""Encodes raw rows by the vocabularies of a store, as the store's own rows were.

Values that the store's training part did not have, or had too rarely, get row 0 of their table and
are counted.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from recsys._support.untrusted import is_finite_number, is_text
from recsys.datasets.store import Store
from recsys.datasets.tabular.dense import DenseRule
from recsys.datasets.tabular.encode import GROUP, LABEL, PART, TIME, WEIGHT, RowEncoder, new_numbers
from recsys.datasets.tabular.numbering import Numbers
from recsys.datasets.tabular.schema import Schema
from recsys.datasets.tabular.store_rows import RowMaker, TableRows, first_row_of
from recsys.datasets.tabular.vocabulary import read_vocabulary, vocabulary_file
from recsys.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys.datasets.tabular.numbering import HashedRows
    from recsys.datasets.tabular.schema import Table
    from recsys.datasets.tabular.store_rows import StoreRows

__all__ = ["Encoder", "StoreRules", "dense_rules_as_json", "read_rules"]


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
    """Encodes raw rows as a store encoded its own; use it as a context manager.

        with Encoder(store) as encoder:
            files = TableFiles(paths, encoder.schema, optional=encoder.optional_columns)
            for batch in files.batches():
                rows = encoder.encode(batch)
                scores = model(rows.as_batch())

    Args:
        store: A store that `recsys prepare table` made, or its folder.
        num_threads: Threads that number columns; by default one per core.

    Attributes:
        schema: The store's schema.
        num_rows: Rows encoded so far.
        unknown: How many values of each numbered column had no row of their own so far; missing
            values are not among them.

    Raises:
        StoreError: the store has no schema, or its vocabularies are damaged.
        ConfigError: the schema has histories, which need the rows of the whole file.
    """

    def __init__(self, store: Store | str | Path, *, num_threads: int | None = None) -> None:
        store = store if isinstance(store, Store) else Store(store)
        self.schema, self._numbers, self._maker = read_rules(store)
        self.num_rows = 0
        self._num_threads = num_threads
        self._encoder: RowEncoder | None = None
        if self.schema.history:
            raise ConfigError(
                f"store {store.path}: a history needs all rows of a file; prepare the file with "
                f"`recsys prepare table FILE --like {store.path} --out STORE`, and use that store"
            )

    @property
    def unknown(self) -> dict[str, int]:  # noqa: D102
        return self._maker.unknown

    @property
    def optional_columns(self) -> frozenset[str]:
        """The columns that batches may lack: those that are not of a feature."""
        features = (*self.schema.dense, *self.schema.value_columns)
        return frozenset(self.schema.columns).difference(features)

    def encode(self, batch: pa.RecordBatch) -> StoreRows:
        """Encode a block of rows.

        Labels, weights, groups and times are None if the first batch lacks their column.

        Args:
            batch: Columns that `conform` made, such as a batch of `TableFiles`.

        Raises:
            DatasetFormatError: a dense value is too large for float32.
        """
        if self._encoder is None:
            roles = {
                LABEL: self.schema.label,
                WEIGHT: self.schema.weight,
                GROUP: self.schema.group,
                TIME: self.schema.timestamp,
            }
            names = batch.schema.names
            without = [PART, *(role for role, column in roles.items() if column not in names)]
            self._encoder = RowEncoder(
                self.schema,
                self._numbers,
                grow=False,
                without=without,
                num_threads=self._num_threads,
            )
        rows = self._maker.make(self._encoder.encode(batch))
        self.num_rows += batch.num_rows
        return rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._encoder is not None:
            self._encoder.__exit__(*error)


def read_rules(store: Store) -> StoreRules:
    """How the rows of a store were made, from its `meta.json` and vocabularies.

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
    numbers: dict[str, Numbers | HashedRows] = {}
    tables: dict[str, TableRows] = {}
    if [table.name for table in schema.tables] != list(store.table_sizes):
        raise _damaged(store, "num_embeddings and schema name different tables")
    for number, table in enumerate(schema.tables):
        numbers[table.name] = new_numbers(table)
        size = store.table_sizes[table.name]
        tables[table.name] = TableRows(size, _read_rows(store, number, table, numbers[table.name]))
    return StoreRules(schema, numbers, RowMaker(schema, tables, _read_dense_rules(store, schema)))


def dense_rules_as_json(rules: Mapping[str, DenseRule]) -> list[dict[str, Any]]:
    """The entry `dense_rules` of `meta.json`: the rule of each dense column, in order."""
    return [asdict(rule) for rule in rules.values()]


def _read_rows(
    store: Store, number: int, table: Table, numbers: Numbers | HashedRows
) -> NDArray[np.int32] | None:
    """The row of each number of a table, after its vocabulary was read into `numbers`."""
    size = store.table_sizes[table.name]
    if not isinstance(numbers, Numbers):
        return None
    first_row = first_row_of(table.has_missing_row)
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
