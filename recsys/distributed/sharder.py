"""The sharders, which users give to `DistributedModelParallel`."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingEnv2D, ShardingType
from torchrec.modules.embedding_configs import PoolingType

from recsys.distributed.collection import (
    EXCHANGES,
    ROWS,
    ShardedHotColdEmbeddingBagCollection,
    ShardedHotColdEmbeddingCollection,
)
from recsys.embeddings.popularity.plan import require_plan
from recsys.embeddings.table import data_type_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torchrec import EmbeddingBagConfig
    from torchrec.distributed.types import ParameterSharding, ShardingEnv

    from recsys.distributed.sharded_tables import AbstractShardedTables

__all__ = ["HotColdEmbeddingBagCollectionSharder", "HotColdEmbeddingCollectionSharder"]

_TYPES = (ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value)
_KERNEL = "fused"
_TIERS = ("budget", "plan", "cold_tier", "cold_path")


class AbstractHotColdSharder(BaseEmbeddingSharder):  # type: ignore[misc]  # TorchRec has no types
    """Divides a collection among ranks, and each rank's rows among two tiers.

        apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.05})
        sharder = HotColdEmbeddingBagCollectionSharder({"budget": "256MiB"})
        model = DistributedModelParallel(model, sharders=[sharder], plan=plan)

    Plans may be table-wise and row-wise, with the compute kernel "fused" (the default of TorchRec's
    plans for tables that have an optimizer). Optimizers may be SGD, Adagrad and RowWiseAdagrad. The
    rows are float32.

    Args:
        fused_params: As in TorchRec, and for this rank's rows of each collection, as for
            `HotColdEmbeddingBagCollection`: "budget", "plan", "cold_tier" and "cold_path". The plan
            is of the whole tables.
        options: More arguments of TorchRec's class.

    Raises:
        TypeError: the plan is no `HotPlan`.
    """

    _exchange = ROWS  # of row-wise tables

    def __init__(self, fused_params: Mapping[str, Any] | None = None, **options: Any) -> None:
        # TorchRec would copy these for every table, and group tables by them.
        settings = dict(fused_params or {})
        self._tiers = {name: settings.pop(name) for name in _TIERS if name in settings}
        require_plan(self._tiers.get("plan"))
        super().__init__(settings, **options)

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> AbstractShardedTables:
        """Shard a collection. `DistributedModelParallel` calls it on every rank.

        Args:
            module: The collection.
            params: The plan of its tables, by name.
            env: The ranks.
            device: The device of lookups and results; the CPU by default.
            module_fqn: Path of the collection in the model.

        Raises:
            ProfileError: the `HotPlan` is of other tables.
            ValueError: the plan, a table or the environment is not supported.
            Exception: of `AbstractShardedTables`.
        """
        if env.process_group is None or isinstance(env, ShardingEnv2D):
            raise ValueError(
                "recsys divides tables among the ranks of one process group, got "
                f"{type(env).__name__}; call torch.distributed.init_process_group, then "
                "DistributedModelParallel (not DMPCollection)"
            )
        configs, weights = self._configs(module), self.shardable_parameters(module)
        for table in configs:
            _require_table(table, params[table.name], self._exchange)
            _require_new(table.name, weights[table.name])
        plan = self._tiers.get("plan")
        if plan is not None:
            plan.of_tables(configs)
        return self.sharded_module_type(
            module,
            params,
            env,
            self._tiers,
            device,
            fused_params=self.fused_params,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            **self._options(),
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Table-wise and row-wise, on any device."""
        return list(_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The one that TorchRec's plans name for it."""
        return [_KERNEL]

    @property
    @abstractmethod
    def sharded_module_type(self) -> type[AbstractShardedTables]:
        """The class of the sharded collection."""

    @abstractmethod
    def _configs(self, module: Any) -> list[EmbeddingBagConfig]:
        """The configs of a collection."""

    @abstractmethod
    def _options(self) -> dict[str, Any]:
        """More arguments of the sharded collection."""


class HotColdEmbeddingBagCollectionSharder(AbstractHotColdSharder, EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Divides an `EmbeddingBagCollection`; see `AbstractHotColdSharder`.

    Args:
        fused_params: As for `AbstractHotColdSharder`, and "row_wise_exchange": "rows" sends the
            distinct rows of row-wise tables to the samples' ranks and pools there, "pooled" pools
            each rank's rows and sends these parts.
        options: More arguments of TorchRec's class.

    Raises:
        TypeError: the plan is no `HotPlan`.
        ValueError: "row_wise_exchange" is another value.
    """

    def __init__(self, fused_params: Mapping[str, Any] | None = None, **options: Any) -> None:
        settings = dict(fused_params or {})
        self._exchange = settings.pop("row_wise_exchange", ROWS)
        if self._exchange not in EXCHANGES:
            raise ValueError(
                f"fused_params: row_wise_exchange must be one of {EXCHANGES}, got "
                f"{self._exchange!r}"
            )
        super().__init__(settings, **options)

    @property
    def sharded_module_type(self) -> type[ShardedHotColdEmbeddingBagCollection]:
        """The class of the sharded collection."""
        return ShardedHotColdEmbeddingBagCollection

    def _configs(self, module: Any) -> list[EmbeddingBagConfig]:
        return list(module.embedding_bag_configs())

    def _options(self) -> dict[str, Any]:
        return {
            "sharded_module_order_overwrite": self._sharded_module_order_overwrite,
            "row_wise_exchange": self._exchange,
        }


class HotColdEmbeddingCollectionSharder(AbstractHotColdSharder, EmbeddingCollectionSharder):  # type: ignore[misc]
    """Divides an `EmbeddingCollection`, without pooling; see `AbstractHotColdSharder`.

    `use_index_dedup=True` needs CUDA, as in TorchRec, and was not tried.
    """

    @property
    def sharded_module_type(self) -> type[ShardedHotColdEmbeddingCollection]:
        """The class of the sharded collection."""
        return ShardedHotColdEmbeddingCollection

    def _configs(self, module: Any) -> list[EmbeddingBagConfig]:
        return list(module.embedding_configs())

    def _options(self) -> dict[str, Any]:
        return {"use_index_dedup": self._use_index_dedup}


def _require_table(table: Any, sharding: ParameterSharding, exchange: str) -> None:
    """Refuse a table or its part of the plan.

    Args:
        table: Its config.
        sharding: Its part of the plan.
        exchange: That of row-wise tables.

    Raises:
        ValueError: it is not supported; the message says why.
    """
    location, kind = f"table {table.name!r}", sharding.sharding_type
    if kind not in _TYPES:
        reason = ""
        if "column" in kind or kind == ShardingType.GRID_SHARD.value:
            reason = (
                " (divided by columns, a row would have a step size for each part of it with a "
                "row-wise optimizer, which is another optimizer)"
            )
        raise ValueError(
            f"{location}: its sharding type must be one of {_TYPES}, got {kind!r}; change the plan"
            f"{reason}"
        )
    if sharding.compute_kernel != _KERNEL:
        raise ValueError(
            f"{location}: its compute kernel must be {_KERNEL!r} in the plan, got "
            f"{sharding.compute_kernel!r}; give the sharder to construct_module_sharding_plan and "
            "call apply_optimizer_in_backward before it, or pass compute_kernel='fused'"
        )
    data_type_of(table, {"fp32": torch.float32})
    if getattr(table, "enable_embedding_update", False):
        raise ValueError(
            f"{location}: enable_embedding_update must be False: recsys rows are not written to by "
            "`write`; load them by load_state_dict, or use TorchRec's own sharder"
        )
    is_mean = getattr(table, "pooling", PoolingType.SUM) == PoolingType.MEAN
    if is_mean and kind == ShardingType.ROW_WISE.value and exchange != ROWS:
        raise ValueError(
            f"{location}: a row-wise table must be pooled by its sum, got MEAN with "
            f"row_wise_exchange={exchange!r}: parts of a mean cannot be added; set "
            "row_wise_exchange='rows' in fused_params of the sharder, or make the table table-wise"
        )


def _require_new(table: str, weight: torch.nn.Parameter) -> None:
    """Refuse a table whose optimizer has already stepped: its state would be lost.

    Raises:
        ValueError: it has.
    """
    for optimizer in getattr(weight, "_in_backward_optimizers", []):
        if float(optimizer.state.get(weight, {}).get("step", 0)) > 0:
            raise ValueError(
                f"table {table!r}: its optimizer has state from training before it was sharded, "
                "which would be lost; shard the model first, then load the optimizer's state_dict"
            )
