"""Turns spooled rows into a store: what is learned from the training part, and each part's rows."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from recsys.datasets.splits import SPLITS
from recsys.datasets.tabular.encode import (
    PART,
    TIME,
    Bags,
    DenseRule,
    Moments,
    RowMaker,
    TableRows,
)
from recsys.datasets.tabular.history import Histories
from recsys.datasets.tabular.negatives import (
    NO_ITEM,
    ItemCatalog,
    ItemValues,
    KnownPositives,
    Sampler,
)
from recsys.datasets.tabular.numbering import (
    Numbers,
    ValueCounts,
    choose_values,
    vocabulary_file,
    write_vocabulary,
)
from recsys.datasets.tabular.split import TRAIN

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from recsys.datasets.store_writer import StoreWriter
    from recsys.datasets.tabular.encode import Columns, StoreRows
    from recsys.datasets.tabular.numbering import HashedRows
    from recsys.datasets.tabular.schema import Table
    from recsys.datasets.tabular.split import SpooledRows
    from recsys.datasets.tabular.spool import Block

__all__ = ["PartWriter", "learn_rows"]


def learn_rows(
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
    _count_listed(rows, counts)
    (folder / "vocabulary").mkdir()
    tables = {}
    for number, table in enumerate(schema.tables):
        values, rules = numbers[table.name], table.rules
        if not isinstance(values, Numbers):
            tables[table.name] = TableRows(rules.num_rows, None)
            continue
        chosen = choose_values(
            counts.pop(table.name),
            min_count=rules.min_count,
            max_rows=rules.max_rows,
            first_row=table.first_row,
        )
        write_vocabulary(vocabulary_file(folder, number), values.values(), chosen, table.first_row)
        num_rows = table.first_row + len(chosen)
        row_of = np.zeros(values.num_values, np.int32)
        row_of[chosen] = np.arange(table.first_row, num_rows, dtype=np.int32)
        tables[table.name] = TableRows(num_rows, row_of)
    dense = {
        name: DenseRule.of(name, column.transform, column.missing, moments[name])
        for name, column in schema.dense.items()
    }
    return RowMaker(schema, tables, dense)


class PartWriter:
    """Writes rows to a store, part by part, with their histories and negatives.

    Warns if a column has one value for each item, and would tell the negatives.

    Args:
        rows: All rows, spooled.
        maker: Makes rows of the store.
        writer: The store.

    Attributes:
        catalog_rows: What the columns of each item of the training part look up, (E, C); None
            without negatives, or without such a part.
        num_lacking: Negatives that could not be drawn: each item of the training part would be a
            positive.
        unknown: For each part, how many values of each column have no row of their own.
    """

    def __init__(self, rows: SpooledRows, maker: RowMaker, writer: StoreWriter) -> None:
        self.catalog_rows: NDArray[np.int32] | None = None
        self.num_lacking = 0
        self.unknown: dict[str, dict[str, int]] = {}
        self._rows, self._maker, self._writer = rows, maker, writer
        self._schema = rows.schema
        columns = {history.of for history in self._schema.history.values()}
        self._history_values = {column: rows.spool.column(column) for column in columns}
        self._sampler: Sampler | None = None
        if self._schema.negatives is not None and not rows.are_for_test:
            self._sampler = self._new_sampler()

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
                made = self._make(block, histories)
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
        of_positives: Histories | None = None
        for name, history in schema.history.items():
            if history.where:
                is_listed = rows.spool.column(f"/where/{name}")
            elif of_positives is not None:
                found[name] = of_positives
                continue
            else:
                is_listed = rows.is_positive & rows.is_sample
            if code == TRAIN:
                is_listed = is_listed & (rows.codes == TRAIN)
            found[name] = Histories(rows.in_group_order, rows.groups, is_listed, times)
            if not history.where:
                of_positives = found[name]
        return found

    def _make(self, block: Block, histories: Mapping[str, Histories]) -> StoreRows:
        bags: dict[str, Bags] = {}
        for name, history in self._schema.history.items():
            values = self._history_values[history.of]
            bags[name] = histories[name].of_rows(block.rows, values, history.max_length)
        made = self._maker.make(block.columns, bags)
        if made.labels is not None:
            return made
        return replace(made, labels=np.ones(len(block.rows), np.int8))

    def _new_sampler(self) -> Sampler:
        """Count the items of the training part, and warn of columns with one value for each."""
        rows, schema, maker, negatives = (
            self._rows,
            self._schema,
            self._maker,
            self._schema.negatives,
        )
        assert negatives is not None
        names = [negatives.item, *negatives.item_columns]
        others = [
            name
            for name in (*schema.dense, *schema.categorical, *schema.multi)
            if name not in names and name != schema.group
        ]
        table = next(table for table in schema.tables if negatives.item in table.columns)
        num_rows = maker.tables[table.name].num_rows
        catalog = ItemCatalog(num_rows, len(negatives.item_columns))
        of_items = ItemValues(others, num_rows)
        for block in rows.blocks(TRAIN, [*names, *others]):
            columns = np.empty((len(block.rows), len(names)), np.int32)
            for place, name in enumerate(names):
                columns[:, place] = maker.rows_of(np.asarray(block.columns[name]), name)
            items = columns[:, 0]
            catalog.add(items, columns[:, 1:])
            items = np.where(items >= table.first_row, items, -1)
            of_items.add(items, {name: block.columns[name] for name in others})
        if found := of_items.found():
            _warn_of_item_columns(negatives.item, found)
        self.catalog_rows = catalog.rows
        is_train = rows.in_part(TRAIN)
        items = maker.rows_of(rows.spool.column(negatives.item)[is_train], negatives.item)
        # Where items come again, the positive's own item is the only one that is not drawn.
        owners = items if schema.has_repeats else rows.groups[is_train]
        return Sampler(
            catalog,
            KnownPositives(owners, items),
            by=negatives.by,
            per_positive=negatives.per_positive,
            seed=negatives.seed,
            first_row=table.first_row,
        )

    def _with_negatives(self, made: StoreRows, block: Block, sampler: Sampler) -> StoreRows:
        """Each row, followed by its negatives."""
        negatives = self._schema.negatives
        assert negatives is not None
        assert made.groups is not None
        positives = np.asarray(made.features[negatives.item])
        drawn = sampler.draw(block.rows, positives if self._schema.has_repeats else made.groups)
        is_negative = np.zeros((len(drawn), 1 + drawn.shape[1]), np.bool_)
        is_negative[:, 1:] = True
        is_kept = np.ones_like(is_negative)
        is_kept[:, 1:] = drawn != NO_ITEM
        copies = np.nonzero(is_kept)[0]
        is_negative, items = is_negative[is_kept], drawn[drawn != NO_ITEM]
        self.num_lacking += drawn.size - len(items)
        result = made.take(copies)
        for place, name in enumerate([negatives.item, *negatives.item_columns]):
            rows = items if not place else sampler.catalog.rows[items, place - 1]
            np.asarray(result.features[name])[is_negative] = rows
        labels = np.where(is_negative, np.int8(0), np.int8(1))
        return replace(result, labels=labels)


def _warn_of_item_columns(item: str, found: list[str]) -> None:
    is_one = len(found) == 1
    warnings.warn(
        f"negatives: column{'' if is_one else 's'} {', '.join(map(repr, found))} "
        f"{'has' if is_one else 'have'} one value for each {item!r}; a negative would keep that of "
        "its positive, which tells them apart; name a categorical column in item_columns, leave a "
        "dense or multi column out of the schema",
        stacklevel=2,
    )


def _count_listed(rows: SpooledRows, counts: Mapping[str, ValueCounts]) -> None:
    """Count the values that histories list of training rows that are no samples."""
    for name, history in rows.schema.history.items():
        table = rows.schema.categorical[history.of].table or history.of
        if history.where and table in counts:
            is_listed = rows.spool.column(f"/where/{name}") & (rows.codes == TRAIN)
            is_listed &= ~rows.is_sample
            counts[table].add(rows.spool.column(history.of)[is_listed])


def _values_in_order(columns: Columns, table: Table) -> NDArray[np.int32]:
    """The values of the columns of a table: row by row, in a row column by column."""
    if len(table.columns) == 1:
        column = columns[table.columns[0]]
        return column.values if isinstance(column, Bags) else column
    bags = [
        column if isinstance(column, Bags) else Bags(column, np.ones(len(column), np.int32))
        for column in (columns[name] for name in table.columns)
    ]
    rows = np.concatenate([np.repeat(np.arange(len(bag.lengths)), bag.lengths) for bag in bags])
    return np.concatenate([bag.values for bag in bags])[np.argsort(rows, kind="stable")]
