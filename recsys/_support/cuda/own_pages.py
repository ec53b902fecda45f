"""Memory of the host in pages that nothing else is in, so that a CUDA device may reach it.

CUDA page-locks whole pages. It refuses to copy memory that is only partly in locked pages, and
copies memory in locked pages while the host goes on. So a page that a table shared with other
memory would break copies of that other memory. A tensor from here is a mapping of its own.
"""

from __future__ import annotations

import mmap
import weakref
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys._support.memory import advise_huge_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Pages", "empty_in_own_pages", "in_own_pages", "pages_of"]


class Pages(NamedTuple):
    """A mapping, which lasts as long as a reference to `memory`.

    Attributes:
        begin: Its address.
        end: The address after its last page.
        memory: The mapping.
    """

    begin: int
    end: int
    memory: mmap.mmap


# The mappings that exist, by where each begins.
_MAPPINGS: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


def empty_in_own_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor of zeros in pages of its own, huge ones if the system has them."""
    num_bytes = prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # Private, so that the table of a forked process is a copy, as other memory is.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = torch.frombuffer(memory, dtype=dtype).view(shape)
    _MAPPINGS[found.data_ptr()] = memory
    advise_huge_pages(found)
    return found


def in_own_pages(tensor: Tensor) -> Tensor:
    """A tensor on the CPU, or a copy of it in pages of its own if it is not in such pages."""
    if not tensor.nbytes or pages_of(tensor) is not None:
        return tensor
    return empty_in_own_pages(tensor.shape, tensor.dtype).copy_(tensor)


def pages_of(tensor: Tensor) -> Pages | None:
    """The mapping that a tensor is in; None if it is in none."""
    address = tensor.data_ptr()
    known = _MAPPINGS.get(address)
    for begin, memory in [(address, known)] if known is not None else list(_MAPPINGS.items()):
        end = begin + -(-len(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin <= address < end:
            return Pages(begin, end, memory)
    return None
