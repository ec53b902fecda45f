"""The hot tier of one row space: slots, what they hold, and what they cost.

    bytes = rows of the row space * 4                       the row map
          + slots * (row + its optimizer state + 8)         and what is known of each slot

The row map answers in one step whether a row is here; it is what a budget has to pay before the
first row.

Not among these bytes, as a mini-batch's ids and pooled vectors are not: a ticket's slot numbers, 4
bytes a lookup and 4 a row; and while slots are claimed at most 20 bytes a lookup and 32 a row in
all, which are gone before anything is computed. On a device that is more, for operations of torch
make an array each, but in proportion to the lookups, too; and a piece of at most 16 MiB is on its
way there. On the CPU, what a larger budget would do is foretold from at most 0.7 MB.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.embeddings.kernels.slots import AWAITED, EMPTY, NOWHERE, PINNED, SlotArrays
from recsys.embeddings.memory import empty_rows
from recsys.embeddings.row_space import RowSpace, compute_dtype
from recsys.embeddings.slot_map import HostSlotMap

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.cold_store import ColdStore
    from recsys.embeddings.slot_map import SlotMap

__all__ = [
    "MAX_SLOTS",
    "AbstractHotTier",
    "HotTier",
    "floor_bytes",
    "map_bytes",
    "row_bytes",
    "slot_bytes",
]

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


class AbstractHotTier(ABC):
    """Slots for some rows of a row space.

    Args:
        sizes: E of every table.
        dim: D.
        dtype: Of the rows.
        state_sizes: Numbers per row of every state array, by name.
        num_slots: S.

    Attributes:
        num_slots: S.
        rows: (S, D); a slot's row is undefined where it has none.
        states: (S, size) of each state array.
        slots: Which row is where.
        first_rows: Where each table's rows begin among all, (T + 1,).
        space: The slots as kernels see them: every table begins at slot 0.
        state_spaces: The same of each state array.

    Raises:
        ValueError: there are more rows, or slots, than 32 bits can number.
    """

    rows: Tensor
    states: Sequence[Tensor]
    slots: Any
    space: Any
    state_spaces: Sequence[Any]

    def __init__(self, sizes: Sequence[int], num_slots: int) -> None:
        self.first_rows: NDArray[np.uint64] = np.cumsum([0, *sizes]).astype(np.uint64)
        num_rows = int(self.first_rows[-1])
        if num_rows >= AWAITED * 2 or num_slots > MAX_SLOTS:
            raise ValueError(
                f"a row space has at most {AWAITED * 2 - 1} rows and {MAX_SLOTS} slots, got "
                f"{num_rows} and {num_slots}; give tables to several modules"
            )
        self.num_slots = num_slots

    @abstractmethod
    def make_map(self) -> SlotMap:
        """What says which row is in which slot; one for all."""

    @abstractmethod
    def pin(self, rows: NDArray[np.int32]) -> None:
        """Keep a slot for each of these rows, numbered over all tables; slots must be new."""

    @abstractmethod
    def fetch(self, cold: ColdStore, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Copy rows and their state from the cold store into slots; see `ColdStore.fetch`."""

    @abstractmethod
    def write_back(
        self, cold: ColdStore, rows: NDArray[np.int32], slots: NDArray[np.int32]
    ) -> None:
        """Copy slots to the cold store; see `ColdStore.write_back`."""

    @abstractmethod
    def in_order(self) -> AbstractContextManager[Any]:
        """A context for one transfer, which comes after all that the caller has queued by now."""

    @abstractmethod
    def after_transfers(self) -> None:
        """Have what the caller does to the slots from now on come after the transfers made."""

    @property
    def num_bytes(self) -> int:
        """What all of it takes."""
        return self.bytes_with(self.num_slots)

    @property
    def row_bytes(self) -> int:
        """What moves with a row: itself and its state."""
        return sum(each.itemsize * each.shape[1] for each in (self.rows, *self.states))

    def bytes_with(self, num_slots: int) -> int:
        """What it would take with another number of slots."""
        sizes = {str(number): state.shape[1] for number, state in enumerate(self.states)}
        of_slot = slot_bytes(self.rows.shape[1], self.rows.dtype, sizes)
        return map_bytes(int(self.first_rows[-1])) + num_slots * of_slot

    def slots_with(self, num_bytes: int) -> int:
        """How many slots there would be with other memory: at most one for each row."""
        more = (num_bytes - self.num_bytes) // (self.bytes_with(1) - self.bytes_with(0))
        return min(self.num_slots + more, int(self.first_rows[-1]))


class HotTier(AbstractHotTier):
    """Slots in the CPU's memory; see `AbstractHotTier`.

    Attributes:
        arrays: Rows and states as arrays of numpy.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        dtype: torch.dtype,
        state_sizes: Mapping[str, int],
        num_slots: int,
    ) -> None:
        super().__init__(sizes, num_slots)
        self.rows = empty_rows(num_slots, dim, dtype=dtype)
        self.states = [
            empty_rows(num_slots, size, dtype=compute_dtype(dtype)) for size in state_sizes.values()
        ]
        self.slots = SlotArrays(
            np.full(int(self.first_rows[-1]), NOWHERE, np.int32),
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

    def make_map(self) -> HostSlotMap:
        """See `AbstractHotTier`."""
        return HostSlotMap(self)

    def pin(self, rows: NDArray[np.int32]) -> None:
        """See `AbstractHotTier`."""
        slots = np.arange(len(rows), dtype=np.int32)
        self.slots.row_of_slot[slots] = rows
        self.slots.flags[slots] = PINNED
        self.slots.slot_of_row[rows] = slots + AWAITED

    def fetch(self, cold: ColdStore, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """See `AbstractHotTier`."""
        cold.fetch(self, rows, slots)

    def write_back(
        self, cold: ColdStore, rows: NDArray[np.int32], slots: NDArray[np.int32]
    ) -> None:
        """See `AbstractHotTier`."""
        cold.write_back(self, rows, slots)

    def in_order(self) -> AbstractContextManager[Any]:
        """See `AbstractHotTier`; on the CPU everything is done when it returns."""
        return nullcontext()

    def after_transfers(self) -> None:
        """See `AbstractHotTier`; on the CPU there is nothing to wait for."""


class _SlotSpace(RowSpace):
    """The slots, once for every table: slot s begins at `flat[s * dim]`, whatever the table."""

    def __init__(self, rows: Tensor, sizes: Sequence[int]) -> None:
        super().__init__([rows])
        self.bases = np.zeros(len(sizes), np.uint64)
        # Kernels begin with the largest table.
        self.sizes_key = np.array(sizes, np.uint64).tobytes()
        self.sizes = np.full(len(sizes), len(rows), np.uint64)
