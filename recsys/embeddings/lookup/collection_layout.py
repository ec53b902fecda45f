"""Where the tables of a collection are looked up, and where their pooled vectors go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys.embeddings.rows.lookups import Lookups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.lookup.table_group import TableGroup

__all__ = ["Layout"]


class Layout:
    """Tables of one group and pooling, and where their results go.

    Args:
        lookups: Of the collection: the table of each, and its feature.
        dims: Of each lookup's output.
        group: Has the tables.
        is_mean: Whether bags are averaged.
        members: Which tables of the collection.
        numbers: Of each of the collection's tables in its group.

    Attributes:
        lookups: What is looked up where.
        positions: Where the features of the collection's lookups stand in the input.
    """

    def __init__(
        self,
        lookups: Sequence[tuple[int, str]],
        dims: Sequence[int],
        group: TableGroup,
        is_mean: bool,
        members: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        self.group, self.is_mean = group, is_mean
        starts = np.cumsum([0, *dims])
        chosen = [
            (numbers[table], lookup)
            for lookup, (table, _) in enumerate(lookups)
            if table in members
        ]
        self._numbers = [lookup for _, lookup in chosen]
        self.positions: Sequence[int] = ()
        self.lookups = Lookups(
            tables=np.array([table for table, _ in chosen], np.uint64),
            positions=np.zeros(len(chosen), np.uint64),
            columns=np.array([starts[lookup] for _, lookup in chosen], np.uint64),
            width=int(starts[-1]),
        )

    def place(self, positions: Sequence[int]) -> None:
        """Look up features that stand at these positions of the input, from now on."""
        known = self.lookups
        self.positions = positions
        self.lookups = Lookups(
            tables=known.tables,
            positions=np.array([positions[lookup] for lookup in self._numbers], np.uint64),
            columns=known.columns,
            width=known.width,
        )
