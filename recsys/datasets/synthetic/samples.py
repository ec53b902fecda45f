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
- Popularity may drift with time; see `SyntheticCriteo` and `drift_cycle`. Time is divided into
  cycles of 1e6 / drift samples. In every cycle, a random reflection of [0, num_embeddings) pairs
  the ranks of a column, and each pair swaps its rows once, at a random moment. So at any time ranks
  and rows map one-to-one, and the popularity curve does not change. The rows of a time need no
  history: two reflections make a translation, so any number of past cycles is one addition.

Samples are generated in blocks, step by step, one function per step. The inner loops run over
columns and have few branches and divisions, so the compiler vectorises them, and the numbers of a
block stay in the cache.

Shape letters: B samples, F categorical features, I dense features, P column pairs,
b samples of a block.
"""

from __future__ import annotations

import math
from functools import lru_cache
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
    NUM_GROUPS,
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

# Buckets of shares; each has the segment at which the search in a popularity curve starts.
GUIDE_SIZE: Final = 1 << 12

# The counter of the first hash of each purpose.
_DRAW, _GROUP, _ROW, _BIJECTION, _DENSE, _FACTOR, _LABEL, _DRIFT = (
    np.uint64(purpose << 32) for purpose in range(1, 9)
)
_KERNEL_BLOCK_SAMPLES: Final = 128
# Drift is a share per this many samples.
_DRIFT_SAMPLES: Final = 1e6


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
        ConfigError: a number is out of range.
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
        self.num_samples, num_test = int(num_samples), int(test_samples)
        _check(self.num_samples, sizes, drift, num_test)
        self.num_dense = len(KAGGLE_DENSE)
        self.table_sizes = {f"cat_{column}": size for column, size in enumerate(sizes)}
        self.splits = classic_splits(self.num_samples)
        if num_test:
            train_end, test_end = self.num_samples - 2 * num_test, self.num_samples - num_test
            self.splits = {
                "train": range(train_end),
                "test": range(train_end, test_end),
                "validation": range(test_end, self.num_samples),
            }
        self._drift, self._test_samples, self._seed = float(drift), num_test, int(seed)
        num_timed = max(self.num_samples if drift else 0, _NUM_CALIBRATION_SAMPLES)
        self._calibrated = _calibrated(self._seed, sizes, self._drift, num_timed)

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
        num_test = self._test_samples
        return (
            f"synthetic:criteo-kaggle {_VERSION} {self.num_samples} {self._seed} {sizes} "
            f"drift={self._drift!r}{f' test={num_test}' if num_test else ''}"
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
            "drift": self._drift,
            "test_samples": self._test_samples,
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


def _check(num_samples: int, sizes: tuple[int, ...], drift: float, test_samples: int) -> None:
    """Check the arguments of `SyntheticCriteo`, whose names are keys of `recsys train`.

    Raises:
        ConfigError: one is out of range.
    """
    most_test = (num_samples - 1) // 2
    for name, values, least, most in (
        ("num_samples", (num_samples,), 7, 2**63 - 1),
        ("table_sizes", sizes, 1, 2**31),  # a rank times a multiplier fits in 63 bits
        ("drift", (drift,), 0, 1e6),
        ("test_samples", (test_samples,), 0, most_test),
    ):
        for value in values:
            if not least <= value <= most:
                raise ConfigError(f"synthetic.{name} must be in [{least}, {most}], got {value}")


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


class SampleArrays(NamedTuple):
    """Samples as the kernel writes them.

    Shape:
        dense (B, I); rows (F, B); logits (B,) without the bias; labels (B,).
    """

    dense: NDArray[np.float32]
    rows: NDArray[np.int64]
    logits: NDArray[np.float64]
    labels: NDArray[np.float32]


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
    pair_effect: float
    dense: NDArray[np.float64]
    drift: float


def bijection_key(seed: np.uint64, column: int) -> int:
    """A 64-bit key for a column's bijection between ranks and rows."""
    return int(_hash(seed, _BIJECTION + np.uint64(column)))


@kernel
def make_samples(
    times_B: NDArray[np.int64],
    parameters: GeneratorParameters,
    gain: float,
    bias: float,
    arrays: SampleArrays,
) -> None:
    """Fill `arrays` with the samples of the given times, block by block, on the calling thread.

    A sample's label is 1 with probability sigmoid(gain * score + bias).
    """
    num_columns = len(parameters.sizes)
    keys_b = np.empty(_KERNEL_BLOCK_SAMPLES, np.uint64)
    ranks_bF = np.empty((_KERNEL_BLOCK_SAMPLES, num_columns), np.int64)
    hashes_bF = np.empty((_KERNEL_BLOCK_SAMPLES, num_columns), np.uint64)
    strengths_bF = np.empty((_KERNEL_BLOCK_SAMPLES, num_columns))
    for start in range(0, len(times_B), _KERNEL_BLOCK_SAMPLES):
        times_b = times_B[start : start + _KERNEL_BLOCK_SAMPLES]
        stop = start + len(times_b)
        logits = arrays.logits[start:stop]
        for position in range(len(times_b)):
            keys_b[position] = _hash(parameters.seed, np.uint64(times_b[position]))
        _draw_dense(parameters, keys_b, arrays.dense[start:stop], logits)
        _draw_ranks(parameters, keys_b[: len(times_b)], hashes_bF, ranks_bF, strengths_bF)
        if parameters.drift > 0.0:
            _apply_drift(parameters, times_b, ranks_bF)
        _number_rows(parameters, ranks_bF, arrays.rows[:, start:stop])
        _hash_rows(parameters, len(times_b), ranks_bF, hashes_bF)
        _add_rows(parameters, hashes_bF, strengths_bF, logits)
        for position in range(len(times_b)):
            logits[position] *= gain
            chance = 1 / (1 + math.exp(-(logits[position] + bias)))
            is_click = _uniform(_hash(keys_b[position], _LABEL)) < chance
            arrays.labels[start + position] = 1.0 if is_click else 0.0


@kernel_part
def _draw_dense(
    parameters: GeneratorParameters,
    keys_b: NDArray[np.uint64],
    dense_bI: NDArray[np.float32],
    scores_b: NDArray[np.float64],
) -> None:
    """Draw the dense features and their part of the score."""
    shapes = parameters.dense
    normals, uniforms = np.empty(NUM_FACTORS), np.empty(NUM_FACTORS)
    for position in range(len(dense_bI)):
        key = keys_b[position]
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
            dense_bI[position, feature] = value
            score += effect * value
        scores_b[position] = score


@kernel_part
def _draw_ranks(
    parameters: GeneratorParameters,
    keys_b: NDArray[np.uint64],
    draws_bF: NDArray[np.uint64],
    ranks_bF: NDArray[np.int64],
    strengths_bF: NDArray[np.float64],
) -> None:
    """Draw a rank per column from its popularity curve, with the strength of its segment."""
    groups, couplings = parameters.groups, parameters.couplings
    edges, shares, strengths = parameters.edges, parameters.shares, parameters.strengths
    group_uniforms = np.empty(NUM_GROUPS)
    for position in range(len(keys_b)):
        key = keys_b[position]
        for group in range(NUM_GROUPS):
            group_uniforms[group] = _uniform(_hash(key, _GROUP + np.uint64(group)))
        for column in range(len(groups)):
            draws_bF[position, column] = _hash(key, _DRAW + np.uint64(column))
        for column in range(len(groups)):
            draw = draws_bF[position, column]
            uniform = _uniform(draw)
            # `_uniform` leaves the low 11 bits of a hash unused.
            if np.float64(draw & np.uint64(2047)) < couplings[column] * 2048.0:
                uniform = group_uniforms[groups[column]]
            rank, segment = _rank(uniform, parameters.guide[column], edges, shares)
            ranks_bF[position, column] = rank
            strengths_bF[position, column] = strengths[segment]


@kernel_part
def _apply_drift(
    parameters: GeneratorParameters, times_b: NDArray[np.int64], ranks_bF: NDArray[np.int64]
) -> None:
    """Replace ranks by the rows that have them at these times; a row is named by its first rank."""
    sizes = parameters.sizes
    num_columns = len(sizes)
    offsets, centres = np.empty(num_columns, np.int64), np.empty(num_columns, np.int64)
    moment_keys = np.empty(num_columns, np.uint64)
    known_cycle = -1
    for position in range(len(times_b)):
        progress = times_b[position] * parameters.drift / _DRIFT_SAMPLES
        cycle = int(progress)
        if cycle != known_cycle:
            known_cycle = cycle
            for column in range(num_columns):
                key = _hash(parameters.seed, _DRIFT + np.uint64(column))
                offset, centre, moment_key = drift_cycle(cycle, sizes[column], key)
                offsets[column], centres[column] = offset, centre
                moment_keys[column] = moment_key
        for column in range(num_columns):
            ranks_bF[position, column] = occupant(
                ranks_bF[position, column],
                sizes[column],
                cycle,
                progress - cycle,
                offsets[column],
                centres[column],
                moment_keys[column],
            )


@kernel_part
def _number_rows(
    parameters: GeneratorParameters, ranks_bF: NDArray[np.int64], rows_Fb: NDArray[np.int64]
) -> None:
    """Convert ranks to row numbers by the columns' bijections."""
    for column in range(len(rows_Fb)):
        # Unsigned, because a signed remainder takes longer.
        size = np.uint64(parameters.sizes[column])
        multiplier, shift = parameters.multipliers[column], parameters.shifts[column]
        for position in range(rows_Fb.shape[1]):
            row = np.uint64(ranks_bF[position, column] * multiplier + shift)
            rows_Fb[column, position] = row % size


@kernel_part
def _hash_rows(
    parameters: GeneratorParameters,
    num_samples: int,
    ranks_bF: NDArray[np.int64],
    hashes_bF: NDArray[np.uint64],
) -> None:
    """Compute the hash of each row that its effects derive from."""
    num_columns = len(parameters.sizes)
    row_keys = np.empty(num_columns, np.uint64)
    for column in range(num_columns):
        row_keys[column] = _hash(parameters.seed, _ROW + np.uint64(column))
    for position in range(num_samples):
        for column in range(num_columns):
            hashes_bF[position, column] = _hash(
                row_keys[column], np.uint64(ranks_bF[position, column])
            )


@kernel_part
def _add_rows(
    parameters: GeneratorParameters,
    hashes_bF: NDArray[np.uint64],
    strengths_bF: NDArray[np.float64],
    scores_b: NDArray[np.float64],
) -> None:
    """Add the parts of the scores from rows and from pairs of rows."""
    pairs = parameters.pairs
    effects = np.empty(hashes_bF.shape[1])
    for position in range(len(scores_b)):
        strengths, hashes = strengths_bF[position], hashes_bF[position]
        for column in range(len(effects)):
            effects[column] = strengths[column] * _normal(hashes[column])
        row_score = 0.0
        for column in range(len(effects)):
            row_score += effects[column]
        pair_score = 0.0
        for pair in range(len(pairs)):
            first, second = pairs[pair, 0], pairs[pair, 1]
            strength = parameters.pair_effect * strengths[first] * strengths[second]
            pair_score += strength * _dot(hashes[first], hashes[second])
        scores_b[position] = scores_b[position] + row_score + pair_score


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
def drift_cycle(cycle: int, size: int, key: np.uint64) -> tuple[np.int64, np.int64, np.uint64]:
    """The arguments of `occupant` for one cycle of a column's drift.

    After k complete cycles, modulo size, rank r has row C_k + r if k is even and C_k - r if k is
    odd. C_0 is 0, the others are random. In cycle k, ranks r and centre - r swap their rows, which
    turns the mapping of k into that of k + 1.

    Returns:
        C_k; the centre; the key of the moments at which pairs swap.
    """
    # np.int64, not int: numba would keep an int unsigned, and mixing signs gives floats.
    offset = np.int64(0)
    if cycle > 0:
        offset = np.int64(_hash(key, np.uint64(cycle)) % np.uint64(size))
    next_offset = np.int64(_hash(key, np.uint64(cycle + 1)) % np.uint64(size))
    centre = next_offset - offset if cycle % 2 == 0 else offset - next_offset
    return offset, centre % size, _mix(key + np.uint64(cycle))


@kernel
def occupant(
    rank: int,
    size: int,
    cycle: int,
    progress: float,
    offset: int,
    centre: int,
    moment_key: np.uint64,
) -> int:
    """The row that has a rank during a cycle of drift, named by its first rank.

    Args:
        rank: In [0, size).
        size: Rows of the column.
        cycle: How many cycles have passed.
        progress: The passed share of the current cycle, 0 to 1.
        offset: Of `drift_cycle`.
        centre: Of `drift_cycle`.
        moment_key: Of `drift_cycle`.
    """
    # One addition or subtraction brings a sum back into [0, size), without a division.
    partner = centre - rank
    partner += size if partner < 0 else 0
    moment = _uniform(_hash(moment_key, np.uint64(min(rank, partner))))
    rank = partner if moment < progress else rank
    row = offset + rank if cycle % 2 == 0 else offset - rank
    row += size if row < 0 else 0
    row -= size if row >= size else 0
    return row


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
