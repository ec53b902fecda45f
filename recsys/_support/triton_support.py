"""Whether Triton kernels can be used. Only asked for tensors on CUDA: a CPU needs no triton."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module

__all__ = ["has_triton"]


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
