"""The exact area under the ROC curve.

Samples are counted by score, and pairs of samples in integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "are_positive",
    "area_under_curve",
    "auc",
    "count_by_score",
    "expected_auc",
    "require_same_length",
    "sum_of_products",
    "twice_below",
]


def auc(scores: NDArray[Any], labels: NDArray[Any]) -> float | None:
    """Exact area under the ROC curve; a tie counts half.

    Shape:
        scores (N,), higher for more likely; labels (N,) 0 or 1; result None if all labels are
        equal, or N is 0.

    Raises:
        ValueError: a score is NaN, a label is neither 0 nor 1, or the shapes differ.
    """
    require_same_length("auc", scores, labels)
    num_bad = int(np.count_nonzero(np.isnan(scores)))
    if num_bad:
        raise ValueError(f"auc: {num_bad} of {len(scores)} scores are NaN; leave them out")
    return area_under_curve(*count_by_score(scores, are_positive("auc", labels)))


def count_by_score(
    scores: NDArray[Any], is_positive: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of positive and negative samples at each distinct score, ascending."""
    order = np.argsort(scores)
    ascending = scores[order]
    is_last = np.ones(len(scores), np.bool_)
    is_last[:-1] = ascending[1:] != ascending[:-1]
    ends = np.flatnonzero(is_last)
    positives = np.diff(np.cumsum(is_positive[order], dtype=np.int64)[ends], prepend=0)
    return positives, np.diff(ends, prepend=-1) - positives


def area_under_curve(positives: NDArray[np.int64], negatives: NDArray[np.int64]) -> float | None:
    """AUC from the numbers of samples at each score, ascending.

    A positive sample counts the negative samples with lower scores, and half of those with equal
    scores.
    """
    num_pairs = int(positives.sum()) * int(negatives.sum())
    if not num_pairs:
        return None
    return sum_of_products(positives, twice_below(negatives)) / (2 * num_pairs)


def expected_auc(rising: NDArray[Any]) -> float:
    """The AUC to expect if each label is 1 with the probability that is predicted.

    Over pairs of samples: sum of p (1 - p') where p >= p', divided by the sum over all pairs.

    Args:
        rising: The predictions, (N,) ascending.
    """
    others = 1 - rising
    below = np.cumsum(others) - others
    num_pairs = rising.sum() * others.sum() - np.dot(rising, others)
    return float(np.dot(rising, below) / num_pairs) if num_pairs > 0 else 0.5


def twice_below(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each group, twice the samples of the groups below it plus its own samples."""
    return 2 * np.cumsum(counts) - counts


def sum_of_products(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Exact dot product of non-negative integers, also beyond 64 bits."""
    if int(first.sum()) * int(second.max(initial=0)) < 2**63:
        return int(np.dot(first, second))
    return int(np.dot(first.astype(object), second.astype(object)))


def are_positive(place: str, labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Which labels are 1; raises ValueError for a label that is neither 0 nor 1."""
    is_positive: NDArray[np.bool_] = labels == 1
    if np.count_nonzero(is_positive) != np.count_nonzero(labels):  # NaN is not zero either
        is_bad = ~(is_positive | (labels == 0))
        sample = int(is_bad.argmax())
        raise ValueError(
            f"{place}: labels must be 0 or 1, got {labels[sample]} at place {sample} "
            f"({int(is_bad.sum())} of {len(labels)} are invalid); leave out samples without a label"
        )
    return is_positive


def require_same_length(place: str, scores: NDArray[Any], labels: NDArray[Any]) -> None:
    """Raise ValueError unless both arrays have one dimension and the same length."""
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(
            f"{place}: scores and labels must both be (N,), got {scores.shape} and {labels.shape}"
        )
