"""How the features of a sample meet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["InteractionArch"]


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
        # No buffer, and on the CPU at first: made of sizes alone, it must survive a meta device.
        self._pairs = first * size + second

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Combine one dense and F sparse vectors per sample."""
        vectors = torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        if self._pairs.device != products.device:
            self._pairs = self._pairs.to(products.device)
        pairs = products.flatten(1).index_select(1, self._pairs)
        return torch.cat([dense_features, pairs], dim=1)
