"""Sizes of launches of Triton kernels; needs no triton."""

from __future__ import annotations

__all__ = ["cdiv", "next_power_of_2"]


def cdiv(dividend: int, divisor: int) -> int:
    """As `triton.cdiv`, which takes 20 times as long because kernels may call it, too."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """As `triton.next_power_of_2`, which takes as long as `triton.cdiv`."""
    return 1 << (number - 1).bit_length()
