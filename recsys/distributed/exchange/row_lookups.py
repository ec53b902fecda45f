"""Looks up rows of some tables of a bag collection without pooling, and pools those of the others.

All lookups are of the collection's tables, and share its budget and its update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from recsys.embeddings import HotColdEmbeddingBagCollection
from recsys.embeddings.lookup.inputs import read_ids
from recsys.embeddings.lookup.lookup import look_up
from recsys.embeddings.rows.bags import Lookups

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor
    from torchrec import KeyedJaggedTensor

    from recsys.embeddings.lookup.lookup import Part
    from recsys.embeddings.rows.bags import Bags

__all__ = ["RowLookups", "without_tables"]


class RowLookups:
    """Lookups without pooling.

    Args:
        collection: Has the rows; a recsys optimizer updates them.
        tables: The names of the tables that are looked up.

    Shape:
        input: one feature of each table; result (sum of dims of the ids,), the rows of one table
        after the other, in the order of the ids.
    """

    def __init__(self, collection: HotColdEmbeddingBagCollection, tables: Sequence[str]) -> None:
        assert collection.nodes is not None
        self._nodes = collection.nodes
        names = [config.name for config in collection.embedding_bag_configs()]
        members = dict(zip(names, collection.members(), strict=True))
        self._parts: list[Part] = [
            (members[table].group, Lookups([(members[table].number, 0, 0)], is_mean=False))
            for table in tables
        ]

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Look up."""
        found = [
            look_up(self._nodes, [part], bags, part[0].dim) for part, bags in self.lookups(features)
        ]
        return torch.cat([rows.flatten() for rows in found])

    def lookups(self, features: KeyedJaggedTensor) -> list[tuple[Part, Bags]]:
        """What is looked up; see `TableModule.lookups`."""
        ids = features.values().long().split(features.length_per_key())
        return [
            (part, read_ids(of_table, part[0].dtype, part[0].device))
            for part, of_table in zip(self._parts, ids, strict=True)
        ]


def without_tables(
    collection: HotColdEmbeddingBagCollection, tables: Collection[str]
) -> HotColdEmbeddingBagCollection | None:
    """The pooled lookups of a collection's other tables; None if there are none.

    Args:
        collection: Has the rows; a recsys optimizer updates them.
        tables: The names of the tables to leave out.
    """
    configs = [config for config in collection.embedding_bag_configs() if config.name not in tables]
    if not configs:
        return None
    bags = nn.ModuleDict(
        {config.name: collection.embedding_bags[config.name] for config in configs}
    )
    others = HotColdEmbeddingBagCollection(configs, collection.is_weighted(), _bags=bags)
    assert collection.nodes is not None
    members = dict(zip(collection.table_weights(), collection.members(), strict=True))
    others.attach([members[table.weight] for table in others.tables()], collection.nodes)
    return others
