"""Shards the tables of a provider on this rank, with the same first rows for every provider."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv

from recsys.distributed import HotColdEmbeddingBagCollectionSharder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.bench.ranks.providers import Provider

__all__ = ["budget_bytes", "keys_of", "shard"]

_CPU = torch.device("cpu")
_OPTIMIZER = {
    "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "learning_rate": 0.01,
    "eps": 1e-8,
}


def keys_of(table_sizes: Sequence[int]) -> list[str]:
    """The features, one for each table."""
    return [f"cat_{number}" for number in range(len(table_sizes))]


def budget_bytes(provider: Provider, table_sizes: Sequence[int], dim: int) -> int | None:
    """Fast memory of this rank under the provider's plan; None if all rows are in it."""
    if provider.budget_share is None:
        return None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if provider.plan == "table_wise":
        num_rows = sum(table_sizes[rank::world_size])
    else:
        blocks = [-(-size // world_size) for size in table_sizes]
        num_rows = sum(
            max(0, min(block, size - rank * block))
            for block, size in zip(blocks, table_sizes, strict=True)
        )
    return int(provider.budget_share * num_rows * dim * 4)


def shard(provider: Provider, table_sizes: Sequence[int], dim: int) -> Any:
    """This rank's part of the collection. A collective.

    Args:
        provider: The sharder and its plan. Table-wise, rank `n` has tables `n`, `n + W`, ...
        table_sizes: Rows per table.
        dim: D.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{key}", num_embeddings=size, embedding_dim=dim, feature_names=[key]
            )
            for key, size in zip(keys_of(table_sizes), table_sizes, strict=True)
        ],
        device=torch.device("meta"),
    )
    settings = {**_OPTIMIZER, **provider.fused_params}
    budget = budget_bytes(provider, table_sizes, dim)
    if budget is not None:
        settings["budget"] = budget
    kind = (
        EmbeddingBagCollectionSharder
        if provider.is_torchrec
        else HotColdEmbeddingBagCollectionSharder
    )
    sharder = kind(fused_params=settings)
    rules = {
        f"t_{key}": row_wise(compute_kernel="fused")
        if provider.plan == "row_wise"
        else table_wise(rank=number % world_size, compute_kernel="fused")
        for number, key in enumerate(keys_of(table_sizes))
    }
    plan = construct_module_sharding_plan(collection, rules, sharder, world_size, world_size, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all rows fit a budget
        sharded = sharder.shard(
            collection, plan, ShardingEnv(world_size, rank, dist.group.WORLD), _CPU
        )
    _set_first_rows(sharded)
    return sharded


def _set_first_rows(sharded: Any) -> None:
    """Write the same rows for every provider and every division of tables."""
    for number, sharded_rows in enumerate(sharded.state_dict().values()):
        for part in sharded_rows.local_shards():
            first = part.metadata.shard_offsets[0]
            part.tensor.copy_(_first_rows(number, first, *part.tensor.shape))


def _first_rows(table: int, first: int, num_rows: int, dim: int) -> Tensor:
    """Rows (num_rows, D) in [-0.05, 0.05) of a table, from row `first` on.

    They are a cheap hash of their place, because drawing them would take longer than the steps.
    """
    rows = torch.arange(first, first + num_rows).unsqueeze(1) * 7919
    columns = torch.arange(dim) * 104_729
    return (rows + columns + table * 1_299_709).remainder(1009).float() / 10_090 - 0.05
