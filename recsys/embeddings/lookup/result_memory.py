"""Memory for the results of lookups."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from recsys._support.memory import empty_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from recsys.embeddings.rows.lookups import Bags, Lookups

__all__ = ["MAX_KEPT_BYTES", "empty_result", "result_in"]

MAX_KEPT_BYTES = 32 * 2**20


def empty_result(
    dtype: torch.dtype, device: torch.device, bags: Bags, lookups: Lookups, num_stacked: int = 0
) -> Tensor:
    """Memory for pooled rows, (B, W) or (B, F, W / F); `result_in`'s if it fits."""
    batch_size, width = bags.batch_size, lookups.width
    shape = (batch_size, num_stacked, width // num_stacked) if num_stacked else (batch_size, width)
    offered: Tensor | None = getattr(_offered, "memory", None)
    if offered is not None and (offered.shape, offered.dtype, offered.device) == (
        shape,
        dtype,
        device,
    ):
        _offered.memory = None
        return offered.detach()
    # glibc gets larger blocks from the system each time, in small pages: at 100 MiB the page
    # faults took longer than the lookup.
    is_large = batch_size * width * dtype.itemsize > MAX_KEPT_BYTES
    return (empty_rows if is_large else torch.empty)(*shape, dtype=dtype, device=device)


@contextmanager
def result_in(memory: Tensor | None) -> Iterator[None]:
    """Have the first lookup in this context write its result to `memory`, if the result fits.

    Args:
        memory: What a CUDA graph reads, so that the result need not be copied there. Its numbers
            are overwritten. None for no memory.
    """
    before = getattr(_offered, "memory", None)
    _offered.memory = memory
    try:
        yield
    finally:
        _offered.memory = before


_offered = threading.local()
