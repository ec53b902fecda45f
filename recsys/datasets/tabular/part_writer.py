"""Writes the parts of a spool to a store: rows, histories, negatives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.datasets.source import SPLITS
from recsys.datasets.tabular.encode import GROUP, LABEL, TIME, WEIGHT
from recsys.datasets.tabular.histories import Histories
from recsys.datasets.tabular.negatives import (
    NO_ITEM,
    ItemCatalog,
    KnownPositives,
    Sampler,
)
from recsys.datasets.tabular.splits import TRAIN
from recsys.datasets.tabular.store_rows import first_row_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.datasets.store_writer import StoreWriter
    from recsys.datasets.tabular.schema import Schema
    from recsys.datasets.tabular.spool import Bags, Block
    from recsys.datasets.tabular.spooled_rows import SpooledRows
    from recsys.datasets.tabular.store_rows import RowMaker, StoreRows

__all__ = ["PartWriter"]


class PartWriter:
    """Writes rows to a store, part by part.

    Args:
        rows: All rows, spooled.
        maker: Makes rows of the store.
        writer: The store.

    Attributes:
        num_lacking: Negatives that could not be drawn: the group has all items.
        unknown: For each part, how many values of each column have no row of their own.
    """

    def __init__(self, rows: SpooledRows, maker: RowMaker, writer: StoreWriter) -> None:
        self.num_lacking = 0
        self.unknown: dict[str, dict[str, int]] = {}
        self._rows = rows
        self._schema: Schema = rows.schema
        self._maker = maker
        self._writer = writer
        self._histories: Histories | None = None
        self._history_values: dict[str, Any] = {}
        if self._schema.history:
            self._histories = Histories(rows.in_group_order, rows.groups, rows.labels)
            columns = {history.of for history in self._schema.history.values()}
            self._history_values = {column: rows.spool.column(column) for column in columns}
        self._catalog: ItemCatalog | None = None
        self._sampler: Sampler | None = None
        if self._schema.negatives is not None and (rows.codes == TRAIN).any():
            self._catalog = self._count_items()
            self._sampler = self._new_sampler(self._catalog)

    @property
    def catalog_rows(self) -> NDArray[np.int32]:
        """What the columns of each item of the training part look up, (E, C)."""
        assert self._catalog is not None
        return self._catalog.rows

    def write(self) -> dict[str, range]:
        """Write all parts; returns their sample numbers."""
        roles = {
            LABEL: self._schema.label,
            WEIGHT: self._schema.weight,
            GROUP: self._schema.group,
            TIME: self._schema.timestamp,
        }
        names = [role for role, column in roles.items() if column]
        names += [*self._schema.dense, *self._schema.value_columns]
        splits = {}
        for code, part in enumerate(SPLITS):
            start = self._writer.num_samples
            self._maker.unknown = self.unknown[part] = {}
            for block in self._rows.blocks(code, names):
                made = self._make(block)
                if code == TRAIN and self._sampler is not None:
                    made = self._with_negatives(made, block, self._sampler)
                self._writer.append(**made.as_arrays())
            splits[part] = range(start, self._writer.num_samples)
        return splits

    def _make(self, block: Block) -> StoreRows:
        histories: dict[str, Bags] = {}
        for name, history in self._schema.history.items():
            assert self._histories is not None
            values = self._history_values[history.of]
            histories[name] = self._histories.of_rows(block.rows, values, history.max_length)
        made = self._maker.make(block.columns, histories)
        if made.labels is not None:
            return made
        return replace(made, labels=np.ones(len(block.rows), np.int8))

    def _count_items(self) -> ItemCatalog:
        """The items of the training part."""
        negatives = self._schema.negatives
        assert negatives is not None
        names = [negatives.item, *negatives.item_columns]
        table = self._schema.categorical[negatives.item].table or negatives.item
        catalog = ItemCatalog(self._maker.tables[table].num_rows, len(negatives.item_columns))
        for block in self._rows.blocks(TRAIN, names):
            items, *others = (
                self._maker.rows_of(np.asarray(block.columns[name]), name) for name in names
            )
            columns = np.stack(others, axis=1) if others else np.empty((len(items), 0), np.int32)
            catalog.add(items, columns)
        return catalog

    def _new_sampler(self, catalog: ItemCatalog) -> Sampler:
        negatives = self._schema.negatives
        assert negatives is not None
        column = self._schema.categorical[negatives.item]
        table = next(
            each for each in self._schema.tables if each.name == (column.table or negatives.item)
        )
        items = self._maker.rows_of(self._rows.spool.column(negatives.item), negatives.item)
        return Sampler(
            catalog,
            KnownPositives(self._rows.groups, items),
            by=negatives.by,
            per_positive=negatives.per_positive,
            seed=negatives.seed,
            first_row=first_row_of(table.has_missing_row),
        )

    def _with_negatives(self, made: StoreRows, block: Block, sampler: Sampler) -> StoreRows:
        """Each row, followed by its negatives."""
        negatives = self._schema.negatives
        assert negatives is not None
        assert self._catalog is not None
        assert made.groups is not None
        drawn = sampler.draw(block.rows, made.groups)
        is_negative = np.zeros((len(drawn), 1 + drawn.shape[1]), np.bool_)
        is_negative[:, 1:] = True
        is_kept = np.ones_like(is_negative)
        is_kept[:, 1:] = drawn != NO_ITEM
        copies = np.nonzero(is_kept)[0]
        is_negative, items = is_negative[is_kept], drawn[drawn != NO_ITEM]
        self.num_lacking += drawn.size - len(items)
        result = made.take(copies)
        for place, name in enumerate([negatives.item, *negatives.item_columns]):
            rows = items if not place else self._catalog.rows[items, place - 1]
            np.asarray(result.features[name])[is_negative] = rows
        labels = np.where(is_negative, np.int8(0), np.int8(1))
        return replace(result, labels=labels)
