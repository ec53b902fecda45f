"""Whether a gradient has nan or inf in it."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys.embeddings.kernels.addresses import array_at
from recsys.jit import unordered_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["are_finite"]

# Up to so many bytes one thread is done before torch has a second one at work.
_MAX_ALONE_BYTES = 2**21
_LIKE: dict[torch.dtype, NDArray[Any]] = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}


def are_finite(numbers: Tensor) -> bool:
    """Whether all are, on the CPU; of any layout and dtype.

    Asked of every gradient before an update, so it takes as long as reading it once.
    """
    like = _LIKE.get(numbers.dtype)
    if like is not None and numbers.is_contiguous() and numbers.nbytes <= _MAX_ALONE_BYTES:
        return bool(_are_finite(numbers.data_ptr(), numbers.numel(), like))
    # One number that is not makes the sum one. A sum of finite numbers may overflow, so then all
    # are looked at, which takes thirty times as long.
    return isfinite(numbers.sum()) or bool(numbers.isfinite().all())


@unordered_kernel
def _are_finite(address: int, length: int, like: NDArray[Any]) -> bool:
    """Of the numbers from an address on; `like` has their dtype."""
    numbers = array_at(address, length, like)
    total = like.dtype.type(0)
    for number in range(np.uint64(length)):
        total += numbers[number] - numbers[number]  # 0, or nan of nan and inf
    return bool(total == total)  # only nan differs from itself
