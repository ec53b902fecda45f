"""The embeddings of a model: those of recsys, or plain PyTorch for comparison.

    embeddings   lookup                              update
    recsys       one kernel for all tables           the optimizer's `step`
    torch        nn.EmbeddingBag(sparse=True)        torch.optim on sparse gradients

Both accept `JaggedIds` or a `KeyedJaggedTensor`, return `PooledEmbeddings`, and draw the same
initial rows from the same seed. They have TorchRec's `state_dict` keys, so a model saved with one
loads with the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from recsys.batch import PooledEmbeddings
from recsys.embeddings.collection import HotColdEmbeddingBagCollection, HotColdEmbeddingCollection
from recsys.embeddings.lookup.abstract import AbstractEmbeddingBags, make_bags
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.batch import Features
    from recsys.config import OptimizerConfig
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.table import TableConfig
    from recsys.embeddings.tables_module import TableModule

__all__ = ["TorchEmbeddingBags", "build_embeddings", "row_optimizer"]


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
    is_pooled: bool = True,
) -> tuple[AbstractEmbeddingBags | TableModule, torch.optim.Optimizer]:
    """The embedding module of a provider, and the optimizer whose `step` updates its rows.

    Args:
        provider: "recsys" or "torch".
        tables: All tables, with distinct names.
        optimizer: Settings of the row optimizer.
        device: Device of the tables.
        budget: Fast memory, empty for no limit; only for "recsys", as are the next three.
        plan: Rows that never leave fast memory.
        cold_tier: "host" or "file".
        cold_path: Folder of the cold tier "file".
        is_pooled: Whether the rows of a bag are pooled; only "recsys" has another module.

    Returns:
        The module and the optimizer.

    Raises:
        BudgetTooSmall: the budget is below the floor.
        ConfigError: the provider does not support the optimizer, or lookups without pooling.
    """
    if not is_pooled and provider != "recsys":
        raise ConfigError(
            f"embeddings must be 'recsys' for a model that looks rows up without pooling, got "
            f"{provider!r}; choose 'recsys', or another model"
        )
    if provider == "recsys":
        kind = HotColdEmbeddingBagCollection if is_pooled else HotColdEmbeddingCollection
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
    require_torch_optimizer(optimizer)  # before the tables are initialized
    module = TorchEmbeddingBags(tables, device)
    return module, module.make_optimizer(optimizer)


class TorchEmbeddingBags(AbstractEmbeddingBags):
    """One `nn.EmbeddingBag(mode="sum", sparse=True)` per table; lookups run one after another.

    Args:
        tables: All tables.
        device: Device of the tables.
    """

    def __init__(self, tables: Sequence[TableConfig], device: torch.device | None = None) -> None:
        super().__init__(tables)
        rows = [
            torch.empty(each.num_embeddings, each.embedding_dim, device=device)
            for each in self._tables
        ]
        self.embedding_bags = make_bags(self._tables, rows)
        self.reset_parameters()

    def table_weights(self) -> Sequence[Tensor]:
        """The rows of every table, (E, D)."""
        return [bag.weight for bag in self.embedding_bags.values()]  # type: ignore[misc]  # Module.__getattr__

    def make_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        """The `torch.optim` optimizer that updates these rows.

        Args:
            config: Its name and constants.

        Raises:
            ConfigError: `torch.optim` has no such optimizer for sparse gradients.
        """
        require_torch_optimizer(config)
        if config.name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=config.lr)
        if config.name == "adam":
            return torch.optim.SparseAdam(
                self.parameters(),
                lr=config.lr,
                betas=(config.betas[0], config.betas[1]),
                eps=config.eps,
            )
        checks = torch.sparse.check_sparse_tensor_invariants
        if not checks.is_enabled():  # type: ignore[no-untyped-call]
            # torch's Adagrad builds sparse tensors. Unless their checks are switched off
            # explicitly, torch warns that they are not checked.
            checks.disable()  # type: ignore[no-untyped-call]
        return torch.optim.Adagrad(self.parameters(), lr=config.lr, eps=config.eps)

    def forward(self, features: Features) -> PooledEmbeddings:
        """Look up and pool the rows of every bag.

        Args:
            features: `JaggedIds`, or a `KeyedJaggedTensor` of TorchRec.

        Shape:
            result (B, sum of dims).
        """
        modules = list(self.embedding_bags.values())
        pooled = [
            modules[table](values, offsets[:-1], weights)
            for (table, _), (values, offsets, weights) in zip(
                self._lookups, self._bags(features), strict=True
            )
        ]
        return PooledEmbeddings(self._output_keys, self._output_dims, torch.cat(pooled, dim=1))


def require_torch_optimizer(config: OptimizerConfig) -> None:
    """Refuse a row optimizer that `torch.optim` does not have.

    Args:
        config: The optimizer of the rows.

    Raises:
        ConfigError: it has no such optimizer for sparse gradients.
    """
    if config.name not in ("sgd", "adagrad", "adam"):
        raise ConfigError(
            f"optimizer.name {config.name!r} is not in torch.optim, so embeddings 'torch' cannot "
            "use it; choose 'sgd', 'adagrad' or 'adam', or embeddings 'recsys'"
        )


def row_optimizer(config: OptimizerConfig) -> RowOptimizer:
    """The recsys optimizer for a configuration."""
    if config.name == "sgd":
        return SGD(lr=config.lr)
    if config.name in ("adagrad", "rowwise_adagrad"):
        kind = Adagrad if config.name == "adagrad" else RowWiseAdagrad
        return kind(lr=config.lr, eps=config.eps)
    kind_of_adam = Adam if config.name == "adam" else PartialRowWiseAdam
    return kind_of_adam(lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps)
