"""Embedding providers that others make, as baselines: plain PyTorch and FBGEMM.

    provider   lookup                              update
    torch      nn.EmbeddingBag(sparse=True)        torch.optim on sparse gradients
    fbgemm     one TBE operator for all tables     fused into backward

Both take `JaggedIds` or a `KeyedJaggedTensor`, return `PooledEmbeddings`, draw the same initial
rows from the same seed and have TorchRec's `state_dict` keys, so a model saved with one loads with
the other.
"""

from __future__ import annotations

from abc import abstractmethod
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recsys.batch import PooledEmbeddings
from recsys.errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from recsys.batch import Features
    from recsys.config import OptimizerConfig
    from recsys.embeddings.table import TableConfig

__all__ = ["FbgemmEmbeddingBags", "TorchEmbeddingBags", "build_embeddings"]


def build_embeddings(
    provider: str,
    tables: Sequence[TableConfig],
    optimizer: OptimizerConfig,
    device: torch.device | None = None,
) -> tuple[AbstractEmbeddingBags, torch.optim.Optimizer | None]:
    """A provider's tables, and what steps their rows: None where backward does.

    Args:
        provider: "torch" or "fbgemm".
        tables: All tables, with distinct names.
        optimizer: How rows are updated.
        device: Where the tables live; "fbgemm" has the CPU only.

    Raises:
        ConfigError: the provider is unknown or lacks the optimizer.
        MissingDependency: the provider's package is not installed.
    """
    if provider == "torch":
        module = TorchEmbeddingBags(tables, device)
        return module, module.make_optimizer(optimizer)
    if provider == "fbgemm":
        return FbgemmEmbeddingBags(tables, optimizer), None
    raise ConfigError(f"embeddings must be one of 'torch', 'fbgemm', got {provider!r}")


class AbstractEmbeddingBags(nn.Module):
    """Sum-pooled lookups in several tables; output columns in table order, then feature order."""

    def __init__(self, tables: Sequence[TableConfig]) -> None:
        super().__init__()
        self._tables = list(tables)
        names = [table.name for table in self._tables]
        if len(set(names)) != len(names):
            raise ValueError(f"table names must be distinct, got {names}")
        self._lookups = [
            (position, feature)
            for position, table in enumerate(self._tables)
            for feature in table.feature_names
        ]
        features = [feature for _, feature in self._lookups]
        self._features = features
        self._output_keys = [
            f"{feature}@{names[position]}" if features.count(feature) > 1 else feature
            for position, feature in self._lookups
        ]
        self._output_dims = [self._tables[position].embedding_dim for position, _ in self._lookups]

    def embedding_bag_configs(self) -> list[TableConfig]:
        """The tables, in order."""
        return self._tables

    @abstractmethod
    def table_weights(self) -> list[Tensor]:
        """The rows of every table, (E, D), in table order; views, not copies."""

    def reset_parameters(self) -> None:
        """Draw all rows anew, uniform between -sqrt(1/E) and +sqrt(1/E), table by table."""
        with torch.no_grad():
            for weight in self.table_weights():
                bound = sqrt(1 / len(weight))
                weight.uniform_(-bound, bound)

    def extra_repr(self) -> str:
        """The tables in words."""
        num_rows = sum(table.num_embeddings for table in self._tables)
        return f"num_tables={len(self._tables)}, num_rows={num_rows}"

    def _positions(self, features: Features) -> list[int]:
        """Where each lookup's feature stands in the input.

        Raises:
            KeyError: a feature is missing.
        """
        keys = features.keys()
        missing = [feature for feature in self._features if feature not in keys]
        if missing:
            raise KeyError(f"features {missing} are missing; the batch has {keys}")
        return [keys.index(feature) for feature in self._features]

    def _bags(self, features: Features) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Values, offsets (B + 1, from 0), weights of each lookup; reads offsets to the host."""
        values, offsets, weights = features.values(), features.offsets(), features.weights_or_none()
        batch_size = features.stride()
        for position in self._positions(features):
            bounds = offsets[position * batch_size : (position + 1) * batch_size + 1]
            begin, end = int(bounds[0]), int(bounds[-1])
            bag_weights = None if weights is None else weights[begin:end]
            yield values[begin:end], bounds - begin, bag_weights


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

    def table_weights(self) -> list[Tensor]:
        """The rows of every table, (E, D)."""
        return [bag.weight for bag in self.embedding_bags.values()]  # type: ignore[misc]  # Module.__getattr__

    def make_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        """The `torch.optim` optimizer that steps these rows.

        Raises:
            ConfigError: `torch.optim` has no such optimizer for sparse gradients.
        """
        if config.name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=config.lr)
        if config.name == "adagrad":
            # torch's Adagrad builds its own sparse tensors; saying that they need no checks, which
            # is the default, keeps it from warning about it.
            torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
            return torch.optim.Adagrad(self.parameters(), lr=config.lr, eps=config.eps)
        raise ConfigError(
            f"optimizer.name {config.name!r} is not in torch.optim, so embeddings 'torch' cannot "
            "use it; choose 'sgd' or 'adagrad', or embeddings 'fbgemm'"
        )

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

    Raises:
        ConfigError: FBGEMM cannot have such a table or optimizer.
        MissingDependency: FBGEMM is not installed.
    """

    def __init__(self, tables: Sequence[TableConfig], optimizer: OptimizerConfig) -> None:
        super().__init__(tables)
        try:
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
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
        )
        # Hidden in a tuple so that nn.Module does not register it: its parameters are nobody
        # else's to step or to save.
        self._hidden = (tbe,)
        self.reset_parameters()

    def table_weights(self) -> list[Tensor]:
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


def _concatenate(
    bags: list[tuple[Tensor, Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Several features' bags as one feature-major whole."""
    values, offsets, weights = zip(*bags, strict=True)
    sizes = torch.cat([bounds[1:] - bounds[:-1] for bounds in offsets])
    whole_offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return torch.cat(values), whole_offsets, None if weights[0] is None else torch.cat(weights)
