"""The rows of several tables of one dim, as kernels see them.

Tables are allocated apart from each other, and each stays the tensor that it was: an adopted
`weight` is still the user's. To a kernel they are one array nevertheless, which begins at the
lowest address:

    row r of table t begins at  flat[bases[t] + r * dim]

What lies between the tables is never touched.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["RowSpace", "compute_dtype"]

_address = torch.Tensor.data_ptr

# By a table's dtype: what kernels see, and what they compute in.
_DTYPES: dict[torch.dtype, tuple[type[np.generic], torch.dtype]] = {
    torch.float32: (np.float32, torch.float32),
    torch.float64: (np.float64, torch.float64),
    torch.bfloat16: (np.uint16, torch.float32),
    torch.float16: (np.int16, torch.float32),
}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What gradients and state of tables of a dtype have, and pooled rows; see `rounding`."""
    return _DTYPES[dtype][1] if dtype in _DTYPES else dtype


class RowSpace:
    """One array over tables that lie anywhere in memory.

    Args:
        tables: On the CPU, contiguous, of one dtype and dim; kept alive.

    Attributes:
        dim: D.
        dtype: Of `flat`; uint16 for bfloat16, int16 for float16.
        compute_dtype: What kernels compute in.
        is_narrow: Whether rows are rounded as they are written.
        flat: Everything from the lowest table's first byte to the highest's last, one-dimensional.
        bases: Where each table begins in it, (T,) uint64.
        sizes: E of each table, (T,) uint64.
        sizes_key: The same, to look something up by.

    Raises:
        ValueError: the tables are not as above.
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        self._tables = [table.detach() for table in tables]  # keeps the memory alive
        self._addresses = [table.data_ptr() for table in tables]
        kinds = {(table.dtype, table.shape[1:].numel(), table.device.type) for table in tables}
        if len(kinds) != 1:
            raise ValueError(f"tables of one row space must have one dtype and dim, got {kinds}")
        dtype, self.dim, device_type = kinds.pop()
        if dtype not in _DTYPES or device_type != "cpu":
            raise ValueError(
                "rows must be float32, float64, bfloat16 or float16 on the CPU, got "
                f"{dtype} on {device_type}; convert them, or leave out optimizer="
            )
        stored, computed = _DTYPES[dtype]
        self.dtype = np.dtype(stored)
        self.compute_dtype = np.dtype(_DTYPES[computed][0])
        self.is_narrow = computed != dtype
        self.sizes = np.array([len(table) for table in tables], np.uint64)
        self.sizes_key = self.sizes.tobytes()
        for table in tables:
            if not table.is_contiguous():
                raise ValueError(f"rows must be contiguous, got strides {table.stride()}")
        held = [table for table in tables if table.numel()]
        low = min((table.data_ptr() for table in held), default=0)
        high = max((table.data_ptr() + table.nbytes for table in held), default=0)
        memory = (ctypes.c_byte * (high - low)).from_address(low)
        self.flat: NDArray[Any] = np.frombuffer(memory, self.dtype)  # type: ignore[call-overload]  # ctypes arrays are buffers
        itemsize = self.dtype.itemsize
        self.bases = np.array(
            [(table.data_ptr() - low) // itemsize if table.numel() else 0 for table in tables],
            np.uint64,
        )

    def holds(self, tables: Sequence[Tensor], numbers: Sequence[int] | None = None) -> bool:
        """Whether tables lie where they lay: `Parameter.data` may have been exchanged.

        Args:
            tables: Those of the row space, or some.
            numbers: Which, in ascending order; None for all.
        """
        known = self._addresses
        if numbers is not None and len(numbers) < len(known):
            known = [known[number] for number in numbers]
        return list(map(_address, tables)) == known
