"""Embedding providers that others make, as baselines: plain PyTorch and FBGEMM.

    provider   lookup                              update
    torch      nn.EmbeddingBag(sparse=True)        torch.optim on sparse gradients
    fbgemm     one TBE operator for all tables     fused into backward

Both take `JaggedIds` or a `KeyedJaggedTensor`, return `PooledEmbeddings`, draw the same initial
rows from the same seed and have TorchRec's `state_dict` keys, so a model saved with one loads with
the other, and with ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recsys.batch import PooledEmbeddings
from recsys.embeddings.abstract import AbstractEmbeddingBags
from recsys.errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.batch import Features
    from recsys.config import OptimizerConfig
    from recsys.embeddings.table import TableConfig

__all__ = ["FbgemmEmbeddingBags", "TorchEmbeddingBags", "require_torch_optimizer"]


class TorchEmbeddingBags(AbstractEmbeddingBags):
    """One `nn.EmbeddingBag(mode="sum", sparse=True)` per table, looked up one after the other."""

    def __init__(self, tables: Sequence[TableConfig], device: torch.device | None = None) -> None:
        super().__init__(tables)
        self.embedding_bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(
                    table.num_embeddings,
                    table.embedding_dim,
                    mode="sum",
                    sparse=True,
                    # Rows are drawn below; nn.EmbeddingBag would first draw normal ones.
                    _weight=torch.empty(table.num_embeddings, table.embedding_dim, device=device),
                )
                for table in self._tables
            }
        )
        self.reset_parameters()

    def table_weights(self) -> Sequence[Tensor]:
        """The rows of every table, (E, D)."""
        return [bag.weight for bag in self.embedding_bags.values()]  # type: ignore[misc]  # Module.__getattr__

    def make_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        """The `torch.optim` optimizer that steps these rows.

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
            # torch's Adagrad builds sparse tensors, and torch warns of each that it is not checked
            # unless it was said aloud that it need not be.
            checks.disable()  # type: ignore[no-untyped-call]
        return torch.optim.Adagrad(self.parameters(), lr=config.lr, eps=config.eps)

    def forward(self, features: Features) -> PooledEmbeddings:
        """Look up and pool.

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
        optimizer: Has the learning rate that the next forward takes along to its backward.

    Raises:
        ConfigError: FBGEMM cannot have such a table or optimizer.
        MissingDependency: FBGEMM is not installed.
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
        except ImportError as error:
            raise MissingDependency(
                "embeddings 'fbgemm' needs fbgemm-gpu-cpu (or fbgemm-gpu) beside a torch it was "
                f"built for ({error}); install it, or choose embeddings 'torch'"
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
            # The default reads row 0 for a row out of range, and goes on.
            bounds_check_mode=BoundsCheckMode.FATAL,
        )
        # Hidden in a tuple so that nn.Module does not register it: its parameters are nobody
        # else's to step or to save.
        self._hidden = (tbe,)
        self.optimizer = _FusedOptimizer(list(tbe.parameters()), {"lr": optimizer.lr})
        self._lr = optimizer.lr
        self.reset_parameters()

    def table_weights(self) -> Sequence[Tensor]:
        """The rows of every table, (E, D)."""
        weights: list[Tensor] = self._hidden[0].split_embedding_weights()
        return weights

    def forward(self, features: Features) -> PooledEmbeddings:
        """Look up and pool.

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
    """The face of an optimizer whose update is made by backward."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing: rows have moved already."""


def _concatenate(
    bags: list[tuple[Tensor, Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Several features' bags as one feature-major whole."""
    values, offsets, weights = zip(*bags, strict=True)
    sizes = torch.cat([bounds[1:] - bounds[:-1] for bounds in offsets])
    whole_offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return torch.cat(values), whole_offsets, None if weights[0] is None else torch.cat(weights)


def require_torch_optimizer(config: OptimizerConfig) -> None:
    """Refuse an optimizer of rows that `torch.optim` does not have.

    Raises:
        ConfigError: it has none of that name for sparse gradients.
    """
    if config.name not in ("sgd", "adagrad", "adam"):
        raise ConfigError(
            f"optimizer.name {config.name!r} is not in torch.optim, so embeddings 'torch' cannot "
            "use it; choose 'sgd', 'adagrad' or 'adam', or embeddings 'recsys'"
        )
