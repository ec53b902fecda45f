"""The kernel that generates the samples of `SyntheticCriteo`.

Every random number is a hash of (seed, purpose, time or row), so a sample depends on no other
sample and on no state. A sample's time is its place in the sequence. Its lookups may change with
time.

`drift_cycle` and `occupant` implement popularity drift. Time is divided into cycles of 1e6 / drift
samples. In every cycle, a random reflection of [0, num_embeddings) pairs the ranks of a column, and
each pair swaps its rows once, at a random moment. So at any time ranks and rows map one-to-one, and
the popularity curve does not change. The rows of a time need no history: two reflections make a
translation, so any number of past cycles is one addition.

Samples are generated in blocks, step by step, one function per step. The inner loops run over
columns and have few branches and divisions, so the compiler vectorises them, and the numbers of a
block stay in the cache.

Shape letters: B samples, F categorical features, I dense features, P column pairs,
b samples of a block.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys._support.jit import kernel, kernel_part
from recsys.datasets.synthetic.shape import NUM_FACTORS, NUM_GROUPS

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "GUIDE_SIZE",
    "GeneratorParameters",
    "SampleArrays",
    "bijection_key",
    "drift_cycle",
    "make_samples",
    "occupant",
]

# Buckets of shares; each has the segment at which the search in a popularity curve starts.
GUIDE_SIZE: Final = 1 << 12

# The counter of the first hash of each purpose.
_DRAW, _GROUP, _ROW, _BIJECTION, _DENSE, _FACTOR, _LABEL, _DRIFT = (
    np.uint64(purpose << 32) for purpose in range(1, 9)
)
_BLOCK_SAMPLES: Final = 128
# Drift is a share per this many samples.
_DRIFT_SAMPLES: Final = 1e6


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
    keys_b = np.empty(_BLOCK_SAMPLES, np.uint64)
    ranks_bF = np.empty((_BLOCK_SAMPLES, num_columns), np.int64)
    hashes_bF = np.empty((_BLOCK_SAMPLES, num_columns), np.uint64)
    strengths_bF = np.empty((_BLOCK_SAMPLES, num_columns))
    for start in range(0, len(times_B), _BLOCK_SAMPLES):
        times_b = times_B[start : start + _BLOCK_SAMPLES]
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
