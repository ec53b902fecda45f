"""Reads ids and offsets of 32 or 64 bits, in a kernel that is compiled once for both.

A kernel takes two arrays, one of each width; `by_width` leaves one of them empty. With one array of
any dtype, numba would compile a large kernel for each combination of the dtypes of ids and offsets,
for seconds each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.jit import kernel_part

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NO_INTEGERS", "by_width", "integer_at"]

_NONE_32: NDArray[np.int32] = np.empty(0, np.int32)
_NONE_64: NDArray[np.int64] = np.empty(0, np.int64)
NO_INTEGERS = _NONE_32, _NONE_64


def by_width(integers: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The array in the place of its width, and an empty one in the other place.

    Args:
        integers: int32 or int64.
    """
    return (integers, _NONE_64) if integers.dtype == np.int32 else (_NONE_32, integers)


@kernel_part
def integer_at(
    narrow: NDArray[np.int32], wide: NDArray[np.int64], place: np.uint64 | int
) -> np.uint64:
    """In a kernel: a number of the array that is not empty; a negative one becomes very large."""
    return np.uint64(wide[place]) if len(wide) else np.uint64(narrow[place])
