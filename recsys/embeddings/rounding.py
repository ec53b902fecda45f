"""How numbers are rounded to 16 bits: the rule, and its reference in plain PyTorch.

Of a number that lies between two stored ones, at a share f of the way,

    stochastic rounding   takes the upper one with probability f: right on average, so that many
                          small steps add up where rounding to the nearest would lose each of them
    rounding to nearest   takes the nearer one, of two equally near the even one

What 16 bits hold exactly stays. Beyond the largest number there is no upper one: there the nearest
counts in either case, so what is out of reach is infinity. NaN stays NaN.

Chance is a hash of (seed, step, table, row, column) and nothing else, so a run repeats to the bit
however many threads there are and in whatever order rows come. The hash is SplitMix64: one number
is folded in by going on as many steps in its sequence as the number says.

References:
    Steele, Lea, Flood (2014), Fast Splittable Pseudorandom Number Generators, Sec. 4 and Fig. 17.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "FACTOR1",
    "FACTOR2",
    "GOLDEN",
    "INFINITY",
    "LARGEST_BFLOAT16",
    "LARGEST_FLOAT16",
    "NORMAL_FLOAT16",
    "REBIAS",
    "fold",
    "round_by",
    "round_reference",
    "table_key",
]

_MASK = 2**64 - 1
# Of SplitMix64.
GOLDEN, FACTOR1, FACTOR2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# float32 as bits, without the sign.
INFINITY = 0x7F800000
# The same: the largest number of bfloat16 and of float16, and the smallest normal one of float16.
LARGEST_BFLOAT16 = 0x7F7F0000
LARGEST_FLOAT16, NORMAL_FLOAT16 = 0x477FE000, 0x38800000
# What float16 counts exponents from, in float32's bits.
REBIAS = 112 << 23


def table_key(seed: int, step: int, table: int) -> int:
    """What the hash makes of these three; unsigned, 64 bits.

    Args:
        seed: Any number.
        step: Number of the update.
        table: Number of the table.
    """
    return fold(fold(fold(0, seed), step), table)


def fold(key: int, number: int) -> int:
    """What the hash makes of a key and one more number; unsigned, 64 bits."""
    mixed = (key + (number + 1) * GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * FACTOR1) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * FACTOR2) & _MASK
    return mixed ^ (mixed >> 31)


def round_reference(values: Tensor, dtype: torch.dtype, keys: Sequence[int] | None) -> Tensor:
    """What kernels make of rows, in plain PyTorch.

    Args:
        values: Any numbers.
        dtype: bfloat16 or float16.
        keys: What the hash has made of each row and all that comes before it; None rounds to
            nearest.

    Shape:
        values (N, D) float32; keys (N,); result (N, D).
    """
    chance = None
    if keys is not None:
        columns = range(values.shape[1])
        hashes = [[fold(key, column) >> 32 for column in columns] for key in keys]
        chance = torch.tensor(hashes, dtype=torch.int64).view(values.shape)
    return round_by(values, dtype, chance)


def round_by(values: Tensor, dtype: torch.dtype, chance: Tensor | None) -> Tensor:
    """Round by what chance has drawn, in plain PyTorch.

    Args:
        values: Any numbers.
        dtype: bfloat16 or float16.
        chance: Integers of 32 bits; None rounds to nearest.

    Shape:
        values (N, D) float32; chance (N, D) int64; result (N, D).
    """
    bits = values.contiguous().view(torch.int32).long()
    magnitude = bits & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        fixed, largest, quiet = magnitude << 16, LARGEST_BFLOAT16, 0x7FC0
    else:
        mantissa, exponent = (magnitude & 0x7FFFFF) | 0x800000, magnitude >> 23
        fixed = torch.where(
            magnitude < NORMAL_FLOAT16,
            (mantissa << 32) >> (126 - exponent).clamp(0, 63),
            (magnitude - REBIAS) << 19,
        )
        largest, quiet = LARGEST_FLOAT16, 0x7E00
    if chance is None:
        chance = 0x7FFFFFFF + ((fixed >> 32) & 1)
    chance = torch.where(magnitude > largest, 1 << 31, chance)
    stored = (fixed + chance) >> 32
    if dtype == torch.float16:
        stored = stored.clamp(max=0x7C00)
    stored = torch.where(magnitude > INFINITY, quiet, stored) | ((bits >> 16) & 0x8000)
    # By int16: not every device knows uint16.
    return torch.where(stored > 0x7FFF, stored - 0x10000, stored).to(torch.int16).view(dtype)
