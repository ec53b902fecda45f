r"""DLRM with TorchRec's signatures, submodule names and state_dict keys.

    dense_features (B, I) -> DenseArch  -> (B, D)    --\
                                                        InteractionArch -> OverArch -> logits
    sparse_features       -> SparseArch -> (B, F, D) --/

The embeddings may be any module that has `embedding_bag_configs()` and maps `JaggedIds` or a
`KeyedJaggedTensor` to `PooledEmbeddings` or a `KeyedTensor`.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from math import comb, sqrt
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.table import output_names
from recsys.models.interaction import InteractionArch
from recsys.models.linear import linear_relu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.batch import Batch, Features, Pooled

__all__ = ["DLRM", "MLP", "DLRMTrain", "DenseArch", "OverArch", "SparseArch", "initialize_classic"]


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
    """The embeddings of all categorical features."""

    def __init__(self, embedding_bag_collection: nn.Module) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        configs: list[Any] = embedding_bag_collection.embedding_bag_configs()  # type: ignore[operator]  # any module
        if not configs:
            raise ValueError("embedding_bag_collection must have at least one table, got none")
        dims = {config.name: config.embedding_dim for config in configs}
        if len(set(dims.values())) != 1:
            raise ValueError(f"all tables must have one embedding_dim, got {dims}")
        self.embedding_dim: int = configs[0].embedding_dim
        self.sparse_feature_names = output_names(configs)

    def forward(self, features: Features) -> Tensor:
        """Pooled vectors, (B, F, D), in the tables' order."""
        embeddings = self.embedding_bag_collection
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
        return values.reshape(-1, len(self.sparse_feature_names), self.embedding_dim)


class DenseArch(nn.Module):
    """The bottom MLP; without features it gives one vector for all samples, computed once."""

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
    """The top MLP; its last layer is linear."""

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        if len(layer_sizes) < 2:
            raise ValueError(
                f"over_arch_layer_sizes must have at least two sizes, got {layer_sizes}"
            )
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


class DLRM(nn.Module):
    """Deep Learning Recommendation Model; a drop-in for `torchrec.models.dlrm.DLRM`.

    Args:
        embedding_bag_collection: Embeddings of one `embedding_dim` D.
        dense_in_features: I, dense features. With 0, the dense vector is a learned constant.
        dense_arch_layer_sizes: Bottom MLP; the last size must be D.
        over_arch_layer_sizes: Top MLP; at least two sizes.
        dense_device: Device of the MLPs.

    Shape:
        dense_features (B, I); sparse_features: F features of B samples; result: logits (B,
        over_arch_layer_sizes[-1]).

    Raises:
        ValueError: there is no table, or sizes do not fit each other.

    References:
        Naumov et al. (2019), Deep Learning Recommendation Model for Personalization and
        Recommendation Systems.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        embedding_dim = self.sparse_arch.embedding_dim
        if dense_arch_layer_sizes[-1] != embedding_dim:
            raise ValueError(
                f"dense_arch_layer_sizes must end in embedding_dim {embedding_dim}, "
                f"got {list(dense_arch_layer_sizes)}"
            )
        num_sparse = len(self.sparse_arch.sparse_feature_names)
        with warnings.catch_warnings():
            # torch has no numbers to draw for the first layer if there are no dense features.
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)
        self.inter_arch = InteractionArch(num_sparse)
        over_in_features = embedding_dim + num_sparse + comb(num_sparse, 2)
        self.over_arch = OverArch(over_in_features, over_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: Features) -> Tensor:
        """Logits, (B, over_arch_layer_sizes[-1])."""
        return self.head(self.dense_arch(dense_features), self.sparse_arch(sparse_features))

    def head(self, embedded_dense: Tensor, embedded_sparse: Tensor) -> Tensor:
        """Logits of samples whose vectors are known.

        Args:
            embedded_dense: Results of `dense_arch`, (B, D).
            embedded_sparse: Results of `sparse_arch`, (B, F, D).
        """
        interactions = self.inter_arch(embedded_dense, embedded_sparse)
        return cast("Tensor", self.over_arch(interactions))


class DLRMTrain(nn.Module):
    """A DLRM with its loss, in the form that training pipelines call.

    Args:
        dlrm_module: The model; its last layer has one output.

    Attributes:
        uses_sample_weights: True: each sample's loss is multiplied by the mini-batch's `weights`,
            if it has any, and the sum is divided by B.

    Shape:
        result (loss, (loss, logits, labels)): loss () with gradient, then detached tensors: loss
        (), logits (B,) and labels (B,).
    """

    uses_sample_weights = True

    def __init__(self, dlrm_module: nn.Module) -> None:
        super().__init__()
        self.model = dlrm_module
        self.loss_fn = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Mean binary cross-entropy of the batch, and the tensors that a pipeline reports."""
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        weights = getattr(batch, "weights", None)
        if weights is None:
            loss = self.loss_fn(logits, batch.labels.float())
        else:
            labels = batch.labels.float()
            loss = functional.binary_cross_entropy_with_logits(
                logits, labels, weights, pos_weight=self.loss_fn.pos_weight
            )
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


def initialize_classic(model: nn.Module) -> None:
    """Initialize every linear layer as facebookresearch/dlrm does, from torch's default generator.

    For a layer with m outputs and n inputs, weights are normal with variance 2 / (m + n), biases
    with variance 1 / m. Embeddings are not changed: the embedding modules here already follow the
    classic rule, uniform in +-sqrt(1 / E).
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            num_outputs, num_inputs = module.weight.shape
            nn.init.normal_(module.weight, std=sqrt(2 / (num_outputs + num_inputs)))
            nn.init.normal_(module.bias, std=sqrt(1 / num_outputs))
