"""The hot tier of one row space: slots, what they hold, and what they cost.

    bytes = rows of the row space * 4                       the row map
          + slots * (row + its optimizer state + 8)         and what is known of each slot

The row map answers in one step whether a row is here; it is what a budget has to pay before the
first row.

Not among these bytes, as a mini-batch's ids and pooled vectors are not: a ticket's slot numbers, 4
bytes a lookup and 4 a row; and while slots are claimed at most 20 bytes a lookup and 32 a row in
all, which are gone before anything is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys.embeddings.kernels.slots import AWAITED, EMPTY, NOWHERE, PINNED, SlotArrays
from recsys.embeddings.memory import empty_rows
from recsys.embeddings.row_space import RowSpace, compute_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["MAX_SLOTS", "HotTier", "floor_bytes", "map_bytes", "row_bytes", "slot_bytes"]

MAX_SLOTS = AWAITED - 1  # a slot's number and one bit more fit 32
_MAP_BYTES_PER_ROW = 4
_NOTE_BYTES_PER_SLOT = 8  # row, claims, uses, flags


def map_bytes(num_rows: int) -> int:
    """What the row map of so many rows takes."""
    return num_rows * _MAP_BYTES_PER_ROW


def row_bytes(dim: int, dtype: torch.dtype, state_sizes: Mapping[str, int]) -> int:
    """What a row and its state take."""
    return dim * dtype.itemsize + sum(state_sizes.values()) * compute_dtype(dtype).itemsize


def slot_bytes(dim: int, dtype: torch.dtype, state_sizes: Mapping[str, int]) -> int:
    """What one slot takes: a row, its state, and what is known of it."""
    return row_bytes(dim, dtype, state_sizes) + _NOTE_BYTES_PER_SLOT


def floor_bytes(num_rows: int, slots: Iterable[tuple[int, int]]) -> int:
    """The least that tables can do with: the row map, and a slot for every row needed at once.

    Args:
        num_rows: Of all tables.
        slots: Of every row space: how many, and what one takes.
    """
    return map_bytes(num_rows) + sum(count * num_bytes for count, num_bytes in slots)


class HotTier:
    """Slots for some rows of a row space.

    Args:
        sizes: E of every table.
        dim: D.
        dtype: Of the rows.
        state_sizes: Numbers per row of every state array, by name.
        num_slots: S.

    Attributes:
        rows: (S, D); a slot's row is undefined where it has none.
        states: (S, size) of each state array.
        slots: Which row is where.
        first_rows: Where each table's rows begin among all, (T + 1,).
        arrays: The same as arrays of numpy, in one list: rows, then state.
        space: The slots as kernels see them: every table begins at slot 0.
        state_spaces: The same of each state array.

    Raises:
        ValueError: there are more rows, or slots, than 32 bits can number.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        dtype: torch.dtype,
        state_sizes: Mapping[str, int],
        num_slots: int,
    ) -> None:
        self.first_rows: NDArray[np.uint64] = np.cumsum([0, *sizes]).astype(np.uint64)
        num_rows = int(self.first_rows[-1])
        if num_rows >= AWAITED * 2 or num_slots > MAX_SLOTS:
            raise ValueError(
                f"a row space has at most {AWAITED * 2 - 1} rows and {MAX_SLOTS} slots, got "
                f"{num_rows} and {num_slots}; give tables to several modules"
            )
        self.num_slots = num_slots
        self.rows = empty_rows(num_slots, dim, dtype=dtype)
        self.states = [
            empty_rows(num_slots, size, dtype=compute_dtype(dtype)) for size in state_sizes.values()
        ]
        self.slots = SlotArrays(
            np.full(num_rows, NOWHERE, np.int32),
            np.full(num_slots, EMPTY, np.int32),
            np.zeros(num_slots, np.uint16),
            np.zeros(num_slots, np.uint8),
            np.zeros(num_slots, np.uint8),
        )
        self.space = _SlotSpace(self.rows, sizes)
        self.space.row_names, self.space.first_names = self.slots.row_of_slot, self.first_rows
        self.state_spaces = [_SlotSpace(state, sizes) for state in self.states]
        spaces = [self.space, *self.state_spaces]
        self.arrays = [space.flat.reshape(num_slots, space.dim) for space in spaces]

    @property
    def num_bytes(self) -> int:
        """What all of it takes."""
        return self.bytes_with(self.num_slots)

    @property
    def row_bytes(self) -> int:
        """What moves with a row: itself and its state."""
        return sum(array.itemsize * array.shape[1] for array in self.arrays)

    def bytes_with(self, num_slots: int) -> int:
        """What it would take with another number of slots."""
        sizes = {str(number): state.shape[1] for number, state in enumerate(self.states)}
        of_slot = slot_bytes(self.rows.shape[1], self.rows.dtype, sizes)
        return map_bytes(int(self.first_rows[-1])) + num_slots * of_slot

    def pin(self, rows: NDArray[np.int32]) -> None:
        """Keep a slot for each of these rows, numbered over all tables; slots must be new."""
        slots = np.arange(len(rows), dtype=np.int32)
        self.slots.row_of_slot[slots] = rows
        self.slots.flags[slots] = PINNED
        self.slots.slot_of_row[rows] = slots + AWAITED


class _SlotSpace(RowSpace):
    """The slots, once for every table: slot s begins at `flat[s * dim]`, whatever the table."""

    def __init__(self, rows: Tensor, sizes: Sequence[int]) -> None:
        super().__init__([rows])
        self.bases = np.zeros(len(sizes), np.uint64)
        # Kernels begin with the largest table.
        self.sizes_key = np.array(sizes, np.uint64).tobytes()
        self.sizes = np.full(len(sizes), len(rows), np.uint64)
