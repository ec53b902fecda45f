"""What recsys is compared with: embeddings that map ids to pooled vectors on the device.

    resident     recsys, every row in the device's memory: the ceiling
    torch        nn.EmbeddingBag(sparse=True) and torch.optim, every row in the device's memory
    hybrid       the same on the CPU; pooled vectors and their gradients cross PCIe
    gather       no hot rows: every distinct row of a mini-batch is gathered on the host, copied to
                 the device, updated there and written back

All of them update rows by SGD, and all lookups are one-hot.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from recsys.batch import PooledEmbeddings
from recsys.bench.gpu.providers import LEARNING_RATE
from recsys.embeddings.lookup.abstract import AbstractEmbeddingBags, make_bags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.batch import Features
    from recsys.bench.gpu.host_tables import HostTables
    from recsys.embeddings.table import TableConfig

__all__ = ["GatheredBags", "HybridBags", "PlainBags"]


class PlainBags(AbstractEmbeddingBags):
    """One `nn.EmbeddingBag` per table, where its rows are.

    Args:
        tables: The tables, each with one feature.
        rows: The rows of each table, (E, D).
    """

    def __init__(self, tables: Sequence[TableConfig], rows: Sequence[Tensor]) -> None:
        super().__init__(tables)
        self.embedding_bags = make_bags(tables, rows)

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the rows."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

    def table_weights(self) -> Sequence[Tensor]:
        """The rows of every table, (E, D)."""
        return list(self.parameters())

    def forward(self, features: Features) -> PooledEmbeddings:
        """Look up one row per feature and sample.

        Shape:
            result (B, F * D).
        """
        return self._pooled(self._look_up(features))

    def _look_up(self, features: Features) -> Tensor:
        ids = features.values().view(len(self._output_keys), -1, 1)
        bags = self.embedding_bags.values()
        return torch.cat([bag(each) for bag, each in zip(bags, ids, strict=True)], dim=1)

    def _pooled(self, values: Tensor) -> PooledEmbeddings:
        return PooledEmbeddings(self._output_keys, self._output_dims, values)


class HybridBags(PlainBags):
    """`PlainBags` on the CPU, whose pooled vectors are copied to a device through pinned memory.

    Args:
        tables: The tables, each with one feature.
        rows: The rows of each table, (E, D), on the CPU.
        device: Where pooled vectors go.
    """

    def __init__(
        self, tables: Sequence[TableConfig], rows: Sequence[Tensor], device: torch.device
    ) -> None:
        super().__init__(tables, rows)
        self._device = device
        self._pinned = torch.empty(0)

    def forward(self, features: Features) -> PooledEmbeddings:
        """Look up one row per feature and sample; ids are on the CPU, the result is on the device.

        Shape:
            result (B, F * D).
        """
        pooled = self._look_up(features)
        if self._pinned.shape != pooled.shape:
            self._pinned = torch.empty(pooled.shape, pin_memory=self._device.type == "cuda")
        return self._pooled(_ToDevice.apply(pooled, self._pinned, self._device))  # type: ignore[no-untyped-call]


class _ToDevice(torch.autograd.Function):
    """Copies to a device through pinned memory, and the gradient back through the same memory."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, pinned: Tensor, device: torch.device) -> Tensor:
        ctx.pinned = pinned
        return pinned.copy_(pooled).to(device, non_blocking=True, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.pinned.copy_(gradient), None, None


class GatheredBags(AbstractEmbeddingBags):
    """Rows on the host; those of a mini-batch are copied to the device, updated and written back.

    The rows of a step are a leaf of the graph, so that one gradient per distinct row comes back.

    Args:
        tables: The tables, each with one feature.
        host: Their rows.
        device: Where models train.
    """

    def __init__(
        self, tables: Sequence[TableConfig], host: HostTables, device: torch.device
    ) -> None:
        super().__init__(tables)
        self._host, self._device = host, device
        sizes = [table.num_embeddings for table in tables]
        self._firsts = torch.tensor([0, *accumulate(sizes)][:-1], device=device).unsqueeze(1)
        self._pinned = torch.empty(0, host.rows.shape[1])
        self._distinct, self._rows = torch.empty(0), torch.empty(0)

    def table_weights(self) -> Sequence[Tensor]:
        """The rows of every table, (E, D)."""
        return self._host.tables()

    def forward(self, features: Features) -> PooledEmbeddings:
        """Gather the distinct rows of a mini-batch, and pool them on the device.

        Shape:
            result (B, F * D).
        """
        rows_FB = features.values().view(len(self._firsts), -1) + self._firsts
        distinct, places_FB = torch.unique(rows_FB, return_inverse=True)
        self._distinct = distinct.cpu()
        if len(self._pinned) < len(distinct):
            is_pinned = self._device.type == "cuda"
            shape = len(distinct) * 5 // 4, self._pinned.shape[1]
            self._pinned = torch.empty(shape, pin_memory=is_pinned)
        gathered = self._pinned[: len(distinct)]
        torch.index_select(self._host.rows, 0, self._distinct, out=gathered)
        self._rows = gathered.to(self._device, non_blocking=True, copy=True).requires_grad_()
        vectors = functional.embedding(places_FB.t(), self._rows)
        return PooledEmbeddings(self._output_keys, self._output_dims, vectors.flatten(1))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the rows of the next step are new."""

    @torch.no_grad()
    def step(self) -> None:
        """Update the rows of this step, and write them back."""
        assert self._rows.grad is not None
        updated = self._pinned[: len(self._rows)]
        updated.copy_(self._rows.sub_(self._rows.grad, alpha=LEARNING_RATE))
        self._host.rows.index_copy_(0, self._distinct, updated)
