"""The exact area under the ROC curve.

The scores of positive and negative samples are sorted apart, and pairs are counted in integers.
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
    "expected_auc",
    "require_same_length",
    "sorted_by_label",
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
    return area_under_curve(*sorted_by_label(scores, are_positive("auc", labels)))


def sorted_by_label(
    scores: NDArray[Any], is_positive: NDArray[np.bool_]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The scores of positive samples and those of negative samples, both ascending."""
    return np.sort(scores[is_positive]), np.sort(scores[~is_positive])


def area_under_curve(positives: NDArray[Any], negatives: NDArray[Any]) -> float | None:
    """AUC from the scores of positive and of negative samples, both ascending.

    A positive sample counts the negative samples with lower scores, and half of those with equal
    scores. Exact up to 2^32 samples.
    """
    num_pairs = len(positives) * len(negatives)
    if not num_pairs:
        return None
    return int(twice_below(positives, negatives).sum()) / (2 * num_pairs)


def twice_below(scores: NDArray[Any], others: NDArray[Any]) -> NDArray[np.int64]:
    """For each score, twice the number of lower scores among the others and once the equal ones."""
    return np.searchsorted(others, scores, "left") + np.searchsorted(others, scores, "right")


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


def are_positive(location: str, labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Which labels are 1; raises ValueError for a label that is neither 0 nor 1."""
    is_positive: NDArray[np.bool_] = labels == 1
    if np.count_nonzero(is_positive) != np.count_nonzero(labels):  # NaN is not zero either
        is_bad = ~(is_positive | (labels == 0))
        sample = int(is_bad.argmax())
        raise ValueError(
            f"{location}: labels must be 0 or 1, got {labels[sample]} at place {sample} "
            f"({int(is_bad.sum())} of {len(labels)} are invalid); leave out samples without a label"
        )
    return is_positive


def require_same_length(location: str, scores: NDArray[Any], labels: NDArray[Any]) -> None:
    """Raise ValueError unless both arrays have one dimension and the same length."""
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(
            f"{location}: scores and labels must both be (N,), got {scores.shape} and "
            f"{labels.shape}"
        )
