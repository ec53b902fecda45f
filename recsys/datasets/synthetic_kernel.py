"""How a synthetic sample is made: the kernel of `recsys.datasets.synthetic`.

Every random number is a hash of (seed, what it is for, sample number or row), so a sample needs no
other sample and no state.

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

__all__ = ["GUIDE_SIZE", "Made", "Recipe", "bijection_key", "make_samples"]

# Buckets that shares are looked up in before a popularity curve is searched.
GUIDE_SIZE: Final = 1 << 12

# What a hash is for: the counters of each purpose start here.
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_DRAW, _GROUP, _ROW, _BIJECTION, _DENSE, _FACTOR, _LABEL = (
    np.uint64(purpose << 32) for purpose in range(1, 8)
)


class Made(NamedTuple):
    """Samples as the kernel writes them.

    Shape:
        dense (B, I); rows (F, B); logits (B,); labels (B,).
    """

    dense: NDArray[np.float32]
    rows: NDArray[np.int64]
    logits: NDArray[np.float64]
    labels: NDArray[np.float32]


class Recipe(NamedTuple):
    """All that samples are made from, laid out for the kernel.

    Shape:
        edges, shares: the columns' popularity curves end to end; guide (F, 4096): where in them to
        start looking for a share in [j / 4096, (j + 1) / 4096); sizes to row_effects (F,); pairs
        (P, 2) columns and pair_effects (P,); dense (I, 6), the fields of `DenseShape`.
    """

    seed: np.uint64
    edges: NDArray[np.int64]
    shares: NDArray[np.float64]
    guide: NDArray[np.int32]
    sizes: NDArray[np.int64]
    multipliers: NDArray[np.int64]
    shifts: NDArray[np.int64]
    groups: NDArray[np.int64]
    couplings: NDArray[np.float64]
    row_effects: NDArray[np.float64]
    pairs: NDArray[np.int64]
    pair_effects: NDArray[np.float64]
    dense: NDArray[np.float64]


def bijection_key(seed: np.uint64, column: int) -> int:
    """A 64-bit number for a column's bijection between ranks and rows."""
    return int(_hash(seed, _BIJECTION + np.uint64(column)))


@kernel
def make_samples(
    samples: NDArray[np.int64], recipe: Recipe, gain: float, bias: float, made: Made
) -> None:
    """Fill `made` with the given samples, one after the other, on the calling thread.

    A sample's label is 1 with probability sigmoid(gain * score + bias).
    """
    num_columns, num_dense = len(recipe.sizes), len(recipe.dense)
    row_keys = np.empty(num_columns, np.uint64)
    for column in range(num_columns):
        row_keys[column] = _hash(recipe.seed, _ROW + np.uint64(column))
    row_hashes = np.empty(num_columns, np.uint64)
    group_uniforms = np.empty(NUM_GROUPS)
    factor_normals, factor_uniforms = np.empty(NUM_FACTORS), np.empty(NUM_FACTORS)

    for position in range(len(samples)):
        sample = _hash(recipe.seed, np.uint64(samples[position]))
        for group in range(NUM_GROUPS):
            group_uniforms[group] = _uniform(_hash(sample, _GROUP + np.uint64(group)))
        for factor in range(NUM_FACTORS):
            factor_hash = _hash(sample, _FACTOR + np.uint64(factor))
            factor_uniforms[factor] = _uniform(factor_hash)
            factor_normals[factor] = _normal(_mix(factor_hash))

        score = 0.0
        for column in range(num_columns):
            draw = _hash(sample, _DRAW + np.uint64(column))
            uniform = _uniform(draw)
            # `_uniform` leaves the low 11 bits of a hash unused.
            if np.float64(draw & np.uint64(2047)) < recipe.couplings[column] * 2048.0:
                uniform = group_uniforms[recipe.groups[column]]
            rank = _rank(uniform, recipe.guide[column], recipe.edges, recipe.shares)
            made.rows[column, position] = (
                rank * recipe.multipliers[column] + recipe.shifts[column]
            ) % recipe.sizes[column]
            row_hashes[column] = _hash(row_keys[column], np.uint64(rank))
            score += recipe.row_effects[column] * _normal(row_hashes[column])

        for pair in range(len(recipe.pairs)):
            first, second = recipe.pairs[pair, 0], recipe.pairs[pair, 1]
            score += recipe.pair_effects[pair] * _dot(row_hashes[first], row_hashes[second])

        for feature in range(num_dense):
            missing, location, scale, shared, loading, effect = recipe.dense[feature]
            value = 0.0
            if factor_uniforms[int(shared)] >= missing:
                own = _normal(_hash(sample, _DENSE + np.uint64(feature)))
                mixed = loading * factor_normals[int(shared)] + math.sqrt(1 - loading**2) * own
                count = math.floor(math.expm1(max(location + scale * mixed, 0.0)) + 0.5)
                value = math.log1p(count)
            made.dense[position, feature] = value
            score += effect * value

        logit = gain * score + bias
        is_click = _uniform(_hash(sample, _LABEL)) < 1 / (1 + math.exp(-logit))
        made.logits[position] = logit
        made.labels[position] = 1.0 if is_click else 0.0


@kernel
def _rank(
    uniform: float,
    guide: NDArray[np.int32],
    edges: NDArray[np.int64],
    shares: NDArray[np.float64],
) -> int:
    """The inverse of a popularity curve."""
    segment = guide[int(uniform * GUIDE_SIZE)]
    while shares[segment + 1] <= uniform:
        segment += 1
    within = (uniform - shares[segment]) / (shares[segment + 1] - shares[segment])
    first, width = int(edges[segment]), int(edges[segment + 1] - edges[segment])
    return first + min(int(within * width), width - 1)


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
