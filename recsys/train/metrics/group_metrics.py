"""GAUC: AUC inside groups of samples, such as users.

The AUC of a group is the share of its pairs of a positive and a negative sample in which the
positive one has the higher score; a tie counts half. A group with one kind of label has no pair and
so no AUC. Pairs are counted in integers.

    GAUC = sum over groups of (samples * AUC) / sum over these groups of samples

Groups without an AUC are left out of both sums.

References:
    Zhou et al. (2018), Deep Interest Network for Click-Through Rate Prediction, which weights the
    AUC of each user by the user's impressions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GroupMetrics", "evaluate_groups"]


@dataclass(frozen=True, kw_only=True)
class GroupMetrics:
    """Quality inside groups of samples.

    Attributes:
        gauc: Mean of the groups' AUCs, weighted by their samples; None if no group has both kinds
            of label.
        num_groups: Groups that `gauc` covers.
        num_groups_left_out: Groups with one kind of label.
    """

    gauc: float | None
    num_groups: int
    num_groups_left_out: int


def evaluate_groups(
    scores: NDArray[Any], labels: NDArray[Any], groups: NDArray[Any]
) -> GroupMetrics:
    """GAUC of some samples.

    Shape:
        scores (N,), no NaN, higher for more likely; labels (N,) 0 or 1; groups (N,) integers.

    Raises:
        ValueError: the shapes differ.
    """
    if not scores.shape == labels.shape == groups.shape:
        raise ValueError(
            "gauc: scores, labels and groups must all be (N,), got "
            f"{scores.shape}, {labels.shape} and {groups.shape}"
        )
    if not len(scores):
        return GroupMetrics(gauc=None, num_groups=0, num_groups_left_out=0)
    order = np.lexsort((scores, groups))
    scores, labels, groups = scores[order], labels[order], groups[order]
    # A tie is a run of samples with equal group and equal score.
    starts_group = _differ(groups)
    starts_tie = starts_group | _differ(scores)
    tie_starts = np.flatnonzero(starts_tie)
    positives = np.add.reduceat(labels.astype(np.int64), tie_starts)
    negatives = np.diff(tie_starts, append=len(scores)) - positives
    first_ties = np.flatnonzero(starts_group[tie_starts])
    below = np.cumsum(negatives) - negatives
    num_ties = np.diff(first_ties, append=len(tie_starts))
    below -= np.repeat(below[first_ties], num_ties)
    doubled_wins = np.add.reduceat(positives * (2 * below + negatives), first_ties)
    num_positive = np.add.reduceat(positives, first_ties)
    num_negative = np.add.reduceat(negatives, first_ties)
    num_pairs = num_positive * num_negative
    has_auc = num_pairs > 0
    num_groups = int(np.count_nonzero(has_auc))
    gauc = None
    if num_groups:
        aucs = doubled_wins[has_auc] / (2 * num_pairs[has_auc])
        gauc = float(np.average(aucs, weights=(num_positive + num_negative)[has_auc]))
    return GroupMetrics(
        gauc=gauc, num_groups=num_groups, num_groups_left_out=len(has_auc) - num_groups
    )


def _differ(ordered: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each value differs from the one before it; True for the first."""
    differ = np.ones(len(ordered), np.bool_)
    differ[1:] = ordered[1:] != ordered[:-1]
    return differ
