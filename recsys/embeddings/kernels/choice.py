"""Chooses the kernels for a device: numba kernels for the CPU; Triton or torch for CUDA.

On CUDA, torch operations do what has no Triton kernel, and everything if triton is not installed.
Triton kernels are imported here, where they are chosen.

A table group chooses once, and again if its tables move to another device. It keeps the result, so
a lookup spends no time on the choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys._support.cuda.triton_support import has_triton
from recsys.embeddings.kernels.cpu.pooled_lookup import pooled_lookup, row_gradient_dots
from recsys.embeddings.kernels.cpu.row_update import row_update
from recsys.embeddings.kernels.cpu.slots import SlotMap
from recsys.embeddings.kernels.torch import pooled_lookup as by_torch
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.kernels.torch.queued_claims import queue_claim
from recsys.embeddings.kernels.torch.row_space import TorchRowSpace
from recsys.embeddings.kernels.torch.row_update import row_update as row_update_by_torch
from recsys.embeddings.kernels.torch.slots import TorchSlotMap
from recsys.embeddings.rows.lookups import Bags
from recsys.embeddings.rows.row_space import RowSpace

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from recsys.embeddings.kernels.cpu.row_update import BadRow
    from recsys.embeddings.kernels.torch.errors import DeferredErrors
    from recsys.embeddings.kernels.torch.queued_claims import QueuedClaim

__all__ = ["NUMBA", "HostCopies", "Kernels", "host_copies_on", "is_by_torch", "kernels_on"]

# Device types that use the torch kernels, and those that use Triton kernels in place of some of
# them. Tests add "cpu".
_BY_TORCH = {"cuda"}
_BY_TRITON = {"cuda"}


@dataclass(eq=False)  # reading its attributes takes half as long as a named tuple's
class Kernels:
    """The kernels of one device, and the functions that make their arguments.

    Attributes:
        make_space: Makes the row space of a list of tables.
        make_bags: Makes bags, like `Bags.from_tensors`.
        pooled_lookup: Like `cpu.pooled_lookup.pooled_lookup`.
        row_gradient_dots: Like `cpu.pooled_lookup.row_gradient_dots`.
        row_update: Like `cpu.row_update.row_update`.
        make_slot_map: Makes the map of slots, like `SlotMap` or `TorchSlotMap`.
        queue_claim: Like `torch.queued_claims.queue_claim`; None if claims never wait.
        errors: Collects errors that a later call raises; None if kernels raise their own.
    """

    make_space: Any
    make_bags: Callable[..., Any]
    pooled_lookup: Callable[..., int]
    row_gradient_dots: Callable[..., None]
    row_update: Callable[..., BadRow | None]
    make_slot_map: Callable[..., Any]
    queue_claim: Callable[..., QueuedClaim] | None
    errors: DeferredErrors | None


NUMBA = Kernels(
    RowSpace, Bags.from_tensors, pooled_lookup, row_gradient_dots, row_update, SlotMap, None, None
)


def is_by_torch(device: torch.device) -> bool:
    """Whether the kernels of a device are operations of torch; otherwise they are numba's."""
    return device.type in _BY_TORCH


def kernels_on(device: torch.device) -> Kernels:
    """The kernels for tables on a device."""
    if not is_by_torch(device):
        return NUMBA
    kernels = Kernels(
        TorchRowSpace,
        TorchBags.from_tensors,
        by_torch.pooled_lookup,
        by_torch.row_gradient_dots,
        row_update_by_torch,
        TorchSlotMap,
        queue_claim,
        errors_on(device),
    )
    if device.type in _BY_TRITON and has_triton():
        from recsys.embeddings.kernels.triton import pooled_lookup as by_triton
        from recsys.embeddings.kernels.triton import slots as slots_by_triton
        from recsys.embeddings.kernels.triton.row_update import row_update as row_update_by_triton

        kernels.pooled_lookup = by_triton.pooled_lookup
        kernels.row_gradient_dots = by_triton.row_gradient_dots
        kernels.row_update = row_update_by_triton
        kernels.make_slot_map = slots_by_triton.TritonSlotMap
        kernels.queue_claim = slots_by_triton.queue_claim
    return kernels


class HostCopies(NamedTuple):
    """The kernels by which a device reads and writes rows in host memory by itself.

    Attributes:
        host_rows: Makes the tables that a device finds by address; `triton.transfers.HostRows`.
        fetch_rows: Like `triton.transfers.fetch_rows`.
        write_rows: Like `triton.transfers.write_rows`.
        pooled_lookup: Like `triton.pooled_lookup.pooled_lookup`, for `ReachedRows`.
    """

    host_rows: Callable[..., Any]
    fetch_rows: Callable[..., None]
    write_rows: Callable[..., None]
    pooled_lookup: Callable[..., int]


def host_copies_on(device: torch.device) -> HostCopies | None:
    """The kernels by which a device copies rows of the host; None if it has none."""
    if device.type not in _BY_TRITON or not has_triton():
        return None
    from recsys.embeddings.kernels.triton import pooled_lookup as by_triton
    from recsys.embeddings.kernels.triton import transfers

    return HostCopies(
        transfers.HostRows, transfers.fetch_rows, transfers.write_rows, by_triton.pooled_lookup
    )
