"""How CPU kernels are compiled by numba, and how a parallel kernel is divided among threads.

A parallel kernel is a loop over independent parts: no two parts write to the same memory. The
caller passes the number of parts, `num_parts()`, which is torch's thread count; one thread runs one
part. The kernel runs on the calling thread alone in four cases: torch has one thread; the thread
called `work_alone()`; the process was forked after kernels ran in parallel (the OpenMP runtime does
not survive a fork); or numba has no threading layer that several threads may enter at once.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from contextlib import suppress
from functools import cache, partial, update_wrapper
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import numba
import torch
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.registry import CPUDispatcher
from torch import get_num_threads

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ParallelKernel",
    "inlined_part",
    "kernel",
    "kernel_part",
    "num_parts",
    "parallel_kernel",
    "work_alone",
]

_F = TypeVar("_F", bound="Callable[..., object]")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def kernel(function: _F) -> _F:
    """Compile a function on its first call. The compiled function releases the GIL.

    It is cached on disk, beside the source or in the user's cache folder; see `_Cache`. If
    neither can be written, every process compiles it again.
    """
    return _compile(function, is_parallel=False)


def kernel_part(function: _F) -> _F:
    """Like `kernel`, for a function that only kernels call. Python must not call it.

    It takes less time to compile: the code that takes Python's objects apart is left out.
    """
    return _compile(function, is_parallel=False, is_part=True)


def inlined_part(function: _F) -> _F:
    """Like `kernel_part`, and always inlined: each array costs a call several arguments."""
    return _compile(function, is_parallel=False, is_part=True, is_inlined=True)


class ParallelKernel(Generic[_P, _R]):
    """Like `kernel`, for a function whose `prange` loops run on several threads.

    Attributes:
        alone: The kernel on the calling thread: small work ends before another thread wakes.
    """

    def __init__(self, function: Callable[_P, _R]) -> None:
        update_wrapper(self, function)
        self._parallel = _compile(function, is_parallel=True)
        self.alone: Callable[_P, _R] = _compile(_under_another_name(function), is_parallel=False)

    def __call__(self, *arguments: _P.args, **more: _P.kwargs) -> _R:
        """Run the kernel, on several threads unless one of this module's four cases holds."""
        is_shared = (
            get_num_threads() > 1 and _threads_are_here() and not _forks and not _thread.works_alone
        )
        return (self._parallel if is_shared else self.alone)(*arguments, **more)


parallel_kernel = ParallelKernel  # as a decorator


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


def _compile(
    function: _F, *, is_parallel: bool, is_part: bool = False, is_inlined: bool = False
) -> _F:
    options: dict[str, Any] = {
        "nogil": True,
        "parallel": is_parallel,
        # Division by zero does not raise. Loops that may raise are not vectorised.
        "error_model": "numpy",
        # C calls no kernel, and compiling for it takes a tenth of the time.
        "no_cfunc_wrapper": True,
        "no_cpython_wrapper": is_part,
        "forceinline": is_inlined,
    }
    try:
        compiled = njit(**options, cache=True)(function)
        if isinstance(compiled, CPUDispatcher):  # it is not compiled if NUMBA_DISABLE_JIT is set
            compiled._cache.__class__ = _Cache
            compiled._cache.stamp_at_import = compiled._cache._cache_file._source_stamp
        return cast("_F", compiled)
    except RuntimeError as error:  # numba found no writable cache folder
        warnings.warn(
            f"compiled kernels cannot be cached ({error}), so each process compiles them again; "
            "set NUMBA_CACHE_DIR to a writable folder",
            stacklevel=3,
        )
        return cast("_F", njit(**options)(function))


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba's cache of one kernel, with an index and a file for each signature.

    numba has one index of all signatures. Two processes that compile a kernel for different ones at
    once may choose the same file there, and one of them may later run the code of the other.

    The stamp of the code is that of the kernel's file and of all files with parts that it uses;
    numba asks for changes of the first alone.

    Code that cannot be read is compiled again, and code that cannot be written, as on a full disk,
    is left out with a warning.
    """

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        key = super()._index_key(sig, codegen)
        signature, machine, (_, closure) = key  # without the bytecode: new code replaces old code
        name = hashlib.sha256(repr((signature, machine, closure)).encode()).hexdigest()[:12]
        stamps = [self.stamp_at_import, *_stamps_of_parts(self._py_func)]
        base = f"{self._impl.filename_base}-{name}"
        self._cache_file = IndexDataCacheFile(self.cache_path, base, stamps)
        return key

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # unpickling raises many types
            with suppress(OSError):
                self._cache_file.flush()  # a damaged index would be read again
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            self._index_key(sig, data.codegen)
            # numba writes the index first. Old code must not be found by it if writing ends there.
            Path(self._cache_file._index_path).with_suffix(".1.nbc").unlink(missing_ok=True)
            super().save_overload(sig, data)
        except Exception as error:  # as above: the index is read first
            warnings.warn(
                f"compiled kernels cannot be cached in {self.cache_path} ({error}), so each "
                "process compiles them again; free some space, or set NUMBA_CACHE_DIR to a folder "
                "that can be written",
                stacklevel=2,
            )


@cache
def _stamps_of_parts(kernel: FunctionType) -> list[tuple[str, int, int]]:
    """The files of what a kernel uses of its own package, each with its time and size."""
    package = kernel.__module__.partition(".")[0]
    found: dict[FunctionType, str] = {}
    waiting: list[Any] = [kernel]
    while waiting:
        value = waiting.pop()
        value = getattr(value, "py_func", getattr(value, "_defn", value))  # numba's wrappers
        if not isinstance(value, FunctionType) or value in found:
            continue
        if (value.__module__ or "").partition(".")[0] == package:
            found[value] = value.__code__.co_filename
            waiting += map(value.__globals__.get, value.__code__.co_names)
    stamps = []
    for file in sorted(set(found.values())):
        with suppress(OSError):  # as for code that was typed in
            stat = Path(file).stat()
            stamps.append((file, stat.st_mtime_ns, stat.st_size))
    return stamps


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


_forks: list[bool] = []  # has an item if this process was forked after numba's threads started


@cache
def _threads_are_here() -> bool:
    """Start numba's threads; returns whether several threads may run kernels at once."""
    before = get_num_threads()
    numba.get_num_threads()
    # Starting them sets the thread count of the OpenMP runtime, which torch uses too.
    torch.set_num_threads(before)
    os.register_at_fork(after_in_child=partial(_forks.append, True))
    if numba.threading_layer() == "workqueue":
        warnings.warn(
            "numba finds neither OpenMP nor TBB, and its own threading layer does not support "
            "several threads at once, so kernels run on one thread; install libgomp or tbb",
            stacklevel=4,
        )
        return False
    return True
