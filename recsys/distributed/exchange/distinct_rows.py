"""Exchanges distinct rows of row-wise tables, instead of parts of pooled vectors.

    rank of the samples   each distinct id of its mini-batch, once   -> rank of the row
    rank of the row       the row, once                              -> rank of the samples
    rank of the samples   pools the rows in lookup order

Backward is the way back: the rank of the samples sums the gradient of each row in lookup order and
sends the sum once. The rank of the row adds what the ranks send, in the order of ranks.

TorchRec divides ids among ranks (`bucketize_kjt_before_all2all`) and moves ids (`KJTAllToAll`) and
rows (`SequenceEmbeddingsAllToAll`). Its own removal of duplicates needs CUDA.

Letters: W ranks, T tables, F features (lookups of a feature in a table), B samples, N lookups,
U distinct rows, D embedding_dim of a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torchrec.distributed.dist_data import KJTAllToAll, SequenceEmbeddingsAllToAll
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingShardingContext,
    bucketize_kjt_before_all2all,
)
from torchrec.distributed.types import CommOp
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.distributed.exchange.received_rows import ReceivedRowsPooling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor
    from torchrec.distributed.embedding_types import ShardedEmbeddingTable
    from torchrec.distributed.types import QuantizedCommCodecs

__all__ = ["DistinctIdsDist", "DistinctRowsContext", "DistinctRowsDist"]


@dataclass
class DistinctRowsContext(EmbeddingShardingContext):  # type: ignore[misc]  # untyped
    """What a rank knows of the exchange of one mini-batch.

    Attributes:
        places: For each lookup of this rank's samples, the number of its row among the rows that
            this rank receives, (N,) int64.
        offsets: Where bags begin, (F * B + 1,) int64.
        weights: One factor per lookup, (N,); None for 1.
        batch_size: B.
        num_received: How many rows this rank receives, by rank and table, (W, T) int64.
        num_sent: How many rows this rank sends, by table and rank, (T, W) int64; set when the ids
            of all ranks have arrived.
    """

    places: Tensor = field(default_factory=lambda: torch.empty(0))
    offsets: Tensor = field(default_factory=lambda: torch.empty(0))
    weights: Tensor | None = None
    batch_size: int = 0
    num_received: Tensor = field(default_factory=lambda: torch.empty(0))
    num_sent: Tensor = field(default_factory=lambda: torch.empty(0))

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses these tensors."""
        for tensor in (self.places, self.offsets, self.weights, self.num_received, self.num_sent):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)


class DistinctIdsDist(BaseSparseFeaturesDist):  # type: ignore[misc]  # TorchRec has no types
    """Sends each distinct id of a mini-batch to the rank that has its row, once.

    Features that share a table share its distinct ids. Bags and weights stay on the rank of the
    samples, in `context`.

    Args:
        group: The ranks.
        tables: The row-wise tables, in TorchRec's order.
        device: The device of ids.

    Attributes:
        context: The context of the last call.

    Shape:
        input: F features of B samples; result: T features, one of each table, of one "sample" of
        each rank, whose ids count from this rank's first row.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[ShardedEmbeddingTable],
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self._names = [table.name for table in tables]
        self._is_weighted = bool(tables[0].is_weighted)  # as are all tables of a collection
        self._world_size = group.size()
        sizes = [int(table.num_embeddings) for table in tables]
        # In which ids travel.
        self._dtype = torch.int32 if max(sizes) < 2**31 else torch.int64
        # The rows of all tables are numbered one table after the other.
        bounds = functional.pad(torch.tensor(sizes).cumsum(0), (1, 0))
        num_features = torch.tensor([len(table.embedding_names) for table in tables])
        blocks = [-(-size // self._world_size) for size in sizes]
        for name, values in (
            ("_bounds", bounds),
            ("_first_rows", bounds[:-1].repeat_interleave(num_features)),
            ("_block_sizes", torch.tensor(blocks)),
        ):
            self.register_buffer(name, values.to(device), persistent=False)
        self._dist = KJTAllToAll(group, [len(tables)] * self._world_size)
        self.context = DistinctRowsContext()

    def forward(self, sparse_features: KeyedJaggedTensor) -> Any:
        """Send ids; arguments and result as in TorchRec."""
        feature_lengths = sparse_features.length_per_key()
        num_lookups, device = sum(feature_lengths), self._bounds.device
        # Of each lookup: the number of its row, counted over all tables.
        first_rows = self._first_rows.repeat_interleave(
            torch.tensor(feature_lengths, device=device)
        )
        rows = sparse_features.values()[:num_lookups] + first_rows
        distinct, numbers = torch.unique(rows, return_inverse=True)
        lengths = torch.searchsorted(distinct, self._bounds).diff()
        ids = distinct - self._bounds[:-1].repeat_interleave(lengths)
        by_rank, positions = bucketize_kjt_before_all2all(
            KeyedJaggedTensor(
                keys=self._names, values=ids.to(self._dtype), lengths=lengths.to(torch.int32)
            ),
            num_buckets=self._world_size,
            block_sizes=self._block_sizes,
            output_permute=True,
        )
        # A collection without weights ignores those of its input.
        weights = sparse_features.weights_or_none() if self._is_weighted else None
        self.context = DistinctRowsContext(
            places=positions.long()[numbers],
            offsets=sparse_features.offsets().long(),
            weights=None if weights is None else weights[:num_lookups],
            batch_size=sparse_features.stride(),
            num_received=by_rank.lengths().view(self._world_size, -1).long(),
        )
        return self._dist(by_rank)


class DistinctRowsDist(BaseEmbeddingDist):  # type: ignore[misc]  # TorchRec has no types
    """Sends rows to the ranks that asked for them, and pools there.

    Rows travel as one array of numbers, so that tables may have different dims.

    Args:
        group: The ranks.
        tables: The row-wise tables, in TorchRec's order.
        device: The device of rows.
        codecs: TorchRec's codecs for rows and gradients that travel.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[ShardedEmbeddingTable],
        device: torch.device | None,
        codecs: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__()
        dims = torch.tensor([table.embedding_dim for table in tables], device=device)
        self.register_buffer("_dims", dims, persistent=False)
        self._dist = SequenceEmbeddingsAllToAll(
            group,
            [len(tables)] * group.size(),
            device,
            (codecs or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name),
        )
        self._pool = ReceivedRowsPooling(tables)

    def forward(self, local_embs: Tensor, sharding_ctx: DistinctRowsContext | None = None) -> Any:
        """Send rows.

        Args:
            local_embs: The rows that other ranks asked for, table by table, and in it rank by rank.
            sharding_ctx: The exchange of this mini-batch.

        Shape:
            local_embs (sum of dims of the rows,).

        Returns:
            An awaitable of the pooled vectors, (B, sum of dims of the features).
        """
        assert sharding_ctx is not None
        # Numbers, not rows.
        sent = sharding_ctx.num_sent * self._dims.unsqueeze(1)
        received = sharding_ctx.num_received * self._dims
        awaitable = self._dist(
            local_embs.view(-1, 1),
            lengths=sent,
            input_splits=received.sum(1).tolist(),
            output_splits=sent.sum(0).tolist(),
        )
        awaitable.callbacks.append(partial(self._pool, context=sharding_ctx))
        return awaitable
