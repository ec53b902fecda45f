"""Which tables of a collection are looked up in one kernel call, and where their results go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys.embeddings.kernels.pooled_lookup import Lookups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.table_group import TableGroup

__all__ = ["TableLayout"]


class TableLayout:
    """Tables of one group and pooling, and where their results go.

    Args:
        output_dims: D of every lookup of the collection.
        all_lookups: The collection's: the table, and the feature.
        group: Has the tables.
        is_mean: Whether bags are averaged.
        members: Which tables of the collection.
        numbers: Of each of the collection's tables in its group.

    Attributes:
        group: As given, and so is `is_mean`.
    """

    def __init__(
        self,
        output_dims: Sequence[int],
        all_lookups: Sequence[tuple[int, str]],
        group: TableGroup,
        is_mean: bool,
        members: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        self.group, self.is_mean = group, is_mean
        starts = np.cumsum([0, *output_dims])
        chosen = [
            (numbers[table], lookup)
            for lookup, (table, _) in enumerate(all_lookups)
            if table in members
        ]
        self._numbers = [lookup for _, lookup in chosen]
        self._positions: Sequence[int] = ()
        self._lookups = Lookups(
            tables=np.array([table for table, _ in chosen], np.uint64),
            positions=np.zeros(len(chosen), np.uint64),
            columns=np.array([starts[lookup] for _, lookup in chosen], np.uint64),
            width=int(starts[-1]),
        )

    def lookups(self, positions: Sequence[int]) -> Lookups:
        """The lookups, for features that stand at these positions of the input."""
        if positions is not self._positions:
            known = self._lookups
            self._positions = positions
            self._lookups = Lookups(
                tables=known.tables,
                positions=np.array([positions[lookup] for lookup in self._numbers], np.uint64),
                columns=known.columns,
                width=known.width,
            )
        return self._lookups
