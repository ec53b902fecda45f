"""Memory of the host in pages that nothing else is in, so that a CUDA device may reach it.

CUDA page-locks whole pages. It refuses to copy memory that is only partly in locked pages, and
copies memory in locked pages while the host goes on. So a page that a table shared with other
memory would break copies of that other memory. A tensor from here is a mapping of its own.

CUDA also refuses to lock a page twice, and several modules may share a table. So each mapping is
registered once in a process, as a whole, and counted.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys._support.memory import advise_huge_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["PageLocks", "Pages", "empty_in_own_pages", "in_own_pages", "pages_of"]


class _Mapping(mmap.mmap):
    device: torch.device | None = None  # the one that is to reach it, if one was named


class Pages(NamedTuple):
    """A mapping, which lasts as long as a reference to `memory`.

    Attributes:
        begin: Its address.
        end: The address after its last page.
        memory: The mapping.
    """

    begin: int
    end: int
    memory: _Mapping


# The mappings that exist, by where each begins.
_MAPPINGS: weakref.WeakValueDictionary[int, _Mapping] = weakref.WeakValueDictionary()

# cudaHostRegisterPortable and cudaHostRegisterMapped: every device of this process reaches the
# memory by the address that the host uses.
_FLAGS = 1 | 2

# How many `PageLocks` need a mapping, by where it begins.
_USERS: dict[int, int] = {}
# Reentrant: the garbage collector may release locks while others are being made.
_CHANGING = threading.RLock()


def empty_in_own_pages(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Allocate a tensor of zeros in pages of its own, huge ones if the system has them.

    Args:
        shape: Of the tensor.
        dtype: Of the tensor.
        device: The one that is to reach it.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # Private, so that the table of a forked process is a copy, as other memory is.
    memory = _Mapping(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.device = device
    found = torch.frombuffer(memory, dtype=dtype).view(shape)
    _MAPPINGS[found.data_ptr()] = memory
    advise_huge_pages(found)
    return found


def in_own_pages(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor on the CPU, or a copy of it in pages of its own if it is not in such pages."""
    if not tensor.nbytes or pages_of(tensor) is not None:
        return tensor
    return empty_in_own_pages(tensor.shape, tensor.dtype, device).copy_(tensor)


def pages_of(tensor: Tensor) -> Pages | None:
    """The mapping that a tensor is in; None if it is in none."""
    address = tensor.data_ptr()
    known = _MAPPINGS.get(address)
    for begin, memory in [(address, known)] if known is not None else list(_MAPPINGS.items()):
        end = begin + -(-len(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin <= address < end:
            return Pages(begin, end, memory)
    return None


class PageLocks:
    """Keeps the memory of tensors page-locked until `release`, or until it is deleted.

    Until then it also keeps the mappings: memory must not be freed while it is registered, and a
    tensor may leave its memory, as by `share_memory_`.

    Args:
        tensors: Tensors in pages of their own.
        device: The CUDA device that uses the memory. `release` waits for it.

    Raises:
        OSError: CUDA refuses a mapping, or a tensor shares pages with other memory; nothing is
            locked then.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        wanted = {span.begin: span for span in map(_pages_of, tensors) if span is not None}
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
