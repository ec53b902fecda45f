"""SASRec: self-attention over a history, in which no step sees a later one.

    history (B, T, D) + positions -> blocks -> last step (B, D)   \
                                                                   sum -> norm -> u (B, D)
    other features of the user -> linear layer (B, D)             /
    rows of the item and of its features -> sum                            -> v (B, D)
    u . v -> logits (B, 1)

Shape letters: B samples, T steps, D embedding_dim, H heads, I dense features.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys.models.histories import steps_back, sum_of_bags
from recsys.models.retrieval import AbstractRetrievalModel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from recsys.embeddings.collection import JaggedEmbeddings

__all__ = ["SASRec"]


class SASRec(AbstractRetrievalModel):
    """Self-Attentive Sequential Recommendation: the last step of a history is the user.

    Differences from the paper: norms come before attention and MLP, and one more at the end;
    positions count from the last step; a sample trains its own item alone, since the samples before
    it in its group train the others; and features of the user beside the histories are added. Of
    several histories, such as those of several kinds of events, each goes through the same blocks,
    with a learned vector that tells its kind.

    Args:
        embedding_collection: See `AbstractRetrievalModel`, as the next three.
        histories: The features that are histories, at least one.
        item_features: The item's feature, and the features that belong to the item.
        catalog: The rows that the latter look up, by the row of the item.
        dense_in_features: I, dense features.
        num_steps: T; of a longer history the last T steps are used.
        num_blocks: Blocks of attention and MLP, at least one.
        num_heads: H; divides D.
        dropout: Of rows, of attention, and of the results of attention and MLP.
        id_dropout: See `AbstractRetrievalModel`.
        dense_device: Device of the layers.

    Shape:
        As `AbstractRetrievalModel`.

    Raises:
        ValueError: sizes or features are not as above.

    References:
        Kang and McAuley (2018), Self-Attentive Sequential Recommendation, section 3.
    """

    initializes_itself = True

    def __init__(
        self,
        embedding_collection: nn.Module,
        histories: Collection[str],
        item_features: Sequence[str],
        catalog: Tensor,
        dense_in_features: int,
        *,
        num_steps: int = 20,
        num_blocks: int = 2,
        num_heads: int = 2,
        dropout: float = 0.2,
        id_dropout: float = 0.0,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(embedding_collection, histories, item_features, catalog, id_dropout)
        dim = self.embedding_dim
        if not self.histories or min(num_steps, num_blocks) < 1 or dim % num_heads:
            raise ValueError(
                "SASRec needs a history, num_steps and num_blocks of at least 1, and num_heads "
                f"that divides embedding_dim {dim}; got {len(self.histories)} histories, num_steps "
                f"{num_steps}, num_blocks {num_blocks}, num_heads {num_heads}"
            )
        self._others = [name for name in self.user_features if name not in self.histories]
        self.positions = nn.Parameter(torch.empty(num_steps, dim, device=dense_device))
        self.kinds = nn.Parameter(torch.empty(len(self.histories), dim, device=dense_device))
        self.no_history = nn.Parameter(torch.empty(dim, device=dense_device))
        for vectors in (self.positions, self.kinds, self.no_history):
            nn.init.normal_(vectors, std=sqrt(1 / dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            _Block(dim, num_heads, dropout, dense_device) for _ in range(num_blocks)
        )
        num_others = dense_in_features + dim * len(self._others)
        self.others = nn.Linear(num_others, dim, device=dense_device) if num_others else None
        self.norm = nn.LayerNorm(dim, device=dense_device)

    def users(self, dense_features: Tensor, rows: Mapping[str, JaggedEmbeddings]) -> Tensor:
        """The vectors u of samples, (B, D); the arguments are those of the base class."""
        vectors = [
            self._last_step(rows[name], kind)
            for name, kind in zip(self.histories, self.kinds, strict=True)
        ]
        if self.others is not None:
            others = [
                sum_of_bags(rows[name].values(), rows[name].lengths()) for name in self._others
            ]
            vectors.append(self.others(torch.cat([dense_features, *others], dim=1)))
        return cast("Tensor", self.norm(torch.stack(vectors).sum(0)))

    def _last_step(self, history: JaggedEmbeddings, kind: Tensor) -> Tensor:
        """The last step of each history after all blocks, (B, D)."""
        num_steps, dim = self.positions.shape
        lengths, size = history.lengths(), (history.lengths().shape[0], num_steps)
        bags, back = steps_back(lengths, history.values().shape[0])
        used = (back <= num_steps).nonzero()[:, 0]
        bags, back = bags[used], back[used]
        steps = history.values().index_select(0, used) * sqrt(dim) + kind
        steps = self.dropout(steps + self.positions.index_select(0, num_steps - back))
        # Steps stand first in their rows, so none sees what is missing, which comes after them.
        places = bags * num_steps + lengths.clamp(max=num_steps)[bags] - back
        last = (back == 1).nonzero()[:, 0]
        for number, block in enumerate(self.blocks, 1):
            steps = block(steps, places, last if number == len(self.blocks) else slice(None), size)
        return self.no_history.expand(size[0], dim).index_copy(0, bags[last], steps)


class _Block(nn.Module):
    """Attention and an MLP, each with a norm before it and a residual around it."""

    def __init__(
        self, dim: int, num_heads: int, dropout: float, device: torch.device | None
    ) -> None:
        super().__init__()
        self._num_heads, self.dropout = num_heads, nn.Dropout(dropout)
        self.norm = nn.LayerNorm(dim, device=device)
        self.inputs = nn.Linear(dim, 3 * dim, device=device)
        self.output = nn.Linear(dim, dim, device=device)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim, device=device),
            nn.Linear(dim, 4 * dim, device=device),
            nn.GELU(),
            nn.Linear(4 * dim, dim, device=device),
        )

    def forward(
        self, steps: Tensor, places: Tensor, needed: Tensor | slice, size: tuple[int, int]
    ) -> Tensor:
        """The steps after this block; only attention takes room for steps that are missing.

        Args:
            steps: The steps of all histories.
            places: Where they stand among B x T places.
            needed: The steps that are results.
            size: B and T.

        Shape:
            steps (N, D); places (N,); needed (n,) or a slice; result (n, D).
        """
        parts = self.inputs(self.norm(steps))
        padded = parts.new_zeros(size[0] * size[1], parts.shape[1]).index_copy(0, places, parts)
        padded = padded.view(*size, 3, self._num_heads, -1)
        query, key, value = padded.permute(2, 0, 3, 1, 4)  # (B, H, T, D / H) each
        found = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout.p if self.training else 0.0,
            is_causal=True,
        )
        steps, places = steps[needed], places[needed]
        found = found.transpose(1, 2).reshape(-1, steps.shape[1]).index_select(0, places)
        steps = steps + self.dropout(self.output(found))
        return cast("Tensor", steps + self.dropout(self.mlp(steps)))
