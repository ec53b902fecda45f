"""TBSM, the Time-based Sequence Model: a small DLRM at every step, and attention over the steps.

    dense features, position, one vector per field -> Tower -> unit vectors (B, T + 1, V)
    the T steps, the candidate                     -> TimeSeriesLayer -> contexts (B, V)
    contexts, the candidate                        -> OverArch -> logits (B, 1)

The tower computes all steps of all samples, and the candidates, in one call.

Shape letters: B samples, T steps of a history, D embedding_dim, F fields of a step, I dense
features, V width of a step's vector.
"""

from __future__ import annotations

from functools import reduce
from math import comb, sqrt
from operator import or_
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys.models.archs import MLP, OverArch, require_sizes
from recsys.models.histories import feature_roles, look_up, pad_left, sum_of_bags
from recsys.models.interaction import InteractionArch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.batch import Features

__all__ = ["TBSM", "TimeSeriesLayer", "Tower"]

_HIDDEN_SIZES = (15, 15)  # of the MLP over the steps, as upstream


class Tower(nn.Module):
    """A small DLRM whose result is a unit vector: bottom MLP, dot products, top MLP.

    The last layer of the top MLP is linear. Upstream it ends in a ReLU, which may turn all numbers
    of a vector into zeros.

    Args:
        dense_in_features: Dense features of a step.
        num_fields: F.
        dense_arch_layer_sizes: Bottom MLP; the last size is D.
        tower_layer_sizes: Top MLP; at least two sizes, the last is V.
        device: Device of the MLPs.

    Shape:
        dense (R, dense_in_features); fields (R, F, D); result (R, V).
    """

    def __init__(
        self,
        dense_in_features: int,
        num_fields: int,
        dense_arch_layer_sizes: Sequence[int],
        tower_layer_sizes: Sequence[int],
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dense_arch = MLP(dense_in_features, dense_arch_layer_sizes, device)
        self.inter_arch = InteractionArch(num_fields)
        width = dense_arch_layer_sizes[-1] + comb(num_fields + 1, 2)
        self.over_arch = OverArch(width, tower_layer_sizes, device)

    def forward(self, dense: Tensor, fields: Tensor) -> Tensor:
        """One unit vector for each step."""
        vectors = self.over_arch(self.inter_arch(self.dense_arch(dense), fields))
        return functional.normalize(vectors, dim=1)


class TimeSeriesLayer(nn.Module):
    """Attention over the steps of a history: the context of a candidate.

    A step h of a candidate c has the score h * A^T A c, with a learned matrix A. An MLP maps the T
    scores of a sample to T coefficients between 0 and 1, so it knows the position of each step. The
    context is the sum of the steps, weighted by their coefficients.

    Args:
        num_steps: T.
        width: V.
        device: Device of the parameters.

    Attributes:
        projection: A, (V, V).

    Shape:
        history (B, T, V), zeros for a step that is missing; candidate (B, V); result (B, V).
    """

    def __init__(self, num_steps: int, width: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.empty(width, width, device=device))
        nn.init.normal_(self.projection, std=sqrt(1 / width))
        self.mlp = OverArch(num_steps, [*_HIDDEN_SIZES, num_steps], device)

    def forward(self, history: Tensor, candidate: Tensor) -> Tensor:
        """The context of each sample."""
        projected = candidate @ self.projection.t() @ self.projection
        scores = torch.bmm(history, projected.unsqueeze(2)).squeeze(2)
        coefficients = self.mlp(scores).sigmoid()
        return torch.bmm(coefficients.unsqueeze(1), history).squeeze(1)


class TBSM(nn.Module):
    """Time-based Sequence Model: a tower over each step of a history, and attention over steps.

    A step has one field for each history: the row of the step, or of the candidate for the last
    step. Every other feature is a field whose sum is the same at all steps. The dense features of
    a step are those of the sample, followed by the position of the step, k / (T + 1) for k = 1 ..
    T, and 1 for the candidate.

    Steps of different histories belong together, counted from the last one. Of a longer history the
    last T steps are used. A step that no history of the sample has gets a zero vector, and so a
    zero score.

    In upstream, each head has a top MLP of its own, and another MLP combines their probabilities.
    Here one top MLP gets the contexts of all heads.

    Args:
        embedding_collection: The tables, looked up without pooling: a `HotColdEmbeddingCollection`,
            or a module with its `embedding_configs()` and its result.
        dense_in_features: I, dense features of a sample.
        histories: The candidate's feature of each history's feature; both look up the same table.
        num_steps: T; upstream's is 20.
        dense_arch_layer_sizes: Bottom MLP of the tower; the last size is D. Upstream's: 16.
        over_arch_layer_sizes: MLP that gives the logit; at least two sizes, the last is 1.
            Upstream's: 60, 1.
        tower_layer_sizes: Top MLP of the tower; at least two sizes, the last is V. The default is
            upstream's.
        num_heads: Number of `TimeSeriesLayer`s.
        dense_device: Device of the MLPs.

    Shape:
        dense_features (B, I); sparse_features: the features of B samples; result: logits (B, 1).

    Raises:
        ValueError: sizes or histories are not as above.

    References:
        Ishkhanov et al. (2020), Time-based Sequence Model for Personalization and Recommendation
        Systems; facebookresearch/tbsm, tbsm_pytorch.py (upstream): `TSL_Net` with "tsl_inner=def",
        `TBSM_Net`.
    """

    def __init__(
        self,
        embedding_collection: nn.Module,
        dense_in_features: int,
        histories: Mapping[str, str],
        num_steps: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        *,
        tower_layer_sizes: Sequence[int] = (15, 15),
        num_heads: int = 1,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._roles = feature_roles("TBSM", embedding_collection, histories)
        for name, number in (("num_steps", num_steps), ("num_heads", num_heads)):
            if number < 1:
                raise ValueError(f"TBSM: {name} must be at least 1, got {number}")
        dim = self._roles.embedding_dim
        require_sizes("TBSM: dense_arch_layer_sizes", dense_arch_layer_sizes, least=1, last=dim)
        require_sizes("TBSM: tower_layer_sizes", tower_layer_sizes, least=2)
        require_sizes("TBSM: over_arch_layer_sizes", over_arch_layer_sizes, least=2, last=1)
        self._num_steps = num_steps
        self.embedding_collection = embedding_collection
        num_fields = len(histories) + len(self._roles.others)
        self.tower = Tower(
            dense_in_features + 1,
            num_fields,
            dense_arch_layer_sizes,
            tower_layer_sizes,
            dense_device,
        )
        width = tower_layer_sizes[-1]
        self.heads = nn.ModuleList(
            TimeSeriesLayer(num_steps, width, dense_device) for _ in range(num_heads)
        )
        over_in_features = (num_heads + 1) * width
        self.over_arch = OverArch(over_in_features, over_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: Features) -> Tensor:
        """Logits, (B, 1).

        Args:
            dense_features: Dense features, (B, I).
            sparse_features: F features of B samples: `JaggedIds`, or a `KeyedJaggedTensor` of
                TorchRec.
        """
        fields, is_step = self._fields(sparse_features)
        num_samples, num_vectors = fields.shape[:2]
        vectors = self.tower(self._dense(dense_features).flatten(0, 1), fields.flatten(0, 1))
        vectors = vectors.view(num_samples, num_vectors, vectors.shape[1])
        history = vectors[:, :-1].masked_fill(~is_step.unsqueeze(2), 0)
        candidate = vectors[:, -1]
        contexts = [head(history, candidate) for head in self.heads]
        return cast("Tensor", self.over_arch(torch.cat([*contexts, candidate], dim=1)))

    def _fields(self, features: Features) -> tuple[Tensor, Tensor]:
        """The fields of all steps and of the candidate, and which steps there are.

        Shape:
            results (B, T + 1, F, D) and (B, T).
        """
        rows = look_up("TBSM", self.embedding_collection, features)
        by_step, are_steps = [], []
        for history, candidate in self._roles.candidates.items():
            of_history, of_candidate = rows[history], rows[candidate]
            steps, is_step = pad_left(of_history.values(), of_history.lengths(), self._num_steps)
            last = sum_of_bags(of_candidate.values(), of_candidate.lengths())
            by_step.append(torch.cat([steps, last.unsqueeze(1)], dim=1))
            are_steps.append(is_step)
        for name in self._roles.others:
            vectors = sum_of_bags(rows[name].values(), rows[name].lengths())
            by_step.append(vectors.unsqueeze(1).expand(-1, self._num_steps + 1, -1))
        return torch.stack(by_step, dim=2), reduce(or_, are_steps)

    def _dense(self, features: Tensor) -> Tensor:
        """The dense features of all steps and of the candidate, (B, T + 1, I + 1)."""
        num_vectors = self._num_steps + 1
        position = torch.arange(1, num_vectors + 1, device=features.device) / num_vectors
        repeated = features.unsqueeze(1).expand(-1, num_vectors, -1)
        positions = position.to(features.dtype).view(1, -1, 1).expand(features.shape[0], -1, 1)
        return torch.cat([repeated, positions], dim=2)
