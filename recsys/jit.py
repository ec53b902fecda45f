"""How kernels for the CPU are compiled, and how one is shared out among threads.

A parallel kernel is a loop over parts that share nothing they write; it is told their number, which
is `num_parts()`. So torch's thread count rules ours, and one thread takes one part. The kernel runs
on the calling thread alone where there is one part, in a thread that has said `work_alone()`, in a
forked child of a process whose threads have been at work (the OpenMP runtime does not survive
that), and where numba has no threading layer that several threads may enter.
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
    """Compile a function on its first call, to run without Python's global lock.

    What was compiled is kept on disk beside the source or in the user's cache folder; where neither
    can be written, every process compiles anew.
    """
    return _compile(function, is_parallel=False)


class ParallelKernel(Generic[_P, _R]):
    """A kernel whose `prange` loops run on several threads; made by `parallel_kernel`."""

    def __init__(self, function: Callable[_P, _R]) -> None:
        update_wrapper(self, function)
        self._parallel = _compile(function, is_parallel=True)
        self._serial: Callable[_P, _R] = _compile(_under_another_name(function), is_parallel=False)

    def __call__(self, *arguments: _P.args, **more: _P.kwargs) -> _R:
        """Run it, on several threads where that may be done."""
        is_shared = (
            get_num_threads() > 1
            and _threads_are_here()
            and not _is_forked.flag
            and not _thread.works_alone
        )
        return (self._parallel if is_shared else self._serial)(*arguments, **more)

    def alone(self, *arguments: _P.args, **more: _P.kwargs) -> _R:
        """Run it on the calling thread: for work that is done before another one is awake."""
        return self._serial(*arguments, **more)


def parallel_kernel(function: Callable[_P, _R]) -> ParallelKernel[_P, _R]:
    """The same for a function whose `prange` loops run on several threads."""
    return ParallelKernel(function)


def work_alone() -> None:
    """From now on, run kernels of the calling thread on it alone.

    For a thread that works beside the one that computes: threads of its own would wait, spinning,
    on the cores that computing needs.
    """
    _thread.works_alone = True


class _Thread(threading.local):
    works_alone = False


_thread = _Thread()


# Parts to cut a parallel kernel's work into: one for each of torch's threads.
num_parts: Callable[[], int] = get_num_threads


def _compile(function: _F, *, is_parallel: bool) -> _F:
    # numpy's arithmetic divides by zero without an error; a loop that may raise is not vectorised.
    options: dict[str, Any] = {"nogil": True, "parallel": is_parallel, "error_model": "numpy"}
    try:
        return cast("_F", njit(**options, cache=True)(function))
    except RuntimeError as error:  # numba finds no folder to keep it in
        warnings.warn(
            f"compiled kernels cannot be kept ({error}); each process compiles them anew. Name a "
            "folder that can be written in NUMBA_CACHE_DIR",
            stacklevel=3,
        )
        return cast("_F", njit(**options)(function))


def _under_another_name(function: Callable[..., object]) -> Any:
    """A copy: numba's files on disk go by name, and know nothing of `parallel`."""
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
    """Whether this process is the child of one whose threads have been at work."""

    flag = False

    def happened(self) -> None:
        self.flag = True


_is_forked = _Fork()


@cache
def _threads_are_here() -> bool:
    """Start numba's threads; whether several of ours may use them at once."""
    before = get_num_threads()
    numba.get_num_threads()
    # Starting them tells the OpenMP runtime, which torch shares, how many there are.
    torch.set_num_threads(before)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_is_forked.happened)
    if numba.threading_layer() == "workqueue":
        warnings.warn(
            "numba finds neither OpenMP nor TBB, and its own threads may not be entered twice at "
            "once: kernels run on one thread. Install libgomp (or pip install tbb)",
            stacklevel=4,
        )
        return False
    return True
