"""Masked-transformer interaction of a sample's feature vectors, after Ad-Rec.

Ad-Rec is known here by its abstract and a summary: a block of masked attention over the vectors,
with layer normalization, learns feature crosses and leaves out irrelevant ones. Neither text fixes
the mask, the number of heads, or how the result enters the top MLP, and we found no published code.
So this is a reconstruction. The summary speaks of normalized outputs; here each block normalizes
its input, because with normalized outputs it hardly learns (docs/models.md).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys.models.interaction import InteractionArch

__all__ = ["MASKS", "MaskedTransformerArch", "keep_highest"]

MASKS = ("none", "causal", "learned")


class MaskedTransformerArch(nn.Module):
    """Transformer blocks over a sample's vectors, then the dot products of all pairs.

    The tokens are the dense vector and the F sparse vectors, in this order. The dense token and the
    products of all pairs of tokens that leave the last block are the result. It is as wide as that
    of `InteractionArch`, so both take the same top MLP.

    Args:
        num_sparse_features: F.
        embedding_dim: D, a multiple of `num_heads`.
        num_layers: Blocks.
        num_heads: H, attention heads.
        feedforward: Hidden width of a block's MLP, in units of D.
        mask: Which tokens each token attends to. "none": all. "causal": itself and those before it.
            "learned": those with the highest learned scores; every layer and head has its own.
        kept: With mask "learned", how many tokens each token attends to; all if there are fewer.
        device: Device of the parameters.

    Attributes:
        out_features: Width of the result.

    Shape:
        dense_features (B, D); sparse_features (B, F, D); result (B, D + F * (F + 1) / 2).

    Raises:
        ValueError: a size is not positive, H does not divide D, or the mask is unknown.

    References:
        Adnan et al. (2023), Ad-Rec: Advanced Feature Interactions to Address Covariate-Shifts in
        Recommendation Networks, arXiv 2308.14902.
    """

    initializes_itself = True

    def __init__(
        self,
        num_sparse_features: int,
        embedding_dim: int,
        *,
        num_layers: int = 1,
        num_heads: int = 2,
        feedforward: int = 2,
        mask: str = "learned",
        kept: int = 8,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("num_sparse_features", num_sparse_features),
            ("embedding_dim", embedding_dim),
            ("num_layers", num_layers),
            ("num_heads", num_heads),
            ("feedforward", feedforward),
            ("kept", kept),
        ):
            if size < 1:
                raise ValueError(f"MaskedTransformerArch: {name} must be at least 1, got {size}")
        if embedding_dim % num_heads:
            raise ValueError(
                f"MaskedTransformerArch: num_heads must divide embedding_dim {embedding_dim}, got "
                f"{num_heads}"
            )
        if mask not in MASKS:
            raise ValueError(f"MaskedTransformerArch: mask must be one of {MASKS}, got {mask!r}")
        self._shape = num_sparse_features, embedding_dim
        self.blocks = nn.ModuleList(
            _Block(
                num_sparse_features + 1, embedding_dim, num_heads, feedforward, mask, kept, device
            )
            for _ in range(num_layers)
        )
        self.products = InteractionArch(num_sparse_features, embedding_dim)
        self.out_features = self.products.out_features

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Combine one dense and F sparse vectors per sample.

        Shape:
            dense_features (B, D); sparse_features (B, F, D); result (B, D + F * (F + 1) / 2).

        Raises:
            ValueError: F or D is another than that of the module.
        """
        if sparse_features.shape[1:] != self._shape:
            raise ValueError(
                f"MaskedTransformerArch: sparse_features must be (B, {self._shape[0]}, "
                f"{self._shape[1]}), got {tuple(sparse_features.shape)}; give the model's number "
                "of sparse features and its dim"
            )
        tokens = torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        return cast("Tensor", self.products(tokens[:, 0], tokens[:, 1:]))


class _Block(nn.Module):
    """Masked attention and an MLP; each normalizes its input and adds its result to it.

    Shape:
        tokens and result (B, T, D); scores (H, T, T), by query and key.
    """

    def __init__(
        self,
        num_tokens: int,
        dim: int,
        num_heads: int,
        feedforward: int,
        mask: str,
        kept: int,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self._num_heads, self._is_causal = num_heads, mask == "causal"
        self._kept = min(kept, num_tokens)
        self.attention_norm = nn.LayerNorm(dim, device=device)
        self.queries_keys_values = nn.Linear(dim, 3 * dim, device=device)
        self.attention_out = nn.Linear(dim, dim, device=device)
        self.mlp_norm = nn.LayerNorm(dim, device=device)
        self.mlp = nn.Sequential(
            nn.Linear(dim, feedforward * dim, device=device),
            nn.ReLU(),
            nn.Linear(feedforward * dim, dim, device=device),
        )
        self.scores: nn.Parameter | None = None
        if mask == "learned":
            self.scores = nn.Parameter(
                torch.empty(num_heads, num_tokens, num_tokens, device=device)
            )
            # Of the size of the first updates, so that training soon changes which keys are kept.
            nn.init.normal_(self.scores, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """One block."""
        tokens = tokens + self._attend(self.attention_norm(tokens))
        return tokens + cast("Tensor", self.mlp(self.mlp_norm(tokens)))

    def _attend(self, tokens: Tensor) -> Tensor:
        batch_size, num_tokens, dim = tokens.shape
        per_head = (batch_size, num_tokens, 3, self._num_heads, dim // self._num_heads)
        projected: Tensor = self.queries_keys_values(tokens)
        queries, keys, values = projected.view(per_head).permute(2, 0, 3, 1, 4).unbind(0)
        mask = None
        if self.scores is not None:
            mask = keep_highest(self.scores, self._kept).to(queries.dtype)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=self._is_causal
        )
        joined = mixed.transpose(1, 2).reshape(batch_size, num_tokens, dim)
        return cast("Tensor", self.attention_out(joined))


def keep_highest(scores: Tensor, kept: int) -> Tensor:
    """A mask to add to attention logits: 0 at the `kept` highest scores of a row, else -inf.

    The gradient is straight-through: a kept score gets the gradient of its logit, as if it had been
    added to it. A dropped score gets none and keeps its value, so its key comes back when training
    lowers a kept score below it.

    Shape:
        scores and result (..., T).
    """
    is_kept = torch.zeros_like(scores, dtype=torch.bool)
    is_kept.scatter_(-1, scores.topk(kept).indices, True)
    return torch.where(is_kept, scores - scores.detach(), -torch.inf)
