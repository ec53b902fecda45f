"""Build the embeddings of a model by the name of their provider: recsys or a baseline."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from recsys.batch import JaggedIds
from recsys.embeddings.collection import HotColdEmbeddingBagCollection, HotColdEmbeddingCollection
from recsys.embeddings.kernels.cpu.lookup import MIN_SHARED_BYTES
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.table import TableConfig
from recsys.errors import ConfigError
from recsys.train.parts.baselines import (
    FbgemmEmbeddingBags,
    TorchEmbeddingBags,
    require_torch_optimizer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.config import OptimizerConfig
    from recsys.embeddings.lookup.abstract import AbstractEmbeddingBags
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.tables_module import TableModule

__all__ = ["build_embeddings", "row_optimizer", "with_bags"]


def build_embeddings(
    provider: str,
    tables: Sequence[TableConfig],
    optimizer: OptimizerConfig,
    device: torch.device | None = None,
    *,
    budget: str = "",
    plan: HotPlan | None = None,
    cold_tier: str = "host",
    cold_path: str = "",
    has_bags: bool = False,
    is_pooled: bool = True,
) -> tuple[AbstractEmbeddingBags | TableModule, torch.optim.Optimizer]:
    """A provider's embedding module and the optimizer of its rows.

    "recsys" and "torch" update rows in the optimizer's `step`. "fbgemm" updates them in backward:
    its `step` does nothing, but schedulers can change the learning rate in its `param_groups`.

    Args:
        provider: "recsys", "torch" or "fbgemm".
        tables: All tables, with distinct names.
        optimizer: Settings of the row optimizer.
        device: Device of the tables; "fbgemm" supports only the CPU here.
        budget: Fast memory, empty for no limit; only for "recsys", as are the next three.
        plan: Rows that never leave fast memory.
        cold_tier: "host" or "file".
        cold_path: Folder of the cold tier "file".
        has_bags: Whether mini-batches have features with any number of rows per sample.
        is_pooled: Whether the rows of a bag are pooled; only "recsys" has another module.

    Returns:
        The module and the optimizer.

    Raises:
        BudgetTooSmall: the budget is below the floor.
        ConfigError: the provider is unknown, or does not support the optimizer or the device.
        MissingDependency: the provider's package is not installed.
    """
    if not is_pooled and provider != "recsys":
        raise ConfigError(
            f"embeddings must be 'recsys' for a model that looks rows up without pooling, got "
            f"{provider!r}; choose 'recsys', or another model"
        )
    if provider == "recsys":
        kind = HotColdEmbeddingBagCollection if is_pooled else HotColdEmbeddingCollection
        if device is None or device.type == "cpu":
            dims = {table.embedding_dim for table in tables}
            _compile_kernels(
                dims,
                row_optimizer(optimizer),
                is_tiered=bool(budget) or plan is not None,
                has_bags=has_bags,
                kind=kind,
            )
        collection = kind(
            tables,
            device=device,
            optimizer=row_optimizer(optimizer),
            auto_apply=False,
            budget=budget or None,
            plan=plan,
            cold_tier=cold_tier,
            cold_path=cold_path or None,
        )
        assert collection.row_optimizer is not None
        return collection, collection.row_optimizer
    if provider == "torch":
        require_torch_optimizer(optimizer)  # before the tables are initialized
        module = TorchEmbeddingBags(tables, device)
        return module, module.make_optimizer(optimizer)
    if provider == "fbgemm":
        if device is not None and device.type != "cpu":
            raise ConfigError(
                f"embeddings 'fbgemm' runs on device 'cpu' here, got {device.type!r}; choose "
                "embeddings 'torch'"
            )
        fused = FbgemmEmbeddingBags(tables, optimizer)
        return fused, fused.optimizer
    raise ConfigError(f"embeddings must be one of ('recsys', 'torch', 'fbgemm'), got {provider!r}")


def _compile_kernels(
    dims: set[int],
    optimizer: RowOptimizer,
    *,
    is_tiered: bool,
    has_bags: bool,
    kind: type[HotColdEmbeddingBagCollection | HotColdEmbeddingCollection],
) -> None:
    """Train small tables, one per dim, so that kernels are compiled before training begins.

    A small and a large mini-batch, since lookups are compiled for one thread and for several.
    """
    large = -(-MIN_SHARED_BYTES // (4 * min(dims)))
    with torch.random.fork_rng(devices=[]):
        tables = [
            TableConfig(
                name=str(dim), num_embeddings=100, embedding_dim=dim, feature_names=("table",)
            )
            for dim in sorted(dims)
        ]
        budget = sum(8 * table.num_embeddings + 16 * table.embedding_dim for table in tables)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that small tables may fit the budget completely
            module = kind(tables, optimizer=optimizer, budget=budget if is_tiered else None)
        for batch_size in (1, large):
            ids = JaggedIds.from_one_hot(["table"], torch.zeros(1, batch_size, dtype=torch.int64))
            _sum(module(ids)).backward()
            if has_bags:
                ids = JaggedIds.from_one_hot(["table"], ids.values().expand(2, -1).reshape(1, -1))
                _sum(module(with_bags(ids))).backward()
        # A thread that works alone fetches rows in the background.
        ids = JaggedIds.from_one_hot(["table"], torch.ones(1, 1, dtype=torch.int64))
        module.prefetch(ids)
        _sum(module(ids)).backward()


def _sum(found: Any) -> Any:
    """The sum of all numbers of a lookup, pooled or not."""
    parts = found.values() if isinstance(found, dict) else [found]
    return torch.stack([part.values().sum() for part in parts]).sum()


def with_bags(ids: JaggedIds) -> JaggedIds:
    """The same rows of one feature in bags: the first has two rows, and the last is empty."""
    offsets = ids.offsets().clone()
    offsets[1:-1] = ids.offsets()[2:]
    return JaggedIds(ids.keys(), ids.values(), offsets)


def row_optimizer(config: OptimizerConfig) -> RowOptimizer:
    """The recsys optimizer for a configuration."""
    if config.name == "sgd":
        return SGD(lr=config.lr)
    if config.name in ("adagrad", "rowwise_adagrad"):
        kind = Adagrad if config.name == "adagrad" else RowWiseAdagrad
        return kind(lr=config.lr, eps=config.eps)
    kind_of_adam = Adam if config.name == "adam" else PartialRowWiseAdam
    return kind_of_adam(lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps)
