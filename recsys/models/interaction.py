"""How the features of a sample meet."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["InteractionArch", "pairwise_dots", "pairwise_dots_reference"]


class InteractionArch(nn.Module):
    """Dot products of every pair of feature vectors, behind the dense vector itself.

    The dense vector counts as the first feature; pairs go row by row through the strict upper
    triangle, as in TorchRec (the classic DLRM goes through the lower one).

    Args:
        num_sparse_features: F.

    Shape:
        dense_features (B, D); sparse_features (B, F, D); result (B, D + F + F * (F - 1) / 2).

    References:
        Naumov et al. (2019), Deep Learning Recommendation Model for Personalization and
        Recommendation Systems.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        size = num_sparse_features + 1
        first, second = torch.triu_indices(size, size, offset=1, device="cpu")
        # No buffers, and on the CPU at first: made of sizes alone, they must survive a meta device.
        self._upper = first * size + second
        self._lower = second * size + first

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Combine one dense and F sparse vectors per sample."""
        if self._upper.device != dense_features.device:
            self._upper = self._upper.to(dense_features.device)
            self._lower = self._lower.to(dense_features.device)
        if torch.is_autocast_enabled(dense_features.device.type):
            dtype = torch.get_autocast_dtype(dense_features.device.type)
            dense_features, sparse_features = dense_features.to(dtype), sparse_features.to(dtype)
        vectors = torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)
        pairs = pairwise_dots(vectors, self._upper, self._lower)
        return torch.cat([dense_features, pairs], dim=1)


def pairwise_dots(vectors: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
    """Dot products of chosen pairs of a sample's vectors, once differentiable.

    Autograd would multiply twice on the way back, once for each side of a product whose sides are
    the same tensor; the two sum to one product with a symmetric matrix.

    Shape:
        vectors (B, N, D); upper, lower (P,) int64, the pair (i, j) as i * N + j and as j * N + i;
        result (B, P).
    """
    return cast("Tensor", _PairwiseDotsFunction.apply(vectors, upper, lower))  # type: ignore[no-untyped-call]


def pairwise_dots_reference(vectors: Tensor, upper: Tensor) -> Tensor:
    """The same in plain PyTorch; see `pairwise_dots`."""
    return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, upper)


class _PairwiseDotsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, upper, lower)
        return pairwise_dots_reference(vectors, upper)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        vectors, upper, lower = ctx.saved_tensors
        batch_size, num_vectors, _ = vectors.shape
        symmetric = gradient.new_zeros(batch_size, num_vectors * num_vectors)
        symmetric.index_copy_(1, upper, gradient).index_copy_(1, lower, gradient)
        return torch.bmm(symmetric.view(batch_size, num_vectors, num_vectors), vectors), None, None
