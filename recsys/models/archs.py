r"""The parts that models over pooled embeddings share, with TorchRec's submodule names and keys.

    dense_features (B, I) -> DenseArch  -> (B, D)    --\
                                                        head -> logits
    sparse_features       -> SparseArch -> (B, F, D) --/

Models differ in `head`: how it combines the vectors, and what enters the top MLP. The embeddings
may be any module that has `embedding_bag_configs()` and maps `JaggedIds` or a `KeyedJaggedTensor`
to `PooledEmbeddings` or a `KeyedTensor`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.table import output_names
from recsys.models.linear import linear_relu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.batch import Features, Pooled

__all__ = [
    "MLP",
    "AbstractPooledModel",
    "DenseArch",
    "OverArch",
    "SparseArch",
    "require_sizes",
]


class Perceptron(nn.Module):
    """A linear layer and a ReLU."""

    def __init__(self, in_size: int, out_size: int, device: torch.device | None = None) -> None:
        super().__init__()
        self._linear = nn.Linear(in_size, out_size, device=device)

    def forward(self, features: Tensor) -> Tensor:
        """(B, in_size) -> (B, out_size)."""
        return linear_relu(features, self._linear.weight, self._linear.bias)


class MLP(nn.Module):
    """A sequence of perceptrons.

    Args:
        in_size: Width of the input.
        layer_sizes: Width of each layer's output.
        device: Device of the parameters.
    """

    def __init__(
        self, in_size: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        sizes = [in_size, *layer_sizes]
        self._mlp = nn.Sequential(*(Perceptron(*pair, device=device) for pair in pairwise(sizes)))

    def forward(self, features: Tensor) -> Tensor:
        """(B, in_size) -> (B, layer_sizes[-1])."""
        return cast("Tensor", self._mlp(features))


class SparseArch(nn.Module):
    """The embeddings of all categorical features, as vectors of one width.

    Tables may have different dims, for example small ones for rare categories. A linear layer
    without bias then projects the pooled vectors of each table that is not `interaction_dim` wide.

    Args:
        embedding_bag_collection: The tables.
        interaction_dim: D, the width of the result. None for the tables' own dim, if all have one.
        device: Device of the projections.

    Attributes:
        interaction_dim: D.
        projections: The linear layers by table name; None if no table needs one.
        sparse_feature_names: The feature of each vector, in the order of the result.

    Raises:
        ValueError: there is no table; or tables have different dims, and `interaction_dim` is None.

    References:
        Ginart et al. (2019), Mixed Dimension Embeddings with Application to Memory-Efficient
        Recommendation Systems.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        interaction_dim: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        configs = _configs_of(embedding_bag_collection)
        if not configs:
            raise ValueError("embedding_bag_collection must have at least one table, got none")
        dims: dict[str, int] = {config.name: config.embedding_dim for config in configs}
        if interaction_dim is None:
            if len(set(dims.values())) != 1:
                raise ValueError(
                    f"tables must have one embedding_dim, got {dims}; give interaction_dim, to "
                    "which the vectors of the others are projected"
                )
            interaction_dim = configs[0].embedding_dim
        self.interaction_dim: int = interaction_dim
        self.sparse_feature_names = output_names(configs)
        self._table_names = [config.name for config in configs for _ in config.feature_names]
        projections = {
            name: nn.Linear(dim, interaction_dim, bias=False, device=device)
            for name, dim in dims.items()
            if dim != interaction_dim
        }
        # Without projections the keys are those of TorchRec's SparseArch.
        self.projections = nn.ModuleDict(projections) if projections else None

    def forward(self, features: Features) -> Tensor:
        """Pooled vectors, (B, F, D), in the tables' order."""
        embeddings = self.embedding_bag_collection
        if self.projections is not None:
            return self._project(embeddings(features).to_dict(), self.projections)
        if (
            type(embeddings) is HotColdEmbeddingBagCollection
            and not embeddings._forward_hooks  # hooks expect the documented result
            and "forward" not in embeddings.__dict__
            and embeddings.output_keys() == self.sparse_feature_names
        ):
            stacked: Tensor = embeddings(features, stacked=True)
            return stacked
        pooled: Pooled = embeddings(features)
        values = pooled.values()
        if pooled.keys() != self.sparse_feature_names:
            # Sharded collections may return their columns in another order.
            columns = pooled.to_dict()
            values = torch.cat([columns[name] for name in self.sparse_feature_names], dim=1)
        return values.reshape(-1, len(self.sparse_feature_names), self.interaction_dim)

    def _project(self, pooled: Mapping[str, Tensor], projections: nn.ModuleDict) -> Tensor:
        """Project and stack the pooled vectors of tables with different dims."""
        vectors = []
        for feature, table in zip(self.sparse_feature_names, self._table_names, strict=True):
            vector = pooled[feature]
            if table in projections:
                # Autocast projects in bfloat16; the other vectors have the dtype of the lookup.
                vector = projections[table](vector).to(vector.dtype)
            vectors.append(vector)
        return torch.stack(vectors, dim=1)


class DenseArch(nn.Module):
    """The bottom MLP; without features it gives one vector for all samples, computed once.

    Args:
        in_features: I.
        layer_sizes: Width of each layer; the last is D.
        device: Device of the parameters.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.model = MLP(in_features, layer_sizes, device)
        self._is_constant = not in_features

    def forward(self, features: Tensor) -> Tensor:
        """(B, I) -> (B, D)."""
        if self._is_constant:
            return cast("Tensor", self.model(features[:1])).expand(features.shape[0], -1)
        return cast("Tensor", self.model(features))


class OverArch(nn.Module):
    """The top MLP; its last layer is linear.

    Args:
        in_features: Width of the input.
        layer_sizes: Width of each layer, at least two.
        device: Device of the parameters.

    Raises:
        ValueError: there are fewer than two sizes, or a size is not positive.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        require_sizes("over_arch_layer_sizes", layer_sizes, least=2)
        self.model = nn.Sequential(
            MLP(in_features, layer_sizes[:-1], device),
            nn.Linear(layer_sizes[-2], layer_sizes[-1], device=device),
        )

    def forward(self, features: Tensor) -> Tensor:
        """(B, in_features) -> (B, layer_sizes[-1]), before the sigmoid."""
        hidden, last = self.model[0](features), self.model[1]
        # Never in bfloat16: 8 significant bits are too few to rank samples.
        with torch.autocast(hidden.device.type, enabled=False):
            return cast("Tensor", last(hidden.to(last.weight.dtype)))


class AbstractPooledModel(nn.Module, ABC):
    """A model of one dense vector and F pooled vectors per sample, all of width D.

    Args:
        embedding_bag_collection: The tables. If all have one `embedding_dim`, it must be D.
        dense_in_features: I, dense features. With 0, the dense vector is a learned constant.
        dense_arch_layer_sizes: Bottom MLP; the last size is D.
        dense_device: Device of the dense part.

    Attributes:
        sparse_arch: The `SparseArch`.
        dense_arch: The `DenseArch`.

    Raises:
        TypeError: the collection does not pool its rows.
        ValueError: there is no table, or sizes do not fit each other.

    Shape:
        dense_features (B, I); sparse_features: F features of B samples; result: logits (B, 1), or
        as wide as the last size of the top MLP.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        require_sizes("dense_arch_layer_sizes", dense_arch_layer_sizes, least=1)
        width = dense_arch_layer_sizes[-1]
        dims = {config.embedding_dim for config in _configs_of(embedding_bag_collection)}
        # More likely a mistake than a wish to project every table.
        if len(dims) == 1 and width not in dims:
            raise ValueError(
                f"dense_arch_layer_sizes must end in embedding_dim {dims.pop()}, the dim of all "
                f"tables, got {list(dense_arch_layer_sizes)}"
            )
        self.sparse_arch = SparseArch(embedding_bag_collection, width, dense_device)
        with warnings.catch_warnings():
            # torch has no numbers to draw for the first layer if there are no dense features.
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: Features) -> Tensor:
        """Logits, (B, 1).

        Args:
            dense_features: Dense features, (B, I).
            sparse_features: F features of B samples: `JaggedIds`, or a `KeyedJaggedTensor` of
                TorchRec.
        """
        return self.head(self.dense_arch(dense_features), self.sparse_arch(sparse_features))

    @abstractmethod
    def head(self, embedded_dense: Tensor, embedded_sparse: Tensor) -> Tensor:
        """Logits of samples whose vectors are known.

        Args:
            embedded_dense: Results of `dense_arch`, (B, D).
            embedded_sparse: Results of `sparse_arch`, (B, F, D).
        """


def require_sizes(name: str, sizes: Sequence[int], *, least: int, last: int | None = None) -> None:
    """Check the sizes of an MLP's layers.

    Args:
        name: The argument that has them.
        sizes: The sizes.
        least: The smallest number of layers.
        last: The size that the last layer must have; None for any.

    Raises:
        ValueError: there are fewer layers, a size is not positive, or the last is another.
    """
    if len(sizes) < least or min(sizes, default=1) < 1:
        raise ValueError(
            f"{name} must be positive sizes, at least {least} of them, got {list(sizes)}"
        )
    if last is not None and sizes[-1] != last:
        raise ValueError(f"{name} must end in {last}, got {list(sizes)}")


def _configs_of(embedding_bag_collection: nn.Module) -> Sequence[Any]:
    if not hasattr(embedding_bag_collection, "embedding_bag_configs"):
        raise TypeError(
            "embedding_bag_collection must pool its rows, got "
            f"{type(embedding_bag_collection).__name__}; make a HotColdEmbeddingBagCollection"
        )
    configs: Sequence[Any] = embedding_bag_collection.embedding_bag_configs()  # type: ignore[operator]  # any module
    return configs
