"""Constants of a module that its kernels use."""

from __future__ import annotations

from typing import Any

import triton.language as tl

__all__ = ["Constant"]


class Constant(tl.constexpr):  # type: ignore[misc]  # triton has no types
    """As `tl.constexpr`, for less host time of launches.

    Each launch asks of each constant whether its value is still that of the compilation. The answer
    of `tl.constexpr` is a `tl.constexpr`, and takes five times as long as a bool.

    In a sum or difference with a tensor the tensor comes first. In Triton's interpreter a constant
    that comes first makes the result a constant, which Triton 3.8 and later refuse as a tensor.
    """

    def __ne__(self, other: object) -> Any:
        return self.value != getattr(other, "value", other)
