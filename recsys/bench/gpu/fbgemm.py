"""FBGEMM's tables in managed memory, with a cache in the device's memory: provider `fbgemm`.

The cache of the next mini-batch is filled on a second stream between forward and backward, as
TorchRec's pipeline with prefetching does. It needs a `fbgemm-gpu` that was built for CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from recsys.batch import PooledEmbeddings
from recsys.bench.gpu.providers import LEARNING_RATE, PlainLoop
from recsys.embeddings.table import output_names
from recsys.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.batch import Batch, Features
    from recsys.bench.gpu.providers import Setting
    from recsys.embeddings.table import TableConfig

__all__ = ["FbgemmLoop", "ManagedBags"]


class ManagedBags(nn.Module):
    """`SplitTableBatchedEmbeddingBagsCodegen` with `EmbeddingLocation.MANAGED_CACHING`.

    Args:
        tables: The tables, each with one feature.
        share: The share of the rows that the cache holds.
        device: The CUDA device.

    Raises:
        MissingDependency: there is no `fbgemm-gpu` for CUDA.
    """

    def __init__(self, tables: Sequence[TableConfig], share: float, device: torch.device) -> None:
        super().__init__()
        if device.type != "cuda":
            raise MissingDependency(
                f"MANAGED_CACHING needs a CUDA device, got {device.type!r}; run it on one"
            )
        try:
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
                EmbeddingLocation,
                PoolingMode,
            )
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
        except (ImportError, OSError) as error:  # OSError: built for another torch
            raise MissingDependency(
                f"fbgemm-gpu for this torch is not installed ({error}); install it to compare"
            ) from error
        self._tables = list(tables)
        self._keys = output_names(tables)
        self.table_batched = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (
                    table.num_embeddings,
                    table.embedding_dim,
                    EmbeddingLocation.MANAGED_CACHING,
                    ComputeDevice.CUDA,
                )
                for table in tables
            ],
            cache_load_factor=share,
            optimizer=EmbOptimType.EXACT_SGD,
            learning_rate=LEARNING_RATE,
            pooling_mode=PoolingMode.SUM,
            stochastic_rounding=False,
            prefetch_pipeline=True,
            device=device,
        )

    def embedding_bag_configs(self) -> list[TableConfig]:
        """The tables, in order."""
        return self._tables

    def forward(self, features: Features) -> PooledEmbeddings:
        """Look up and pool.

        Shape:
            result (B, F * D).
        """
        pooled = self.table_batched(features.values(), features.offsets())
        dims = [table.embedding_dim for table in self._tables]
        return PooledEmbeddings(self._keys, dims, pooled)


class FbgemmLoop(PlainLoop):
    """A plain loop that fills the cache for the next mini-batch while this one computes.

    It cannot train on a few mini-batches again and again: the cache would hold all their rows.

    Args:
        setting: As for `PlainLoop`.
        embeddings: The tables; rows are updated in backward.
    """

    def __init__(self, setting: Setting, embeddings: ManagedBags) -> None:
        super().__init__(setting, embeddings, [])
        self._managed = embeddings.table_batched
        self._side = torch.cuda.Stream(setting.device)  # type: ignore[no-untyped-call]
        self._known: dict[int, Batch] = {}

    def _between(self, following: Batch) -> None:
        current, ids = torch.cuda.current_stream(), following.sparse_features
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._managed.prefetch(ids.values(), ids.offsets(), forward_stream=current)
        following.record_stream(self._side)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, object]:
        torch.cuda.current_stream().wait_stream(self._side)
        return super()._forward(batch)

    def _batch(self, number: int) -> Batch:
        if number not in self._known:
            self._known = {
                known: each for known, each in self._known.items() if known >= self._next
            }
            self._known[number] = self._setting.batches.batch(number)
            self._known[number].sparse_features.offsets()  # made when first asked for
        return self._known[number]
