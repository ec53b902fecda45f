"""Row-wise sharding that exchanges distinct rows, or parts of pooled vectors.

With parts, each rank pools its rows of every bag. TorchRec adds these parts by `reduce_scatter`, in
an order of the backend's choice; with unequal batch sizes its backward fails on gloo, which gathers
no tensors of different sizes. Here, parts are exchanged as table-wise vectors are, which sends as
many bytes, and are then added in the order of ranks.

`distinct_rows` describes the other exchange.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist

from recsys.distributed.exchange.distinct_rows import DistinctIdsDist, DistinctRowsDist

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["RowWiseSharding"]


class RowWiseSharding(RwPooledEmbeddingSharding):  # type: ignore[misc]  # TorchRec has no types
    """A range of every table's rows on each rank.

    Attributes:
        exchanges_rows: Whether distinct rows travel; else parts of pooled vectors.
    """

    exchanges_rows = False

    def create_input_dist(self, device: torch.device | None = None) -> Any:
        """The exchange of ids; arguments as in TorchRec."""
        if self.exchanges_rows:
            tables = self.embedding_tables()
            return DistinctIdsDist(self._pg, tables, device or self._device)
        return super().create_input_dist(device)

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        """The exchange of rows or pooled vectors; arguments as in TorchRec."""
        if self.exchanges_rows:
            tables = self.embedding_tables()
            codecs = self.qcomm_codecs_registry
            return DistinctRowsDist(self._pg, tables, device or self._device, codecs)
        dims = self.embedding_dims()
        return TwPooledEmbeddingDist(
            pg=self._pg,
            dim_sum_per_rank=[sum(dims)] * self._world_size,
            emb_dim_per_rank_per_feature=[dims] * self._world_size,
            device=device if device is not None else self._device,
            callbacks=[partial(_add_parts, num_parts=self._world_size)],
            qcomm_codecs_registry=self.qcomm_codecs_registry,
        )


def _add_parts(parts: Tensor, num_parts: int) -> Tensor:
    """Add what the ranks have pooled, one rank after the other.

    Shape:
        parts (B, num_parts * W), rank after rank; result (B, W).
    """
    total, *others = parts.tensor_split(num_parts, dim=1)
    for part in others:
        total = total + part
    return total
