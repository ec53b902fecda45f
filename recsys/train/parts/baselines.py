"""Baselines: embedding providers made of plain PyTorch and of FBGEMM.

    provider   lookup                              update
    torch      nn.EmbeddingBag(sparse=True)        torch.optim on sparse gradients
    fbgemm     one TBE operator for all tables     fused into backward

Both accept `JaggedIds` or a `KeyedJaggedTensor`, return `PooledEmbeddings`, and draw the same
initial rows from the same seed. They have TorchRec's `state_dict` keys, so a model saved with one
provider, recsys' own included, loads with another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recsys.batch import PooledEmbeddings
from recsys.embeddings.lookup.abstract import AbstractEmbeddingBags, make_bags
from recsys.errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.batch import Features
    from recsys.config import OptimizerConfig
    from recsys.embeddings.table import TableConfig

__all__ = ["FbgemmEmbeddingBags", "TorchEmbeddingBags", "require_torch_optimizer"]


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


class FbgemmEmbeddingBags(AbstractEmbeddingBags):
    """FBGEMM's table-batched embedding on the CPU, its optimizer fused into backward.

    Args:
        tables: All tables; `embedding_dim` must be a multiple of 4.
        optimizer: "sgd", "adagrad" or "rowwise_adagrad".

    Attributes:
        optimizer: Holds the learning rate of the next forward and its backward; `step` does
            nothing.

    Raises:
        ConfigError: FBGEMM does not support such a table or optimizer.
        MissingDependency: FBGEMM is not installed, or was built for another torch.
    """

    def __init__(self, tables: Sequence[TableConfig], optimizer: OptimizerConfig) -> None:
        super().__init__(tables)
        try:
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
                BoundsCheckMode,
                EmbeddingLocation,
                PoolingMode,
            )
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
        except (ImportError, OSError) as error:  # OSError: built for another torch
            raise MissingDependency(
                "embeddings 'fbgemm' needs fbgemm-gpu-cpu (or fbgemm-gpu) that was built for this "
                f"torch ({error}); install it, or choose embeddings 'torch'"
            ) from error
        optimizers = {
            "sgd": EmbOptimType.EXACT_SGD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }
        if optimizer.name not in optimizers:
            raise ConfigError(
                f"optimizer.name must be one of {sorted(optimizers)} with embeddings 'fbgemm', "
                f"got {optimizer.name!r}"
            )
        for table in self._tables:
            if table.embedding_dim % 4:
                raise ConfigError(
                    f"table {table.name!r}: embedding_dim must be a multiple of 4 with embeddings "
                    f"'fbgemm', got {table.embedding_dim}"
                )
        tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (
                    table.num_embeddings,
                    table.embedding_dim,
                    EmbeddingLocation.HOST,
                    ComputeDevice.CPU,
                )
                for table in self._tables
            ],
            feature_table_map=[position for position, _ in self._lookups],
            optimizer=optimizers[optimizer.name],
            learning_rate=optimizer.lr,
            eps=optimizer.eps,
            pooling_mode=PoolingMode.SUM,
            stochastic_rounding=False,
            # The default would read row 0 for a row out of range.
            bounds_check_mode=BoundsCheckMode.FATAL,
        )
        # In a tuple, so that nn.Module does not register it: other optimizers must not update its
        # parameters, and `state_dict` must not save them under FBGEMM's keys.
        self._hidden = (tbe,)
        self.optimizer = _FusedOptimizer(list(tbe.parameters()), {"lr": optimizer.lr})
        self._lr = optimizer.lr
        self.reset_parameters()

    def table_weights(self) -> Sequence[Tensor]:
        """The rows of every table, (E, D)."""
        weights: list[Tensor] = self._hidden[0].split_embedding_weights()
        return weights

    def forward(self, features: Features) -> PooledEmbeddings:
        """Look up and pool the rows of every bag.

        Args:
            features: `JaggedIds`, or a `KeyedJaggedTensor` of TorchRec.

        Shape:
            result (B, sum of dims).
        """
        values, offsets, weights = features.values(), features.offsets(), features.weights_or_none()
        if self._positions(features) != list(range(len(features.keys()))):
            values, offsets, weights = _concatenate(list(self._bags(features)))
        lr = self.optimizer.param_groups[0]["lr"]
        if lr != self._lr:
            self._hidden[0].set_learning_rate(lr)
            self._lr = lr
        pooled = self._hidden[0](values.long(), offsets.long(), weights)
        return PooledEmbeddings(self._output_keys, self._output_dims, pooled)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for table, weight in zip(self._tables, self.table_weights(), strict=True):
            destination[f"{prefix}embedding_bags.{table.name}.weight"] = weight.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {
            f"{prefix}embedding_bags.{table.name}.weight": weight
            for table, weight in zip(self._tables, self.table_weights(), strict=True)
        }
        if strict:
            unexpected_keys += [
                key for key in state_dict if key.startswith(prefix) and key not in own
            ]
        with torch.no_grad():
            for key, weight in own.items():
                if key not in state_dict:
                    missing_keys.append(key)
                elif state_dict[key].shape != weight.shape:
                    error_msgs.append(
                        f"{key} must be {tuple(weight.shape)}, got {tuple(state_dict[key].shape)}"
                    )
                else:
                    weight.copy_(state_dict[key])


class _FusedOptimizer(torch.optim.Optimizer):
    """An optimizer object for rows that backward updates."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Does nothing: backward has updated the rows."""


def _concatenate(
    bags: list[tuple[Tensor, Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Concatenate the bags of all features, feature by feature."""
    values, offsets, weights = zip(*bags, strict=True)
    sizes = torch.cat([bounds[1:] - bounds[:-1] for bounds in offsets])
    whole_offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return torch.cat(values), whole_offsets, None if weights[0] is None else torch.cat(weights)


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
