"""Rounding to bfloat16: the rule, and how kernels read and write such rows.

For a number between two such numbers, at a fraction f of the distance,

    stochastic rounding   rounds up with probability f. This is exact on average, so many small
                          steps add up, while rounding to nearest would lose each of them
    rounding to nearest   takes the nearer number; if both are equally near, the even one

Numbers that bfloat16 can represent do not change. Above the largest finite number both methods
round to nearest, so large numbers become infinity. NaN stays NaN.

The random bits are a hash of (seed, step, table, row, column), so a run repeats to the bit for any
number of threads and any order of rows. The hash is SplitMix64: to fold in a number n, it takes the
element n + 1 of the sequence that starts at the current key.

numpy has no bfloat16. So a kernel sees these rows as uint16, and distinguishes them by this type.
It computes in float32: `widen` is exact, `narrow` rounds.

References:
    Steele, Lea, Flood (2014), Fast Splittable Pseudorandom Number Generators, Sec. 4 and Fig. 17.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from recsys._support.jit import kernel

__all__ = [
    "FACTOR1",
    "FACTOR2",
    "GOLDEN",
    "INFINITY",
    "LARGEST_BFLOAT16",
    "TO_NEAREST",
    "fold",
    "key_of_row",
    "narrow",
    "table_key",
    "widen",
]

_MASK = 2**64 - 1
# Constants of SplitMix64.
GOLDEN, FACTOR1, FACTOR2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# Bits of float32 numbers without the sign: infinity, and the largest bfloat16.
INFINITY = 0x7F800000
LARGEST_BFLOAT16 = 0x7F7F0000

# The tables' keys for kernels that round to nearest or not at all.
TO_NEAREST = np.zeros(0, np.bool_)

_GOLDEN, _FACTOR1, _FACTOR2 = np.uint64(GOLDEN), np.uint64(FACTOR1), np.uint64(FACTOR2)


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


def widen(stored: Any) -> Any:
    """In a kernel: convert a stored number to the dtype of the computation."""
    raise NotImplementedError("for kernels")


def narrow(stored: Any, value: Any, key: Any, column: Any) -> Any:
    """In a kernel: convert a computed number to the dtype of a row.

    Args:
        stored: The number to be replaced; only its type is used.
        value: The computed number.
        key: The result of `key_of_row`.
        column: Number of the column.
    """
    raise NotImplementedError("for kernels")


def key_of_row(keys: Any, table: Any, row: Any) -> Any:
    """In a kernel: the hash of a table's key and a row; False for `TO_NEAREST`."""
    raise NotImplementedError("for kernels")


@overload(widen)  # type: ignore[untyped-decorator]  # numba's
def _widen(stored: Any) -> Any:
    if isinstance(stored, types.Float):
        return _widen_nothing
    return _widen_bfloat16 if stored == types.uint16 else None


@overload(narrow)  # type: ignore[untyped-decorator]  # numba's
def _narrow(stored: Any, value: Any, key: Any, column: Any) -> Any:
    if isinstance(stored, types.Float):
        return _narrow_nothing
    if stored != types.uint16:
        return None
    return _nearest_bfloat16 if isinstance(key, types.Boolean) else _chance_bfloat16


@overload(key_of_row)  # type: ignore[untyped-decorator]  # numba's
def _key_of_row(keys: Any, table: Any, row: Any) -> Any:
    if keys.dtype == types.uint64:
        return _hash_of_row
    return _no_key


def _hash_of_row(keys: Any, table: Any, row: Any) -> Any:
    return _fold(keys[table], row)


def _no_key(keys: Any, table: Any, row: Any) -> Any:
    return False


def _widen_nothing(stored: Any) -> Any:
    return stored


def _narrow_nothing(stored: Any, value: Any, key: Any, column: Any) -> Any:
    return value


def _widen_bfloat16(stored: Any) -> Any:
    return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)


def _nearest_bfloat16(stored: Any, value: Any, key: Any, column: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    fixed = np.uint64(bits & np.uint32(0x7FFFFFFF)) << np.uint64(16)
    return _round_bfloat16(bits, np.uint64(0x7FFFFFFF) + ((fixed >> np.uint64(32)) & np.uint64(1)))


def _chance_bfloat16(stored: Any, value: Any, key: Any, column: Any) -> Any:
    return _round_bfloat16(np.float32(value).view(np.uint32), _fold(key, column) >> np.uint64(32))


@kernel
def _round_bfloat16(bits: np.uint32, chance: np.uint64) -> np.uint16:
    """Round by 32 random bits: up if the fraction and the bits add up to 2**32 or more.

    The bits of bfloat16 numbers, read as integers, are 0, 1, 2, ... in order of size, across powers
    of two as well. So a float32 is such an integer and a 32-bit fraction of the distance to the
    next.
    """
    magnitude = np.uint64(bits & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint64(LARGEST_BFLOAT16):
        chance = np.uint64(1 << 31)
    stored = ((magnitude << np.uint64(16)) + chance) >> np.uint64(32)
    if magnitude > np.uint64(INFINITY):
        stored = np.uint64(0x7FC0)
    return np.uint16(stored | np.uint64((bits >> np.uint32(16)) & np.uint32(0x8000)))


@kernel
def _fold(key: np.uint64, number: np.uint64) -> np.uint64:
    """`fold` in a kernel."""
    mixed = key + (np.uint64(number) + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FACTOR1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _FACTOR2
    return mixed ^ (mixed >> np.uint64(31))
