"""Which of the two exchanges a collection uses for row-wise tables.

"rows"     distinct rows travel, and are pooled on the rank of the samples
"pooled"   each rank pools its rows of every bag, and these parts travel
"auto"     the one that sends fewer bytes in the first mini-batch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from recsys.distributed.exchange.distinct_rows import id_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrec import KeyedJaggedTensor
    from torchrec.distributed.embedding_types import ShardedEmbeddingTable

__all__ = ["AUTO", "POOLED", "ROWS", "cheaper_exchange", "require_exchange"]

ROWS, POOLED, AUTO = _EXCHANGES = "rows", "pooled", "auto"
_FLOAT_BYTES = 4


def require_exchange(exchange: Any) -> str:
    """Check the entry "row_wise_exchange" of `fused_params`.

    Raises:
        ValueError: it is another value.
    """
    if exchange not in _EXCHANGES:
        raise ValueError(
            f"fused_params: row_wise_exchange must be one of {_EXCHANGES}, got {exchange!r}"
        )
    return str(exchange)


def cheaper_exchange(
    features: KeyedJaggedTensor,
    tables: Sequence[ShardedEmbeddingTable],
    group: dist.ProcessGroup | None,
    device: torch.device | None,
) -> str:
    """The exchange that sends fewer bytes for a mini-batch; the same on every rank. A collective.

    It counts ids, and vectors or rows there and back, as if no row were on the rank of its sample:
    in both exchanges, (W - 1) / W of these bytes travel.

    Args:
        features: This rank's part of the mini-batch.
        tables: The row-wise tables.
        group: The ranks.
        device: The device of tensors that the group's backend exchanges.
    """
    bytes_of_rows = bytes_of_parts = 0
    num_ranks, bounds = dist.get_world_size(group), features.length_per_key()
    # Not `to_dict`, which fails for a rank without samples.
    ids = dict(zip(features.keys(), features.values().split(bounds), strict=True))
    for table in tables:
        both_ways = 2 * _FLOAT_BYTES * int(table.embedding_dim)
        looked_up = torch.cat([ids[feature] for feature in table.feature_names])
        id_bytes = id_dtype([int(table.num_embeddings)]).itemsize
        bytes_of_rows += len(torch.unique(looked_up)) * (both_ways + id_bytes)
        num_bags = num_ranks * features.stride() * len(table.feature_names)
        bytes_of_parts += num_bags * both_ways + len(looked_up) * looked_up.dtype.itemsize
    counts = torch.tensor([bytes_of_rows, bytes_of_parts], dtype=torch.int64, device=device)
    dist.all_reduce(counts, group=group)
    of_rows, of_parts = counts.tolist()
    return ROWS if of_rows <= of_parts else POOLED
