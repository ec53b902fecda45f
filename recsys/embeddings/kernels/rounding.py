"""How kernels read and write rows of bfloat16 and float16.

numpy has no bfloat16 and numba no float16. So a kernel sees bfloat16 rows as uint16 and float16
rows as int16, and distinguishes them by these types. It computes in float32: `widen` is exact,
`narrow` rounds. For a number between two 16-bit numbers, at a fraction f of the distance,

    stochastic rounding   rounds up with probability f. This is exact on average, so many small
                          steps add up, while rounding to nearest would lose each of them
    rounding to nearest   takes the nearer number; if both are equally near, the even one

Numbers that 16 bits can represent do not change. Above the largest finite number both methods round
to nearest, so large numbers become infinity. NaN stays NaN.

The random bits are a hash of (seed, step, table, row, column), so a run repeats to the bit for any
number of threads and any order of rows. The hash is SplitMix64: to fold in a number n, it takes the
element n + 1 of the sequence that starts at the current key.

References:
    Steele, Lea, Flood (2014), Fast Splittable Pseudorandom Number Generators, Sec. 4 and Fig. 17.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import types
from numba.extending import overload

from recsys.jit import kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "TO_NEAREST",
    "fold",
    "key_of_row",
    "narrow",
    "round_by",
    "round_reference",
    "table_key",
    "widen",
]

# The tables' keys for kernels that round to nearest or not at all.
TO_NEAREST = np.zeros(0, np.bool_)

_MASK = 2**64 - 1
_GOLDEN, _FACTOR1, _FACTOR2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN_64, _FACTOR1_64, _FACTOR2_64 = (
    np.uint64(_GOLDEN),
    np.uint64(_FACTOR1),
    np.uint64(_FACTOR2),
)

# Bits of float32 numbers without the sign: infinity, the largest bfloat16 and float16, and the
# smallest normal float16.
_INFINITY = 0x7F800000
_LARGEST_BFLOAT16 = 0x7F7F0000
_LARGEST_FLOAT16, _NORMAL_FLOAT16 = 0x477FE000, 0x38800000
# The difference of the exponent biases of float32 and float16, in float32's bits.
_REBIAS = 112 << 23


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
    mixed = (key + (number + 1) * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _FACTOR1) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _FACTOR2) & _MASK
    return mixed ^ (mixed >> 31)


def round_reference(values: Tensor, dtype: torch.dtype, keys: Sequence[int] | None) -> Tensor:
    """Round rows as `narrow` does, in plain PyTorch.

    Args:
        values: The rows.
        dtype: bfloat16 or float16.
        keys: The hash of (seed, step, table, row) for each row; None to round to nearest.

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
    """Round by given random bits, in plain PyTorch.

    Args:
        values: The rows.
        dtype: bfloat16 or float16.
        chance: 32 random bits for each number; None to round to nearest.

    Shape:
        values (N, D) float32; chance (N, D) int64; result (N, D).
    """
    bits = values.contiguous().view(torch.int32).long()
    magnitude = bits & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        fixed, largest, quiet = magnitude << 16, _LARGEST_BFLOAT16, 0x7FC0
    else:
        mantissa, exponent = (magnitude & 0x7FFFFF) | 0x800000, magnitude >> 23
        fixed = torch.where(
            magnitude < _NORMAL_FLOAT16,
            (mantissa << 32) >> (126 - exponent).clamp(0, 63),
            (magnitude - _REBIAS) << 19,
        )
        largest, quiet = _LARGEST_FLOAT16, 0x7E00
    if chance is None:
        chance = 0x7FFFFFFF + ((fixed >> 32) & 1)
    chance = torch.where(magnitude > largest, 1 << 31, chance)
    stored = (fixed + chance) >> 32
    if dtype == torch.float16:
        stored = stored.clamp(max=0x7C00)
    stored = torch.where(magnitude > _INFINITY, quiet, stored) | ((bits >> 16) & 0x8000)
    # Through int16, because some devices do not support uint16.
    return torch.where(stored > 0x7FFF, stored - 0x10000, stored).to(torch.int16).view(dtype)


def widen(stored: Any) -> Any:
    """In a kernel: convert a stored number to the dtype of the computation."""
    raise NotImplementedError("for kernels")


def narrow(stored: Any, value: Any, key: Any, column: Any) -> Any:
    """In a kernel: convert a computed number to the dtype of a row.

    Args:
        stored: The number to be replaced; only its type is used.
        value: The computed number.
        key: Of `key_of_row`.
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
    return {types.uint16: _widen_bfloat16, types.int16: _widen_float16}.get(stored)


@overload(narrow)  # type: ignore[untyped-decorator]  # numba's
def _narrow(stored: Any, value: Any, key: Any, column: Any) -> Any:
    if isinstance(stored, types.Float):
        return _narrow_nothing
    if isinstance(key, types.Boolean):
        by_type = {types.uint16: _nearest_bfloat16, types.int16: _nearest_float16}
    else:
        by_type = {types.uint16: _chance_bfloat16, types.int16: _chance_float16}
    return by_type.get(stored)


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


def _widen_float16(stored: Any) -> Any:
    bits = np.uint32(stored)
    sign = (bits & np.uint32(0x8000)) << np.uint32(16)
    magnitude = bits & np.uint32(0x7FFF)
    rebias = np.uint32(_REBIAS if magnitude < 0x7C00 else 2 * _REBIAS)
    normal = np.uint32((magnitude << np.uint32(13)) + rebias)
    tiny = np.float32(np.int32(magnitude)) * np.float32(2.0**-24)
    found = normal if magnitude >= 0x400 else np.float32(tiny).view(np.uint32)
    return np.uint32(found | sign).view(np.float32)


def _nearest_bfloat16(stored: Any, value: Any, key: Any, column: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    fixed = np.uint64(bits & np.uint32(0x7FFFFFFF)) << np.uint64(16)
    return _round_bfloat16(bits, np.uint64(0x7FFFFFFF) + ((fixed >> np.uint64(32)) & np.uint64(1)))


def _chance_bfloat16(stored: Any, value: Any, key: Any, column: Any) -> Any:
    return _round_bfloat16(np.float32(value).view(np.uint32), _fold(key, column) >> np.uint64(32))


def _nearest_float16(stored: Any, value: Any, key: Any, column: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    fixed = _fixed_float16(np.uint64(bits & np.uint32(0x7FFFFFFF)))
    return _round_float16(bits, np.uint64(0x7FFFFFFF) + ((fixed >> np.uint64(32)) & np.uint64(1)))


def _chance_float16(stored: Any, value: Any, key: Any, column: Any) -> Any:
    return _round_float16(np.float32(value).view(np.uint32), _fold(key, column) >> np.uint64(32))


@kernel
def _round_bfloat16(bits: np.uint32, chance: np.uint64) -> np.uint16:
    """Round by 32 random bits: up if the fraction and the bits add up to 2**32 or more.

    The bits of 16-bit floats, read as integers, are 0, 1, 2, ... in order of size, across powers of
    two as well. So a float32 is such an integer and a 32-bit fraction of the distance to the next.
    """
    magnitude = np.uint64(bits & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint64(_LARGEST_BFLOAT16):
        chance = np.uint64(1 << 31)
    stored = ((magnitude << np.uint64(16)) + chance) >> np.uint64(32)
    if magnitude > np.uint64(_INFINITY):
        stored = np.uint64(0x7FC0)
    return np.uint16(stored | np.uint64((bits >> np.uint32(16)) & np.uint32(0x8000)))


@kernel
def _round_float16(bits: np.uint32, chance: np.uint64) -> np.int16:
    """`_round_bfloat16` for float16."""
    magnitude = np.uint64(bits & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint64(_LARGEST_FLOAT16):
        chance = np.uint64(1 << 31)
    stored = min((_fixed_float16(magnitude) + chance) >> np.uint64(32), np.uint64(0x7C00))
    if magnitude > np.uint64(_INFINITY):
        stored = np.uint64(0x7E00)
    return np.int16(stored | np.uint64((bits >> np.uint32(16)) & np.uint32(0x8000)))


@kernel
def _fixed_float16(magnitude: np.uint64) -> np.uint64:
    """A float32 as the integer of a float16 (high 32 bits) and the fraction to the next (low)."""
    mantissa = (magnitude & np.uint64(0x7FFFFF)) | np.uint64(0x800000)
    places = min(np.uint64(126) - (magnitude >> np.uint64(23)), np.uint64(63))
    tiny = (mantissa << np.uint64(32)) >> places
    normal = (magnitude - np.uint64(_REBIAS)) << np.uint64(19)
    return tiny if magnitude < np.uint64(_NORMAL_FLOAT16) else normal


@kernel
def _fold(key: np.uint64, number: np.uint64) -> np.uint64:
    """`fold` in a kernel."""
    mixed = key + (np.uint64(number) + np.uint64(1)) * _GOLDEN_64
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FACTOR1_64
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _FACTOR2_64
    return mixed ^ (mixed >> np.uint64(31))
