"""Looks up rows of tables of a bag collection without pooling, each table by itself.

The modules here hold no rows: they are on the Parameters of the collection and use its updater. So
all lookups share one budget and one update. `make_room` makes room for all of them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast
from weakref import ref

import torch
from torch import nn

from recsys.embeddings import HotColdEmbedding, HotColdEmbeddingBagCollection
from recsys.embeddings.lookup.fused_lookup import count_distinct

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor
    from torchrec import KeyedJaggedTensor

    from recsys.embeddings.lookup.fused_lookup import Part
    from recsys.embeddings.tiers.ahead import Prefetched
    from recsys.embeddings.update.row_updater import Places, RowUpdater

__all__ = ["RowLookups", "make_room", "without_tables"]


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
        self._lookups = [_row_lookup(collection, table) for table in tables]

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Look up.

        Raises:
            BudgetTooSmall: the budget has no room for the rows.
        """
        return torch.cat(
            [
                lookup(ids).flatten()
                for lookup, ids in zip(self._lookups, self._ids(features), strict=True)
            ]
        )

    def parts(self, features: KeyedJaggedTensor) -> list[Part]:
        """What is looked up; see `AbstractTables.parts`."""
        pairs = zip(self._lookups, self._ids(features), strict=True)
        return [part for lookup, ids in pairs for part in lookup.parts(ids)]

    def prefetch(self, features: KeyedJaggedTensor) -> list[Prefetched]:
        """Start to fetch rows, one table after the other; the last claim may have no room."""
        claims: list[Prefetched] = []
        for lookup, ids in zip(self._lookups, self._ids(features), strict=True):
            claims.append(lookup.prefetch(ids))
            if not claims[-1].has_room:
                break
        return claims

    def _ids(self, features: KeyedJaggedTensor) -> list[Tensor]:
        return list(features.values().long().split(features.length_per_key()))


def make_room(updater: RowUpdater, parts: Sequence[Part]) -> None:
    """Divide the budget for the rows of a mini-batch, before several lookups claim slots for them.

    One lookup makes room for itself. But groups of tables that share a budget cannot give slots to
    each other while an earlier lookup of the mini-batch uses some of them.

    Args:
        updater: Updates the rows.
        parts: What the mini-batch looks up.

    Raises:
        BudgetTooSmall: the budget has no room for the rows.
    """
    num_slots = {
        each.group: each.group.tiers.hot.num_slots
        for each in updater.groups
        if each.group.tiers is not None
    }
    num_lookups = dict.fromkeys(num_slots, 0)
    for group, lookups, bags in parts:
        num_lookups[group] += sum(map(len, map(bags.values_of, lookups.positions.tolist())))
    if all(num_lookups[group] <= num_slots[group] for group in num_slots):
        return
    num_distinct = count_distinct(parts)
    for group, count in num_distinct.items():
        if count > num_slots[group]:
            assert group.tiers is not None
            updater.make_room(ref(group.tiers.residency), count, num_distinct)
            return


def without_tables(
    collection: HotColdEmbeddingBagCollection, tables: Collection[str]
) -> HotColdEmbeddingBagCollection | None:
    """The pooled lookups of a collection's other tables; None if there are none.

    Args:
        collection: Has the rows; a recsys optimizer updates them.
        tables: The names of the tables to leave out.
    """
    configs = [each for each in collection.embedding_bag_configs() if each.name not in tables]
    if not configs:
        return None
    bags = nn.ModuleDict({each.name: collection.embedding_bags[each.name] for each in configs})
    others = HotColdEmbeddingBagCollection(configs, collection.is_weighted(), _bags=bags)
    _attach(others, collection)
    return others


def _row_lookup(collection: HotColdEmbeddingBagCollection, table: str) -> HotColdEmbedding:
    weight = cast("nn.Parameter", collection.embedding_bags[table].weight)
    # On the "meta" device it takes no memory before it gets the collection's Parameter.
    lookup = HotColdEmbedding(len(weight), weight.shape[1], sparse=True, device="meta")
    lookup.weight = weight
    _attach(lookup, collection)
    return lookup


def _attach(
    module: HotColdEmbedding | HotColdEmbeddingBagCollection,
    collection: HotColdEmbeddingBagCollection,
) -> None:
    """Let a module on the Parameters of a collection use the collection's updater."""
    updater = collection.row_updater
    assert updater is not None
    place_of: dict[int, tuple[object, int]] = {
        id(table): (each.group, number)
        for each in updater.groups
        for number, table in enumerate(each.group.tables)
    }
    places = [place_of[id(holder.weight)] for holder in module.holders()]
    module.attach(updater, cast("Places", places))
