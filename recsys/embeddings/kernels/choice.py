"""Chooses the kernels for a device: numba kernels for the CPU, Triton kernels for CUDA.

Triton kernels are imported here, where they are chosen.

A table group chooses once, and again if its tables move to another device. It keeps the result, so
a lookup spends no time on the choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys.embeddings.kernels.cpu.pooled_lookup import pooled_lookup, row_gradient_dots
from recsys.embeddings.kernels.cpu.row_update import row_update
from recsys.embeddings.kernels.cpu.slots import SlotMap
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.kernels.torch.row_space import TorchRowSpace
from recsys.embeddings.rows.lookups import Bags
from recsys.embeddings.rows.row_space import RowSpace
from recsys.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from recsys.embeddings.kernels.cpu.row_update import BadRow
    from recsys.embeddings.kernels.torch.errors import DeferredErrors
    from recsys.embeddings.kernels.torch.slots import QueuedClaim

__all__ = [
    "DEVICE_KERNELS",
    "NUMBA",
    "HostCopies",
    "Kernels",
    "has_own_kernels",
    "kernels_by_triton",
    "kernels_on",
]


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


@dataclass(eq=False)  # reading its attributes takes half as long as a named tuple's
class Kernels:
    """The kernels of one device, and the functions that make their arguments.

    Attributes:
        make_space: Makes the row space of a list of tables.
        make_bags: Makes bags, like `Bags.from_tensors`.
        pooled_lookup: Like `cpu.pooled_lookup.pooled_lookup`.
        row_gradient_dots: Like `cpu.pooled_lookup.row_gradient_dots`.
        row_update: Like `cpu.row_update.row_update`.
        make_slot_map: Makes the map of slots, like `SlotMap` or `TritonSlotMap`.
        queue_claim: Like `triton.slots.queue_claim`; None if claims never wait.
        errors: Collects errors that a later call raises; None if kernels raise their own.
        host_copies: None if the device does not copy rows of the host by itself.
    """

    make_space: Any
    make_bags: Callable[..., Any]
    pooled_lookup: Callable[..., int]
    row_gradient_dots: Callable[..., None]
    row_update: Callable[..., BadRow | None]
    make_slot_map: Callable[..., Any]
    queue_claim: Callable[..., QueuedClaim] | None = None
    errors: DeferredErrors | None = None
    host_copies: HostCopies | None = None


NUMBA = Kernels(RowSpace, Bags.from_tensors, pooled_lookup, row_gradient_dots, row_update, SlotMap)


def kernels_by_triton(device: torch.device) -> Kernels:
    """The Triton kernels, for tables on a CUDA device.

    Raises:
        MissingDependency: triton cannot be imported.
    """
    try:
        from recsys.embeddings.kernels.triton import pooled_lookup as lookup
        from recsys.embeddings.kernels.triton import row_update as update
        from recsys.embeddings.kernels.triton import slots, transfers
    except ImportError as error:
        raise MissingDependency(
            f"tables on '{device}' need triton, which cannot be imported ({error}); install the "
            "triton that belongs to this version of torch, or keep the tables on the CPU"
        ) from error
    return Kernels(
        TorchRowSpace,
        TorchBags.from_tensors,
        lookup.pooled_lookup,
        lookup.row_gradient_dots,
        update.row_update,
        slots.TritonSlotMap,
        slots.queue_claim,
        errors_on(device),
        HostCopies(
            transfers.HostRows, transfers.fetch_rows, transfers.write_rows, lookup.pooled_lookup
        ),
    )


# By the type of a device, what makes its kernels; all others have numba's.
DEVICE_KERNELS: dict[str, Callable[[torch.device], Kernels]] = {"cuda": kernels_by_triton}


def has_own_kernels(device: torch.device) -> bool:
    """Whether a device has kernels that the host does not wait for, in place of numba's."""
    return device.type in DEVICE_KERNELS


def kernels_on(device: torch.device) -> Kernels:
    """The kernels for tables on a device.

    Raises:
        MissingDependency: they are Triton's, and triton cannot be imported.
    """
    return DEVICE_KERNELS[device.type](device) if has_own_kernels(device) else NUMBA
