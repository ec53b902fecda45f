r"""DCN V2 with the signature, submodule names and state_dict keys of TorchRec's `DLRM_DCN`.

    dense_features (B, I) -> DenseArch  -> (B, D)    --\
                                                        cross network -> OverArch -> logits
    sparse_features       -> SparseArch -> (B, F, D) --/

The cross network comes before the top MLP, which the paper calls the stacked structure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys.models.archs import AbstractPooledModel, OverArch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CrossNetArch", "DCNv2", "LowRankCrossNet"]


class LowRankCrossNet(nn.Module):
    """Cross layers, each with a matrix of low rank.

    Layer l computes x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l, where * multiplies element by
    element. Each layer raises the degree of the feature crosses by one.

    Args:
        in_features: N, the width of the input and of the result.
        num_layers: L, the number of layers.
        low_rank: R, the rank of each layer's matrix W_l V_l. Below N / 2 it saves computation.
        device: Device of the parameters.

    Shape:
        input and result (B, N); W_kernels (N, R), V_kernels (R, N) and bias (N,) of each layer.

    Raises:
        ValueError: a size is not positive.

    References:
        Wang et al. (2021), DCN V2: Improved Deep & Cross Network and Practical Lessons for
        Web-scale Learning to Rank Systems.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        low_rank: int = 1,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if min(in_features, num_layers, low_rank) < 1:
            raise ValueError(
                "LowRankCrossNet: in_features, num_layers and low_rank must be at least 1, got "
                f"{in_features}, {num_layers} and {low_rank}"
            )
        self.in_features = in_features
        self.W_kernels = _parameters(num_layers, (in_features, low_rank), device)
        self.V_kernels = _parameters(num_layers, (low_rank, in_features), device)
        self.bias = _parameters(num_layers, (in_features,), device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw normal matrices with the variance of Xavier; biases are 0."""
        for matrix in (*self.W_kernels, *self.V_kernels):
            nn.init.xavier_normal_(matrix)
        for bias in self.bias:
            nn.init.zeros_(bias)

    def forward(self, input: Tensor) -> Tensor:  # TorchRec's name
        """(B, N) -> (B, N)."""
        crossed = input
        for W, V, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            crossed = input * functional.linear(functional.linear(crossed, V), W, bias) + crossed
        return crossed

    def extra_repr(self) -> str:
        """Sizes, for `repr`."""
        num_layers, low_rank = len(self.bias), self.V_kernels[0].shape[0]
        return f"in_features={self.in_features}, num_layers={num_layers}, low_rank={low_rank}"


class CrossNetArch(nn.Module):
    """Passes a sample's vectors, side by side, through a cross network.

    Args:
        crossnet: The cross network of (F + 1) * D features.

    Attributes:
        out_features: Width of the result.

    Shape:
        dense_features (B, D); sparse_features (B, F, D); result (B, (F + 1) * D).
    """

    def __init__(self, crossnet: LowRankCrossNet) -> None:
        super().__init__()
        self.crossnet = crossnet
        self.out_features = crossnet.in_features

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Cross one dense and F sparse vectors per sample."""
        vectors = torch.cat([dense_features, sparse_features.flatten(1)], dim=1)
        return cast("Tensor", self.crossnet(vectors))


class DCNv2(AbstractPooledModel):
    """Deep & Cross Network V2; a drop-in for `torchrec.models.dlrm.DLRM_DCN`.

    Args:
        embedding_bag_collection: The tables. If all have one `embedding_dim`, it must be D; if they
            have different dims, `SparseArch` projects them to D.
        dense_in_features: I, dense features. With 0, the dense vector is a learned constant.
        dense_arch_layer_sizes: Bottom MLP; the last size is D.
        over_arch_layer_sizes: Top MLP; at least two sizes.
        dcn_num_layers: Layers of the cross network.
        dcn_low_rank_dim: Rank of each layer's matrix.
        dense_device: Device of the dense part, the cross network included.

    Shape:
        dense_features (B, I); sparse_features: F features of B samples; result: logits (B,
        over_arch_layer_sizes[-1]).

    Raises:
        ValueError: there is no table, or sizes do not fit each other.

    References:
        Wang et al. (2021), DCN V2: Improved Deep & Cross Network and Practical Lessons for
        Web-scale Learning to Rank Systems.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, dense_device
        )
        num_vectors = len(self.sparse_arch.sparse_feature_names) + 1
        width = num_vectors * self.sparse_arch.interaction_dim
        crossnet = LowRankCrossNet(width, dcn_num_layers, dcn_low_rank_dim, dense_device)
        self.inter_arch = CrossNetArch(crossnet)
        self.over_arch = OverArch(width, over_arch_layer_sizes, dense_device)

    def head(self, embedded_dense: Tensor, embedded_sparse: Tensor) -> Tensor:
        """Logits, (B, over_arch_layer_sizes[-1]), of samples whose vectors are known.

        Args:
            embedded_dense: Results of `dense_arch`, (B, D).
            embedded_sparse: Results of `sparse_arch`, (B, F, D).
        """
        return cast("Tensor", self.over_arch(self.inter_arch(embedded_dense, embedded_sparse)))


def _parameters(
    num_layers: int, shape: tuple[int, ...], device: torch.device | None
) -> nn.ParameterList:
    return nn.ParameterList(
        [nn.Parameter(torch.empty(shape, device=device)) for _ in range(num_layers)]
    )
