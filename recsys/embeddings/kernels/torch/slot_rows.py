"""Rows in slots, and rows in either tier, for the kernels of a device.

    SlotRows      a slot's number is its row's number; for training
    TieredRows    row numbers count over all tables; a row is read from its slot, or from a copy if
                  it has no slot; for evaluation
    ReachedRows   as `TieredRows`, but a row without a slot is read from the host's memory

A device that does not reach the host's memory needs the copies.

Letters: T tables, R rows of all tables, S slots, M rows without a slot, U requested rows, D dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from recsys.embeddings.kernels.cpu.slot_arrays import NOWHERE
from recsys.embeddings.kernels.torch.row_space import RowNumbers, TableStarts, TorchRows
from recsys.embeddings.kernels.torch.slots import slots_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.embeddings.kernels.torch.slots import TorchSlots

__all__ = ["ReachedRows", "SlotRows", "TieredRows", "number_rows"]


def number_rows(sizes: Sequence[int], dim: int, rows: Tensor) -> RowNumbers:
    """Number the rows of all tables, one table after the other.

    Args:
        sizes: E of each table.
        dim: D.
        rows: A tensor that has the dtype and the device of the rows.
    """
    first_rows = [sum(sizes[:table]) for table in range(len(sizes))]
    return RowNumbers(first_rows, sizes, sum(sizes), dim, rows.dtype, rows.device)


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


class TieredRows(RowNumbers):
    """Rows of all tables, read from slots or, if they have none, from copies.

    Args:
        numbers: Numbers of the rows of all tables.
        slots: Which row each slot holds.
        slot_rows: The rows in the slots, (S, D).
        others: Rows without a slot, in ascending order, (M,) int64.
        other_rows: Copies of these rows, (M, D).
    """

    def __init__(
        self,
        numbers: RowNumbers,
        slots: TorchSlots,
        slot_rows: Tensor,
        others: Tensor,
        other_rows: Tensor,
    ) -> None:
        super().__init__(
            numbers.first_rows,
            numbers.sizes,
            numbers.num_rows,
            numbers.dim,
            slot_rows.dtype,
            slot_rows.device,
        )
        self.layers = numbers.layers  # the same layers; making them would copy to the device
        self._slots, self._slot_rows = slots, slot_rows
        self._others, self._other_rows = others, other_rows

    def read(self, rows: Tensor) -> Tensor:
        """Read rows in the compute dtype; see `TorchRows`."""
        slots_U = slots_of(self._slots, rows.clamp(max=self.num_rows))
        found = self._slot_rows.index_select(0, slots_U.clamp(min=0))
        if len(self._others):
            places_U = torch.searchsorted(self._others, rows).clamp(max=len(self._others) - 1)
            copies = self._other_rows.index_select(0, places_U)
            found = torch.where((slots_U == NOWHERE).unsqueeze(1), copies, found)
        return found.to(self.compute_dtype)


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
