"""Models that score a user and an item by the product of two vectors, and their loss.

    features but those of the item -> users -> u (B, D)   \
                                                           u . v
    rows of the item and of its features   -> v (n, D)    /

u does not depend on the item, so one matrix product scores all items. Training compares the item of
each positive sample with other items, which is a softmax over u . v:

    full       all items of the table are looked up in each step, and compared
    sampled    the items of the other positives of the mini-batch, and items that are drawn by equal
               chances. u . v is lowered by the logarithm of how often the item is expected among
               them, so that popular items are not punished for being there

Shape letters: B samples, P positive ones, n items, E rows of the item's table, D embedding_dim, C
further features of the item.

References:
    Yi et al. (2019), Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations.
    Yang et al. (2020), Mixed Negative Sampling for Learning Two-tower Neural Networks in
    Recommendations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from recsys.batch import JaggedIds
from recsys.models.dlrm import DLRMTrain
from recsys.models.histories import look_up, sum_of_bags

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from recsys.batch import Batch, Features
    from recsys.embeddings.collection import JaggedEmbeddings

__all__ = ["AbstractRetrievalModel", "RetrievalTrain", "drop_ids", "softmax_loss"]

_MOST_LOGITS = 1 << 22  # held at a time by the full softmax


class AbstractRetrievalModel(nn.Module, ABC):
    """A model of two vectors of a sample, one of which does not depend on the item.

    The vector of an item is the sum of its row and of the rows of its features.

    Args:
        embedding_collection: The tables, looked up without pooling: a `HotColdEmbeddingCollection`,
            or a module with its `embedding_configs()` and its result.
        histories: The features that are histories.
        item_features: The item's feature, and the features that belong to the item.
        catalog: The rows that the latter look up, by the row of the item.
        id_dropout: The probability with which each step of a history is left out in training. A
            step that is left out is not looked up, and its row has no gradient.

    Attributes:
        item_features: The item's feature, and the features that belong to the item.
        user_features: The other features, in the order of the collection.
        histories: Those of them that are histories.

    Shape:
        catalog (E, C); dense_features (B, I); sparse_features: the features of B samples; result:
        logits (B, 1).

    Raises:
        ValueError: a history or a feature of the item is not a feature of the collection.
    """

    def __init__(
        self,
        embedding_collection: nn.Module,
        histories: Collection[str],
        item_features: Sequence[str],
        catalog: Tensor,
        id_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding_collection = embedding_collection
        configs: Any = embedding_collection.embedding_configs()  # type: ignore[operator]  # any module
        self._names = [name for config in configs for name in config.feature_names]
        unknown = {*histories, *item_features} - {*self._names}
        if unknown:
            raise ValueError(
                f"{type(self).__name__}: histories and item_features must be features of "
                f"embedding_collection, which are {self._names}; got {sorted(unknown)}"
            )
        self.embedding_dim: int = configs[0].embedding_dim
        self.item_features, self._id_dropout = list(item_features), id_dropout
        self.user_features = [name for name in self._names if name not in item_features]
        self.histories = [name for name in self.user_features if name in histories]
        self.register_buffer("catalog", catalog.long(), persistent=False)
        self.catalog: Tensor

    @property
    def num_items(self) -> int:
        """E, the rows of the item's table; not all of them need to stand for items."""
        return len(self.catalog)

    def forward(self, dense_features: Tensor, sparse_features: Features) -> Tensor:
        """Logits, (B, 1).

        Args:
            dense_features: Dense features, (B, I).
            sparse_features: F features of B samples: `JaggedIds`, or a `KeyedJaggedTensor` of
                TorchRec.
        """
        users, items = self.vectors(dense_features, sparse_features)
        return (users * items).sum(1, keepdim=True)

    def vectors(self, dense_features: Tensor, sparse_features: Features) -> tuple[Tensor, Tensor]:
        """The vectors u and v of samples, (B, D) each.

        Args:
            dense_features: As for `forward`.
            sparse_features: As for `forward`.
        """
        return self.vectors_of(dense_features, self.rows_of(sparse_features))

    def rows_of(self, sparse_features: Features) -> dict[str, JaggedEmbeddings]:
        """The rows of each feature, without the ids that training leaves out.

        Args:
            sparse_features: As for `forward`.
        """
        if self.training and self._id_dropout:
            sparse_features = drop_ids(sparse_features, self.histories, self._id_dropout)
        return look_up(type(self).__name__, self.embedding_collection, sparse_features)

    def vectors_of(
        self, dense_features: Tensor, rows: Mapping[str, JaggedEmbeddings]
    ) -> tuple[Tensor, Tensor]:
        """The vectors u and v of samples whose rows were looked up, (B, D) each.

        Args:
            dense_features: As for `forward`.
            rows: The result of `rows_of`.
        """
        return self.users(dense_features, rows).float(), self._sum_of_item(rows)

    def items(self, rows: Tensor) -> Tensor:
        """The vectors of items, by their rows.

        Shape:
            rows (n,) int64; result (n, D).
        """
        columns = [rows, *self.catalog[rows].T]
        of_features = dict(zip(self.item_features, columns, strict=True))
        has_row = torch.tensor([name in of_features for name in self._names], device=rows.device)
        lengths = has_row.long().repeat_interleave(len(rows))
        features = JaggedIds(
            self._names,
            torch.cat([of_features[name] for name in self._names if name in of_features]),
            functional.pad(lengths.cumsum(0), (1, 0)),
        )
        return self._sum_of_item(self.embedding_collection(features))

    @abstractmethod
    def users(self, dense_features: Tensor, rows: Mapping[str, JaggedEmbeddings]) -> Tensor:
        """The vectors u of samples, (B, D).

        Args:
            dense_features: Dense features, (B, I).
            rows: The rows of each feature.
        """

    def _sum_of_item(self, rows: Mapping[str, JaggedEmbeddings]) -> Tensor:
        found = [rows[name] for name in self.item_features]
        return torch.stack([sum_of_bags(bags.values(), bags.lengths()) for bags in found]).sum(0)


class RetrievalTrain(DLRMTrain):
    """A retrieval model with its softmax loss, in the form that training pipelines call.

    Samples with label 0 have no loss. Items are drawn by torch's default generator, whose state
    checkpoints keep.

    Args:
        model: The model.
        num_sampled: How many items are drawn for a mini-batch; 0 for the full softmax.
        counts: How often each item is in a positive sample of the training part; only read if items
            are drawn.
        row_decay: Weight decay of the rows that samples look up. Half of it times the square of
            each such row, of histories too, is added to the loss, as a mean over samples. A row
            that is only compared has no decay.

    Shape:
        counts (E,). Result (loss, (loss, logits, labels)): loss () with gradient, the mean over the
        positive samples and the decay of rows; 0 in evaluation mode. Then detached tensors: loss
        (), logits (B,), which are u . v of each sample and its own item, and labels (B,).
    """

    def __init__(
        self,
        model: AbstractRetrievalModel,
        num_sampled: int = 0,
        counts: Tensor | None = None,
        row_decay: float = 0.0,
    ) -> None:
        super().__init__(model)
        self._num_sampled, self._row_decay = num_sampled, row_decay
        shares = None if counts is None else counts / counts.sum()
        self.register_buffer("_shares", shares, persistent=False)
        self._shares: Tensor

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Mean softmax loss of the positive samples, and the tensors that a pipeline reports."""
        model: Any = self.model
        rows = model.rows_of(batch.sparse_features)
        users, items = model.vectors_of(batch.dense_features, rows)
        logits = (users * items).sum(1)
        loss = logits.new_zeros(())
        if self.training:
            are_positive = batch.labels.nonzero()[:, 0]
            targets = batch.sparse_features[model.item_features[0]].values()[are_positive]
            with torch.autocast(users.device.type, enabled=False):
                losses = self._losses(users[are_positive], items[are_positive], targets)
            if batch.weights is not None:
                losses = losses * batch.weights[are_positive]
            loss = losses.sum() / max(1, len(losses))
            if self._row_decay:
                squares = [of_feature.values().square().sum() for of_feature in rows.values()]
                loss = loss + self._row_decay / 2 / len(users) * torch.stack(squares).sum()
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())

    def _losses(self, users: Tensor, items: Tensor, targets: Tensor) -> Tensor:
        """The loss of each positive sample, (P,)."""
        model: Any = self.model
        if not self._num_sampled:
            every = torch.arange(model.num_items, device=targets.device)
            return softmax_loss(users, model.items(every), targets)
        drawn = torch.randint(model.num_items, (self._num_sampled,), device=targets.device)
        rows = torch.cat([targets, drawn])
        expected = self._shares[rows] * len(targets) + self._num_sampled / model.num_items
        items = torch.cat([items, model.items(drawn)])
        own = torch.arange(len(targets), device=targets.device)
        is_again = rows == targets.unsqueeze(1)  # elsewhere than at the sample's own place
        is_again[own, own] = False
        logits = (users @ items.T - expected.log()).masked_fill_(is_again, -torch.inf)
        return functional.cross_entropy(logits, own, reduction="none")


def softmax_loss(users: Tensor, items: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of a softmax over all items; logits are held for a block of items at a time.

    Backward computes the logits of each block again.

    Args:
        users: The vectors of samples.
        items: The vectors of all items.
        targets: The item of each sample.

    Shape:
        users (P, D); items (E, D); targets (P,) int64; result (P,).
    """
    sums = partial(checkpoint, _log_sums, users, use_reentrant=False, preserve_rng_state=False)
    blocks = torch.split(items, max(1, _MOST_LOGITS // max(1, len(users))))
    of_blocks = torch.stack([sums(block) for block in blocks])
    return of_blocks.logsumexp(0) - (users * items[targets]).sum(1)


def _log_sums(users: Tensor, items: Tensor) -> Tensor:
    return (users @ items.T).logsumexp(1)


def drop_ids(features: Features, names: Collection[str], probability: float) -> JaggedIds:
    """The same samples; each id of some features is left out with a probability.

    Args:
        features: The features of B samples, without weights.
        names: The features of which ids are left out.
        probability: The probability.
    """
    values, keys = features.values(), features.keys()
    lengths = features.offsets().diff()
    bags = torch.repeat_interleave(lengths)
    may_go = torch.tensor([key in names for key in keys], device=values.device)
    is_kept = torch.rand(len(values), device=values.device) >= probability
    is_kept |= ~may_go[bags // features.stride()]
    lengths = torch.bincount(bags[is_kept], minlength=len(lengths))
    offsets = functional.pad(lengths.cumsum(0), (1, 0)).to(values.dtype)
    return JaggedIds(keys, values[is_kept], offsets)
