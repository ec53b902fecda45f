"""Which kernels work on which device: numba's on the CPU, operations of torch on CUDA.

It is chosen once for the tables of a group, and again where they are moved to another device. A
call finds the kernels at the group, so choosing takes no time of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recsys.embeddings.kernels.cpu.pooled_lookup import pooled_lookup, row_gradient_dots
from recsys.embeddings.kernels.cpu.row_update import row_update
from recsys.embeddings.kernels.torch import pooled_lookup as by_torch
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.kernels.torch.row_space import TorchRowSpace
from recsys.embeddings.kernels.torch.row_update import row_update as row_update_by_torch
from recsys.embeddings.rows.lookups import Bags
from recsys.embeddings.rows.row_space import RowSpace

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from recsys.embeddings.kernels.cpu.row_update import BadRow
    from recsys.embeddings.kernels.torch.errors import DeferredErrors

__all__ = ["NUMBA", "Kernels", "kernels_on"]

# Tests let the CPU be one of them.
_BY_TORCH = {"cuda"}


@dataclass(eq=False)  # attributes of which take half as long as a tuple's
class Kernels:
    """The functions that work on the tables of a group.

    Attributes:
        make_space: From tables to the row space that the others take.
        make_bags: As `Bags.from_tensors`.
        pooled_lookup: As `cpu.pooled_lookup.pooled_lookup`, and so are the others.
        row_gradient_dots: Likewise.
        row_update: Likewise.
        errors: Where errors of an input are found behind a call; None where they are raised by it.
    """

    make_space: Any
    make_bags: Callable[..., Any]
    pooled_lookup: Callable[..., int]
    row_gradient_dots: Callable[..., None]
    row_update: Callable[..., BadRow | None]
    errors: DeferredErrors | None


NUMBA = Kernels(RowSpace, Bags.from_tensors, pooled_lookup, row_gradient_dots, row_update, None)


def kernels_on(device: torch.device) -> Kernels:
    """Those for tables on a device."""
    if device.type not in _BY_TORCH:
        return NUMBA
    return Kernels(
        TorchRowSpace,
        TorchBags.from_tensors,
        by_torch.pooled_lookup,
        by_torch.row_gradient_dots,
        row_update_by_torch,
        errors_on(device),
    )
