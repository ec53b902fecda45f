"""Recall and NDCG at k: where the items that were chosen stand in a ranking of all items.

A ranking orders candidates by score. The rank of a relevant item is the number of candidates with
at least its score, itself included. So a tie counts against the item, and a model that gives all
items the same score finds none of them.

    recall at k    relevant items with rank <= k / relevant items
    NDCG at k      sum over relevant items with rank <= k of 1 / log2(1 + rank)
                   / sum for i = 1 to min(k, relevant items) of 1 / log2(1 + i)

Relevant items that the ranking does not hold count as not found.

References:
    Jarvelin and Kekalainen (2002), Cumulated gain-based evaluation of IR techniques; gains are 0 or
    1 here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["RankingMetrics", "Rankings", "ndcg_at", "ranks_of", "recall_at"]


@dataclass(frozen=True, kw_only=True)
class RankingMetrics:
    """Quality of rankings of all items.

    Attributes:
        recall_at_k: Recall at `ranking_k`: the mean over the groups of the mean over the rankings
            of a group; None without a ranking.
        recall_standard_error: Standard error of `recall_at_k` as an estimate from a sample of
            groups; None with fewer than two groups.
        ndcg_at_k, ndcg_standard_error: The same of NDCG.
        ranking_k: k.
        num_rankings: Number of rankings.
        num_unknown_items: Relevant items that no ranking holds, because training has no row for
            them. They count as not found.
    """

    recall_at_k: float | None
    recall_standard_error: float | None
    ndcg_at_k: float | None
    ndcg_standard_error: float | None
    ranking_k: int
    num_rankings: int
    num_unknown_items: int


def ranks_of(
    scores: NDArray[Any], items: NDArray[np.integer], is_candidate: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """The ranks of some items among the candidates, from 1.

    Shape:
        scores (E,), higher for better; items (T,) in [0, E), each a candidate; is_candidate (E,);
        result (T,).
    """
    ordered = np.sort(scores[is_candidate])
    found: NDArray[np.int64] = len(ordered) - np.searchsorted(ordered, scores[items], "left")
    return found


def recall_at(k: int, ranks: NDArray[np.int64], num_relevant: int) -> float:
    """Share of the relevant items whose rank is at most k.

    Args:
        k: Number of items that are shown.
        ranks: Ranks of relevant items in the ranking, (T,).
        num_relevant: All relevant items, at least T and at least 1; the others are not found.
    """
    return int(np.count_nonzero(ranks <= k)) / num_relevant


def ndcg_at(k: int, ranks: NDArray[np.int64], num_relevant: int) -> float:
    """Discounted gain of the relevant items among the first k, divided by the largest possible one.

    Args:
        k: Number of items that are shown.
        ranks: Ranks of relevant items in the ranking, (T,).
        num_relevant: All relevant items, at least T and at least 1; the others are not found.
    """
    best = np.arange(1, min(k, num_relevant) + 1)
    return float(np.sum(1 / np.log2(1 + ranks[ranks <= k])) / np.sum(1 / np.log2(1 + best)))


class Rankings:
    """Collects rankings.

    Args:
        k: Number of items that recall and NDCG count.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._groups: list[int] = []
        self._recalls: list[float] = []
        self._ndcgs: list[float] = []
        self._num_unknown = 0

    def add(
        self,
        group: int,
        scores: NDArray[Any],
        relevant: NDArray[np.integer],
        is_candidate: NDArray[np.bool_],
        num_unknown: int = 0,
    ) -> None:
        """Add a ranking.

        Args:
            group: The group that the ranking is for.
            scores: Score of each item, higher for better.
            relevant: The relevant items; each a candidate, each once.
            is_candidate: Whether each item is ranked.
            num_unknown: Further relevant items, which have no number.

        Shape:
            scores (E,); relevant (T,) in [0, E); is_candidate (E,); T + num_unknown >= 1.
        """
        ranks, num_relevant = ranks_of(scores, relevant, is_candidate), len(relevant) + num_unknown
        self._groups.append(group)
        self._recalls.append(recall_at(self._k, ranks, num_relevant))
        self._ndcgs.append(ndcg_at(self._k, ranks, num_relevant))
        self._num_unknown += num_unknown

    def result(self) -> RankingMetrics:
        """The metrics of all rankings so far."""
        recall, recall_error = self._mean(self._recalls)
        ndcg, ndcg_error = self._mean(self._ndcgs)
        return RankingMetrics(
            recall_at_k=recall,
            recall_standard_error=recall_error,
            ndcg_at_k=ndcg,
            ndcg_standard_error=ndcg_error,
            ranking_k=self._k,
            num_rankings=len(self._recalls),
            num_unknown_items=self._num_unknown,
        )

    def _mean(self, values: Sequence[float]) -> tuple[float | None, float | None]:
        """The mean over the groups of their means, and its standard error."""
        if not values:
            return None, None
        _, numbers = np.unique(self._groups, return_inverse=True)
        means = np.bincount(numbers, values) / np.bincount(numbers)
        num_groups = len(means)
        error = None if num_groups < 2 else float(np.std(means, ddof=1) / np.sqrt(num_groups))
        return float(np.mean(means)), error
