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

Shape letters: B samples, F categorical features, I dense features, P column pairs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np
import torch

from recsys._support.auc import auc, expected_auc
from recsys._support.hashing import GOLDEN, mix64
from recsys._support.jit import kernel, kernel_part
from recsys.batch import Batch, JaggedIds
from recsys.datasets.splits import classic_splits
from recsys.datasets.synthetic.shape import (
    KAGGLE_COLUMNS,
    KAGGLE_DENSE,
    KAGGLE_TABLE_SIZES,
    NUM_FACTORS,
    popularity_curve,
)
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    # dense (B, I), rows (F, B), labels (B,), logits (B,) without the bias
    SampleArrays = tuple[
        NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.float64]
    ]

__all__ = ["SyntheticCriteo"]

# Raise it if a change of the code changes the samples of the same settings.
_VERSION: Final = "v3"
_NUM_CALIBRATION_SAMPLES: Final = 1 << 15
CLICK_RATE: Final = 0.256
BEST_AUC: Final = 0.80
_MAX_PAIRS: Final = 4
_PAIR_EFFECT: Final = 1.2
# Effects of a row with this many lookups in this many samples have half the full strength.
_HALF_STRENGTH_LOOKUPS: Final = 300
_STRENGTH_SAMPLES: Final = 1_000_000

# Buckets of shares; each has the segment at which the search in a popularity curve starts.
GUIDE_SIZE: Final = 1 << 12

# The counter of the first hash of each purpose.
_DRAW, _GROUP, _ROW, _BIJECTION, _DENSE, _FACTOR, _LABEL = (
    np.uint64(purpose << 32) for purpose in range(1, 8)
)


@final
class SyntheticCriteo:
    """Samples with the shape of Criteo Kaggle's and planted labels; a `SampleSource`.

    Args:
        num_samples: Samples in all splits together. It does not change sample i.
        seed: Any integer; only its low 64 bits are used.
        table_sizes: `num_embeddings` of each column, Kaggle's 26 sizes if empty. The columns take
            Kaggle's 26 shapes in turn; a smaller table truncates the popularity curve, a larger one
            extends it.
        test_samples: Samples of the test part, and of the validation part; 0 for a fourteenth of
            all samples each, as in `classic_splits`.

    Attributes:
        num_samples: Samples in all splits together.
        num_dense: I, the number of dense features: 13.
        table_sizes: `num_embeddings` by feature: cat_0, cat_1, ...
        splits: The sample numbers of "train", "test" and "validation", in this order.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        seed: int = 0,
        table_sizes: Sequence[int] = (),
        test_samples: int = 0,
    ) -> None:
        sizes = tuple(map(int, table_sizes)) or KAGGLE_TABLE_SIZES
        self.num_samples, num_test = int(num_samples), int(test_samples)
        _check(self.num_samples, sizes, num_test)
        self.num_dense = len(KAGGLE_DENSE)
        self.table_sizes = {f"cat_{column}": size for column, size in enumerate(sizes)}
        self.splits = classic_splits(self.num_samples, 2 * num_test or None)
        self._test_samples, self._seed = num_test, int(seed)
        self._calibrated = _calibrated(self._seed, sizes)

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """The given samples, in the given order. Several threads may call it at once.

        Shape:
            samples (B,); result: dense_features (B, 13) float32, values of log(x + 1);
            sparse_features with one int64 lookup per feature and sample; labels (B,) float32.
        """
        samples = np.ascontiguousarray(samples, np.int64)
        dense, rows, labels, _ = map(torch.from_numpy, _make(samples, *self._calibrated))
        return Batch(dense, JaggedIds.from_one_hot(list(self.table_sizes), rows), labels)

    def best_auc(self, samples: int = 100_000) -> float | None:
        """AUC of the true click probabilities on the test part, which is that of the best model.

        Args:
            samples: Use at most so many samples, from the start of the test part.

        Returns:
            The AUC; None if all labels of these samples are equal.
        """
        part = np.array(self.splits["test"][: max(samples, 0)], np.int64)
        _, _, labels, logits = _make(part, *self._calibrated)
        return auc(logits.astype(np.float32), labels)

    @property
    def fingerprint(self) -> str:
        """Equal for equal settings."""
        sizes = ",".join(map(str, self.table_sizes.values()))
        num_test = self._test_samples
        return (
            f"synthetic:criteo-kaggle {_VERSION} {self.num_samples} {self._seed} {sizes}"
            f"{f' test={num_test}' if num_test else ''}"
        )

    def describe(self) -> dict[str, Any]:
        """The entry for this data in a run record; JSON types only.

        `best_auc` is measured on the first 100,000 test samples; None if it is not defined.
        """
        return {
            "name": "synthetic:criteo-kaggle",
            "num_samples": self.num_samples,
            "seed": self._seed,
            "num_dense": self.num_dense,
            "table_sizes": self.table_sizes,
            "test_samples": self._test_samples,
            "planted_click_rate": CLICK_RATE,
            "planted_auc": BEST_AUC,
            "best_auc": self.best_auc(),
        }


def _check(num_samples: int, sizes: tuple[int, ...], test_samples: int) -> None:
    """Check the arguments of `SyntheticCriteo`, whose names are keys of `recsys train`.

    Raises:
        ConfigError: one is out of range.
    """
    most_test = (num_samples - 1) // 2
    for name, values, least, most in (
        ("num_samples", (num_samples,), 7, 2**63 - 1),
        ("table_sizes", sizes, 1, 2**31),  # a rank times a multiplier fits in 63 bits
        ("test_samples", (test_samples,), 0, most_test),
    ):
        for value in values:
            if not least <= value <= most:
                raise ConfigError(f"synthetic.{name} must be in [{least}, {most}], got {value}")


@lru_cache(maxsize=16)
def _calibrated(
    seed: int, table_sizes: tuple[int, ...]
) -> tuple[GeneratorParameters, float, float]:
    """Parameters, gain and bias: they take 0.2 seconds, and a run opens its source several times.

    Args:
        seed: As in `SyntheticCriteo`.
        table_sizes: The same.
    """
    parameters = _build_parameters(seed, list(table_sizes))
    first = np.arange(_NUM_CALIBRATION_SAMPLES, dtype=np.int64)
    *_, scores = _make(first, parameters, gain=1.0, bias=0.0)
    return parameters, *calibrate(scores)


def _make(
    times: NDArray[np.int64], parameters: GeneratorParameters, gain: float, bias: float
) -> SampleArrays:
    num_samples = len(times)
    dense = np.empty((num_samples, len(KAGGLE_DENSE)), np.float32)
    rows = np.empty((len(parameters.sizes), num_samples), np.int64)
    labels, logits = np.empty(num_samples, np.float32), np.empty(num_samples)
    make_samples(times, parameters, gain, bias, dense, rows, labels, logits)
    return dense, rows, labels, logits


def _build_parameters(seed: int, sizes: list[int]) -> GeneratorParameters:
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
    keys = [int(_hash(low_seed, _BIJECTION + np.uint64(column))) for column in range(num_columns)]
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
        dense=np.array(KAGGLE_DENSE, np.float64),
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
    first = size // 3 + key % (size // 3 + 1)
    return next(number for number in count(first) if math.gcd(number, size) == 1)


def calibrate(scores_B: NDArray[np.float64]) -> tuple[float, float]:
    """The gain and bias for a click rate of `CLICK_RATE` and a best AUC of `BEST_AUC`."""
    scores_B = np.sort(scores_B)

    def is_too_clear(gain: float) -> bool:
        logits_B = gain * scores_B
        return expected_auc(_sigmoid(logits_B + _bias(logits_B))) > BEST_AUC

    gain = _solve(is_too_clear, 0.0, 8.0 / float(scores_B.std()), relative=1e-3)
    return gain, _bias(gain * scores_B)


def _bias(logits_B: NDArray[np.float64]) -> float:
    """The bias of the logits for a click rate of `CLICK_RATE`."""
    ends = -40.0 - logits_B.max(), 40.0 - logits_B.min()
    return _solve(lambda bias: _sigmoid(logits_B + bias).mean() > CLICK_RATE, *ends, absolute=1e-4)


def _solve(
    is_too_high: Callable[[float], bool],
    low: float,
    high: float,
    *,
    relative: float = 0.0,
    absolute: float = 0.0,
) -> float:
    """Where `is_too_high` begins between low and high, by bisection."""
    middle = low
    while high - low > relative * high + absolute:
        middle = (low + high) / 2
        low, high = (low, middle) if is_too_high(middle) else (middle, high)
    return float(middle)


def _sigmoid(logits_B: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-logits_B))


class GeneratorParameters(NamedTuple):
    """All parameters of the generator except gain and bias, as arrays for the kernel.

    Shape:
        edges, shares: the concatenated popularity curves of all columns; strengths: the scale of
        the effects of rows in each segment of these, 0 to 1; guide (F, 4096): the segment at which
        to start the search for a share in [j / 4096, (j + 1) / 4096); sizes to couplings (F,);
        pairs (P, 2) columns; dense (I, 6), the fields of `DenseShape`.
    """

    seed: np.uint64
    edges: NDArray[np.int64]
    shares: NDArray[np.float64]
    strengths: NDArray[np.float64]
    guide: NDArray[np.int32]
    sizes: NDArray[np.int64]
    multipliers: NDArray[np.int64]
    shifts: NDArray[np.int64]
    groups: NDArray[np.int64]
    couplings: NDArray[np.float64]
    pairs: NDArray[np.int64]
    dense: NDArray[np.float64]


@kernel
def make_samples(
    times_B: NDArray[np.int64],
    parameters: GeneratorParameters,
    gain: float,
    bias: float,
    dense_BI: NDArray[np.float32],
    rows_FB: NDArray[np.int64],
    labels_B: NDArray[np.float32],
    logits_B: NDArray[np.float64],
) -> None:
    """Fill the last four with the samples of the given times; logits are without the bias.

    A sample's label is 1 with probability sigmoid(gain * score + bias).
    """
    num_columns = len(parameters.sizes)
    row_keys, hashes = np.empty(num_columns, np.uint64), np.empty(num_columns, np.uint64)
    strengths = np.empty(num_columns)
    for column in range(num_columns):
        row_keys[column] = _hash(parameters.seed, _ROW + np.uint64(column))
    for position in range(len(times_B)):
        key = _hash(parameters.seed, np.uint64(times_B[position]))
        dense_score = _draw_dense(parameters.dense, key, dense_BI[position])
        _draw_rows(parameters, key, row_keys, rows_FB[:, position], hashes, strengths)
        row_score = pair_score = 0.0
        for column in range(num_columns):
            row_score += strengths[column] * _normal(hashes[column])
        for first, second in parameters.pairs:
            strength = _PAIR_EFFECT * strengths[first] * strengths[second]
            pair_score += strength * _dot(hashes[first], hashes[second])
        logits_B[position] = gain * (dense_score + row_score + pair_score)
        chance = 1 / (1 + math.exp(-(logits_B[position] + bias)))
        labels_B[position] = 1.0 if _uniform(_hash(key, _LABEL)) < chance else 0.0


@kernel_part
def _draw_dense(shapes: NDArray[np.float64], key: np.uint64, dense_I: NDArray[np.float32]) -> float:
    """Draw the dense features; returns their part of the score."""
    normals, uniforms = np.empty(NUM_FACTORS), np.empty(NUM_FACTORS)
    for factor in range(NUM_FACTORS):
        bits = _hash(key, _FACTOR + np.uint64(factor))
        uniforms[factor] = _uniform(bits)
        normals[factor] = _normal(_mix(bits))
    score = 0.0
    for feature in range(len(shapes)):
        missing, location, scale, shared, loading, effect = shapes[feature]
        value = 0.0
        if uniforms[int(shared)] >= missing:
            own = _normal(_hash(key, _DENSE + np.uint64(feature)))
            mixed = loading * normals[int(shared)] + math.sqrt(1 - loading**2) * own
            count = math.floor(math.expm1(max(location + scale * mixed, 0.0)) + 0.5)
            value = math.log1p(count)
        dense_I[feature] = value
        score += effect * value
    return score


@kernel_part
def _draw_rows(
    parameters: GeneratorParameters,
    key: np.uint64,
    row_keys_F: NDArray[np.uint64],
    rows_F: NDArray[np.int64],
    hashes_F: NDArray[np.uint64],
    strengths_F: NDArray[np.float64],
) -> None:
    """Draw a row per column, the hash that its effects derive from, and their strength."""
    for column in range(len(rows_F)):
        draw = _hash(key, _DRAW + np.uint64(column))
        uniform = _uniform(draw)
        # `_uniform` leaves the low 11 bits of a hash unused.
        if np.float64(draw & np.uint64(2047)) < parameters.couplings[column] * 2048.0:
            uniform = _uniform(_hash(key, _GROUP + np.uint64(parameters.groups[column])))
        guide = parameters.guide[column]
        rank, segment = _rank(uniform, guide, parameters.edges, parameters.shares)
        strengths_F[column] = parameters.strengths[segment]
        hashes_F[column] = _hash(row_keys_F[column], np.uint64(rank))
        # Unsigned, because a signed remainder takes longer.
        row = np.uint64(rank * parameters.multipliers[column] + parameters.shifts[column])
        rows_F[column] = row % np.uint64(parameters.sizes[column])


@kernel_part
def _rank(
    uniform: float,
    guide: NDArray[np.int32],
    edges: NDArray[np.int64],
    shares: NDArray[np.float64],
) -> tuple[int, int]:
    """The inverse of a popularity curve: a rank, and its segment of the curve."""
    segment = guide[int(uniform * GUIDE_SIZE)]
    while shares[segment + 1] <= uniform:
        segment += 1
    within = (uniform - shares[segment]) / (shares[segment + 1] - shares[segment])
    first, width = int(edges[segment]), int(edges[segment + 1] - edges[segment])
    return first + min(int(within * width), width - 1), segment


@kernel
def _hash(key: np.uint64, counter: np.uint64) -> np.uint64:
    """Number `counter` of the SplitMix64 stream that starts at key."""
    mixed: np.uint64 = _mix(key + (counter + np.uint64(1)) * GOLDEN)
    return mixed


_mix: Any = kernel(mix64)  # of one number


@kernel_part
def _uniform(bits: np.uint64) -> float:
    """A number in [0, 1)."""
    return np.float64(bits >> np.uint64(11)) * 2.0**-53


@kernel_part
def _lane(bits: np.uint64, lane: int) -> float:
    """One of four independent numbers in [-0.5, 0.5)."""
    return np.float64((bits >> np.uint64(16 * lane)) & np.uint64(0xFFFF)) * 2.0**-16 - 0.5


@kernel_part
def _normal(bits: np.uint64) -> float:
    """About N(0, 1): the sum of four uniform numbers, its variance 4 / 12 scaled to 1."""
    total = 0.0
    for lane in range(4):
        total += _lane(bits, lane)
    return total * math.sqrt(3.0)


@kernel_part
def _dot(first: np.uint64, second: np.uint64) -> float:
    """The dot product of two rows' hidden vectors of four numbers, variance 4 / 144 scaled to 1."""
    # Mixed once more, because the rows' own effects use the lanes before.
    first, second = _mix(first), _mix(second)
    total = 0.0
    for lane in range(4):
        total += _lane(first, lane) * _lane(second, lane)
    return total * 6.0
