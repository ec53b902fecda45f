"""AUC inside each part of some samples: GAUC of groups such as users, and AUC by day.

The AUC of a part is the share of its pairs of a positive and a negative sample in which the
positive one has the higher score; a tie counts half. A part with one kind of label has no pair and
so no AUC. Pairs are counted in integers.

    GAUC = sum over groups of (samples * AUC) / sum over these groups of samples

Groups without an AUC are left out of both sums.

References:
    Zhou et al. (2018), Deep Interest Network for Click-Through Rate Prediction, which weights the
    AUC of each user by the user's impressions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys._support.auc import are_positive, require_same_length

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GroupMetrics", "PartAucs", "auc_by_day", "auc_by_part", "evaluate_groups"]

_SECONDS_OF_DAY = 86_400


class PartAucs(NamedTuple):
    """AUC of each of P parts, in ascending order of their keys.

    Shape:
        keys (P,); aucs (P,) float64, NaN for a part with one kind of label; num_samples (P,) int64.
    """

    keys: NDArray[Any]
    aucs: NDArray[np.float64]
    num_samples: NDArray[np.int64]


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


def auc_by_part(scores: NDArray[Any], labels: NDArray[Any], keys: NDArray[Any]) -> PartAucs:
    """Exact AUC of the samples of each key.

    Shape:
        scores (N,), higher for more likely; labels (N,) 0 or 1; keys (N,) integers.

    Raises:
        ValueError: a score is NaN, a label is neither 0 nor 1, or the shapes differ.
    """
    require_same_length("auc by part", scores, labels)
    if keys.shape != scores.shape:
        raise ValueError(
            f"auc by part: keys must be one for each score, {scores.shape}, got {keys.shape}"
        )
    num_bad = int(np.count_nonzero(np.isnan(scores)))
    if num_bad:
        raise ValueError(f"auc by part: {num_bad} of {len(scores)} scores are NaN; leave them out")
    is_positive = are_positive("auc by part", labels)
    if not len(scores):
        return PartAucs(keys, np.empty(0), np.empty(0, np.int64))
    order = np.lexsort((scores, keys))
    scores, keys, is_positive = scores[order], keys[order], is_positive[order]
    # A tie is a run of samples with equal key and equal score; ties of one key are a part.
    starts_part = _differ(keys)
    starts_tie = starts_part | _differ(scores)
    tie_starts, part_starts = np.flatnonzero(starts_tie), np.flatnonzero(starts_part)
    positives = np.add.reduceat(is_positive.astype(np.int64), tie_starts)
    negatives = np.diff(tie_starts, append=len(scores)) - positives
    first_ties = np.flatnonzero(starts_part[tie_starts])
    below = np.cumsum(negatives) - negatives
    num_ties = np.diff(first_ties, append=len(tie_starts))
    below -= np.repeat(below[first_ties], num_ties)
    doubled_wins = np.add.reduceat(positives * (2 * below + negatives), first_ties)
    num_positive = np.add.reduceat(positives, first_ties)
    num_negative = np.add.reduceat(negatives, first_ties)
    num_pairs = num_positive * num_negative
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: no pair, no AUC
        aucs = doubled_wins / (2 * num_pairs)
    return PartAucs(keys[part_starts], aucs, num_positive + num_negative)


def evaluate_groups(
    scores: NDArray[Any], labels: NDArray[Any], groups: NDArray[Any]
) -> GroupMetrics:
    """GAUC of some samples.

    Shape:
        scores (N,), higher for more likely; labels (N,) 0 or 1; groups (N,) integers.

    Raises:
        ValueError: as `auc_by_part`.
    """
    found = auc_by_part(scores, labels, groups)
    has_auc = ~np.isnan(found.aucs)
    num_groups = int(np.count_nonzero(has_auc))
    gauc = None
    if num_groups:
        gauc = float(np.average(found.aucs[has_auc], weights=found.num_samples[has_auc]))
    return GroupMetrics(
        gauc=gauc, num_groups=num_groups, num_groups_left_out=len(has_auc) - num_groups
    )


def auc_by_day(
    scores: NDArray[Any], labels: NDArray[Any], times: NDArray[np.int64]
) -> dict[str, float | None]:
    """AUC of the samples of each day in UTC, by date such as "2014-10-21", in order.

    Shape:
        scores (N,), higher for more likely; labels (N,) 0 or 1; times (N,) seconds since 1970.

    Returns:
        None for a day with one kind of label. Days without samples are absent.

    Raises:
        ValueError: as `auc_by_part`.
    """
    days, aucs, _ = auc_by_part(scores, labels, times // _SECONDS_OF_DAY)
    dates = days.astype("datetime64[D]").astype(str).tolist()
    return {
        date: None if np.isnan(auc) else auc for date, auc in zip(dates, aucs.tolist(), strict=True)
    }


def _differ(ordered: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each value differs from the one before it; True for the first."""
    differ = np.ones(len(ordered), np.bool_)
    differ[1:] = ordered[1:] != ordered[:-1]
    return differ
