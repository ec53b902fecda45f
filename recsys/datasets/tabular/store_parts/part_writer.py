"""Writes the parts of a spool to a store: rows, histories, negatives.

`ItemValues` finds columns that have one value for each item, such as its genre. A negative is its
positive with another item. A column that belongs to the item but stays as it was no longer fits the
item, and so tells the negatives from the positives. It must change with the item, or be left out.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys.datasets.splits import SPLITS
from recsys.datasets.tabular.encoding.row_encoder import GROUP, LABEL, TIME, WEIGHT, Bags, roles_of
from recsys.datasets.tabular.store_parts.histories import Histories
from recsys.datasets.tabular.store_parts.negatives import (
    NO_ITEM,
    ItemCatalog,
    KnownPositives,
    Sampler,
)
from recsys.datasets.tabular.store_parts.spooled_rows import TRAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from recsys.datasets.store_writer import StoreWriter
    from recsys.datasets.tabular.encoding.store_rows import RowMaker, StoreRows
    from recsys.datasets.tabular.schemas.schema import Schema
    from recsys.datasets.tabular.store_parts.spool import Block
    from recsys.datasets.tabular.store_parts.spooled_rows import SpooledRows

__all__ = ["ItemValues", "PartWriter"]


class PartWriter:
    """Writes rows to a store, part by part.

    Warns if a column has one value for each item, and would tell the negatives.

    Args:
        rows: All rows, spooled.
        maker: Makes rows of the store.
        writer: The store.
        place: Names a row in messages, by its number from 0 among all rows.

    Attributes:
        num_lacking: Negatives that could not be drawn: each item of the training part would be a
            positive.
        unknown: For each part, how many values of each column have no row of their own.
    """

    def __init__(
        self,
        rows: SpooledRows,
        maker: RowMaker,
        writer: StoreWriter,
        place: Callable[[int], str],
    ) -> None:
        self.num_lacking = 0
        self.unknown: dict[str, dict[str, int]] = {}
        self._rows = rows
        self._schema: Schema = rows.schema
        self._maker = maker
        self._writer = writer
        self._place = place
        columns = {history.of for history in self._schema.history.values()}
        self._history_values = {column: rows.spool.column(column) for column in columns}
        self._sampler: Sampler | None = None
        if self._schema.negatives is not None and (rows.codes == TRAIN).any():
            self._sampler = self._new_sampler(self._count_items())

    @property
    def catalog_rows(self) -> NDArray[np.int32]:
        """What the columns of each item of the training part look up, (E, C)."""
        assert self._sampler is not None
        return self._sampler.catalog.rows

    def write(self) -> dict[str, range]:
        """Write all parts; returns their sample numbers."""
        roles = roles_of(self._schema)
        names = [role for role in (LABEL, WEIGHT, GROUP, TIME) if role in roles]
        names += [*self._schema.dense, *self._schema.value_columns, *self._schema.weights_of]
        splits = {}
        for code, part in enumerate(SPLITS):
            start = self._writer.num_samples
            self._maker.unknown = self.unknown[part] = {}
            histories = self._new_histories(code) if self._schema.history else None
            for block in self._rows.blocks(code, names):
                made = self._make(block, histories)
                if code == TRAIN and self._sampler is not None:
                    made = self._with_negatives(made, block, self._sampler)
                self._writer.append(**made.as_arrays())
            splits[part] = range(start, self._writer.num_samples)
        return splits

    def _new_histories(self, code: int) -> Histories:
        """Histories for the rows of a part; those of training rows list training rows alone."""
        rows = self._rows
        is_listed = rows.labels != 0
        if code == TRAIN:
            is_listed &= rows.codes == TRAIN
        has_both = self._schema.label and self._schema.timestamp
        times = rows.spool.column(TIME) if has_both else None
        return Histories(rows.in_group_order, rows.groups, is_listed, times)

    def _make(self, block: Block, histories: Histories | None) -> StoreRows:
        bags: dict[str, Bags] = {}
        for name, history in self._schema.history.items():
            assert histories is not None
            values = self._history_values[history.of]
            bags[name] = histories.of_rows(block.rows, values, history.max_length)
        made = self._maker.make(
            block.columns, bags, place=lambda row: self._place(int(block.rows[row]))
        )
        if made.labels is not None:
            return made
        return replace(made, labels=np.ones(len(block.rows), np.int8))

    def _count_items(self) -> ItemCatalog:
        """The items of the training part. Warns of columns with one value for each of them."""
        schema, negatives = self._schema, self._schema.negatives
        assert negatives is not None
        names = [negatives.item, *negatives.item_columns]
        others = [
            name
            for name in (*schema.dense, *schema.categorical, *schema.multi)
            if name not in names and name != schema.group
        ]
        table = schema.categorical[negatives.item].table or negatives.item
        num_rows = self._maker.tables[table].num_rows
        catalog = ItemCatalog(num_rows, len(negatives.item_columns))
        of_items, first_item = ItemValues(others, num_rows), self._first_item()
        for block in self._rows.blocks(TRAIN, [*names, *others]):
            items, *changing = (
                self._maker.rows_of(np.asarray(block.columns[name]), name) for name in names
            )
            no_columns = np.empty((len(items), 0), np.int32)
            catalog.add(items, np.stack(changing, axis=1) if changing else no_columns)
            items = np.where(items >= first_item, items, -1)
            of_items.add(items, {name: block.columns[name] for name in others})
        if found := of_items.found():
            _warn_of_item_columns(negatives.item, found)
        return catalog

    def _first_item(self) -> int:
        """The first row of the items' table that stands for an item."""
        negatives = self._schema.negatives
        assert negatives is not None
        name = self._schema.categorical[negatives.item].table or negatives.item
        table = next(each for each in self._schema.tables if each.name == name)
        return table.first_row

    def _new_sampler(self, catalog: ItemCatalog) -> Sampler:
        negatives, rows = self._schema.negatives, self._rows
        assert negatives is not None
        is_train = rows.codes == TRAIN
        items = self._maker.rows_of(rows.spool.column(negatives.item), negatives.item)[is_train]
        # Where items come again, the positive's own item is the only one that is not drawn.
        owners = items if self._schema.has_repeats else rows.groups[is_train]
        return Sampler(
            catalog,
            KnownPositives(owners, items),
            by=negatives.by,
            per_positive=negatives.per_positive,
            seed=negatives.seed,
            first_row=self._first_item(),
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


class ItemValues:
    """Compares the values of columns in all rows of an item. Missing values are values.

    Args:
        names: The columns.
        num_items: Items are numbered below it.
    """

    def __init__(self, names: Sequence[str], num_items: int) -> None:
        self._is_seen = np.zeros(num_items, np.bool_)
        self._values = {name: np.zeros(num_items) for name in names}
        self._num_rows = 0

    def add(self, items: NDArray[Any], columns: Mapping[str, NDArray[Any] | Bags]) -> None:
        """Add rows: items (n,), and a value or a bag of each column for each of them.

        Rows whose item is negative are left out.
        """
        is_item = items >= 0
        items = items[is_item]
        is_new = ~self._is_seen[items]
        for name in list(self._values):
            values, kept = _as_numbers(columns[name])[is_item], self._values[name]
            kept[items[is_new]] = values[is_new]  # of several rows of an item, one
            if (kept[items] != values).any():
                del self._values[name]
        self._is_seen[items] = True
        self._num_rows += len(items)

    def found(self) -> list[str]:
        """The columns with one value for each item, and not the same one for all.

        Empty if no item came twice: then every column has one value for each item.
        """
        if self._num_rows <= np.count_nonzero(self._is_seen):
            return []
        values = {name: kept[self._is_seen] for name, kept in self._values.items()}
        return [name for name, each in values.items() if (each != each[0]).any()]


def _as_numbers(column: NDArray[Any] | Bags) -> NDArray[np.float64]:
    """A number for each row; equal values and equal bags have equal ones."""
    if isinstance(column, Bags):
        hashes = mix64(column.values.astype(np.uint64) + GOLDEN)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes)])
        ends = np.cumsum(column.lengths, dtype=np.int64)
        of_bags: NDArray[np.uint64] = sums[ends] - sums[ends - column.lengths]
        return of_bags.astype(np.float64)
    numbers = column.astype(np.float64)
    return np.where(np.isnan(numbers), np.inf, numbers)  # nan would differ from itself
