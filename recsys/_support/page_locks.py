"""Page-locks memory of the host where it is, so that a CUDA device reads and writes it by itself.

CUDA locks whole pages and refuses to lock a page twice. Tensors may share a page, and several
modules may share a tensor. So each run of pages is registered once in a process, and counted.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["PageLocks"]

# cudaHostRegisterPortable and cudaHostRegisterMapped: every device of this process reaches the
# memory by the address that the host uses.
_FLAGS = 1 | 2
_PAGE_BYTES = mmap.PAGESIZE

# A run of pages, as (begin, end), and how many `PageLocks` need it.
_USERS: dict[tuple[int, int], int] = {}
# Reentrant: the garbage collector may release locks while others are being made.
_CHANGING = threading.RLock()


class PageLocks:
    """Keeps the memory of tensors page-locked until `release`, or until it is deleted.

    Until then it also keeps the tensors: memory must not be freed while it is registered.

    Args:
        tensors: Contiguous tensors on the CPU. Those that torch has pinned are left as they are.
        device: The CUDA device that uses the memory. `release` waits for it.

    Raises:
        OSError: CUDA refuses a run of pages; nothing is locked then.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        kept = [tensor for tensor in tensors if tensor.nbytes]
        runs: list[tuple[int, int]] = []
        try:
            for begin, end in _page_runs([each for each in kept if not _is_pinned(each)]):
                _lock(begin, end, runs, device)
        except BaseException:
            _unlock(runs)
            raise
        # `kept` is an argument, so that the memory outlives its registration.
        self._finalizer = weakref.finalize(self, _release, runs, kept, device, os.getpid())
        self._finalizer.atexit = False  # the driver frees what a process leaves

    def release(self) -> None:
        """Unlock the memory, unless others need it; a second call does nothing."""
        self._finalizer()


def _is_pinned(tensor: Tensor) -> bool:
    """Whether others have page-locked a tensor, not this module."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    is_own = any(run[0] < end and begin < run[1] for run in list(_USERS))
    return not is_own and tensor.is_pinned()


def _page_runs(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """The pages that tensors lie in, as disjoint runs from begin to end, in bytes."""
    runs: list[tuple[int, int]] = []
    for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
        address = tensor.data_ptr()
        begin = address // _PAGE_BYTES * _PAGE_BYTES
        end = -(-(address + tensor.nbytes) // _PAGE_BYTES) * _PAGE_BYTES
        if runs and begin < runs[-1][1]:
            begin, last = runs.pop()
            end = max(end, last)
        runs.append((begin, end))
    return runs


def _lock(begin: int, end: int, runs: list[tuple[int, int]], device: torch.device) -> None:
    """Register the pages from `begin` to `end` that are not registered; adds to `runs`."""
    with _CHANGING:
        shared = sorted(run for run in list(_USERS) if run[0] < end and begin < run[1])
        for run in shared:
            _USERS[run] = _USERS.get(run, 0) + 1
            runs.append(run)
        for first, last in [*shared, (end, end)]:
            if begin < first:
                _register(begin, first, device)
                _USERS[begin, first] = 1
                runs.append((begin, first))
            begin = max(begin, last)


def _unlock(runs: Iterable[tuple[int, int]]) -> None:
    with _CHANGING:
        for run in runs:
            _USERS[run] -= 1
            if not _USERS[run]:
                del _USERS[run]
                torch.cuda.cudart().cudaHostUnregister(run[0])  # type: ignore[no-untyped-call]


def _release(
    runs: Sequence[tuple[int, int]], kept: list[Tensor], device: torch.device, process: int
) -> None:
    if runs and process == os.getpid():  # a fork has no CUDA
        torch.cuda.synchronize(device)  # kernels may still use the memory
        _unlock(runs)
    kept.clear()


def _register(begin: int, end: int, device: torch.device) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        error = cudart.cudaHostRegister(begin, end - begin, _FLAGS)
        if int(error):
            _clear_error(device)
            raise OSError(
                f"CUDA cannot page-lock {end - begin} bytes of memory "
                f"({cudart.cudaGetErrorString(error)})"
            )


def _clear_error(device: torch.device) -> None:
    """CUDA keeps an error until it is asked for it, which torch does at its next kernel."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)
