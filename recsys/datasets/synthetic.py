"""`synthetic:criteo-kaggle`: samples shaped like Criteo Kaggle's, any number of them, no files.

Sample i is a pure function of the seed, the table sizes and i: every random number in it is a hash
of (seed, i, what the number is for). So samples come out the same in any order, any batch and any
thread, and nothing is kept.

- Lookups follow `recsys.datasets.criteo_shape`, which also says how the curves' tails were
  found. The column's rank r is row (r * multiplier + shift) mod num_embeddings, a seeded bijection:
  nothing can be read off a row number, and popular rows lie scattered all over the table, the worst
  case for locality. (Rows numbered by first appearance put popular rows first.)
- Labels are planted: 1 with probability sigmoid(gain * score + bias). The score adds up an effect
  of every row, the dot products of hidden vectors of the rows of a few column pairs, and effects of
  the dense features. Effects are smaller in columns whose lookups go to rows too rare to learn
  from. Gain and bias are solved on the first samples, so that, whatever the seed and the table
  sizes, the click rate is Kaggle's 0.256 and no model can expect an AUC above about 0.80.

Shape letters: B samples, F categorical features, I dense features, P column pairs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from recsys.batch import Batch, JaggedIds
from recsys.datasets.criteo_shape import (
    KAGGLE_COLUMNS,
    KAGGLE_DENSE,
    KAGGLE_TABLE_SIZES,
    popularity_curve,
)
from recsys.datasets.source import classic_splits
from recsys.datasets.synthetic_kernel import GUIDE_SIZE, Made, Recipe, bijection_key, make_samples
from recsys.errors import ConfigError
from recsys.metrics import auc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["SyntheticCriteo"]

_CLICK_RATE: Final = 0.256
_BEST_AUC: Final = 0.80
_NUM_CALIBRATION_SAMPLES: Final = 1 << 15
_BLOCK_SAMPLES: Final = 1 << 16
# A rank times a multiplier below the table's size must fit in 63 bits.
_MAX_TABLE_SIZE: Final = 1 << 31
_MAX_PAIRS: Final = 8
_PAIR_EFFECT: Final = 1.25
# A row effect is scaled by the share of the lookups that this many most popular rows get.
_LEARNABLE_ROWS: Final = 1000


@final
class SyntheticCriteo:
    """Criteo-Kaggle-shaped samples with planted labels; a `recsys.datasets.source.SampleSource`.

    Args:
        num_samples: Samples in all splits together. Sample i does not depend on it.
        seed: Any integer; its low 64 bits count.
        table_sizes: `num_embeddings` of each column, at least one. The columns take Kaggle's 26
            shapes in turn; a smaller table truncates the popularity curve, a larger one
            continues it.

    Raises:
        ConfigError: fewer than 7 samples, no table, or a table size not in [1, 2**31].
    """

    def __init__(
        self,
        *,
        num_samples: int,
        seed: int = 0,
        table_sizes: Sequence[int] = KAGGLE_TABLE_SIZES,
    ) -> None:
        _check(num_samples, table_sizes)
        self._num_samples = int(num_samples)
        self._seed = int(seed)
        self._table_sizes = {f"cat_{column}": int(size) for column, size in enumerate(table_sizes)}
        self._recipe = _build_recipe(self._seed, list(self._table_sizes.values()))
        self._gain, self._bias = 1.0, 0.0
        first_samples = np.arange(_NUM_CALIBRATION_SAMPLES, dtype=np.int64)
        self._gain, self._bias = _calibrate(self._make(first_samples).logits)

    @property
    def num_samples(self) -> int:
        """Samples in all splits together."""
        return self._num_samples

    @property
    def num_dense(self) -> int:
        """I, the number of dense features: 13."""
        return len(KAGGLE_DENSE)

    @property
    def table_sizes(self) -> dict[str, int]:
        """`num_embeddings` by feature: cat_0, cat_1, ..."""
        return dict(self._table_sizes)

    @property
    def splits(self) -> dict[str, range]:
        """The sample numbers of "train", "test" and "validation", as `classic_splits` has them."""
        return classic_splits(self._num_samples)

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """The given samples, in the given order. Safe to call from several threads at once.

        Shape:
            samples (B,); result: dense_features (B, 13) float32, log(x + 1) already taken;
            sparse_features with one int64 lookup per feature and sample; labels (B,) float32.

        Raises:
            IndexError: a sample number is not in [0, num_samples).
        """
        samples = np.ascontiguousarray(samples, np.int64)
        outside = (samples < 0) | (samples >= self._num_samples)
        if outside.any():
            raise IndexError(
                f"synthetic:criteo-kaggle: sample {samples[outside.argmax()]} is not in "
                f"[0, {self._num_samples}); raise num_samples"
            )
        made = self._make(samples)
        return Batch(
            torch.from_numpy(made.dense),
            JaggedIds.from_one_hot(list(self._table_sizes), torch.from_numpy(made.rows)),
            torch.from_numpy(made.labels),
        )

    def best_auc(self, samples: int = 1_000_000) -> float:
        """AUC of the true click probabilities on the test part: what the best model would reach.

        Args:
            samples: How many samples of the test part to take at most, from its start.

        Raises:
            ValueError: the labels of these samples all agree.
        """
        part = self.splits["test"][: max(samples, 0)]
        logits, labels = np.empty(len(part), np.float32), np.empty(len(part), np.float32)
        for begin in range(0, len(part), _BLOCK_SAMPLES):
            block = slice(begin, begin + _BLOCK_SAMPLES)
            made = self._make(np.array(part[block], np.int64))
            logits[block], labels[block] = made.logits, made.labels
        area = auc(logits, labels)
        if area is None:
            raise ValueError(
                f"best_auc: needs clicked and unclicked samples, got {len(part)} samples with "
                "labels that all agree; raise samples or num_samples"
            )
        return area

    @property
    def fingerprint(self) -> str:
        """Equal for equal seeds, table sizes and numbers of samples."""
        sizes = ",".join(map(str, self._table_sizes.values()))
        return f"synthetic:criteo-kaggle {self._num_samples} {self._seed} {sizes}"

    def describe(self) -> dict[str, Any]:
        """What a run record should say of this data; JSON types only."""
        return {
            "name": "synthetic:criteo-kaggle",
            "num_samples": self._num_samples,
            "seed": self._seed,
            "num_dense": self.num_dense,
            "table_sizes": self.table_sizes,
            "planted_click_rate": _CLICK_RATE,
            "planted_auc": _BEST_AUC,
        }

    def _make(self, samples: NDArray[np.int64]) -> Made:
        num_samples = len(samples)
        made = Made(
            dense=np.empty((num_samples, len(KAGGLE_DENSE)), np.float32),
            rows=np.empty((len(self._table_sizes), num_samples), np.int64),
            logits=np.empty(num_samples, np.float64),
            labels=np.empty(num_samples, np.float32),
        )
        make_samples(samples, self._recipe, self._gain, self._bias, made)
        return made


def _check(num_samples: int, table_sizes: Sequence[int]) -> None:
    if num_samples < 7:
        raise ConfigError(
            "synthetic.num_samples must be at least 7, one sample for each part that is split off, "
            f"got {num_samples}; raise it"
        )
    if not len(table_sizes):
        raise ConfigError(
            "synthetic:criteo-kaggle: table_sizes must name at least one size, got none; "
            "leave it out for Kaggle's 26"
        )
    for column, size in enumerate(table_sizes):
        if not 1 <= size <= _MAX_TABLE_SIZE:
            raise ConfigError(
                f"synthetic:criteo-kaggle: the table size of 'cat_{column}' must be in "
                f"[1, {_MAX_TABLE_SIZE}], got {size}; change table_sizes[{column}]"
            )


def _build_recipe(seed: int, sizes: list[int]) -> Recipe:
    num_columns = len(sizes)
    shapes = [KAGGLE_COLUMNS[column % len(KAGGLE_COLUMNS)] for column in range(num_columns)]
    curves = [popularity_curve(shape, size) for shape, size in zip(shapes, sizes, strict=True)]
    starts = np.cumsum([0, *(len(edges) for edges, _ in curves)])
    bucket_begins = np.arange(GUIDE_SIZE) / GUIDE_SIZE
    guide = [
        start + np.searchsorted(shares, bucket_begins, side="right") - 1
        for start, (_, shares) in zip(starts[:-1], curves, strict=True)
    ]
    learnable = np.array([np.interp(_LEARNABLE_ROWS, edges, shares) for edges, shares in curves])
    # Column c and column c + F / 2 make a pair, for at most _MAX_PAIRS columns spread evenly.
    half = num_columns // 2
    firsts = sorted({pair * half // _MAX_PAIRS for pair in range(_MAX_PAIRS)}) if half else []
    pairs = np.array([(first, first + half) for first in firsts], np.int64).reshape(-1, 2)
    low_seed = np.uint64(seed & (2**64 - 1))
    keys = [bijection_key(low_seed, column) for column in range(num_columns)]
    return Recipe(
        seed=low_seed,
        edges=np.concatenate([edges for edges, _ in curves]),
        shares=np.concatenate([shares for _, shares in curves]),
        guide=np.array(guide, np.int32),
        sizes=np.array(sizes, np.int64),
        multipliers=np.array(
            [_multiplier(key, size) for key, size in zip(keys, sizes, strict=True)]
        ),
        shifts=np.array([key // size % size for key, size in zip(keys, sizes, strict=True)]),
        groups=np.array([shape.group for shape in shapes]),
        couplings=np.array([shape.coupling for shape in shapes]),
        row_effects=learnable,
        pairs=pairs,
        pair_effects=_PAIR_EFFECT * learnable[pairs].prod(axis=1),
        dense=np.array(KAGGLE_DENSE, np.float64),
    )


def _multiplier(key: int, size: int) -> int:
    """A number coprime to size, from the middle third of [0, size) where there is one."""
    multiplier = size // 3 + key % (size // 3 + 1)
    while math.gcd(multiplier, size) != 1:
        multiplier += 1
    return multiplier


def _calibrate(scores_B: NDArray[np.float64]) -> tuple[float, float]:
    """The gain and bias that give the click rate and the best AUC aimed at."""
    scores_B = np.sort(scores_B)
    low, high = 0.0, 8.0 / float(scores_B.std())
    while high - low > 1e-3 * high:
        gain = (low + high) / 2
        bias = _bias(gain * scores_B)
        too_high = _expected_auc(_sigmoid(gain * scores_B + bias)) > _BEST_AUC
        low, high = (low, gain) if too_high else (gain, high)
    return gain, bias


def _bias(logits_B: NDArray[np.float64]) -> float:
    """What to add to logits for the click rate aimed at."""
    low, high = -40.0 - logits_B.max(), 40.0 - logits_B.min()
    while high - low > 1e-4:
        bias = (low + high) / 2
        too_high = _sigmoid(logits_B + bias).mean() > _CLICK_RATE
        low, high = (low, bias) if too_high else (bias, high)
    return float(bias)


def _sigmoid(logits_B: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-logits_B))


def _expected_auc(rising_probabilities_B: NDArray[np.float64]) -> float:
    """AUC of click probabilities against labels drawn from them, in expectation."""
    clicks, unclicked = rising_probabilities_B, 1 - rising_probabilities_B
    unclicked_below = np.cumsum(unclicked) - unclicked
    num_pairs = clicks.sum() * unclicked.sum() - clicks @ unclicked
    return float(clicks @ unclicked_below / num_pairs)
