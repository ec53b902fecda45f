"""Maps features of the input to tables of a collection, and tables to columns of the result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from recsys.embeddings.rows.lookups import Lookups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.lookup.table_group import TableGroup

__all__ = ["Layout"]


class Layout:
    """The lookups of one kernel call: tables of one group and pooling.

    Args:
        lookups: All lookups of the collection: table and feature.
        dims: The embedding_dim of each lookup.
        group: Has the tables.
        is_mean: Whether bags are averaged.
        members: The tables of this layout, by their position in the collection.
        numbers: For every table of the collection, its number in its group.

    Attributes:
        lookups: Tables, positions in the input, and columns of the result.
        positions: Position in the input of each lookup's feature, for all lookups.
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
        """Change the positions of the features in the input."""
        self.positions = positions
        chosen = np.array([positions[lookup] for lookup in self._numbers], np.uint64)
        self.lookups = replace(self.lookups, positions=chosen)
