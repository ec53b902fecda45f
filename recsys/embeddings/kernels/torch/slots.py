"""The map of the slots on a device, without claims.

The arrays are those of `cpu.slot_arrays`, with the same dtypes and meaning, and one place more than
there are rows or slots: a row without a slot, or a slot without a row, points to the last place.
Row numbers count over all tables.

    DeviceSlotMap   the base class of the map; `triton.slots` claims slots for a mini-batch
    distinct_rows   the rows of a mini-batch, each once
    QueuedClaim     a claim that the host does not wait for
    mark_dirty

The host cannot take back what it has queued, so it must know before that there are enough slots.
It counts the most rows that each ticket can need, or reads the counts of an earlier claim. If all
tickets together need at most the slots that are not pinned, the claim finds its slots, whatever its
ids are.

Letters: R rows, S slots, N lookups, U places for distinct rows (N of them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED, DIRTY, EMPTY, NOWHERE, PINNED
from recsys.embeddings.kernels.cpu.slots import Shortage
from recsys.embeddings.kernels.torch.bags import layers_of, rows_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from recsys.embeddings.kernels.torch.bags import TorchBags
    from recsys.embeddings.kernels.torch.row_space import RowNumbers
    from recsys.embeddings.rows.lookups import Lookups

__all__ = [
    "LOOKED_AT",
    "Copies",
    "DeviceSlotMap",
    "QueuedClaim",
    "TorchSlots",
    "Transfer",
    "distinct_rows",
    "first_unpinned",
    "mark_dirty",
    "most_rows",
    "needs",
    "num_enough",
    "rows_first",
    "slots_of",
]

LOOKED_AT = 4  # slots that a claim looks at first, for each lookup


class TorchSlots(NamedTuple):
    """Slots and what they hold.

    Attributes:
        slot_of_row: (R + 1,) int32.
        row_of_slot: (S + 1,) int32.
        num_claims: (S + 1,) int16.
        num_uses: (S + 1,) uint8.
        flags: (S + 1,) uint8.
        hand: The slot that the next claim looks at first, () int64.
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    num_claims: Tensor
    num_uses: Tensor
    flags: Tensor
    hand: Tensor

    @classmethod
    def empty(cls, num_rows: int, num_slots: int, device: torch.device) -> TorchSlots:
        """No slot holds a row."""

        def full(size: int, value: int, dtype: torch.dtype) -> Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        return cls(
            full(num_rows + 1, NOWHERE, torch.int32),
            full(num_slots + 1, EMPTY, torch.int32),
            full(num_slots + 1, 0, torch.int16),
            full(num_slots + 1, 0, torch.uint8),
            full(num_slots + 1, 0, torch.uint8),
            torch.zeros((), dtype=torch.int64, device=device),
        )

    @property
    def num_rows(self) -> int:
        """R."""
        return self.slot_of_row.numel() - 1  # `len` of a tensor is Python

    @property
    def num_slots(self) -> int:
        """S."""
        return self.row_of_slot.numel() - 1


class DeviceSlotMap:
    """The slots of a device: what `SlotMap` is for the CPU, without claims.

    Args:
        numbers: The rows of all tables.
        num_slots: S.

    Attributes:
        numbers: As given.
        tensors: For kernels.
        first_slot: As of the last `recount`, all slots before it are pinned.
        num_pinned: Slots that were pinned then.
        slot_of_row: (R + 1,) int32; one of `tensors`, as are the next four.
        row_of_slot: (S + 1,) int32.
        num_claims: (S + 1,) int16.
        num_uses: (S + 1,) uint8.
        flags: (S + 1,) uint8.
    """

    def __init__(self, numbers: RowNumbers, num_slots: int) -> None:
        self.numbers = numbers
        self.tensors = TorchSlots.empty(numbers.num_rows, num_slots, numbers.device)
        self.slot_of_row, self.row_of_slot, self.num_claims, self.num_uses, self.flags = (
            self.tensors[:5]
        )
        self.first_slot = self.num_pinned = 0

    def mark_dirty(self, slots: Any) -> None:
        """As `SlotMap.mark_dirty`; negative numbers stand for no slot."""
        mark_dirty(self.tensors, torch.as_tensor(slots).to(self.flags.device, torch.int64))

    def recount(self) -> None:
        """As `SlotMap.recount`; the host waits."""
        self.first_slot = first_unpinned(self.tensors)
        self.num_pinned = int(((self.flags & PINNED) > 0).sum())

    def rows_of(self, lookups: Lookups, bags: TorchBags) -> Tensor:
        """The distinct rows looked up, as `distinct_rows` gives them."""
        rows_N, _ = self.rows_of_values(lookups, bags)
        return distinct_rows(torch.where(rows_N < self.tensors.num_rows, rows_N, NOWHERE))

    def rows_of_values(self, lookups: Lookups, bags: TorchBags) -> tuple[Tensor, Tensor]:
        """The row of each value, R for none; and which values are looked up and are no rows.

        Shape:
            results (L * N,): N values for each layer of lookups, of which there are L.
        """
        if not bags.batch_size or not len(lookups.tables):
            none = torch.zeros_like(bags.values, dtype=torch.bool)
            return torch.full_like(none, self.tensors.num_rows, dtype=torch.int64), none
        _, layers = layers_of(self.numbers, lookups, bags.num_features)
        found = [rows_of(self.numbers, layer, bags) for layer in layers]
        return torch.cat([rows for rows, _ in found]), torch.cat([is_bad for _, is_bad in found])

    def _shortage(self, rows_U: Tensor) -> Shortage:
        """The error of a claim of these rows; the host waits."""
        is_missing, is_needed = needs(self.tensors, rows_U)
        is_pinned = ((self.flags & PINNED) > 0)[:-1]
        num_missing, num_idle = int(is_missing.sum()), int((~is_needed & ~is_pinned).sum())
        return Shortage(is_needed.nonzero().flatten(), num_missing, num_missing - num_idle)


class Transfer(NamedTuple):
    """The rows to copy for a claim, in this order; places of no row are `NOWHERE`.

    For a queued claim, rows come first, in descending order, then places of no row.

    Attributes:
        written_rows: Rows that must be written back, (U,).
        written_slots: The slot of each.
        fetched_rows: Rows that must be fetched, (U,).
        fetched_slots: The slot of each.
        is_enough: Whether there were slots for all, one number of any dtype; if not, nothing was
            changed.
    """

    written_rows: Tensor
    written_slots: Tensor
    fetched_rows: Tensor
    fetched_slots: Tensor
    is_enough: Tensor


class Copies(Protocol):
    """Makes the transfers of claims; see `DeviceCopies`."""

    @property
    def key(self) -> Hashable:
        """Differs if the tables are others."""

    @property
    def reads(self) -> Any:
        """What owns the memory that the copies read, besides lists, tables and slots."""

    def launch(self, moves: Transfer) -> None:
        """Queue the copies."""


def rows_first(rows_U: Tensor, slots_U: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in descending order, then places of no row; and the slot of each, (U,)."""
    in_order = rows_U.sort(descending=True)
    return in_order.values, slots_U[in_order.indices]


def distinct_rows(rows: Tensor) -> Tensor:
    """Rows, each once and in ascending order, then `NOWHERE`.

    Shape:
        rows (N,) int64; result (N,).
    """
    if not len(rows):
        return rows
    rows_N = rows.sort().values
    is_first = torch.ones_like(rows_N, dtype=torch.bool)
    torch.ne(rows_N[1:], rows_N[:-1], out=is_first[1:])
    last = torch.iinfo(torch.int64).max
    found = torch.where(is_first & (rows_N >= 0), rows_N, last).sort().values
    return torch.where(found == last, NOWHERE, found)


def slots_of(slots: TorchSlots, rows: Tensor) -> Tensor:
    """The slot that each row is in, `NOWHERE` for a row that is in none.

    Shape:
        rows (M,) int64, R for no row; result (M,) int64.
    """
    found = slots.slot_of_row[rows].long()
    return torch.where(found < AWAITED, found, NOWHERE)


def mark_dirty(slots: TorchSlots, slot_U: Tensor) -> None:
    """Note that rows are newer than in the cold store; negative numbers stand for no slot."""
    held_U = torch.where(slot_U < 0, slots.num_slots, slot_U)
    slots.flags.index_copy_(0, held_U, slots.flags[held_U] | DIRTY)
    _clear_last_places(slots)


def first_unpinned(slots: TorchSlots) -> int:
    """The first slot that is not pinned, or the last slot; the host waits for it."""
    is_pinned = (slots.flags & PINNED) > 0
    return min(int(is_pinned.long().cumprod(0).sum()), slots.num_slots - 1)


def needs(slots: TorchSlots, rows_U: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows are in no slot, (U,); which slots tickets or these rows need, (S,)."""
    is_row = rows_U >= 0
    known_U = slots.slot_of_row[torch.where(is_row, rows_U, slots.num_rows)].long()
    is_missing = is_row & (known_U == NOWHERE)
    held_U = torch.where(known_U >= AWAITED, known_U - AWAITED, known_U)
    is_needed = slots.num_claims > 0
    is_needed.index_fill_(0, torch.where(known_U == NOWHERE, slots.num_slots, held_U), True)
    return is_missing, is_needed[:-1]


def _clear_last_places(slots: TorchSlots) -> None:
    """Undo writes for no row, or no slot."""
    slots.slot_of_row[-1:].fill_(NOWHERE)
    slots.row_of_slot[-1:].fill_(EMPTY)
    for counts in (slots.num_claims, slots.num_uses, slots.flags):
        counts[-1:].zero_()


class QueuedClaim(NamedTuple):
    """The claim of one mini-batch, as the device will know it.

    Attributes:
        slot_of_value: (N,); negative for a value without a slot: `NOWHERE` if it is padding or not
            looked up, another number if it is not a row of its table.
        held: The slots that count this claim, (U,).
        moves: The rows to copy before the slots are read.
        counts: The numbers of `TierCounts` for this claim, (6,) int32 or int64.
    """

    slot_of_value: Tensor
    held: Tensor
    moves: Transfer
    counts: Tensor


def most_rows(slot_map: DeviceSlotMap, lookups: Lookups, bags: TorchBags) -> int:
    """The most distinct rows that a mini-batch can need; the host does not wait.

    A one-hot feature has B values. Of other features the host may only know how many values there
    are in all.

    Args:
        slot_map: Knows the sizes of the tables.
        lookups: Which features are looked up in which tables; each feature in at most one.
        bags: The input.
    """
    sizes = list(map(slot_map.numbers.sizes.__getitem__, lookups.distinct_tables))
    if bags.offsets is None:
        return sum(map(min, (count * bags.batch_size for count in lookups.num_in_tables), sizes))
    if not bags.counts:
        return min(len(bags.values), sum(sizes))
    of_tables = dict.fromkeys(lookups.distinct_tables, 0)
    for table, position in zip(lookups.tables.tolist(), lookups.positions.tolist(), strict=True):
        of_tables[table] += bags.counts[position]
    return sum(map(min, of_tables.values(), sizes))


def num_enough(slot_map: DeviceSlotMap, num_needed: int) -> int:
    """How many slots from the hand on surely include enough free ones for a claim.

    Args:
        slot_map: The slots.
        num_needed: The most slots that all tickets need, including this claim.
    """
    return max(1, num_needed + slot_map.num_pinned - slot_map.first_slot)
