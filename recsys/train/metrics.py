"""How good predictions are: AUC, logloss, calibration; GAUC inside groups; recall and NDCG at k.

    of samples
    auc                     probability that a positive sample has a higher score than a negative
                            one; a tie counts half; None if all labels are equal
    auc_standard_error      of `auc` as an estimate from a sample; None with fewer than two positive
                            or two negative samples; too large for the difference of two models on
                            the same samples
    logloss                 mean binary cross-entropy, in nats
    normalized_entropy      `logloss` divided by the logloss of always predicting the mean label;
                            None if all labels are equal
    calibration             mean prediction divided by mean label; None if all labels are equal
    accuracy                share of predictions on the right side of 0.5; None if all labels are
                            equal
    num_samples             number of samples
    num_positives           those with label 1

    of data with groups
    gauc                    mean of the groups' AUCs, weighted by their samples; None if no group
                            has both kinds of label
    num_groups              groups that `gauc` covers
    num_groups_left_out     groups with one kind of label

    of rankings of all items
    recall_at_k             the mean over the groups of the mean over the rankings of a group; None
                            without a ranking
    recall_standard_error   of `recall_at_k` as an estimate from a sample of groups; None with fewer
                            than two groups
    ndcg_at_k, ndcg_standard_error
                            the same of NDCG
    ranking_k               k
    num_rankings            number of rankings
    num_unknown_items       relevant items that no ranking holds, because training has no row for
                            them; they count as not found

Metrics are dictionaries of JSON types by these names, as in the run record.

Every metric counts each sample once: sample weights are not read. AUC is exact: every float32 score
is kept, and pairs are counted in integers. Sums run in float64, those of ranks for GAUC, too, which
are exact up to 90 million samples in a group.

    GAUC           sum over groups of (samples * AUC) / sum over these groups of samples.
                   A group with one kind of label has no AUC, and is left out of both sums
    recall at k    relevant items with rank <= k / relevant items
    NDCG at k      sum over relevant items with rank <= k of 1 / log2(1 + rank)
                   / sum for i = 1 to min(k, relevant items) of 1 / log2(1 + i)

A ranking orders candidates by score. The rank of a relevant item is the number of candidates with
at least its score, itself included. So a tie counts against the item, and a model that gives all
items the same score finds none of them. Relevant items that the ranking does not hold count as not
found.

References:
    DeLong, DeLong and Clarke-Pearson (1988), Comparing the areas under two or more correlated
    receiver operating characteristic curves, Biometrics 44, 837-845: the error of one AUC.
    Zhou et al. (2018), Deep Interest Network for Click-Through Rate Prediction: GAUC, with each
    user's AUC weighted by the user's impressions.
    Jarvelin and Kekalainen (2002), Cumulated gain-based evaluation of IR techniques: NDCG; gains
    are 0 or 1 here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from recsys._support.auc import (
    are_positive,
    area_under_curve,
    auc,
    sorted_by_label,
    twice_below,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "MetricsAccumulator",
    "Rankings",
    "auc",
    "evaluate_groups",
]


class MetricsAccumulator:
    """Collects logits and labels, and computes their metrics.

    It keeps 5 bytes a sample. `result` uses about 25 more for a while, and 80 with groups.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self._logits: list[NDArray[np.float32]] = []
        self._is_positive: list[NDArray[np.bool_]] = []
        self._loss = self._prediction = 0.0
        self._num_positive = self._num_right = 0

    def add(self, logits: NDArray[np.float32], labels: NDArray[Any]) -> None:
        """Add samples.

        Shape:
            logits (N,) float32, finite, before the sigmoid; labels (N,) 0 or 1.

        Raises:
            ValueError: a label is neither 0 nor 1.
        """
        is_positive = are_positive("metrics", labels)
        wide = logits.astype(np.float64)
        softplus = np.logaddexp(0, wide)
        self._loss += float(np.sum(softplus - is_positive * wide))
        # The sigmoid of `wide`. Its other forms round small predictions, or overflow.
        self._prediction += float(np.sum(np.exp(wide - softplus)))
        self._num_positive += int(np.count_nonzero(is_positive))
        self._num_right += int(np.count_nonzero((wide > 0) == is_positive))
        self.num_samples += len(logits)
        self._logits.append(logits.copy())  # the caller may reuse its array
        self._is_positive.append(is_positive)

    def result(self, groups: NDArray[Any] | None = None) -> dict[str, Any]:
        """The metrics of all samples so far, at least one.

        Args:
            groups: The group of each sample, integers (N,); None for data without groups.
        """
        logits, is_positive = np.concatenate(self._logits), np.concatenate(self._is_positive)
        positives, negatives = sorted_by_label(logits, is_positive)
        logloss = self._loss / self.num_samples
        rate = self._num_positive / self.num_samples
        entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate) if 0 < rate < 1 else None
        found = {
            "auc": area_under_curve(positives, negatives),
            "auc_standard_error": _standard_error(positives, negatives),
            "logloss": logloss,
            "normalized_entropy": None if entropy is None else float(logloss / entropy),
            "calibration": None if entropy is None else self._prediction / self._num_positive,
            "accuracy": None if entropy is None else self._num_right / self.num_samples,
            "num_samples": self.num_samples,
            "num_positives": self._num_positive,
        }
        return found if groups is None else found | evaluate_groups(logits, is_positive, groups)


def _standard_error(positives: NDArray[np.float32], negatives: NDArray[np.float32]) -> float | None:
    """Standard error of the AUC from the scores of both kinds of samples, ascending.

    Each of the m positive samples beats a share of the negative samples; S10 is the variance of
    these shares. Each of the n negative samples is beaten by a share of the positive samples; S01
    is the variance of those. The variance of the AUC is S10 / m + S01 / n.
    """
    if min(len(positives), len(negatives)) < 2:
        return None
    beaten = twice_below(positives, negatives) / (2 * len(negatives))
    beating = twice_below(negatives, positives) / (2 * len(positives))
    variance = np.var(beaten, ddof=1) / len(positives) + np.var(beating, ddof=1) / len(negatives)
    return float(np.sqrt(variance))


def evaluate_groups(
    scores: NDArray[Any], labels: NDArray[Any], groups: NDArray[Any]
) -> dict[str, Any]:
    """GAUC of some samples, at least one.

    Shape:
        scores (N,), no NaN, higher for more likely; labels (N,) 0 or 1; groups (N,) integers.
    """
    frame = pd.DataFrame({"group": groups, "score": scores, "positives": labels.astype(np.int64)})
    # Equal scores share the mean of their ranks, so a tie counts half. Ranks are exact: halves.
    by_group = frame.groupby("group")
    frame["ranks"] = by_group["score"].rank() * frame["positives"]
    found = by_group.agg(
        ranks=("ranks", "sum"), positives=("positives", "sum"), samples=("score", "size")
    )
    found["pairs"] = found["positives"] * (found["samples"] - found["positives"])
    judged, gauc = found[found["pairs"] > 0], None
    if len(judged):
        # The ranks that positives have, without those that they have among themselves.
        wins = judged["ranks"] - judged["positives"] * (judged["positives"] + 1) / 2
        gauc = float(np.average(wins / judged["pairs"], weights=judged["samples"]))
    num_left_out = len(found) - len(judged)
    return {"gauc": gauc, "num_groups": len(judged), "num_groups_left_out": num_left_out}


class Rankings:
    """Collects rankings.

    Args:
        k: Number of items that recall and NDCG count.
    """

    def __init__(self, k: int) -> None:
        self._k, self._num_unknown = k, 0
        self._found: list[tuple[int, float, float]] = []  # group, recall and NDCG

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
        num_relevant = len(relevant) + num_unknown
        ordered = np.sort(scores[is_candidate])
        ranks = len(ordered) - np.searchsorted(ordered, scores[relevant], "left")
        shown = ranks[ranks <= self._k]
        best = np.arange(1, min(self._k, num_relevant) + 1)
        ndcg = float(np.sum(1 / np.log2(1 + shown)) / np.sum(1 / np.log2(1 + best)))
        self._found.append((group, len(shown) / num_relevant, ndcg))
        self._num_unknown += num_unknown

    def result(self) -> dict[str, Any]:
        """The metrics of all rankings so far."""
        found = pd.DataFrame(self._found, columns=["group", "recall", "ndcg"], dtype=float)
        means = found.groupby("group").mean()
        metrics = {
            f"{name}_{what}": None if np.isnan(value) else float(value)
            for name in means
            for what, value in (("at_k", means[name].mean()), ("standard_error", means[name].sem()))
        }
        return metrics | {
            "ranking_k": self._k,
            "num_rankings": len(self._found),
            "num_unknown_items": self._num_unknown,
        }
