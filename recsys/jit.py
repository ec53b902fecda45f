"""How kernels for the CPU are compiled, and how one is shared out among threads.

A parallel kernel is a loop over parts that share nothing they write; it is told their number, which
is `num_parts()`. So torch's thread count rules ours, and one thread takes one part.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from numba import njit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["kernel", "num_parts", "parallel_kernel"]

_F = TypeVar("_F", bound="Callable[..., object]")


def kernel(function: _F) -> _F:
    """Compile a function on its first call, to run without Python's global lock.

    What was compiled is kept on disk beside the source or in the user's cache folder; where neither
    can be written, every process compiles anew.
    """
    return _compile(function, is_parallel=False)


def parallel_kernel(function: _F) -> _F:
    """The same for a function whose `prange` loops run on several threads."""
    return _compile(function, is_parallel=True)


def num_parts() -> int:
    """Parts to cut a parallel kernel's work into: one for each of torch's threads."""
    return torch.get_num_threads()


def _compile(function: _F, *, is_parallel: bool) -> _F:
    compile_function = partial(njit, nogil=True, parallel=is_parallel)
    try:
        return cast("_F", compile_function(cache=True)(function))
    except RuntimeError as error:  # numba finds no folder to keep it in
        warnings.warn(
            f"compiled kernels cannot be kept ({error}); each process compiles them anew. Name a "
            "folder that can be written in NUMBA_CACHE_DIR",
            stacklevel=3,
        )
        return cast("_F", compile_function()(function))
