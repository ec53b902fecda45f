"""The parameters of synthetic samples: popularity curves, planted effects, gain and bias.

`samples` describes the model; this module computes its numbers for the kernel.

Shape letters: B samples, F categorical features, P column pairs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from recsys._support.auc import expected_auc
from recsys.datasets.criteo.shape import KAGGLE_COLUMNS, KAGGLE_DENSE, popularity_curve
from recsys.datasets.synthetic.kernel import GUIDE_SIZE, GeneratorParameters, bijection_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BEST_AUC", "CLICK_RATE", "build_parameters", "calibrate"]

CLICK_RATE: Final = 0.256
BEST_AUC: Final = 0.80
_MAX_PAIRS: Final = 4
_PAIR_EFFECT: Final = 1.2
# Effects of a row with this many lookups in this many samples have half the full strength.
_HALF_STRENGTH_LOOKUPS: Final = 300
_STRENGTH_SAMPLES: Final = 1_000_000


def build_parameters(seed: int, sizes: list[int], drift: float) -> GeneratorParameters:
    """All parameters except gain and bias, for tables of the given sizes."""
    num_columns = len(sizes)
    shapes = [KAGGLE_COLUMNS[column % len(KAGGLE_COLUMNS)] for column in range(num_columns)]
    curves = [popularity_curve(shape, size) for shape, size in zip(shapes, sizes, strict=True)]
    starts = np.cumsum([0, *(len(edges) for edges, _ in curves)])
    bucket_begins = np.arange(GUIDE_SIZE) / GUIDE_SIZE
    guide = [
        start + np.searchsorted(shares, bucket_begins, side="right") - 1
        for start, (_, shares) in zip(starts[:-1], curves, strict=True)
    ]
    strengths = [_strengths(edges, shares) for edges, shares in curves]
    low_seed = np.uint64(seed & (2**64 - 1))
    keys = [bijection_key(low_seed, column) for column in range(num_columns)]
    return GeneratorParameters(
        seed=low_seed,
        edges=np.concatenate([edges for edges, _ in curves]),
        shares=np.concatenate([shares for _, shares in curves]),
        strengths=np.concatenate(strengths),
        guide=np.array(guide, np.int32),
        sizes=np.array(sizes, np.int64),
        multipliers=np.array(
            [_multiplier(key, size) for key, size in zip(keys, sizes, strict=True)]
        ),
        shifts=np.array([key // size % size for key, size in zip(keys, sizes, strict=True)]),
        groups=np.array([shape.group for shape in shapes]),
        couplings=np.array([shape.coupling for shape in shapes]),
        pairs=_choose_pairs(curves, strengths),
        pair_effect=_PAIR_EFFECT,
        dense=np.array(KAGGLE_DENSE, np.float64),
        drift=drift,
    )


def _strengths(edges: NDArray[np.int64], shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """The scale, 0 to 1, of the effects of rows in each segment of a popularity curve."""
    lookups = _STRENGTH_SAMPLES * np.diff(shares) / np.diff(edges)
    return np.append(lookups / (lookups + _HALF_STRENGTH_LOOKUPS), 0.0)


def _choose_pairs(
    curves: list[tuple[NDArray[np.int64], NDArray[np.float64]]],
    strengths: list[NDArray[np.float64]],
) -> NDArray[np.int64]:
    """Pairs of the columns whose row effects differ most from sample to sample.

    This excludes columns whose samples nearly all have one row, which would hardly interact, and
    columns of rare rows, whose effects cannot be learnt. A column is in one pair at most.

    Shape:
        result: (P, 2), at most half as many pairs as columns.
    """
    variances = []
    for (edges, shares), strength in zip(curves, strengths, strict=True):
        lookups, effects = np.diff(shares), strength[:-1]
        variances.append(np.sum(lookups * effects**2 * (1 - lookups / np.diff(edges))))
    num_pairs = min(_MAX_PAIRS, len(curves) // 2)
    chosen = np.argsort(variances, kind="stable")[::-1][: 2 * num_pairs]
    by_size = sorted(chosen.tolist(), key=lambda column: (curves[column][0][-1], column))
    pairs = list(zip(by_size[:num_pairs], by_size[num_pairs:], strict=True))
    return np.array(pairs, np.int64).reshape(-1, 2)


def _multiplier(key: int, size: int) -> int:
    """A number coprime to size, from the middle third of [0, size) if there is one."""
    multiplier = size // 3 + key % (size // 3 + 1)
    while math.gcd(multiplier, size) != 1:
        multiplier += 1
    return multiplier


def calibrate(scores_B: NDArray[np.float64]) -> tuple[float, float]:
    """The gain and bias for a click rate of `CLICK_RATE` and a best AUC of `BEST_AUC`."""
    scores_B = np.sort(scores_B)
    low, high = 0.0, 8.0 / float(scores_B.std())
    while high - low > 1e-3 * high:
        gain = (low + high) / 2
        bias = _bias(gain * scores_B)
        too_high = expected_auc(_sigmoid(gain * scores_B + bias)) > BEST_AUC
        low, high = (low, gain) if too_high else (gain, high)
    return gain, bias


def _bias(logits_B: NDArray[np.float64]) -> float:
    """The bias of the logits for a click rate of `CLICK_RATE`."""
    low, high = -40.0 - logits_B.max(), 40.0 - logits_B.min()
    while high - low > 1e-4:
        bias = (low + high) / 2
        too_high = _sigmoid(logits_B + bias).mean() > CLICK_RATE
        low, high = (low, bias) if too_high else (bias, high)
    return float(bias)


def _sigmoid(logits_B: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-logits_B))
