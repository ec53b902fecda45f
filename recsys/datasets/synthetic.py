"""`synthetic:criteo-kaggle`: any number of generated samples with the shape of Criteo Kaggle's.

The sample of time i is a pure function of the seed, the settings and i: every random number in it
is a hash of (seed, i, the number's purpose). So samples are the same in any order, batch and
thread, and the source keeps no state. `docs/synthetic.md` has the measurements.

- Lookups follow the popularity curves of Criteo Kaggle's columns. A column's rank r is row
  (r * multiplier + shift) mod num_embeddings, a seeded bijection. So a row number says nothing
  about popularity, and popular rows are scattered over the table, the worst case for locality.
  (Numbering by first appearance would put popular rows first.)
- Labels are planted: 1 with probability sigmoid(gain * score + bias). The score is the sum of an
  effect of every row, of dot products of hidden vectors of the rows in a few column pairs, and of
  effects of the dense features. The effect of a row with c lookups per million samples is scaled by
  c / (c + 300). Without this, rare rows would have effects that no model can learn, and the best
  AUC could not be reached. Gain and bias are solved on 32,768 samples: for any seed and table
  sizes, the click rate is Kaggle's 0.256, and no model can expect an AUC above about 0.80.

The numbers of Kaggle's 26 categorical and 13 dense columns, at the end, are aggregates of a uniform
sample of 137,139 labelled rows of the challenge's training file. This module contains no value, row
or id of the file.

- `shares`: the percentage of a column's lookups that go to its 1, 2, 3, ... most popular rows, at
  the ranks `KNOT_RANKS`, down to rows that were seen about four times. A sample that is ranked by
  its own counts overstates the share of its top rows. So each share was adjusted until 137,139
  draws from the curve, ranked by their own counts, had the measured share.
- `tail_exponent`: below the last knot the sample contains mostly rows seen once. There, popularity
  falls as rank**-exponent down to the last row of the column's table (`num_embeddings` of the
  complete training file). With this exponent, 137,139 draws have as many distinct rows as the
  sample. Most rows of the big tables never appear in a sample of this size.
- `group`, `coupling`: in some columns values are popular together (a rare value of C12 comes with
  rare values of C3, C16 and C21). These columns share one uniform number per sample and group. A
  column uses it with probability `coupling`, otherwise an independent number. Coupling does not
  change the popularity within a column; it changes how many samples are popular in all of their
  columns. Couplings are the sample's rank correlations, raised slightly until that share fits.
- dense columns, `DenseShape`: missing shares, locations and scales are measured; the factors model
  the strongest correlations; the effects are invented, with the signs of the sample.

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
from recsys.datasets.store_writer import classic_splits
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

# fmt: off
KNOT_RANKS: Final = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000, 1500,
    2000, 3000,
)
# fmt: on
# How many random numbers the dense columns of a sample share.
NUM_FACTORS: Final = 4
# Consecutive edges of a curve differ by this factor; between them all ranks are equally popular.
_EDGE_RATIO = 1.1

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


class ColumnShape(NamedTuple):
    """Popularity of one categorical column; see the module docstring for the fields."""

    num_embeddings: int
    tail_exponent: float
    group: int
    coupling: float
    shares: tuple[float, ...]


class DenseShape(NamedTuple):
    """One dense column. If a value is not missing, `log(x + 1)` is normal, cut off at 0.

    A missing value is 0. Columns of one factor share two random numbers per sample: a normal one
    with weight `loading` (the rest is independent), and a uniform one that decides which values are
    missing. `effect` is the change of the planted score per unit of log(x + 1).
    """

    missing: float
    location: float
    scale: float
    factor: int
    loading: float
    effect: float


def popularity_curve(
    shape: ColumnShape, num_embeddings: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The share of lookups that go to the most popular rows, as a fine, piecewise linear curve.

    Between the knots of the shape, popularity falls as 1 / rank; below the last knot, by the power
    law. A smaller table truncates the curve, a larger one extends the power law. Both renormalise.

    Shape:
        result: edges (K + 1,), ranks ascending from 0 to num_embeddings; shares (K + 1,) ascending
        from 0 to 1: `shares[k]` of the lookups go to the `edges[k]` most popular rows.
    """
    knots = np.array([0, *KNOT_RANKS[: len(shape.shares)]])
    knot_shares = np.array([0.0, *shape.shares]) / 100
    edges = [0]
    while edges[-1] < num_embeddings:
        edges.append(min(max(edges[-1] + 1, int(edges[-1] * _EDGE_RATIO)), num_embeddings))
    ranks = np.array(sorted({*edges, *knots[knots < num_embeddings].tolist()}), np.int64)

    shares = np.interp(np.log1p(ranks), np.log1p(knots), knot_shares)
    last, size = int(knots[-1]), shape.num_embeddings
    in_tail = ranks > last
    length = _power_integral(last, ranks[in_tail], shape.tail_exponent)
    whole = _power_integral(last, np.array([size]), shape.tail_exponent)
    shares[in_tail] = knot_shares[-1] + (1 - knot_shares[-1]) * length / whole
    return ranks, shares / shares[-1]


def _power_integral(begin: int, ends: NDArray[np.int64], exponent: float) -> NDArray[np.float64]:
    """The integral of (1 + x)**-exponent from begin to each of ends, up to a constant factor."""
    # expm1 is accurate for exponents near 1, where the integral becomes a logarithm.
    log_ratio = np.log1p(ends) - np.log1p(begin)
    power = 1.0 - exponent
    return np.asarray(np.expm1(power * log_ratio) / power if power else log_ratio)


# fmt: off
# I1 .. I13. Factors: 0 and 1 activity, 2 content, 3 none.
KAGGLE_DENSE: Final = (
    #            missing location scale factor loading effect
    DenseShape(0.4509,  0.613, 1.303, 0,  0.75,  0.70),
    DenseShape(0.0000,  1.653, 2.710, 3,  0.00,  0.10),
    DenseShape(0.2134,  2.134, 1.221, 2,  0.45, -0.30),
    DenseShape(0.2145,  1.697, 0.918, 2,  0.90, -0.15),
    DenseShape(0.0263,  7.269, 2.939, 0, -0.75, -0.30),
    DenseShape(0.2227,  3.382, 1.794, 0, -0.65, -0.15),
    DenseShape(0.0428,  1.499, 1.598, 1,  0.95,  0.75),
    DenseShape(0.0005,  2.024, 1.188, 2,  0.70, -0.15),
    DenseShape(0.0428,  3.536, 1.647, 1,  0.50,  0.00),
    DenseShape(0.4509,  0.423, 0.357, 0,  0.95,  2.40),
    DenseShape(0.0428,  0.883, 0.858, 1,  0.95,  1.20),
    DenseShape(0.7652, -0.603, 1.400, 3,  0.00,  0.60),
    DenseShape(0.2145,  1.721, 0.984, 2,  0.87, -0.90),
)

# C1 .. C26: num_embeddings, tail_exponent, group, coupling, shares.
KAGGLE_COLUMNS: Final = (
    ColumnShape(1_460, 1.578, 0, 0.00,
        (50.042, 66.817, 75.209, 80.175, 83.462, 85.789, 87.575, 88.970, 90.086, 90.962, 93.900,
         95.335, 96.821, 98.109, 98.644, 99.055, 99.388, 99.544)),
    ColumnShape(583, 7.983, 0, 0.00,
        (11.335, 15.621, 19.411, 23.084, 26.620, 29.839, 32.886, 35.570, 37.758, 40.204, 49.058,
         55.107, 63.251, 73.727, 80.109, 86.351, 92.191, 95.297, 97.996)),
    ColumnShape(10_131_227, 0.953, 0, 0.95,
        (3.440, 5.970, 7.013, 8.042, 8.994, 9.856, 10.692, 11.456, 12.267, 12.988, 15.970, 17.506,
         20.675, 24.546, 26.988, 29.502, 32.692, 34.999, 38.125, 41.863, 44.161, 46.359, 48.838,
         50.929)),
    ColumnShape(2_202_608, 1.236, 0, 0.95,
        (3.578, 7.020, 9.262, 11.405, 13.303, 15.127, 16.604, 17.633, 18.501, 19.222, 22.794,
         25.322, 29.074, 34.012, 37.355, 40.907, 44.930, 47.972, 51.951, 56.856, 59.959, 63.227,
         66.656, 69.136, 72.430)),
    ColumnShape(305, 2.346, 0, 0.00,
        (67.417, 82.879, 89.154, 92.477, 94.322, 95.611, 96.475, 97.025, 97.479, 97.868, 98.815,
         99.239, 99.602, 99.834)),
    ColumnShape(24, 8.000, 0, 0.00,
        (39.609, 61.467, 80.077, 92.258, 95.414, 98.190, 99.957, 99.964, 99.989, 99.994)),
    ColumnShape(12_517, 2.997, 1, 0.93,
        (2.125, 3.439, 4.338, 5.073, 5.800, 6.506, 7.086, 7.676, 8.214, 8.769, 11.098, 12.993,
         15.743, 20.087, 23.692, 27.366, 32.974, 37.160, 43.692, 52.852, 59.318, 66.312, 74.331,
         79.930, 85.609)),
    ColumnShape(633, 2.147, 0, 0.00,
        (59.463, 76.003, 83.433, 87.614, 90.155, 91.998, 93.260, 94.257, 94.984, 95.599, 97.345,
         98.121, 98.841, 99.409, 99.627, 99.741)),
    ColumnShape(3, 2.000, 0, 0.00,
        (90.007, 99.985)),
    ColumnShape(93_145, 1.937, 0, 0.00,
        (22.205, 23.693, 24.448, 25.037, 25.585, 26.066, 26.479, 26.911, 27.119, 27.355, 29.354,
         30.923, 33.034, 36.673, 39.238, 42.144, 46.291, 49.599, 54.525, 61.245, 65.986, 70.946,
         76.524, 80.236, 84.603)),
    ColumnShape(5_683, 5.136, 1, 0.95,
        (3.201, 5.305, 6.853, 8.149, 9.216, 9.884, 10.897, 11.627, 12.382, 13.192, 16.488, 18.939,
         23.522, 29.416, 33.941, 39.032, 45.597, 50.407, 58.118, 68.408, 75.168, 82.156, 89.445,
         92.468)),
    ColumnShape(8_351_593, 0.984, 0, 0.99,
        (3.434, 5.952, 8.199, 9.245, 10.245, 11.190, 12.055, 12.867, 13.602, 14.420, 17.653,
         19.515, 22.619, 26.923, 29.727, 32.361, 35.611, 38.030, 41.277, 45.161, 47.549, 49.801,
         52.402, 54.448)),
    ColumnShape(3_194, 7.321, 1, 0.97,
        (3.203, 5.567, 7.243, 8.605, 9.699, 11.074, 12.459, 13.409, 14.181, 14.583, 18.411,
         21.764, 26.455, 33.149, 38.197, 43.728, 51.028, 56.353, 64.137, 74.547, 81.136, 87.575,
         94.057, 97.062)),
    ColumnShape(27, 8.000, 0, 0.00,
        (34.893, 69.090, 84.565, 89.038, 92.053, 94.494, 95.796, 97.046, 97.793, 98.402, 99.603,
         99.892)),
    ColumnShape(14_992, 2.805, 2, 0.95,
        (1.547, 2.614, 3.552, 4.426, 5.071, 5.786, 6.534, 7.297, 8.110, 8.974, 12.510, 15.639,
         20.683, 28.456, 34.151, 40.374, 48.110, 53.932, 62.148, 72.320, 78.415, 84.489, 90.119,
         92.783)),
    ColumnShape(5_461_306, 1.062, 0, 0.98,
        (3.440, 5.977, 8.194, 9.236, 10.259, 11.236, 12.109, 12.986, 13.781, 14.429, 18.093,
         20.406, 24.291, 29.438, 32.672, 35.705, 39.484, 42.253, 45.808, 50.054, 52.673, 55.392,
         58.352, 60.658)),
    ColumnShape(10, 2.000, 0, 0.00,
        (46.026, 59.196, 70.509, 78.966, 84.261, 88.796, 93.148, 97.370, 99.999)),
    ColumnShape(5_652, 3.776, 2, 0.95,
        (3.197, 6.028, 8.707, 11.032, 13.125, 14.977, 17.018, 18.867, 20.521, 21.051, 25.656,
         30.195, 37.201, 46.349, 52.990, 60.015, 68.278, 74.068, 81.343, 88.653, 92.509, 95.765,
         97.994)),
    ColumnShape(2_173, 3.931, 3, 0.88,
        (44.149, 78.587, 80.508, 81.105, 82.032, 82.607, 83.171, 83.670, 84.032, 84.313, 85.610,
         86.560, 88.013, 90.090, 91.440, 92.816, 94.301, 95.357, 96.693, 98.162, 98.875)),
    ColumnShape(4, 2.000, 3, 0.87,
        (44.188, 63.186, 81.694)),
    ColumnShape(7_046_547, 1.012, 0, 0.99,
        (3.449, 5.960, 8.170, 9.216, 10.228, 11.156, 11.857, 12.827, 13.697, 14.433, 18.072,
         20.275, 23.493, 28.109, 31.064, 33.840, 37.488, 40.122, 43.471, 47.479, 49.976, 52.293,
         55.051, 57.077)),
    ColumnShape(18, 0.900, 0, 0.00,
        (76.147, 89.735, 98.263, 99.027, 99.558, 99.936, 99.968, 99.980, 99.996)),
    ColumnShape(15, 8.000, 0, 0.00,
        (43.725, 63.745, 75.840, 82.814, 88.575, 94.182, 96.627, 98.176, 99.029, 99.483)),
    ColumnShape(286_181, 1.550, 0, 0.97,
        (5.297, 10.099, 14.676, 18.949, 22.406, 24.548, 26.788, 28.845, 30.511, 31.897, 37.387,
         40.828, 45.295, 51.063, 54.407, 57.844, 61.684, 64.472, 68.259, 73.180, 76.331, 79.530,
         82.900, 85.023)),
    ColumnShape(105, 8.000, 3, 0.87,
        (44.144, 58.379, 69.157, 77.193, 81.183, 83.979, 87.056, 90.466, 93.398, 95.449, 98.137,
         99.090, 99.812)),
    ColumnShape(142_572, 1.558, 0, 0.88,
        (44.182, 48.347, 50.177, 51.769, 53.255, 54.684, 55.753, 56.408, 57.378, 58.119, 60.306,
         61.705, 63.720, 66.980, 68.898, 71.206, 73.749, 75.605, 78.264, 81.790, 83.918, 86.143,
         88.496, 89.973)),
)
# fmt: on

KAGGLE_TABLE_SIZES: Final = tuple(column.num_embeddings for column in KAGGLE_COLUMNS)
