"""The rows of several tables of one dim, as kernels see them.

Tables are allocated separately, and an adopted `weight` remains the user's tensor, unless a GPU is
to reach it (`own_pages`). Still, a kernel sees them as one array, which begins at the lowest
address:

    row r of table t begins at  flat[bases[t] + r * dim]

Kernels never touch the memory between the tables.
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

# For each dtype of a table: the dtype that kernels see, and the compute dtype.
_DTYPES: dict[torch.dtype, tuple[type[np.generic], torch.dtype]] = {
    torch.float32: (np.float32, torch.float32),
    torch.float64: (np.float64, torch.float64),
    torch.bfloat16: (np.uint16, torch.float32),
}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gradients, state and pooled rows of tables of a dtype; see `rounding`."""
    return _DTYPES[dtype][1] if dtype in _DTYPES else dtype


_DEVICE_TYPES = ("cpu", "cuda")
# Advice for a dtype or device that kernels do not support, by the device of the rows.
_ADVICE = {
    "cuda": "convert them by .float()",
    "cpu": "convert them by .float()",
    "meta": "give them memory by module.to_empty(device='cpu'), then values by reset_parameters() "
    "or load_state_dict",
}


def require_device(device: torch.device | str | None, advice: str) -> None:
    """Check that a device is "cpu", "cuda" or "meta".

    Args:
        device: As for `torch.empty`; None for the default device.
        advice: The end of the error message, which tells what to do.

    Raises:
        ValueError: it is another device.
    """
    found = torch.get_default_device() if device is None else torch.device(device)
    if found.type not in _ADVICE:
        raise ValueError(
            f"device must be 'cpu', 'cuda' or 'meta' (others are not supported yet), got "
            f"'{found}'; {advice}"
        )


def require_aligned(place: str, table: Tensor) -> None:
    """Check that a table's memory is aligned to its dtype.

    Args:
        place: Start of the error message; names the table.
        table: The table.

    Raises:
        ValueError: it is not, as in a view of bytes that begins at an odd address.
    """
    itemsize = table.dtype.itemsize
    if table.data_ptr() % itemsize:
        raise ValueError(
            f"{place}rows must begin at a multiple of {itemsize} bytes in memory, got address "
            f"{table.data_ptr():#x}; use a clone of them"
        )


class AbstractRowSpace:
    """Several tables of one dtype and dim, their addresses, and their compute dtype.

    Args:
        tables: Contiguous; kept alive.

    Attributes:
        tables: Views of the tables, which share their memory and their versions.
        addresses: Address of each table.
        dim: D.
        compute_dtype: The dtype of gradients, state and pooled rows.
        is_narrow: Whether rows are rounded when they are written.

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
                "tables that are updated together must have one dtype and embedding_dim, on one "
                f"device, got {kinds}; convert them alike, such as by module.float() or .to()"
            )
        dtype, self.dim, _ = kinds.pop()
        device_type = tables[0].device.type
        if dtype not in _DTYPES or device_type not in _DEVICE_TYPES:
            advice = _ADVICE.get(device_type, "move the module by .cpu()")
            raise ValueError(
                "rows must be float32, float64 or bfloat16 on the CPU or on CUDA, got "
                f"{dtype} on {device_type}; {advice}"
            )
        self.compute_dtype = compute_dtype(dtype)
        self.is_narrow = self.compute_dtype != dtype
        for table in tables:
            if not table.is_contiguous():
                raise ValueError(
                    f"rows must be contiguous, got strides {table.stride()}; use "
                    "weight.contiguous()"
                )

    def holds(self, tables: Sequence[Tensor], used: Sequence[int] | None = None) -> bool:
        """Whether the tables have the same addresses as before; checked at every step.

        Args:
            tables: All tables.
            used: Numbers of those that count; None for all.
        """
        if used is None or len(used) == len(tables):
            return list(map(address_of, tables)) == self.addresses
        return all(address_of(tables[number]) == self.addresses[number] for number in used)

    def are_alike(self, tables: Sequence[Tensor], used: Sequence[int] | None = None) -> bool:
        """Whether the tables have the same shapes and dtypes; arguments as for `holds`."""
        if used is None or len(used) == len(tables):
            return list(map(_kind, tables)) == self._kinds
        return all(_kind(tables[number]) == self._kinds[number] for number in used)


class RowSpace(AbstractRowSpace):
    """One array over tables anywhere in memory.

    Args:
        tables: On the CPU, contiguous, of one dtype and dim; kept alive.

    Attributes:
        dtype: Dtype of `flat`; uint16 for bfloat16.
        flat: The memory from the lowest table's begin to the highest's end, one-dimensional.
        bases: Where each table begins in `flat`, (T,) uint64.
        sizes: E of each table, (T,) uint64.
        sizes_key: The bytes of `sizes`, as a dictionary key.
        row_names: For a space of slots, the row in each slot, counted over all tables, (S,) int32;
            else empty.
        first_names: For a space of slots, where each table's rows begin among the rows of all
            tables, (T + 1,) uint64; else empty.
        nothing: An empty array of the compute dtype.
        with_states: The result of the last `join_states`; a step uses it again for equal states.

    Raises:
        ValueError: the tables are not as above.
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        super().__init__(tables)
        if tables[0].device.type != "cpu":
            raise ValueError(
                f"rows must be on the CPU for the CPU kernels, got {tables[0].device}; move the "
                "whole module by .to()"
            )
        dtype = tables[0].dtype
        self.dtype = np.dtype(_DTYPES[dtype][0])
        self.sizes = np.array([len(table) for table in tables], np.uint64)
        self.sizes_key = self.sizes.tobytes()
        self.row_names: NDArray[np.int32] = np.empty(0, np.int32)
        self.first_names: NDArray[np.uint64] = np.empty(0, np.uint64)
        for table in tables:
            require_aligned("", table)
            if table.numel() and not table.data_ptr():  # kernels would read address 0
                raise ValueError(
                    f"a table of shape {tuple(table.shape)} must have memory, and its storage has "
                    f"{table.untyped_storage().nbytes()} bytes; resize it, or set weight.data"
                )
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
        self.nothing: NDArray[Any] = np.empty(0, _DTYPES[self.compute_dtype][0])
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
