"""`synthetic:criteo-kaggle`: any number of generated samples with the shape of Criteo Kaggle's.

The sample of time i is a pure function of the seed, the settings and i: every random number in it
is a hash of (seed, i, the number's purpose). So samples are the same in any order, batch and
thread, and the source keeps no state. `docs/synthetic.md` has the measurements.

- Lookups follow `recsys.datasets.criteo.shape`. The column's rank r is row (r * multiplier + shift)
  mod num_embeddings, a seeded bijection. So a row number says nothing about popularity, and popular
  rows are scattered over the table, the worst case for locality. (Numbering by first appearance
  would put popular rows first.)
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

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from recsys._support.auc import auc
from recsys.batch import Batch, JaggedIds
from recsys.datasets.criteo.shape import KAGGLE_DENSE, KAGGLE_TABLE_SIZES
from recsys.datasets.splits import classic_splits
from recsys.datasets.synthetic.config import SyntheticConfig
from recsys.datasets.synthetic.kernel import SampleArrays, make_samples
from recsys.datasets.synthetic.parameters import BEST_AUC, CLICK_RATE, build_parameters, calibrate
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.datasets.synthetic.kernel import GeneratorParameters

__all__ = ["SyntheticCriteo"]

# Raise it if a change of the code changes the samples of the same settings.
_VERSION: Final = "v3"
_NUM_CALIBRATION_SAMPLES: Final = 1 << 15
_BLOCK_SAMPLES: Final = 1 << 16
# A rank times a multiplier below the table's size must fit in 63 bits.
_MAX_TABLE_SIZE: Final = 1 << 31
_MAX_BEST_AUC_SAMPLES: Final = 100_000


@final
class SyntheticCriteo:
    """Samples with the shape of Criteo Kaggle's and planted labels; a `SampleSource`.

    Args:
        num_samples: Samples in all splits together. It does not change sample i, with one
            exception: if popularity drifts, it changes labels, since the click rate and the best
            AUC are calibrated over all samples.
        seed: Any integer; only its low 64 bits are used.
        table_sizes: `num_embeddings` of each column, at least one. The columns take Kaggle's 26
            shapes in turn; a smaller table truncates the popularity curve, a larger one extends it.
        drift: Share of every column's popularity that moves to other rows per million samples.
        test_samples: Samples of the test part, and of the validation part; 0 for a fourteenth of
            all samples each, as in `classic_splits`.

    Raises:
        ConfigError: there are fewer than 7 samples or no table, a table size is not in [1, 2**31],
            or `SyntheticConfig` refuses a value.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        seed: int = 0,
        table_sizes: Sequence[int] = KAGGLE_TABLE_SIZES,
        drift: float = 0.0,
        test_samples: int = 0,
    ) -> None:
        _check(num_samples, table_sizes)
        try:
            self._in_time = SyntheticConfig(
                num_samples=int(num_samples),
                drift=float(drift),
                test_samples=int(test_samples),
            )
        except ConfigError as error:
            raise ConfigError(f"synthetic.{error}") from None
        self._num_samples = int(num_samples)
        self._seed = int(seed)
        self._table_sizes = {f"cat_{column}": int(size) for column, size in enumerate(table_sizes)}
        self._parameters, self._gain, self._bias = _calibrated(
            self._seed,
            tuple(self._table_sizes.values()),
            self._in_time.drift,
            max(self._num_samples if self._in_time.drift else 0, _NUM_CALIBRATION_SAMPLES),
        )

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
        """The sample numbers of "train", "test" and "validation", in this order.

        They are those of `classic_splits`, unless `test_samples` is set.
        """
        num_test = self._in_time.test_samples
        if not num_test:
            return classic_splits(self._num_samples)
        train_end, test_end = self._num_samples - 2 * num_test, self._num_samples - num_test
        return {
            "train": range(train_end),
            "test": range(train_end, test_end),
            "validation": range(test_end, self._num_samples),
        }

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
            JaggedIds.from_one_hot(list(self._table_sizes), torch.from_numpy(arrays.rows)),
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
            logits[block], labels[block] = arrays.logit_parts.sum(axis=0), arrays.labels
        area = auc(logits, labels)
        if area is None:
            raise ValueError(
                f"best_auc: needs clicked and unclicked samples, got {len(part)} samples with "
                "equal labels; raise samples or num_samples"
            )
        return area

    def logit_parts(self, samples: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """The parts of the true logits: of "dense" features, "rows" and "pairs" of rows.

        Shape:
            samples (B,) in [0, num_samples); each part (B,), without the bias of the logits.

        Raises:
            IndexError: a sample number is not in [0, num_samples).
        """
        parts = self._make(samples).logit_parts
        return dict(zip(("dense", "rows", "pairs"), parts, strict=True))

    @property
    def fingerprint(self) -> str:
        """Equal for equal settings."""
        sizes = ",".join(map(str, self._table_sizes.values()))
        in_time = self._in_time
        test = f" test={in_time.test_samples}" if in_time.test_samples else ""
        return (
            f"synthetic:criteo-kaggle {_VERSION} {self._num_samples} {self._seed} {sizes} "
            f"drift={in_time.drift!r}{test}"
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
            "num_samples": self._num_samples,
            "seed": self._seed,
            "num_dense": self.num_dense,
            "table_sizes": self.table_sizes,
            "drift": self._in_time.drift,
            "test_samples": self._in_time.test_samples,
            "planted_click_rate": CLICK_RATE,
            "planted_auc": BEST_AUC,
            "best_auc": best_auc,
        }

    def _make(self, samples: NDArray[np.int64]) -> SampleArrays:
        samples = np.ascontiguousarray(samples, np.int64)
        outside = (samples < 0) | (samples >= self._num_samples)
        if outside.any():
            raise IndexError(
                f"synthetic:criteo-kaggle: sample {samples[outside.argmax()]} is not in "
                f"[0, {self._num_samples}); raise num_samples"
            )
        return _make(samples, self._parameters, self._gain, self._bias)


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
    parameters = build_parameters(seed, list(table_sizes), drift)
    times = np.arange(_NUM_CALIBRATION_SAMPLES, dtype=np.int64)
    times = times * num_samples // len(times)
    scores = _make(times, parameters, gain=1.0, bias=0.0).logit_parts.sum(axis=0)
    return parameters, *calibrate(scores)


def _make(
    times: NDArray[np.int64], parameters: GeneratorParameters, gain: float, bias: float
) -> SampleArrays:
    num_samples = len(times)
    arrays = SampleArrays(
        dense=np.empty((num_samples, len(KAGGLE_DENSE)), np.float32),
        rows=np.empty((len(parameters.sizes), num_samples), np.int64),
        logit_parts=np.empty((3, num_samples)),
        labels=np.empty(num_samples, np.float32),
    )
    make_samples(times, parameters, gain, bias, arrays)
    return arrays


def _check(num_samples: int, table_sizes: Sequence[int]) -> None:
    if num_samples < 7:
        raise ConfigError(
            "synthetic.num_samples must be at least 7, one for each part of the classic split, "
            f"got {num_samples}; raise it"
        )
    if not len(table_sizes):
        raise ConfigError(
            "synthetic:criteo-kaggle: table_sizes must have at least one size, got none; "
            "leave it out for Kaggle's 26"
        )
    for column, size in enumerate(table_sizes):
        if not 1 <= size <= _MAX_TABLE_SIZE:
            raise ConfigError(
                f"synthetic:criteo-kaggle: the table size of 'cat_{column}' must be in "
                f"[1, {_MAX_TABLE_SIZE}], got {size}; change table_sizes[{column}]"
            )
