r"""DeepFM: a factorization machine and an MLP over the same vectors.

    dense_features (B, I) -> DenseArch  -> (B, D)    --\    /-- column 0     -> sum       --\
                                                        ----    columns 1..  -> FM           +
    sparse_features       -> SparseArch -> (B, F, D) --/    \-- all columns  -> OverArch  --/

The three results are added up to a logit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from recsys.models.archs import AbstractPooledModel, OverArch, require_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DeepFM", "factorization_machine"]


def factorization_machine(factors: Tensor) -> Tensor:
    """The second-order term of a factorization machine: the sum of v_i . v_j over all pairs i < j.

    Computed as (|sum of v_i|^2 - sum of |v_i|^2) / 2, in time linear in the number of vectors.

    Shape:
        factors (B, N, K), N vectors v_i per sample; result (B, 1).

    References:
        Rendle (2010), Factorization Machines.
    """
    of_sum, of_each = factors.sum(1).square(), factors.square().sum(1)
    return 0.5 * (of_sum - of_each).sum(1, keepdim=True)


class DeepFM(AbstractPooledModel):
    """DeepFM over the dense vector and the F pooled vectors.

    A logit is the sum of
    - the vectors' columns 0, which are first-order weights,
    - the dot products of all pairs of vectors, without column 0,
    - an MLP of all vectors side by side, whose last bias is the bias of the model.

    Differences from the paper:
    - It has a second table of first-order weights for each feature. Here a row's weight is stored
      in front of its factors, so one lookup reads both and they share a place in the tiers. The MLP
      reads it, too. If a table is projected to D, column 0 mixes all its columns.
    - Each dense feature is a field of its own there. Here they take part as one vector, that of the
      bottom MLP, whose numbers are not negative.

    Args:
        embedding_bag_collection: The tables. If all have one `embedding_dim`, it must be D; if they
            have different dims, `SparseArch` projects them to D.
        dense_in_features: I, dense features. With 0, the dense vector is a learned constant.
        dense_arch_layer_sizes: Bottom MLP; the last size is D, at least 2.
        over_arch_layer_sizes: The MLP of all vectors; at least two sizes, the last is 1.
        dense_device: Device of the MLPs.

    Shape:
        dense_features (B, I); sparse_features: F features of B samples; result: logits (B, 1).

    Raises:
        ValueError: there is no table, or sizes do not fit each other.

    References:
        Guo et al. (2017), DeepFM: A Factorization-Machine based Neural Network for CTR Prediction.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        require_sizes("dense_arch_layer_sizes", dense_arch_layer_sizes, least=1)
        require_sizes("over_arch_layer_sizes", over_arch_layer_sizes, least=2, last=1)
        if dense_arch_layer_sizes[-1] < 2:
            raise ValueError(
                "dense_arch_layer_sizes must end in 2 or more, a first-order weight and factors, "
                f"got {list(dense_arch_layer_sizes)}; widen the tables"
            )
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, dense_device
        )
        num_vectors = len(self.sparse_arch.sparse_feature_names) + 1
        width = num_vectors * self.sparse_arch.interaction_dim
        self.over_arch = OverArch(width, over_arch_layer_sizes, dense_device)

    def head(self, embedded_dense: Tensor, embedded_sparse: Tensor) -> Tensor:
        """Logits, (B, 1), of samples whose vectors are known.

        Args:
            embedded_dense: Results of `dense_arch`, (B, D).
            embedded_sparse: Results of `sparse_arch`, (B, F, D).
        """
        vectors = torch.cat([embedded_dense.unsqueeze(1), embedded_sparse], dim=1)
        first_order = vectors[:, :, 0].sum(1, keepdim=True)
        second_order = factorization_machine(vectors[:, :, 1:])
        return cast("Tensor", self.over_arch(vectors.flatten(1)) + first_order + second_order)
