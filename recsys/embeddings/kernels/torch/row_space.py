"""Tables of one dim as one tensor: row = first row of the table + id.

Torch operations index one tensor, not several. So the tables of one row space share one allocation,
and each `weight` is a view of it. recsys modules allocate their tables this way. Other tables are
copied into one allocation once, and stay the same `Parameter` objects.

A tier on a device has other rows than these:

    SlotRows      a slot's number is its row's number; for training
    ReachedRows   row numbers count over all tables; a row is read from its slot, or, if it has
                  none, from the host's memory; for evaluation

A device that does not reach the host's memory needs copies; see `pooled_lookup.TieredRows`.

Letters: T tables, R rows, S slots, D dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from recsys._support.cuda.replays import Replays
from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.rows.row_space import AbstractRowSpace, compute_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.torch.bags import Layer
    from recsys.embeddings.kernels.torch.slots import TorchSlots
    from recsys.embeddings.rows.lookups import Lookups

__all__ = [
    "ReachedRows",
    "RowNumbers",
    "SlotRows",
    "TableStarts",
    "TorchRowSpace",
    "TorchRows",
    "number_rows",
    "upload",
]


class TableStarts(NamedTuple):
    """The tables that have rows, in the order of their rows.

    Attributes:
        first_rows: Number of each table's first row, ascending.
        tables: The number of each table.
        row_of_slot: If rows are in slots: the row in each slot, (S,) int32; then `first_rows` are
            of these.
    """

    first_rows: Tensor
    tables: Tensor
    row_of_slot: Tensor | None


class RowNumbers:
    """Numbers the rows of several tables: row = first row of the table + id.

    Args:
        first_rows: Number of each table's first row, (T,); arbitrary for a table without rows.
        sizes: E of each table.
        num_rows: R; greater than every row number.
        dim: D.
        dtype: Dtype of the rows.
        device: Device of the rows.

    Attributes:
        first_rows: As given, like `sizes`, `num_rows`, `dim` and `device`.
        is_narrow: Whether rows are rounded when they are written.
        compute_dtype: The dtype of gradients, state and pooled rows.
        errors: Errors of lookups that are still to be raised.
        layers: Cached layers, by lookups and number of features; see `bags`.
        placed: Cached arguments of Triton kernels, by lookups; see `triton.pooled_lookup`.
        replays: Recorded launches that work on these rows.
    """

    def __init__(
        self,
        first_rows: Sequence[int],
        sizes: Sequence[int],
        num_rows: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.first_rows, self.sizes = list(first_rows), list(sizes)
        self.num_rows, self.dim, self.device = num_rows, dim, device
        self.compute_dtype = compute_dtype(dtype)
        self.is_narrow = self.compute_dtype != dtype
        self.errors = errors_on(device)
        self.layers: dict[tuple[Lookups, int], tuple[Layer, list[Layer]]] = {}
        self.placed: dict[Lookups, Any] = {}
        self.replays = Replays()
        self._starts: TableStarts | None = None
        self._firsts: Tensor | None = None

    def numbers_of(self, sequence: Sequence[int]) -> Tensor:
        """Numbers as an int64 tensor on the device of the rows, for kernels on any stream.

        They are kept, so the host waits for their copy once; no later stream has to.
        """
        return torch.from_numpy(np.array(sequence, np.int64)).to(self.device)

    @property
    def starts(self) -> TableStarts:
        """Where the tables begin."""
        if self._starts is None:
            held = [number for number, size in enumerate(self.sizes) if size]
            held.sort(key=self.first_rows.__getitem__)
            starts = [self.first_rows[number] for number in held]
            self._starts = TableStarts(self.numbers_of(starts), self.numbers_of(held), None)
        return self._starts


def number_rows(sizes: Sequence[int], dim: int, rows: Tensor) -> RowNumbers:
    """Number the rows of all tables, one table after the other.

    Args:
        sizes: E of each table.
        dim: D.
        rows: A tensor that has the dtype and the device of the rows.
    """
    first_rows = [sum(sizes[:table]) for table in range(len(sizes))]
    return RowNumbers(first_rows, sizes, sum(sizes), dim, rows.dtype, rows.device)


class TorchRows(RowNumbers, ABC):
    """One tensor in which kernels read and write rows.

    Attributes:
        rows: The tensor, (R, D).
        slots: What its rows are, if they are slots; updates mark them as newer than the cold store.
    """

    rows: Tensor
    slots: TorchSlots | None = None

    @abstractmethod
    def shifts(self, other: Any, tables: Sequence[int]) -> Tensor | None:
        """What `translate` adds to the rows of each table, (T,) int64; None for nothing."""


class TorchRowSpace(TorchRows, AbstractRowSpace):
    """One tensor over several tables, one after the other.

    Args:
        tables: Contiguous, of one dtype and dim, on one device. If they are in different
            allocations, their `data` is copied into one.

    Attributes:
        rows: (R, D); rows between the tables, if any, are not used.
        tables: Views of the tables, which share their memory and their versions.

    Raises:
        ValueError: the tables are not as above, or they overlap and need to be copied.
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        AbstractRowSpace.__init__(self, tables)
        if not _share_allocation(tables, self.dim):
            _copy_to_one_allocation(tables, self.dim)
            AbstractRowSpace.__init__(self, tables)
        dim, held = self.dim, [table for table in self.tables if table.numel()]
        low = min((table.storage_offset() for table in held), default=0)
        high = max((table.storage_offset() + table.numel() for table in held), default=0)
        like = self.tables[0]
        self.rows = torch.empty(0, dim, dtype=like.dtype, device=like.device)
        if held:
            # Made by `set_`, so that it is no view to autograd and has a version of its own.
            storage = held[0].untyped_storage()
            self.rows.set_(storage, low, ((high - low) // dim, dim), (dim, 1))
        first_rows = [
            (table.storage_offset() - low) // dim if table.numel() else 0 for table in self.tables
        ]
        sizes = [len(table) for table in self.tables]
        RowNumbers.__init__(self, first_rows, sizes, len(self.rows), dim, like.dtype, like.device)
        self._shifts: tuple[list[int], Tensor | None] = ([], None)

    def shifts(self, other: TorchRowSpace, tables: Sequence[int]) -> Tensor | None:
        """See `TorchRows`."""
        shifts = [0] * len(self.first_rows)
        for table in tables:
            shifts[table] = self.first_rows[table] - other.first_rows[table]
        if not any(shifts):
            return None
        if self._shifts[0] != shifts:
            self._shifts = shifts, upload(np.array(shifts, np.int64), self.device)
        return self._shifts[1]


class SlotRows(TorchRows):
    """Slots as a row space: slot s is row s of every table.

    Args:
        rows: The rows in the slots, (S, D), or one of their state arrays, (S, size).
        slots: Which row each slot holds.
        numbers: Numbers of the rows of all tables.

    Attributes:
        slots: As given.
        tables: A list of `rows` alone.
    """

    def __init__(self, rows: Tensor, slots: TorchSlots, numbers: RowNumbers) -> None:
        num_slots, dim = rows.shape
        num_tables = len(numbers.sizes)
        super().__init__(
            [0] * num_tables, [num_slots] * num_tables, num_slots, dim, rows.dtype, rows.device
        )
        self.rows, self.tables = rows, [rows]
        self.slots: TorchSlots = slots
        self._numbers = numbers

    def shifts(self, other: Any, tables: Sequence[int]) -> Tensor | None:
        """See `TorchRows`; nothing, for the same reason."""
        return None

    @property
    def starts(self) -> TableStarts:
        """Where the tables begin among the rows in the slots."""
        return self._numbers.starts._replace(row_of_slot=self.slots.row_of_slot)


class ReachedRows(RowNumbers):
    """Rows of all tables, read from slots or, if they have none, from the host's memory.

    Args:
        numbers: Numbers of the rows of all tables.
        slots: Which row each slot holds.
        rows: The rows in the slots, (S, D).
        host: Where the tables lie in memory that the device reaches; `triton.transfers.HostRows`.

    Attributes:
        slots: As given, like `rows` and `host`.
    """

    def __init__(self, numbers: RowNumbers, slots: TorchSlots, rows: Tensor, host: Any) -> None:
        super().__init__(
            numbers.first_rows,
            numbers.sizes,
            numbers.num_rows,
            numbers.dim,
            rows.dtype,
            rows.device,
        )
        self.layers, self.placed = numbers.layers, numbers.placed  # the same
        self.slots, self.rows, self.host = slots, rows, host


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device; the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _share_allocation(tables: Sequence[Tensor], dim: int) -> bool:
    """Whether the tables are in one allocation, a multiple of the dim apart."""
    held = [table for table in tables if table.numel()]
    storages = {table.untyped_storage().data_ptr() for table in held}
    places = {table.storage_offset() % dim for table in held}
    return len(storages) <= 1 and len(places) <= 1


def _copy_to_one_allocation(tables: Sequence[Tensor], dim: int) -> None:
    """Copy the tables into one allocation, in order."""
    held = sorted((table.data_ptr(), table.nbytes) for table in tables if table.numel())
    if any(
        address + num_bytes > following for (address, num_bytes), (following, _) in pairwise(held)
    ):
        raise ValueError(
            "tables on a device must not overlap in memory, because they are copied into one "
            "allocation; use one Parameter for them, or clones"
        )
    first = tables[0]
    rows = torch.empty(sum(map(len, tables)), dim, dtype=first.dtype, device=first.device)
    start = 0
    for table in tables:
        of_table = rows[start : start + len(table)].view(table.shape)
        of_table.copy_(table.detach())
        table.data = of_table
        start += len(table)
