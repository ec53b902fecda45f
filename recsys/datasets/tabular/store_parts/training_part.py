"""What a preparation learns from the training part: vocabularies, and rules for dense columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys.datasets.tabular.encoding.dense import DenseRule, Moments
from recsys.datasets.tabular.encoding.numbering import Numbers
from recsys.datasets.tabular.encoding.row_encoder import Bags
from recsys.datasets.tabular.encoding.store_rows import RowMaker, TableRows
from recsys.datasets.tabular.encoding.vocabulary import (
    ValueCounts,
    choose_values,
    vocabulary_file,
    write_vocabulary,
)
from recsys.datasets.tabular.store_parts.spooled_rows import TRAIN

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from recsys.datasets.tabular.encoding.numbering import HashedRows
    from recsys.datasets.tabular.encoding.row_encoder import Columns
    from recsys.datasets.tabular.schemas.schema import Table
    from recsys.datasets.tabular.store_parts.spooled_rows import SpooledRows

__all__ = ["learn_rows"]


def learn_rows(
    rows: SpooledRows, numbers: Mapping[str, Numbers | HashedRows], folder: Path
) -> RowMaker:
    """Count the training part, give values rows, and write the vocabularies.

    Args:
        rows: All rows.
        numbers: The numbering of each table.
        folder: The store's folder, which has a folder `vocabulary`.

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
    tables = {}
    for number, table in enumerate(schema.tables):
        values = numbers[table.name]
        if isinstance(values, Numbers):
            file = vocabulary_file(folder, number)
            tables[table.name] = _give_rows(table, values, counts.pop(table.name), file)
        else:
            tables[table.name] = TableRows(table.num_rows, None)
    rules = {
        name: DenseRule.of(name, column.transform, column.missing, moments[name])
        for name, column in schema.dense.items()
    }
    return RowMaker(schema, tables, rules)


def _give_rows(table: Table, values: Numbers, seen: ValueCounts, file: Path) -> TableRows:
    first_row = table.first_row
    chosen = choose_values(
        seen, min_count=table.min_count, max_rows=table.max_rows, first_row=first_row
    )
    write_vocabulary(file, values.values(), chosen, first_row)
    row_of = np.zeros(values.num_values, np.int32)
    row_of[chosen] = np.arange(first_row, first_row + len(chosen), dtype=np.int32)
    return TableRows(first_row + len(chosen), row_of)


def _values_in_order(columns: Columns, table: Table) -> NDArray[np.int32]:
    """The values of the columns of a table: row by row, in a row column by column."""
    if len(table.columns) == 1:
        column = columns[table.columns[0]]
        return column.values if isinstance(column, Bags) else column
    bags = [
        column if isinstance(column, Bags) else Bags(column, np.ones(len(column), np.int32))
        for column in (columns[name] for name in table.columns)
    ]
    rows = np.concatenate([np.repeat(np.arange(len(each.lengths)), each.lengths) for each in bags])
    return np.concatenate([each.values for each in bags])[np.argsort(rows, kind="stable")]
