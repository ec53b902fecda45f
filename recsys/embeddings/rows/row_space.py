"""The rows of several tables of one dim, as kernels see them.

Tables are allocated apart from each other, and each stays the tensor that it was: an adopted
`weight` is still the user's. To a kernel they are one array nevertheless, which begins at the
lowest address:

    row r of table t begins at  flat[bases[t] + r * dim]

What lies between the tables is never touched.
"""

from __future__ import annotations

import ctypes
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

__all__ = [
    "AbstractRowSpace",
    "JoinedStates",
    "RowSpace",
    "address_of",
    "compute_dtype",
    "require_aligned",
    "require_device",
]

address_of = torch.Tensor.data_ptr
_kind = attrgetter("shape", "dtype")

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


_DEVICE_TYPES = ("cpu", "cuda")
# By the device that rows of a module are on.
_WAYS_OUT = {
    "cuda": "convert them by .float()",
    "cpu": "convert them by .float()",
    "meta": "give them memory by module.to_empty(device='cpu'), then values by reset_parameters() "
    "or load_state_dict",
}


def require_device(device: torch.device | str | None, way_out: str) -> None:
    """Check that kernels of ours can work on a device, or that it is "meta", without memory yet.

    Args:
        device: As it is given to `torch.empty`.
        way_out: What the error recommends.

    Raises:
        ValueError: they cannot.
    """
    found = torch.get_default_device() if device is None else torch.device(device)
    if found.type not in _WAYS_OUT:
        raise ValueError(
            f"device must be 'cpu', 'cuda' or 'meta' (others are not supported yet), got "
            f"'{found}'; {way_out}"
        )


def require_aligned(place: str, table: Tensor) -> None:
    """Check that a table's numbers lie where an array of them has its own.

    Raises:
        ValueError: they do not, as in a view of bytes from an odd one on.
    """
    itemsize = table.dtype.itemsize
    if table.data_ptr() % itemsize:
        raise ValueError(
            f"{place}rows must begin at a multiple of {itemsize} bytes in memory, got address "
            f"{table.data_ptr():#x}; use a clone of them"
        )


class AbstractRowSpace:
    """Several tables of one dtype and dim; where they lie, and what is computed in.

    Args:
        tables: Contiguous; kept alive.

    Attributes:
        tables: Views of them, which share their memory and their versions.
        addresses: Where each table begins.
        dim: D.
        computed: The dtype that is computed in.
        is_narrow: Whether rows are rounded as they are written.

    Raises:
        ValueError: the tables are not as above.
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        self.tables = [table.detach() for table in tables]  # keeps the memory alive
        self.addresses = list(map(address_of, tables))
        self._kinds = list(map(_kind, tables))
        kinds = {(table.dtype, table.shape[1:].numel(), str(table.device)) for table in tables}
        if len(kinds) != 1:
            raise ValueError(
                f"tables of one row space must have one dtype and dim, on one device, got {kinds}"
            )
        dtype, self.dim, _ = kinds.pop()
        device_type = tables[0].device.type
        if dtype not in _DTYPES or device_type not in _DEVICE_TYPES:
            way_out = _WAYS_OUT.get(device_type, "move the module by .cpu()")
            raise ValueError(
                "rows must be float32, float64, bfloat16 or float16 on the CPU or on CUDA, got "
                f"{dtype} on {device_type}; {way_out}"
            )
        self.computed = compute_dtype(dtype)
        self.is_narrow = self.computed != dtype
        for table in tables:
            if not table.is_contiguous():
                raise ValueError(f"rows must be contiguous, got strides {table.stride()}")

    def holds(self, tables: Sequence[Tensor]) -> bool:
        """Whether the tables begin where they began; checked at every step."""
        return list(map(address_of, tables)) == self.addresses

    def are_alike(self, tables: Sequence[Tensor]) -> bool:
        """Whether the tables are as long as they were, and of the same dtype."""
        return list(map(_kind, tables)) == self._kinds


class RowSpace(AbstractRowSpace):
    """One array over tables that lie anywhere in memory.

    Args:
        tables: On the CPU, contiguous, of one dtype and dim; kept alive.

    Attributes:
        dtype: Of `flat`; uint16 for bfloat16, int16 for float16.
        compute_dtype: What kernels compute in.
        flat: Everything from the lowest table's first byte to the highest's last, one-dimensional.
        bases: Where each table begins in it, (T,) uint64.
        sizes: E of each table, (T,) uint64.
        sizes_key: The same, to look something up by.
        row_names: Which row of all tables lies where, (S,) int32, if others than the tables' own
            lie here; else empty.
        first_names: The first row of each table among all, (T + 1,) uint64; else empty.
        with_states: The result of the last `join_states`; a step uses it again for equal states.

    Raises:
        ValueError: the tables are not as above.
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        super().__init__(tables)
        if tables[0].device.type != "cpu":
            raise ValueError(
                f"rows must be on the CPU for kernels of the CPU, got {tables[0].device}; move the "
                "module by .to(), as a whole"
            )
        dtype = tables[0].dtype
        stored, computed = _DTYPES[dtype]
        self.dtype = np.dtype(stored)
        self.compute_dtype = np.dtype(_DTYPES[computed][0])
        self.sizes = np.array([len(table) for table in tables], np.uint64)
        self.sizes_key = self.sizes.tobytes()
        self.row_names: NDArray[np.int32] = np.empty(0, np.int32)
        self.first_names: NDArray[np.uint64] = np.empty(0, np.uint64)
        for table in tables:
            require_aligned("", table)
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
        self.nothing: NDArray[Any] = np.empty(0, self.compute_dtype)
        self.with_states: JoinedStates | None = None

    def join_states(self, states: Sequence[RowSpace]) -> JoinedStates:
        """Join the tables with their state arrays, and keep the result in `with_states`.

        Args:
            states: State arrays of the same tables, two at most.
        """
        flats = [*(state.flat for state in states), self.nothing, self.nothing]
        bases = [self.bases, *(state.bases for state in states), self.bases, self.bases]
        self.with_states = JoinedStates(list(states), (flats[0], flats[1]), np.stack(bases[:3]))
        return self.with_states


class JoinedStates(NamedTuple):
    """The state arrays of a row space, as kernels take them together with the tables.

    Attributes:
        states: As given to `join_states`.
        flats: `flat` of the first and of the second state; empty if there are fewer states.
        bases: `bases` of the tables, the first and the second state, (3, T) uint64; those of the
            tables if there are fewer states.
    """

    states: list[RowSpace]
    flats: tuple[NDArray[Any], NDArray[Any]]
    bases: NDArray[np.uint64]
