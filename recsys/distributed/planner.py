"""What tables cost under a budget, for TorchRec's planner.

TorchRec's planner counts every row of a table as a row in memory, and refuses plans that fit with
rows in files. It takes the bytes of a table from `ShardEstimator`s, not from the sharder:

    planner = EmbeddingShardingPlanner(
        topology=topology,
        enumerator=EmbeddingEnumerator(
            topology,
            batch_size,
            estimator=[
                EmbeddingPerfEstimator(topology),
                HotPlanStorageEstimator(plan, topology, cold_tier="file"),
            ],
        ),
    )
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from torchrec.distributed.planner.shard_estimators import (
    EmbeddingStorageEstimator,
    _calculate_storage_specific_sizes,
)
from torchrec.distributed.planner.types import Storage
from torchrec.distributed.types import get_tensor_size_bytes

from recsys.embeddings.tiers import COLD_TIERS
from recsys.embeddings.tiers.budget import map_bytes
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrec.distributed.planner.types import ShardingOption, Topology

    from recsys.embeddings.popularity.plan import HotPlan

__all__ = ["HotPlanStorageEstimator", "fast_bytes"]


def fast_bytes(plan: HotPlan, table: str) -> int:
    """Bytes of fast memory that a table takes under a plan.

    The row map of its rows, its pinned rows, and its share of the slots for other rows.

    Args:
        plan: The plan.
        table: Name of the table.
    """
    planned, num_rows = plan.tables[table], plan.profile.table_sizes[table]
    num_pinned = len(plan.pinned_rows(table))
    num_shared = min(plan.window_lookups * planned.num_features, num_rows - num_pinned)
    return map_bytes(num_rows) + (num_pinned + num_shared) * planned.slot_bytes


class HotPlanStorageEstimator(EmbeddingStorageEstimator):  # type: ignore[misc]  # untyped
    """TorchRec's estimate of storage, with rows in two tiers.

    On CUDA the slots take device memory, and the cold tier of `cold_tier="host"` takes host
    memory. On the CPU both take host memory. A cold tier in files takes neither.

    Args:
        plan: Has the tables of which rows are in two tiers; the estimate of others is TorchRec's.
        topology: As in TorchRec.
        constraints: As in TorchRec.
        cold_tier: "host" or "file".

    Raises:
        ConfigError: `cold_tier` is neither.
    """

    def __init__(
        self,
        plan: HotPlan,
        topology: Topology,
        constraints: Mapping[str, Any] | None = None,
        *,
        cold_tier: str = "host",
    ) -> None:
        if cold_tier not in COLD_TIERS:
            raise ConfigError(f"cold_tier must be one of {COLD_TIERS}, got {cold_tier!r}")
        super().__init__(topology, constraints)
        self._plan, self._cold_tier = plan, cold_tier

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: Mapping[str, Any]
    ) -> None:
        """Set the storage of every shard of every option."""
        super().estimate(sharding_options, sharder_data_map)
        for option in sharding_options:
            if option.name in self._plan.tables:
                self._correct(option)

    def _correct(self, option: ShardingOption) -> None:
        """Replace the bytes of a table's rows and state in TorchRec's estimate."""
        whole = _calculate_storage_specific_sizes(
            storage=get_tensor_size_bytes(option.tensor),
            shape=option.tensor.shape,
            shard_sizes=[shard.size for shard in option.shards],
            sharding_type=option.sharding_type,
            optimizer_class=getattr(option.tensor, "_optimizer_classes", [None])[0],
        )
        fast, num_rows = fast_bytes(self._plan, option.name), option.tensor.shape[0]
        is_on_host = self._topology.compute_device == "cpu"
        for shard, its_rows in zip(option.shards, whole, strict=True):
            in_slots = ceil(fast * shard.size[0] / num_rows)
            in_store = its_rows if self._cold_tier == "host" else 0
            of_device = in_slots - its_rows  # in place of all rows
            shard.storage += Storage(
                hbm=0 if is_on_host else of_device,
                ddr=in_store + (of_device if is_on_host else 0),
            )
