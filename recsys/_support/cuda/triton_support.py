"""Whether Triton kernels can be used, and sizes of their launches; a CPU needs no triton."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module

__all__ = ["cdiv", "has_triton", "next_power_of_2"]


@cache
def has_triton() -> bool:
    """Whether triton can be imported; if not, the first call warns and says why."""
    try:
        import_module("triton")
    except ImportError as error:
        warnings.warn(
            f"triton cannot be imported ({error}), so recsys runs PyTorch operations on CUDA in "
            "place of its Triton kernels, which is slower; install the triton that belongs to this "
            "version of torch",
            stacklevel=2,
        )
        return False
    return True


def cdiv(dividend: int, divisor: int) -> int:
    """As `triton.cdiv`, which takes 20 times as long because kernels may call it, too."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """As `triton.next_power_of_2`, which takes as long as `triton.cdiv`."""
    return 1 << (number - 1).bit_length()
