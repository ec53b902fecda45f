"""The input of a lookup as arguments of the kernels that read its row numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.rows.lookups import NO_OFFSETS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.rows.lookups import Lookups

__all__ = ["NO_PADDING", "kernel_arguments"]

# The value -2**63. A wrong id such as -1 must not pass for padding: its lookup raises an error.
NO_PADDING = np.uint64(2**63)


def kernel_arguments(lookups: Lookups, bags: Any) -> Any:
    """The arguments by which kernels read the row numbers of bags.

    Args:
        lookups: Which features are looked up in which tables.
        bags: The input, with rows; that of a device is copied to the host, which waits.

    Returns:
        Tables and positions, (L,) uint64; values, (N,); offsets, (F * B + 1,), empty if
        bag i is value i; whether it is; B; and the padding id, which is not looked up.
    """
    values: NDArray[Any] = bags.values
    offsets: NDArray[Any] | None = bags.offsets
    padding = NO_PADDING
    if isinstance(bags, TorchBags):
        values = bags.values.cpu().numpy()
        offsets = None if bags.offsets is None else bags.bounds().cpu().numpy()
        if bags.padding is not None:
            padding = np.uint64(bags.padding)
    return (
        lookups.tables,
        lookups.positions,
        values,
        NO_OFFSETS if offsets is None else offsets,
        int(offsets is None),
        bags.batch_size,
        padding,
    )
