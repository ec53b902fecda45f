"""Memory of tensors: huge pages, reads of scattered rows, and tensors that outlast a mode.

A processor caches the addresses of a few thousand pages (in the TLB). With pages of 4 KiB this
covers a few MiB. In a table of several GiB nearly every lookup then misses the TLB, and walking the
page table takes longer than fetching the row. Huge pages of 2 MiB cover 512 times as much.

Uniformly distributed lookups in a large table gain most. Lookups as skewed as Criteo's mostly read
the same rows, and gain less.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["advise_huge_pages", "advise_random", "empty_rows", "lasting_tensors"]

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_RANDOM, _MADV_HUGEPAGE = 1, 14  # from linux/mman.h


def empty_rows(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Allocate a table, in huge pages if the system has them; its values are undefined."""
    rows = torch.empty(shape, dtype=dtype, device=device)
    advise_huge_pages(rows)
    return rows


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask the system for huge pages for a tensor's storage; its values do not change.

    Only huge pages that lie completely inside the storage are requested, so it takes no extra
    memory. If the system has no huge pages or refuses, only speed differs.

    Args:
        tensor: Its whole storage is advised. Call this before the first write, when huge pages cost
            no extra time. Tensors that are not on the CPU are ignored.

    Returns:
        Whether the system accepted the advice.
    """
    storage = tensor.untyped_storage()
    page_bytes = _page_bytes()
    if storage.device.type != "cpu" or not page_bytes:
        return False
    first = -(-storage.data_ptr() // page_bytes) * page_bytes
    end = (storage.data_ptr() + storage.nbytes()) // page_bytes * page_bytes
    if end <= first:
        return False
    return _madvise(first, end - first, _MADV_HUGEPAGE)


def advise_random(tensor: Tensor) -> bool:
    """Tell the system that rows of a tensor mapped from a file are read in random order.

    The system then reads only the requested pages, without read-ahead.

    Args:
        tensor: Its whole storage is advised.

    Returns:
        Whether the system accepted the advice.
    """
    storage = tensor.untyped_storage()
    return _madvise(storage.data_ptr(), storage.nbytes(), _MADV_RANDOM)


@contextmanager
def lasting_tensors() -> Iterator[None]:
    """Make tensors that may be changed later, in any mode; no operation here is differentiated.

    torch refuses to change a tensor that was made under `torch.inference_mode`, and an evaluation
    may be the first to need what training changes.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


@cache
def _page_bytes() -> int:
    """The size of a huge page; 0 if the system has none, or they are disabled."""
    try:
        return int((_SETTINGS / "hpage_pmd_size").read_text())
    except OSError:
        return 0


def _madvise(address: int, num_bytes: int, advice: int) -> bool:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(function(address, num_bytes, advice) == 0)
