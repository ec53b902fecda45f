"""How CPU kernels are compiled by numba, and how a parallel kernel is divided among threads.

A parallel kernel is a loop over independent parts: no two parts write to the same memory. The
caller passes the number of parts, `num_parts()`, which is torch's thread count; one thread runs one
part. The kernel runs on the calling thread alone in four cases: torch has one thread; the thread
called `work_alone()`; the process was forked after kernels ran in parallel (the OpenMP runtime does
not survive a fork); or numba has no threading layer that several threads may enter at once.
"""

from __future__ import annotations

import os
import threading
import warnings
from functools import cache, update_wrapper
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import numba
import torch
from numba import njit
from torch import get_num_threads

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ParallelKernel", "kernel", "num_parts", "parallel_kernel", "work_alone"]

_F = TypeVar("_F", bound="Callable[..., object]")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def kernel(function: _F) -> _F:
    """Compile a function on its first call. The compiled function releases the GIL.

    numba caches it on disk, beside the source or in the user's cache folder. If neither can be
    written, every process compiles it again.
    """
    return _compile(function, is_parallel=False)


class ParallelKernel(Generic[_P, _R]):
    """A kernel whose `prange` loops run on several threads; made by `parallel_kernel`."""

    def __init__(self, function: Callable[_P, _R]) -> None:
        update_wrapper(self, function)
        self._parallel = _compile(function, is_parallel=True)
        self._serial: Callable[_P, _R] = _compile(_under_another_name(function), is_parallel=False)

    def __call__(self, *arguments: _P.args, **more: _P.kwargs) -> _R:
        """Run the kernel, on several threads unless one of this module's four cases holds."""
        is_shared = (
            get_num_threads() > 1
            and _threads_are_here()
            and not _is_forked.flag
            and not _thread.works_alone
        )
        return (self._parallel if is_shared else self._serial)(*arguments, **more)

    def alone(self, *arguments: _P.args, **more: _P.kwargs) -> _R:
        """Run the kernel on the calling thread: small work is done before another thread wakes."""
        return self._serial(*arguments, **more)


def parallel_kernel(function: Callable[_P, _R]) -> ParallelKernel[_P, _R]:
    """Like `kernel`, for a function whose `prange` loops run on several threads."""
    return ParallelKernel(function)


def work_alone() -> None:
    """From now on, run the calling thread's kernels on this thread alone.

    For background threads. More threads would spin on the cores that the training thread needs.
    """
    _thread.works_alone = True


class _Thread(threading.local):
    works_alone = False


_thread = _Thread()


# The number of parts of a parallel kernel: torch's thread count.
num_parts: Callable[[], int] = get_num_threads


def _compile(function: _F, *, is_parallel: bool) -> _F:
    # With "numpy", division by zero does not raise. Loops that may raise are not vectorised.
    options: dict[str, Any] = {"nogil": True, "parallel": is_parallel, "error_model": "numpy"}
    try:
        return cast("_F", njit(**options, cache=True)(function))
    except RuntimeError as error:  # numba found no writable cache folder
        warnings.warn(
            f"compiled kernels cannot be cached ({error}), so each process compiles them again; "
            "set NUMBA_CACHE_DIR to a writable folder",
            stacklevel=3,
        )
        return cast("_F", njit(**options)(function))


def _under_another_name(function: Callable[..., object]) -> Any:
    """A renamed copy: numba's disk cache is keyed by name and ignores `parallel`."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__qualname__ = f"{function.__qualname__}_serial"
    copy.__module__ = function.__module__
    return copy


class _Fork:
    """Whether this process was forked after numba's threads were started."""

    flag = False

    def happened(self) -> None:
        self.flag = True


_is_forked = _Fork()


@cache
def _threads_are_here() -> bool:
    """Start numba's threads; returns whether several threads may run kernels at once."""
    before = get_num_threads()
    numba.get_num_threads()
    # Starting them sets the thread count of the OpenMP runtime, which torch uses too.
    torch.set_num_threads(before)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_is_forked.happened)
    if numba.threading_layer() == "workqueue":
        warnings.warn(
            "numba finds neither OpenMP nor TBB, and its own threading layer does not support "
            "several threads at once, so kernels run on one thread; install libgomp or tbb",
            stacklevel=4,
        )
        return False
    return True
