"""Page-locks memory of the host where it is, so that a CUDA device reads and writes it by itself.

CUDA refuses to lock a page twice, and several modules may share a table. So each mapping of
`own_pages` is registered once in a process, as a whole, and counted.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from recsys._support.cuda.own_pages import Pages, pages_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["PageLocks"]

# cudaHostRegisterPortable and cudaHostRegisterMapped: every device of this process reaches the
# memory by the address that the host uses.
_FLAGS = 1 | 2

# How many `PageLocks` need a mapping, by where it begins.
_USERS: dict[int, int] = {}
# Reentrant: the garbage collector may release locks while others are being made.
_CHANGING = threading.RLock()


class PageLocks:
    """Keeps the memory of tensors page-locked until `release`, or until it is deleted.

    Until then it also keeps the mappings: memory must not be freed while it is registered, and a
    tensor may leave its memory, as by `share_memory_`.

    Args:
        tensors: Tensors in pages of their own; see `own_pages`.
        device: The CUDA device that uses the memory. `release` waits for it.

    Raises:
        OSError: CUDA refuses a mapping, or a tensor shares pages with other memory; nothing is
            locked then.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        wanted = {each.begin: each for each in map(_pages_of, tensors) if each is not None}
        locked: list[Pages] = []
        try:
            for pages in wanted.values():
                _lock(pages, device)
                locked.append(pages)
        except BaseException:
            _unlock(locked)
            raise
        # The mappings are in an argument, so that memory outlives its registration.
        self._finalizer = weakref.finalize(self, _release, locked, device, os.getpid())
        self._finalizer.atexit = False  # the driver frees what a process leaves

    def release(self) -> None:
        """Unlock the memory, unless others need it; a second call does nothing."""
        self._finalizer()


def _pages_of(tensor: Tensor) -> Pages | None:
    if not tensor.nbytes:
        return None
    found = pages_of(tensor)
    if found is None:
        raise OSError(f"a tensor of shape {tuple(tensor.shape)} shares pages with other memory")
    return found


def _lock(pages: Pages, device: torch.device) -> None:
    with _CHANGING:
        if pages.begin not in _USERS:
            _register(pages.begin, pages.end, device)
        _USERS[pages.begin] = _USERS.get(pages.begin, 0) + 1


def _unlock(locked: Iterable[Pages]) -> None:
    with _CHANGING:
        for pages in locked:
            _USERS[pages.begin] -= 1
            if not _USERS[pages.begin]:
                del _USERS[pages.begin]
                torch.cuda.cudart().cudaHostUnregister(pages.begin)  # type: ignore[no-untyped-call]


def _release(locked: list[Pages], device: torch.device, process: int) -> None:
    if locked and process == os.getpid():  # a fork has no CUDA
        torch.cuda.synchronize(device)  # kernels may still use the memory
        _unlock(locked)
    locked.clear()


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
