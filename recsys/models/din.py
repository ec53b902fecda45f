"""DIN, the Deep Interest Network: the candidate decides which steps of a history count.

    history (N, D), candidate (B, D) -> ActivationUnit -> weights (N, 1)
    weights, history                 -> weighted sums (B, D)
    all other features               -> sums (B, D)
    dense features, all sums         -> OverArch -> logits (B, 1)

Shape letters: B samples, N steps of a history in all samples, D embedding_dim, I dense features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from recsys.models.archs import OverArch, require_sizes
from recsys.models.histories import bags_of_rows, feature_roles, look_up, sum_of_bags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.batch import Features

__all__ = ["DIN", "ActivationUnit"]


class ActivationUnit(nn.Module):
    """The weight of each step of a history, given the candidate.

    An MLP of [h, c, h - c, h * c], where h is the row of the step and c the row of the candidate.
    Weights are not normalised by a softmax: their sum tells how strong the interest is.

    Args:
        embedding_dim: D.
        layer_sizes: Widths of the hidden layers, at least one.
        device: Device of the layers.

    Shape:
        history (N, D); candidate (N, D), the candidate of each step; result (N, 1).
    """

    initializes_itself = True

    def __init__(
        self, embedding_dim: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.mlp = OverArch(4 * embedding_dim, [*layer_sizes, 1], device)

    def forward(self, history: Tensor, candidate: Tensor) -> Tensor:
        """One weight for each step."""
        parts = [history, candidate, history - candidate, history * candidate]
        return cast("Tensor", self.mlp(torch.cat(parts, dim=1)))


class DIN(nn.Module):
    """Deep Interest Network: attention of a candidate over the history of a sample.

    The steps of a history are weighted by an `ActivationUnit` and summed; a sample without a
    history gets zeros. Each history has a unit of its own, also if several histories have their
    steps in common, such as the items of some events and their categories. All other features are
    summed. The vectors and the dense features are joined for the top MLP.

    Differences from the paper: a unit for each history, where the authors join the item and the
    category of an event and weight both by one unit; ReLU in place of PReLU or Dice; and no
    mini-batch aware regularization.

    Args:
        embedding_collection: The tables, looked up without pooling: a `HotColdEmbeddingCollection`,
            or a module with its `embedding_configs()` and its result.
        dense_in_features: I, dense features.
        histories: The candidate's feature of each history's feature; both look up the same table.
            A history may have any number of steps.
        over_arch_layer_sizes: Top MLP; at least two sizes, the last is 1.
        attention_layer_sizes: Widths of the hidden layers of an activation unit. The default is
            that of the authors' code.
        dense_device: Device of the MLPs.

    Shape:
        dense_features (B, I); sparse_features: the features of B samples; result: logits (B, 1).

    Raises:
        ValueError: sizes or histories are not as above.

    References:
        Zhou et al. (2018), Deep Interest Network for Click-Through Rate Prediction, section 4.3.
    """

    def __init__(
        self,
        embedding_collection: nn.Module,
        dense_in_features: int,
        histories: Mapping[str, str],
        over_arch_layer_sizes: Sequence[int],
        *,
        attention_layer_sizes: Sequence[int] = (80, 40),
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._roles = feature_roles("DIN", embedding_collection, histories)
        require_sizes("DIN: attention_layer_sizes", attention_layer_sizes, least=1)
        require_sizes("DIN: over_arch_layer_sizes", over_arch_layer_sizes, least=2, last=1)
        self.embedding_collection = embedding_collection
        dim = self._roles.embedding_dim
        self.attention = nn.ModuleList(
            ActivationUnit(dim, attention_layer_sizes, dense_device) for _ in self._roles.candidates
        )
        over_in_features = dense_in_features + dim * len(self._roles.names)
        self.over_arch = OverArch(over_in_features, over_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: Features) -> Tensor:
        """Logits, (B, 1).

        Args:
            dense_features: Dense features, (B, I).
            sparse_features: F features of B samples: `JaggedIds`, or a `KeyedJaggedTensor` of
                TorchRec.
        """
        rows = look_up("DIN", self.embedding_collection, sparse_features)
        candidates = self._roles.candidates
        vectors = {
            name: sum_of_bags(rows[name].values(), rows[name].lengths())
            for name in self._roles.names
            if name not in candidates
        }
        for unit, (history, candidate) in zip(self.attention, candidates.items(), strict=True):
            steps, lengths = rows[history].values(), rows[history].lengths()
            bags = bags_of_rows(lengths, steps.shape[0])
            weights = unit(steps, vectors[candidate].index_select(0, bags))
            vectors[history] = sum_of_bags(weights * steps, lengths, bags)
        ordered = [vectors[name] for name in self._roles.names]
        return cast("Tensor", self.over_arch(torch.cat([dense_features, *ordered], dim=1)))
