"""Two towers: the features of a user become one vector, those of an item another.

    user features, mean of each history -> sum, and an MLP's correction of it -> u (B, D)
    rows of the item and of its features -> sum                               -> v (B, D)
    u . v -> logits (B, 1)

The sum makes factorisation of the matrix of users and items a special case, as the MLP may be 0.

Shape letters: B samples, D embedding_dim, I dense features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from recsys.models.archs import OverArch, require_sizes
from recsys.models.histories import sum_of_bags
from recsys.models.retrieval import AbstractRetrievalModel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from recsys.embeddings.collection import JaggedEmbeddings

__all__ = ["TwoTower"]


class TwoTower(AbstractRetrievalModel):
    """A tower for the user and one for the item, which share the rows of items.

    Args:
        embedding_collection: See `AbstractRetrievalModel`, as the next three.
        histories: The features that are histories, of which means are taken. There may be none.
        item_features: The item's feature, and the features that belong to the item.
        catalog: The rows that the latter look up, by the row of the item.
        dense_in_features: I, dense features.
        layer_sizes: Widths of the hidden layers of the user's MLP, at least one.
        dropout: Of the input of the MLP.
        id_dropout: See `AbstractRetrievalModel`.
        dense_device: Device of the MLP.

    Shape:
        As `AbstractRetrievalModel`.

    Raises:
        ValueError: sizes or features are not as above.

    References:
        Covington et al. (2016), Deep Neural Networks for YouTube Recommendations, section 3.
    """

    def __init__(
        self,
        embedding_collection: nn.Module,
        histories: Collection[str],
        item_features: Sequence[str],
        catalog: Tensor,
        dense_in_features: int,
        layer_sizes: Sequence[int] = (128,),
        *,
        dropout: float = 0.0,
        id_dropout: float = 0.0,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(embedding_collection, histories, item_features, catalog, id_dropout)
        require_sizes("TwoTower: layer_sizes", layer_sizes, least=1)
        self.dropout = nn.Dropout(dropout)
        in_features = dense_in_features + self.embedding_dim * len(self.user_features)
        self.mlp = OverArch(in_features, [*layer_sizes, self.embedding_dim], dense_device)

    def users(self, dense_features: Tensor, rows: Mapping[str, JaggedEmbeddings]) -> Tensor:
        """The vectors u of samples, (B, D); the arguments are those of the base class."""
        vectors = [torch.zeros_like(rows[self.item_features[0]].values())]
        for name in self.user_features:
            lengths = rows[name].lengths()
            vector = sum_of_bags(rows[name].values(), lengths)
            if name in self.histories:
                vector = vector / lengths.clamp(min=1).unsqueeze(1)
            vectors.append(vector)
        joined = torch.cat([dense_features, *vectors[1:]], dim=1)
        return torch.stack(vectors).sum(0) + cast("Tensor", self.mlp(self.dropout(joined)))
