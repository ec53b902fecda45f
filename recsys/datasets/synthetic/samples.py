"""`synthetic:criteo-kaggle`: any number of generated samples with the shape of Criteo Kaggle's.

The sample of time i is a pure function of the seed, the settings and i: every random number in it
is a hash of (seed, i, the number's purpose). So samples are the same in any order, batch and
thread, and the source keeps no state. `docs/synthetic.md` has the measurements.

- Lookups follow the `shape` module beside this one. A column's rank r is row (r * multiplier +
  shift) mod num_embeddings, a seeded bijection. So a row number says nothing about popularity, and
  popular rows are scattered over the table, the worst case for locality. (Numbering by first
  appearance would put popular rows first.)
- Labels are planted: 1 with probability sigmoid(gain * score + bias). The score is the sum of an
  effect of every row, of dot products of hidden vectors of the rows in a few column pairs, and of
  effects of the dense features. The effect of a row with c lookups per million samples is scaled by
  c / (c + 300). Without this, rare rows would have effects that no model can learn, and the best
  AUC could not be reached. Gain and bias are solved on 32,768 samples: for any seed and table
  sizes, the click rate is Kaggle's 0.256, and no model can expect an AUC above about 0.80.
- Popularity may drift with time; see `SyntheticConfig`.

Shape letters: B samples, F categorical features, I dense features, P column pairs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from recsys._support.auc import auc, expected_auc
from recsys.batch import Batch, JaggedIds
from recsys.datasets.splits import classic_splits
from recsys.datasets.synthetic.config import SyntheticConfig
from recsys.datasets.synthetic.kernel import (
    GUIDE_SIZE,
    GeneratorParameters,
    SampleArrays,
    bijection_key,
    make_samples,
)
from recsys.datasets.synthetic.shape import (
    KAGGLE_COLUMNS,
    KAGGLE_DENSE,
    KAGGLE_TABLE_SIZES,
    popularity_curve,
)
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["SyntheticCriteo"]

# Raise it if a change of the code changes the samples of the same settings.
_VERSION: Final = "v3"
_NUM_CALIBRATION_SAMPLES: Final = 1 << 15
_BLOCK_SAMPLES: Final = 1 << 16
_MAX_BEST_AUC_SAMPLES: Final = 100_000
CLICK_RATE: Final = 0.256
BEST_AUC: Final = 0.80
_MAX_PAIRS: Final = 4
_PAIR_EFFECT: Final = 1.2
# Effects of a row with this many lookups in this many samples have half the full strength.
_HALF_STRENGTH_LOOKUPS: Final = 300
_STRENGTH_SAMPLES: Final = 1_000_000


@final
class SyntheticCriteo:
    """Samples with the shape of Criteo Kaggle's and planted labels; a `SampleSource`.

    Args:
        num_samples: Samples in all splits together. It does not change sample i, with one
            exception: if popularity drifts, it changes labels, since the click rate and the best
            AUC are calibrated over all samples.
        seed: Any integer; only its low 64 bits are used.
        table_sizes: `num_embeddings` of each column, Kaggle's 26 sizes if empty. The columns take
            Kaggle's 26 shapes in turn; a smaller table truncates the popularity curve, a larger one
            extends it.
        drift: Share of every column's popularity that moves to other rows per million samples.
        test_samples: Samples of the test part, and of the validation part; 0 for a fourteenth of
            all samples each, as in `classic_splits`.

    Attributes:
        num_samples: Samples in all splits together.
        num_dense: I, the number of dense features: 13.
        table_sizes: `num_embeddings` by feature: cat_0, cat_1, ...
        splits: The sample numbers of "train", "test" and "validation", in this order.

    Raises:
        ConfigError: `SyntheticConfig` refuses a value.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        seed: int = 0,
        table_sizes: Sequence[int] = (),
        drift: float = 0.0,
        test_samples: int = 0,
    ) -> None:
        sizes = tuple(map(int, table_sizes)) or KAGGLE_TABLE_SIZES
        try:
            config = SyntheticConfig(
                num_samples=int(num_samples),
                table_sizes=sizes,
                drift=float(drift),
                test_samples=int(test_samples),
            )
        except ConfigError as error:
            raise ConfigError(f"synthetic.{error}") from None
        self.num_samples = config.num_samples
        self.num_dense = len(KAGGLE_DENSE)
        self.table_sizes = {f"cat_{column}": size for column, size in enumerate(sizes)}
        self.splits = classic_splits(self.num_samples)
        if num_test := config.test_samples:
            train_end, test_end = self.num_samples - 2 * num_test, self.num_samples - num_test
            self.splits = {
                "train": range(train_end),
                "test": range(train_end, test_end),
                "validation": range(test_end, self.num_samples),
            }
        self._config, self._seed = config, int(seed)
        num_timed = max(self.num_samples if config.drift else 0, _NUM_CALIBRATION_SAMPLES)
        self._calibrated = _calibrated(self._seed, sizes, config.drift, num_timed)

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """The given samples, in the given order. Several threads may call it at once.

        Shape:
            samples (B,); result: dense_features (B, 13) float32, values of log(x + 1);
            sparse_features with one int64 lookup per feature and sample; labels (B,) float32.

        Raises:
            IndexError: a sample number is not in [0, num_samples).
        """
        arrays = self._make(samples)
        return Batch(
            torch.from_numpy(arrays.dense),
            JaggedIds.from_one_hot(list(self.table_sizes), torch.from_numpy(arrays.rows)),
            torch.from_numpy(arrays.labels),
        )

    def best_auc(self, samples: int = 1_000_000) -> float:
        """AUC of the true click probabilities on the test part, which is that of the best model.

        Args:
            samples: Use at most so many samples, from the start of the test part.

        Raises:
            ValueError: all labels of these samples are equal.
        """
        part = self.splits["test"][: max(samples, 0)]
        logits, labels = np.empty(len(part), np.float32), np.empty(len(part), np.float32)
        for begin in range(0, len(part), _BLOCK_SAMPLES):
            block = slice(begin, begin + _BLOCK_SAMPLES)
            arrays = self._make(np.array(part[block], np.int64))
            logits[block], labels[block] = arrays.logits, arrays.labels
        area = auc(logits, labels)
        if area is None:
            raise ValueError(
                f"best_auc: needs clicked and unclicked samples, got {len(part)} samples with "
                "equal labels; raise samples or num_samples"
            )
        return area

    @property
    def fingerprint(self) -> str:
        """Equal for equal settings."""
        sizes = ",".join(map(str, self.table_sizes.values()))
        num_test = self._config.test_samples
        return (
            f"synthetic:criteo-kaggle {_VERSION} {self.num_samples} {self._seed} {sizes} "
            f"drift={self._config.drift!r}{f' test={num_test}' if num_test else ''}"
        )

    def describe(self) -> dict[str, Any]:
        """The entry for this data in a run record; JSON types only.

        `best_auc` is measured on the first 100,000 test samples; None if it is not defined.
        """
        try:
            best_auc = self.best_auc(_MAX_BEST_AUC_SAMPLES)
        except ValueError:
            best_auc = None
        return {
            "name": "synthetic:criteo-kaggle",
            "num_samples": self.num_samples,
            "seed": self._seed,
            "num_dense": self.num_dense,
            "table_sizes": self.table_sizes,
            "drift": self._config.drift,
            "test_samples": self._config.test_samples,
            "planted_click_rate": CLICK_RATE,
            "planted_auc": BEST_AUC,
            "best_auc": best_auc,
        }

    def _make(self, samples: NDArray[np.int64]) -> SampleArrays:
        samples = np.ascontiguousarray(samples, np.int64)
        outside = (samples < 0) | (samples >= self.num_samples)
        if outside.any():
            raise IndexError(
                f"synthetic:criteo-kaggle: sample {samples[outside.argmax()]} is not in "
                f"[0, {self.num_samples}); raise num_samples"
            )
        return _make(samples, *self._calibrated)


@lru_cache(maxsize=16)
def _calibrated(
    seed: int, table_sizes: tuple[int, ...], drift: float, num_samples: int
) -> tuple[GeneratorParameters, float, float]:
    """Parameters, gain and bias: they take 0.2 seconds, and a run opens its source several times.

    Args:
        seed: As in `SyntheticCriteo`.
        table_sizes: The same.
        drift: The same.
        num_samples: The samples that gain and bias are for.
    """
    parameters = _build_parameters(seed, list(table_sizes), drift)
    times = np.arange(_NUM_CALIBRATION_SAMPLES, dtype=np.int64)
    times = times * num_samples // len(times)
    scores = _make(times, parameters, gain=1.0, bias=0.0).logits
    return parameters, *calibrate(scores)


def _make(
    times: NDArray[np.int64], parameters: GeneratorParameters, gain: float, bias: float
) -> SampleArrays:
    num_samples = len(times)
    arrays = SampleArrays(
        dense=np.empty((num_samples, len(KAGGLE_DENSE)), np.float32),
        rows=np.empty((len(parameters.sizes), num_samples), np.int64),
        logits=np.empty(num_samples),
        labels=np.empty(num_samples, np.float32),
    )
    make_samples(times, parameters, gain, bias, arrays)
    return arrays


def _build_parameters(seed: int, sizes: list[int], drift: float) -> GeneratorParameters:
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
