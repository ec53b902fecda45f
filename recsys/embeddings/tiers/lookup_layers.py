"""Divides lookups so that each value of the input needs one slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recsys.embeddings.rows.lookups import Lookups

__all__ = ["LookupLayers"]

_MOST_KEPT = 64


class LookupLayers:
    """Groups of lookups without a repeated feature, cached by the lookups."""

    def __init__(self) -> None:
        self._layers: dict[Lookups, list[Lookups]] = {}

    def of(self, lookups: Lookups) -> list[Lookups]:
        """Divide lookups into groups without a repeated feature, so that a value has one slot.

        All lookups of a table are in one group, in their order.
        """
        if len(lookups.distinct_tables) == 1:
            return [lookups]
        if lookups not in self._layers:
            features_of: dict[int, set[int]] = {}
            for table, position in zip(
                lookups.tables.tolist(), lookups.positions.tolist(), strict=True
            ):
                features_of.setdefault(table, set()).add(position)
            layers: list[tuple[set[int], set[int]]] = []  # tables and their features
            for table, features in features_of.items():
                fitting = [layer for layer in layers if not layer[1] & features]
                if not fitting:
                    fitting = [(set(), set())]
                    layers += fitting
                fitting[0][0].add(table)
                fitting[0][1].update(features)
            if len(self._layers) > _MOST_KEPT:
                self._layers.clear()
            self._layers[lookups] = [
                lookups if len(layers) == 1 else lookups.of_tables(tables) for tables, _ in layers
            ]
        return self._layers[lookups]
