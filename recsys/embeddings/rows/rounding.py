"""Rounding to bfloat16: the rule, and its reference in plain PyTorch.

For a number between two such numbers, at a fraction f of the distance,

    stochastic rounding   rounds up with probability f. This is exact on average, so many small
                          steps add up, while rounding to nearest would lose each of them
    rounding to nearest   takes the nearer number; if both are equally near, the even one

Numbers that bfloat16 can represent do not change. Above the largest finite number both methods
round to nearest, so large numbers become infinity. NaN stays NaN.

The random bits are a hash of (seed, step, table, row, column), so a run repeats to the bit for any
number of threads and any order of rows. The hash is SplitMix64: to fold in a number n, it takes the
element n + 1 of the sequence that starts at the current key.

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
    "fold",
    "round_by",
    "round_reference",
    "table_key",
]

_MASK = 2**64 - 1
# Constants of SplitMix64.
GOLDEN, FACTOR1, FACTOR2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# Bits of float32 numbers without the sign: infinity, and the largest bfloat16.
INFINITY = 0x7F800000
LARGEST_BFLOAT16 = 0x7F7F0000


def table_key(seed: int, step: int, table: int) -> int:
    """The hash of (seed, step, table); unsigned, 64 bits.

    Args:
        seed: Any integer.
        step: Number of the update.
        table: Number of the table.
    """
    return fold(fold(fold(0, seed), step), table)


def fold(key: int, number: int) -> int:
    """The hash of a key and one more number; unsigned, 64 bits."""
    mixed = (key + (number + 1) * GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * FACTOR1) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * FACTOR2) & _MASK
    return mixed ^ (mixed >> 31)


def round_reference(values: Tensor, keys: Sequence[int] | None) -> Tensor:
    """Round rows to bfloat16 as kernels do, in plain PyTorch.

    Args:
        values: The rows.
        keys: The hash of (seed, step, table, row) for each row; None to round to nearest.

    Shape:
        values (N, D) float32; keys (N,); result (N, D).
    """
    chance = None
    if keys is not None:
        columns = range(values.shape[1])
        hashes = [[fold(key, column) >> 32 for column in columns] for key in keys]
        chance = torch.tensor(hashes, dtype=torch.int64).view(values.shape)
    return round_by(values, chance)


def round_by(values: Tensor, chance: Tensor | None) -> Tensor:
    """Round to bfloat16 by given random bits, in plain PyTorch.

    Args:
        values: The rows.
        chance: 32 random bits for each number; None to round to nearest.

    Shape:
        values (N, D) float32; chance (N, D) int64; result (N, D).
    """
    bits = values.contiguous().view(torch.int32).long()
    magnitude = bits & 0x7FFFFFFF
    fixed = magnitude << 16
    if chance is None:
        chance = 0x7FFFFFFF + ((fixed >> 32) & 1)
    chance = torch.where(magnitude > LARGEST_BFLOAT16, 1 << 31, chance)
    stored = (fixed + chance) >> 32
    stored = torch.where(magnitude > INFINITY, 0x7FC0, stored) | ((bits >> 16) & 0x8000)
    # Through int16, because some devices do not support uint16.
    return (
        torch.where(stored > 0x7FFF, stored - 0x10000, stored).to(torch.int16).view(torch.bfloat16)
    )
