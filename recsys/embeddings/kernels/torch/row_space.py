"""Tables of one dim as one tensor: row = first row of the table + id.

Operations of torch index one tensor, not several. So tables of one row space lie in one allocation,
of which each `weight` is a view. A module of ours allocates them so; tables that come from
elsewhere are moved into one, once, and stay the very `Parameter`s that they were.

Letters: T tables, R rows, U rows asked for, D dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys.embeddings.kernels.torch.errors import errors_on
from recsys.embeddings.rows.row_space import AbstractRowSpace, compute_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.torch.bags import Layer
    from recsys.embeddings.rows.lookups import Lookups

__all__ = ["RowNumbers", "TorchRowSpace", "TorchRows", "upload"]


class RowNumbers:
    """Rows of several tables under one number: first row of the table + id.

    Args:
        first_rows: Of each table, (T,); any of a table without rows.
        sizes: E of each table.
        num_rows: R, more than any number of a row.
        dim: D.
        dtype: Of the rows.
        device: Where they are.

    Attributes:
        first_rows: As given, and so are `sizes`, `num_rows`, `dim` and `device`.
        is_narrow: Whether rows are rounded as they are written.
        compute_dtype: What gradients, state and pooled rows have.
        errors: What is wrong with lookups.
        layers: Lookups as tensors, by lookups and number of features; see `bags`.
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
        self._starts: tuple[Tensor, Tensor] | None = None
        self._firsts: Tensor | None = None

    def numbers_of(self, sequence: Sequence[int]) -> Tensor:
        """Some numbers as a tensor of int64 beside the rows."""
        return upload(np.array(sequence, np.int64), self.device)

    def table_of(self, rows: Tensor) -> Tensor:
        """Which table has each row, (U,) int64."""
        if self._starts is None:
            held = [number for number, size in enumerate(self.sizes) if size]
            held.sort(key=self.first_rows.__getitem__)
            starts = [self.first_rows[number] for number in held]
            self._starts = self.numbers_of(starts), self.numbers_of(held)
        starts_T, tables_T = self._starts
        return tables_T[torch.searchsorted(starts_T, rows, right=True) - 1]

    def ids_of(self, rows: Tensor) -> Tensor:
        """Each row's number in its table, (U,) int64."""
        if self._firsts is None:
            self._firsts = self.numbers_of(self.first_rows)
        return rows - self._firsts[self.table_of(rows)]


class TorchRows(RowNumbers, ABC):
    """One tensor that kernels read rows from, and write them to.

    Attributes:
        rows: (R, D).
    """

    rows: Tensor

    def read(self, rows: Tensor) -> Tensor:
        """Some rows, in the dtype that is computed in.

        Shape:
            rows (U,) int64, any number at or behind R for a row that will not be used; result
            (U, D).
        """
        if not len(self.rows):
            return self.rows.new_zeros(len(rows), self.dim, dtype=self.compute_dtype)
        return self.rows.index_select(0, rows.clamp(max=len(self.rows) - 1)).to(self.compute_dtype)

    @abstractmethod
    def follow(self, rows: Tensor, other: Any, tables: Sequence[int]) -> Tensor:
        """Rows of another space (rows) as rows of this (their state).

        Args:
            rows: (U,) int64, of tables that both have rows of.
            other: Where they are rows; of the same kind.
            tables: Which these are.
        """


class TorchRowSpace(TorchRows, AbstractRowSpace):
    """The same over several tables, one behind the other.

    Args:
        tables: Contiguous, of one dtype and dim, on one device. Where they do not lie in one
            allocation, they do afterwards: their `data` is moved.

    Attributes:
        rows: (R, D); rows between tables, if any, are not ours.
        tables: Views of them, which share their memory and their versions.

    Raises:
        ValueError: the tables are not as above, or share memory, so that they cannot be moved.
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        AbstractRowSpace.__init__(self, tables)
        if not _lie_together(tables, self.dim):
            _move_together(tables, self.dim)
            AbstractRowSpace.__init__(self, tables)
        dim, held = self.dim, [table for table in self.tables if table.numel()]
        low = min((table.storage_offset() for table in held), default=0)
        high = max((table.storage_offset() + table.numel() for table in held), default=0)
        like = self.tables[0]
        self.rows = torch.empty(0, dim, dtype=like.dtype, device=like.device)
        if held:
            # Neither autograd nor the version of any table is to know of it.
            storage = held[0].untyped_storage()
            self.rows.set_(storage, low, ((high - low) // dim, dim), (dim, 1))
        first_rows = [
            (table.storage_offset() - low) // dim if table.numel() else 0 for table in self.tables
        ]
        sizes = [len(table) for table in self.tables]
        RowNumbers.__init__(self, first_rows, sizes, len(self.rows), dim, like.dtype, like.device)
        self._shifts: tuple[list[int], Tensor | None] = ([], None)

    def follow(self, rows: Tensor, other: TorchRowSpace, tables: Sequence[int]) -> Tensor:
        """See `TorchRows`."""
        shifts = [0] * len(self.first_rows)
        for table in tables:
            shifts[table] = self.first_rows[table] - other.first_rows[table]
        if not any(shifts):
            return rows
        if self._shifts[0] != shifts:
            self._shifts = shifts, self.numbers_of(shifts)
        assert self._shifts[1] is not None
        return rows + self._shifts[1][other.table_of(rows)]


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device; nobody waits for it to get there."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _lie_together(tables: Sequence[Tensor], dim: int) -> bool:
    held = [table for table in tables if table.numel()]
    storages = {table.untyped_storage().data_ptr() for table in held}
    places = {table.storage_offset() % dim for table in held}
    return len(storages) <= 1 and len(places) <= 1


def _move_together(tables: Sequence[Tensor], dim: int) -> None:
    """Into one allocation, in order."""
    held = sorted((table.data_ptr(), table.nbytes) for table in tables if table.numel())
    if any(
        address + num_bytes > following for (address, num_bytes), (following, _) in pairwise(held)
    ):
        raise ValueError(
            "tables on a device are brought into one allocation, and these share memory, which "
            "they would not any more; give the modules one Parameter, or clones"
        )
    first = tables[0]
    rows = torch.empty(sum(map(len, tables)), dim, dtype=first.dtype, device=first.device)
    start = 0
    for table in tables:
        of_table = rows[start : start + len(table)].view(table.shape)
        of_table.copy_(table.detach())
        table.data = of_table
        start += len(table)
