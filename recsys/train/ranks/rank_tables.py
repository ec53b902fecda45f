"""TorchRec's sharded collection in the model of a run: takes `JaggedIds`, and may look ahead.

begin of a step          ids of the last mini-batch in the window start to travel
begin of the next one    they have arrived; slots for their rows are claimed, if there is room
its own step             the lookup finds its ids and rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.types import NoWait

from recsys.embeddings.table import output_names
from recsys.embeddings.tiers.ahead import Prefetched
from recsys.pipeline.divided_tables import AbstractDividedTables

if TYPE_CHECKING:
    from torchrec.distributed.types import Awaitable

    from recsys.batch import JaggedIds
    from recsys.embeddings.tiers.table_tiers import Tiers

__all__ = ["RankTables"]


class RankTables(AbstractDividedTables):
    """The tables of a run on several processes.

    Args:
        collection: TorchRec's. `DistributedModelParallel` replaces it by the sharded one.

    Shape:
        input: ids of this process's B samples; result: their pooled vectors, a `KeyedTensor`, in
        the order of the tables.
    """

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection: Any = collection
        self._output_keys = output_names(collection.embedding_bag_configs())
        # Of each mini-batch whose ids were sent: TorchRec's context, and the ids of all processes
        # for the rows of this one.
        self._sent: WeakKeyDictionary[JaggedIds, tuple[Any, Awaitable[Any]]] = WeakKeyDictionary()

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        found: list[EmbeddingBagConfig] = self.collection.embedding_bag_configs()
        return found

    def output_keys(self) -> list[str]:
        """The feature of each pooled vector, in column order."""
        return self._output_keys

    def agree_on_tiers(self) -> None:
        """Find out whether any process has rows in two tiers, after sharding. A collective."""
        found = torch.tensor(len(self.tiers()))
        dist.all_reduce(found)
        self.has_tiers = bool(found)

    def forward(self, ids: JaggedIds) -> KeyedTensor:
        """Look up; ids that were not sent before are sent now. A collective."""
        sent = self._sent.pop(ids, None)
        if sent is None:
            return self._in_order(self.collection(_keyed(ids)))
        context, arriving = sent
        found = self.collection.compute_and_output_dist(context, arriving.wait())
        return self._in_order(found)

    def _in_order(self, pooled: Any) -> KeyedTensor:
        """Vectors with their columns in the order of the tables, on any number of processes."""
        columns = pooled.to_dict()
        found = [columns[name] for name in self._output_keys]
        return KeyedTensor(
            self._output_keys, [each.shape[1] for each in found], torch.cat(found, 1)
        )

    def tiers(self) -> list[Tiers]:
        """The tiers of this process's rows; empty if all are in fast memory."""
        found: list[Tiers] = self.collection.tiers()
        return found

    def send(self, features: JaggedIds) -> None:
        """Start to send ids; returns when all processes know how many they will get."""
        context = self.collection.create_context()
        self._sent[features] = context, self.collection.input_dist(context, _keyed(features)).wait()

    def prefetch(self, features: JaggedIds) -> Prefetched:
        """Wait for ids that were sent, and start to fetch this process's rows."""
        context, arriving = self._sent[features]
        ids = arriving.wait()
        self._sent[features] = context, NoWait(ids)
        return self.collection.local_tables.prefetch(ids) or Prefetched(())

    def settle(self) -> None:
        """End all pending work of this process's tiers, and drop ids that were sent."""
        self._sent.clear()
        if self.collection.local_tables.collection is not None:
            self.collection.local_tables.collection.settle()


def _keyed(ids: JaggedIds) -> KeyedJaggedTensor:
    """The ids as TorchRec takes them."""
    return KeyedJaggedTensor(
        ids.keys(),
        ids.values(),
        weights=ids.weights_or_none(),
        lengths=ids.lengths(),
        offsets=ids.offsets(),
    )
