"""The tables of one D, built once: on the device, on the host, and in two tiers over the latter."""

from __future__ import annotations

import gc
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from recsys.bench.gpu.baselines import GatheredBags, HybridBags, PlainBags
from recsys.bench.gpu.clock import allocated_bytes
from recsys.bench.gpu.fbgemm import ManagedBags
from recsys.bench.gpu.host_tables import HostTables
from recsys.bench.gpu.providers import LEARNING_RATE
from recsys.bench.parts.shares import FLOOR
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.lookup.abstract import make_bags
from recsys.embeddings.optimizer import SGD
from recsys.embeddings.table import TableConfig
from recsys.embeddings.tier_arguments import empty_tables
from recsys.embeddings.tiers.slot_costs import floor_bytes, row_bytes, slot_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from recsys.bench.gpu.samples import MiniBatches, Stream

__all__ = ["Tables", "TieredTables"]

_FILL_SAMPLES = 1 << 16  # of one input while slots are filled, if so many rows have slots
_NUM_FILLS_OF_FLOOR = 4


class TieredTables:
    """A collection in two tiers whose slots were filled by lookups and updates, as in training.

    Attributes:
        module: The collection.
        budget: Bytes of fast memory that it may use.
        held_bytes: Bytes of the device's memory that it uses by the device's own count; on the CPU
            by its own count.
        next_sample: The first sample that no loop over it has trained on.
    """

    def __init__(
        self,
        tables: Tables,
        budget: int,
        batches: MiniBatches,
        samples_per_fill: int,
        num_fills: int,
    ) -> None:
        before = allocated_bytes(tables.device)
        self.budget, self.next_sample = budget, 0
        self.module = HotColdEmbeddingBagCollection(
            tables.configs,
            device=tables.device,
            optimizer=SGD(lr=LEARNING_RATE),
            auto_apply=False,
            budget=budget,
            _bags=make_bags(tables.configs, tables.host.tables()),
        )
        fill(self.module, batches, samples_per_fill, num_fills)
        self.module.settle()
        self.held_bytes = allocated_bytes(tables.device) - before or sum(
            tiers.hot.num_bytes for tiers in self.module.tiers()
        )

    def numbers(self, batch_size: int) -> Iterator[int]:
        """Numbers of mini-batches that no loop over these slots has trained on.

        Args:
            batch_size: B, which may change from case to case.
        """
        while True:
            number = -(-self.next_sample // batch_size)
            self.next_sample = (number + 1) * batch_size
            yield number


class Tables:
    """The tables of one D.

    Args:
        stream: The samples, which name the tables.
        dim: D.
        device: Where models train.

    Attributes:
        configs: The tables.
        device: As given.
        resident: recsys with every row on the device.
    """

    def __init__(self, stream: Stream, dim: int, device: torch.device) -> None:
        self._sizes, self._dim, self.device = stream.table_sizes, dim, device
        self._managed: ManagedBags | None = None
        self._tiered: tuple[str, TieredTables] | None = None  # with their share
        self.configs = [
            TableConfig(name=key, num_embeddings=size, embedding_dim=dim)
            for key, size in zip(stream.keys, stream.table_sizes, strict=True)
        ]
        rows = empty_tables(self.configs, device, has_budget=False)
        for each in rows:
            each.uniform_(-0.01, 0.01)  # on the device: the CPU would take longer than measuring
        self.resident = HotColdEmbeddingBagCollection(
            self.configs,
            device=device,
            optimizer=SGD(lr=LEARNING_RATE),
            auto_apply=False,
            _bags=make_bags(self.configs, rows),
        )

    @cached_property
    def host(self) -> HostTables:
        """The rows in the host's memory."""
        return HostTables(self._sizes, self._dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; SGD keeps no state."""
        return row_bytes(self._dim, torch.float32, {})

    @property
    def everything(self) -> int:
        """Bytes of all rows."""
        return sum(self._sizes) * self.row_bytes

    def budget(self, share: str, batches: MiniBatches) -> int:
        """The bytes of a budget.

        Args:
            share: A share of the bytes of all rows; or "floor": slots for one mini-batch.
            batches: The mini-batches.
        """
        if share != FLOOR:
            return int(float(share) * self.everything)
        num_slots = min(batches.most_distinct, sum(self._sizes))
        of_slot = slot_bytes(self._dim, torch.float32, {})
        return floor_bytes(sum(self._sizes), [(num_slots, of_slot)])

    def tiered(self, share: str, batches: MiniBatches) -> TieredTables:
        """Tables in two tiers, filled; kept until another share is asked for.

        Earlier results must have been deleted, or the device holds their slots, too.

        Raises:
            BudgetTooSmall: the budget has no room for a mini-batch.
        """
        if self._tiered is None or self._tiered[0] != share or share == FLOOR:
            self.forget_tiered()
            gc.collect()
            self._tiered = share, self._make_tiered(share, batches)
        return self._tiered[1]

    def forget_tiered(self) -> None:
        """Have the next case fill slots anew, after an error that may have broken these."""
        self._tiered = None

    def _make_tiered(self, share: str, batches: MiniBatches) -> TieredTables:
        budget, size = self.budget(share, batches), batches.batch_size
        if share == FLOOR:
            return TieredTables(self, budget, batches, size, _NUM_FILLS_OF_FLOOR)
        floor = self.budget(FLOOR, batches)
        # Inputs of k mini-batches have at most k times as many distinct rows.
        times = max(1, min(_FILL_SAMPLES // size, budget // floor))
        return TieredTables(self, budget, batches, times * size, 2**31)

    def plain(self) -> PlainBags:
        """`nn.EmbeddingBag`s on the resident rows."""
        return PlainBags(self.configs, [each.detach() for each in self.resident.table_weights()])

    def hybrid(self) -> HybridBags:
        """`nn.EmbeddingBag`s on the host's rows."""
        return HybridBags(self.configs, self.host.tables(), self.device)

    def gathered(self) -> GatheredBags:
        """The host's rows, without hot rows."""
        return GatheredBags(self.configs, self.host, self.device)

    def managed(self, share: str, batches: MiniBatches) -> ManagedBags:
        """FBGEMM's tables, built by the first call, with a filled cache.

        Raises:
            MissingDependency: FBGEMM is not installed for this device.
        """
        if self._managed is None:
            self._managed = ManagedBags(self.configs, float(share), self.device)
            fill(self._managed, batches, batches.batch_size, 2**31)
        return self._managed


def fill(module: nn.Module, batches: MiniBatches, num_samples: int, most: int) -> None:
    """Look rows up and update them with zeros, so that slots are filled and must be written back.

    Args:
        module: Tables.
        batches: Has the lookups.
        num_samples: Samples of each lookup.
        most: The most lookups.
    """
    of_rows = getattr(module, "row_optimizer", None)
    for ids in batches.fill(num_samples, most):
        (module(ids).values() * 0).sum().backward()
        if of_rows is not None:
            of_rows.step()
