"""How kernels for the CPU are compiled."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeVar, cast

from numba import njit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["kernel"]

_F = TypeVar("_F", bound="Callable[..., object]")


def kernel(function: _F) -> _F:
    """Compile a function on its first call, to run without Python's global lock.

    What was compiled is kept on disk beside the source or in the user's cache folder; where neither
    can be written, every process compiles anew.
    """
    try:
        return cast("_F", njit(nogil=True, cache=True)(function))
    except RuntimeError as error:  # numba finds no folder to keep it in
        warnings.warn(
            f"compiled kernels cannot be kept ({error}); each process compiles them anew. Name a "
            "folder that can be written in NUMBA_CACHE_DIR",
            stacklevel=2,
        )
        return cast("_F", njit(nogil=True)(function))
