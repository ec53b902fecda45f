"""How a synthetic sample is made: the kernel of `recsys.datasets.synthetic`.

Every random number is a hash of (seed, what it is for, time or row), so a sample needs no other
sample and no state. A sample's time is its place in the sequence; what it looks up and how its
label is planted may change with it.

Popularity drift is in `occupant`. Time is cut into cycles of 1e6 / drift samples. In every cycle a
column's ranks are matched in pairs by a random reflection of [0, num_embeddings), and each pair
swaps its rows once, at a moment of its own. So at any time every rank has one row and every row one
rank, the popularity curve stays as it is, and the rows of a time follow from the time alone: a
reflection of a reflection is a translation, so however many cycles have passed, they are one
addition.

Shape letters: B samples, F categorical features, I dense features, P column pairs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from recsys.datasets.criteo_shape import NUM_FACTORS, NUM_GROUPS
from recsys.jit import kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GUIDE_SIZE", "Made", "Recipe", "bijection_key", "make_samples", "occupant", "split_key"]

# Buckets that shares are looked up in before a popularity curve is searched.
GUIDE_SIZE: Final = 1 << 12

# What a hash is for: the counters of each purpose start here.
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_DRAW, _GROUP, _ROW, _BIJECTION, _DENSE, _FACTOR, _LABEL, _DRIFT, _CHANGE, _SPLIT = (
    np.uint64(purpose << 32) for purpose in range(1, 11)
)
# Drift is a share per so many samples.
_DRIFT_SAMPLES: Final = 1e6


class Made(NamedTuple):
    """Samples as the kernel writes them.

    Shape:
        dense (B, I); rows (F, B); logit_parts (3, B): what dense features, rows and pairs of rows
        add to the logit, its bias left out; labels (B,).
    """

    dense: NDArray[np.float32]
    rows: NDArray[np.int64]
    logit_parts: NDArray[np.float64]
    labels: NDArray[np.float32]


class Recipe(NamedTuple):
    """All that samples are made from, laid out for the kernel.

    Shape:
        edges, shares: the columns' popularity curves end to end; strengths: how much the rows of
        each of their segments matter, 0 to 1; guide (F, 4096): where in them to start looking for
        a share in [j / 4096, (j + 1) / 4096); sizes to couplings (F,); pairs (P, 2) columns; dense
        (I, 6), the fields of `DenseShape`; changes: rising times of preference changes.
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
    changes: NDArray[np.int64]
    changed_share: float


def bijection_key(seed: np.uint64, column: int) -> int:
    """A 64-bit number for a column's bijection between ranks and rows."""
    return int(_hash(seed, _BIJECTION + np.uint64(column)))


def split_key(seed: np.uint64) -> np.uint64:
    """What decides, hashed with a group's number, which of its samples are held out."""
    return np.uint64(_hash(seed, _SPLIT))


@kernel
def make_samples(
    times_B: NDArray[np.int64], recipe: Recipe, gain: float, bias: float, made: Made
) -> None:
    """Fill `made` with the samples of the given times, one after the other, on the calling thread.

    A sample's label is 1 with probability sigmoid(gain * score + bias).
    """
    num_columns, num_dense = len(recipe.sizes), len(recipe.dense)
    row_keys = np.empty(num_columns, np.uint64)
    drift_keys = np.empty(num_columns, np.uint64)
    for column in range(num_columns):
        row_keys[column] = _hash(recipe.seed, _ROW + np.uint64(column))
        drift_keys[column] = _hash(recipe.seed, _DRIFT + np.uint64(column))
    row_hashes, strengths = np.empty(num_columns, np.uint64), np.empty(num_columns)
    group_uniforms = np.empty(NUM_GROUPS)
    factor_normals, factor_uniforms = np.empty(NUM_FACTORS), np.empty(NUM_FACTORS)

    for position in range(len(times_B)):
        time = times_B[position]
        sample = _hash(recipe.seed, np.uint64(time))
        progress = time * recipe.drift / _DRIFT_SAMPLES
        for group in range(NUM_GROUPS):
            group_uniforms[group] = _uniform(_hash(sample, _GROUP + np.uint64(group)))
        for factor in range(NUM_FACTORS):
            factor_hash = _hash(sample, _FACTOR + np.uint64(factor))
            factor_uniforms[factor] = _uniform(factor_hash)
            factor_normals[factor] = _normal(_mix(factor_hash))

        row_score = 0.0
        for column in range(num_columns):
            draw = _hash(sample, _DRAW + np.uint64(column))
            uniform = _uniform(draw)
            # `_uniform` leaves the low 11 bits of a hash unused.
            if np.float64(draw & np.uint64(2047)) < recipe.couplings[column] * 2048.0:
                uniform = group_uniforms[recipe.groups[column]]
            rank, segment = _rank(uniform, recipe.guide[column], recipe.edges, recipe.shares)
            strengths[column] = recipe.strengths[segment]
            size = recipe.sizes[column]
            if progress > 0.0:
                rank = occupant(rank, size, progress, drift_keys[column])
            made.rows[column, position] = (
                rank * recipe.multipliers[column] + recipe.shifts[column]
            ) % size
            row_hash = _hash(row_keys[column], np.uint64(rank))
            if len(recipe.changes):
                row_hash = _changed(row_hash, time, recipe.changes, recipe.changed_share)
            row_hashes[column] = row_hash
            row_score += strengths[column] * _normal(row_hash)

        pair_score = 0.0
        for pair in range(len(recipe.pairs)):
            first, second = recipe.pairs[pair, 0], recipe.pairs[pair, 1]
            strength = recipe.pair_effect * strengths[first] * strengths[second]
            pair_score += strength * _dot(row_hashes[first], row_hashes[second])

        dense_score = 0.0
        for feature in range(num_dense):
            missing, location, scale, shared, loading, effect = recipe.dense[feature]
            value = 0.0
            if factor_uniforms[int(shared)] >= missing:
                own = _normal(_hash(sample, _DENSE + np.uint64(feature)))
                mixed = loading * factor_normals[int(shared)] + math.sqrt(1 - loading**2) * own
                count = math.floor(math.expm1(max(location + scale * mixed, 0.0)) + 0.5)
                value = math.log1p(count)
            made.dense[position, feature] = value
            dense_score += effect * value

        logit = gain * (dense_score + row_score + pair_score) + bias
        is_click = _uniform(_hash(sample, _LABEL)) < 1 / (1 + math.exp(-logit))
        made.logit_parts[0, position] = gain * dense_score
        made.logit_parts[1, position] = gain * row_score
        made.logit_parts[2, position] = gain * pair_score
        made.labels[position] = 1.0 if is_click else 0.0


@kernel
def _rank(
    uniform: float,
    guide: NDArray[np.int32],
    edges: NDArray[np.int64],
    shares: NDArray[np.float64],
) -> tuple[int, int]:
    """The inverse of a popularity curve: a rank, and the segment of the curve it lies in."""
    segment = guide[int(uniform * GUIDE_SIZE)]
    while shares[segment + 1] <= uniform:
        segment += 1
    within = (uniform - shares[segment]) / (shares[segment + 1] - shares[segment])
    first, width = int(edges[segment]), int(edges[segment + 1] - edges[segment])
    return first + min(int(within * width), width - 1), segment


@kernel
def occupant(rank: int, size: int, progress: float, key: np.uint64) -> int:
    """Which row has a rank after `progress` cycles of drift, named by the rank it had at first.

    After k whole cycles rank r has row C_k + r where k is even, C_k - r where it is odd, modulo
    size; C_0 is 0, the others are random. During cycle k, pairs of ranks that add up to its centre
    swap, which leads from the one to the next.
    """
    cycle = int(progress)
    direction = 1 if cycle % 2 == 0 else -1
    offset = 0
    if cycle > 0:
        offset = int(_hash(key, np.uint64(cycle)) % np.uint64(size))
    next_offset = int(_hash(key, np.uint64(cycle + 1)) % np.uint64(size))
    partner = (direction * (next_offset - offset) - rank) % size
    moment = _uniform(_hash(_mix(key + np.uint64(cycle)), np.uint64(min(rank, partner))))
    if moment < progress - cycle:
        rank = partner
    return (offset + direction * rank) % size


@kernel
def _changed(row_hash: np.uint64, time: int, changes: NDArray[np.int64], share: float) -> np.uint64:
    """What a row's effects are made from at a time: drawn anew by the last change that met it."""
    for change in range(len(changes) - 1, -1, -1):
        if time >= changes[change]:
            draw = _hash(row_hash, _CHANGE + np.uint64(change))
            if _uniform(draw) < share:
                drawn: np.uint64 = _mix(draw)
                return drawn
    return row_hash


@kernel
def _hash(key: np.uint64, counter: np.uint64) -> np.uint64:
    """Number `counter` of the SplitMix64 stream that starts at key."""
    mixed: np.uint64 = _mix(key + (counter + np.uint64(1)) * _GOLDEN)
    return mixed


@kernel
def _mix(bits: np.uint64) -> np.uint64:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@kernel
def _uniform(bits: np.uint64) -> float:
    """A number in [0, 1)."""
    return np.float64(bits >> np.uint64(11)) * 2.0**-53


@kernel
def _lane(bits: np.uint64, lane: int) -> float:
    """One of four independent numbers in [-0.5, 0.5)."""
    return np.float64((bits >> np.uint64(16 * lane)) & np.uint64(0xFFFF)) * 2.0**-16 - 0.5


@kernel
def _normal(bits: np.uint64) -> float:
    """About N(0, 1): four uniform numbers added up, variance 4 / 12 scaled to 1."""
    total = 0.0
    for lane in range(4):
        total += _lane(bits, lane)
    return total * math.sqrt(3.0)


@kernel
def _dot(first: np.uint64, second: np.uint64) -> float:
    """The product of two rows' hidden vectors of four numbers; variance 4 / 144 scaled to 1."""
    # Mixed once more: the unmixed lanes already make the rows' own effects.
    first, second = _mix(first), _mix(second)
    total = 0.0
    for lane in range(4):
        total += _lane(first, lane) * _lane(second, lane)
    return total * 6.0
