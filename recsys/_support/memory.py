"""Huge pages: memory of large tables that the processor can address without a walk of its own.

A processor keeps the places of a few thousand pages at hand. Of pages of 4 KiB that is some MiB;
rows looked up in a table of GiB miss it nearly every time, and looking up where a page lies takes
longer than fetching the row. Pages of 2 MiB are 512 times as few.

So rows drawn evenly from a large table are found sooner. Lookups as uneven as Criteo's, which
mostly meet the same rows, gain less.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["advise_huge_pages", "advise_random", "empty_rows"]

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_NORMAL, _MADV_RANDOM, _MADV_HUGEPAGE = 0, 1, 14  # of linux/mman.h


def empty_rows(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Memory for a table, in huge pages where the system has them; its values are undefined."""
    rows = torch.empty(shape, dtype=dtype, device=device)
    advise_huge_pages(rows)
    return rows


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask the system for huge pages under a tensor's memory; values stay as they are.

    Only whole huge pages inside the memory are asked for, so a tensor takes no more of it than it
    has elements for. A system that has no such pages, or refuses, changes nothing but speed.

    Args:
        tensor: Its whole storage is meant, not yet written to: then huge pages take no longer than
            small ones. One on another device than the CPU is left alone.

    Returns:
        Whether the system agreed.
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


def advise_random(tensor: Tensor, *, is_random: bool = True) -> bool:
    """Say of a tensor mapped from a file that its rows are read in no order.

    The system then reads the pages that are asked for, and none ahead.

    Args:
        tensor: Its whole storage is meant.
        is_random: Whether that is so from now on; else the system goes on as it does by itself.

    Returns:
        Whether the system agreed.
    """
    storage = tensor.untyped_storage()
    advice = _MADV_RANDOM if is_random else _MADV_NORMAL
    return _madvise(storage.data_ptr(), storage.nbytes(), advice)


@cache
def _page_bytes() -> int:
    """Of a huge page; 0 where there are none, or the system's owner wants none."""
    if sys.platform != "linux":
        return 0
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text():
            return 0
        return int((_SETTINGS / "hpage_pmd_size").read_text())
    except OSError:
        return 0


def _madvise(address: int, num_bytes: int, advice: int) -> bool:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(function(address, num_bytes, advice) == 0)
