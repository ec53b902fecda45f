"""Baselines of a ranking: what twenty lines reach on the same questions, without a model.

popularity    an item's score is the number of its training positives
item_knn      an item's score is the sum, over the items that the question knows, of the cosine
              of both: the number of groups whose training positives have both, divided by the
              root of the product of the numbers of groups that have one. A question knows the
              items of its history, or, in a store without one, those of its group's training
              positives. Of each known item the nearest 200 count, and of a large training part the
              last 16 million samples
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.jit import kernel
from recsys.train.ranking import Items, rank_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from recsys.datasets.store import Store
    from recsys.train.ranking import Question

__all__ = ["rank_baselines"]

_METRICS = ("recall_at_k", "recall_standard_error", "ndcg_at_k", "ndcg_standard_error")
_NEIGHBORS = 200
_MOST_SAMPLES = 1 << 24  # of the training part that item_knn reads: the last ones
_MOST_KEPT = 1 << 15  # items whose neighbors are kept


@lru_cache(maxsize=4)  # a store does not change, and a run evaluates several times
def rank_baselines(
    store: Store, split: str, k: int, most_questions: int
) -> dict[str, float | None]:
    """Recall and NDCG of each baseline and their errors, by names such as `item_knn_recall_at_k`.

    Args:
        store: As for `rank_items`, as are the others.
        split: "test" or "validation".
        k: Number of items that recall and NDCG count.
        most_questions: Bound of the number of questions.
    """
    counts = store.item_counts()
    neighbors = _Neighbors(store, len(counts))
    scorers: dict[str, Callable[[Sequence[Question]], NDArray[Any]]] = {
        "popularity": lambda questions: np.tile(counts, (len(questions), 1)),
        "item_knn": neighbors.score,
    }
    found: dict[str, float | None] = {}
    for name, score in scorers.items():
        ranking = rank_by(score, store, split, k=k, most_questions=most_questions)
        found |= {f"{name}_{metric}": ranking[metric] for metric in _METRICS}
    return found


class _Neighbors:
    """Items near each item, by the groups of the training part.

    Args:
        store: The store.
        num_items: E.
    """

    def __init__(self, store: Store, num_items: int) -> None:
        assert store.groups is not None
        samples, items = store.splits["train"][-_MOST_SAMPLES:], Items(store)
        positives = np.flatnonzero(store.labels[samples.start : samples.stop]) + samples.start
        rows = items.of_samples(positives)
        pairs = (store.groups[positives].astype(np.int64) << 32) | rows
        pairs = np.unique(pairs[rows >= items.first_row])  # group by group
        groups, self._items = pairs >> 32, pairs & 0xFFFFFFFF
        self._store, self._num_items = store, num_items
        names = [name for name, of in store.histories.items() if of == items.names[0]]
        self._history = next(iter(names), None)
        self._ends = np.cumsum(np.bincount(groups))
        self._groups = groups[np.argsort(self._items, kind="stable")]  # item by item
        self._sizes = np.bincount(self._items, minlength=num_items)
        self._item_ends = np.cumsum(self._sizes)
        self._of_item = lru_cache(_MOST_KEPT)(self._find)

    def score(self, questions: Sequence[Question]) -> NDArray[np.float32]:
        """The scores of all items for questions, (Q, E)."""
        scores = np.zeros((len(questions), self._num_items), np.float32)
        for of_question, question in zip(scores, questions, strict=True):
            known = question.known
            if self._history is not None:
                batch = self._store.read(np.array([question.sample]))
                known = batch.sparse_features[self._history].values().numpy()
            for item in known.tolist():
                near, cosines = self._of_item(item)
                of_question[near] += cosines
        return scores

    def _find(self, item: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The nearest items of one, and their cosines."""
        end = self._item_ends[item]
        groups = self._groups[end - self._sizes[item] : end]
        counts = np.zeros(self._num_items, np.int64)
        _count_kernel(groups, self._items, self._ends, counts)
        counts[item] = 0
        near = np.flatnonzero(counts)
        cosines = counts[near] / np.sqrt(self._sizes[near] * max(1, self._sizes[item]))
        nearest = np.argsort(-cosines, kind="stable")[:_NEIGHBORS]
        return near[nearest], cosines[nearest].astype(np.float32)


@kernel
def _count_kernel(
    groups: NDArray[np.int64],
    items: NDArray[np.int64],
    ends: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> None:
    """Count the groups that have each item, among these groups."""
    for group in groups:
        for position in range(ends[group - 1] if group else 0, ends[group]):
            counts[items[position]] += 1
