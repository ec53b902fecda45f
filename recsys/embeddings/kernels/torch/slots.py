"""The map of the slots on a device, with torch operations.

The arrays are those of `cpu.slot_arrays`, with the same dtypes and meaning, and one place more than
there are rows or slots: a row without a slot, or a slot without a row, points to the last place.
Row numbers count over all tables.

    TorchSlotMap    claims slots for a mini-batch
    distinct_rows   the rows of a mini-batch, each once
    claim           counts a ticket into the slots of its rows, finds slots for the other rows, and
                    lists the rows to copy: all of it, or nothing
    mark_dirty, release

The clock's hand halves the uses of each slot that it passes, and takes the first slot without uses.
So it takes a slot of u uses in the round whose number is the number of bits of u, and slots in the
order (round, distance from the hand): one sort for all rows of a mini-batch. A claim that looks at
all slots takes the same slots as `cpu.slots`. A claim that looks at fewer takes slots among
these; its time and memory then do not grow with the number of slots.

Every array has a place for each lookup, `NOWHERE` where there is no row, so the host waits for the
device only to learn which rows to copy, if it copies them. Whether there were enough slots is a
number on the device, too.

Letters: R rows, S slots, W slots looked at, N lookups, U places for distinct rows (N of them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED, DIRTY, EMPTY, NOWHERE, PINNED
from recsys.embeddings.kernels.cpu.slots import Moves, NoSuchRow, Shortage, SlotClaim
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
    "TorchSlotMap",
    "TorchSlots",
    "Transfer",
    "claim",
    "distinct_rows",
    "first_unpinned",
    "mark_dirty",
    "needs",
    "release",
    "rows_first",
    "slots_of",
]

_MOST_USES = 255
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


class TorchSlotMap:
    """Claims slots on a device; the same methods as `SlotMap`, which does it for the CPU.

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

    def claim(self, lookups: Lookups, bags: TorchBags) -> SlotClaim:
        """As `SlotMap.claim`; the host waits once, to learn which rows to copy."""
        slots = self.tensors
        rows_N, is_bad_N = self.rows_of_values(lookups, bags)
        is_row_N = rows_N < slots.num_rows
        num_hits = (slots_of(slots, rows_N) != NOWHERE).sum()
        first_bad = _first(is_bad_N)
        # Where a value is no row, nothing is claimed.
        is_claimed_N = is_row_N & (first_bad == _NO_PLACE)
        rows_U = distinct_rows(torch.where(is_claimed_N, rows_N, NOWHERE))
        numbers = torch.stack([first_bad, is_row_N.sum(), num_hits, (rows_U != NOWHERE).sum()])
        slot_U, listed = self._try(rows_U, numbers, LOOKED_AT * len(rows_U))
        if not listed.is_enough:
            slot_U, listed = self._try(rows_U, numbers, slots.num_slots)
        if listed.first_bad != _NO_PLACE:
            raise NoSuchRow(listed.first_bad)
        if not listed.is_enough:
            raise self._shortage(rows_U)
        return SlotClaim(
            slots_of(slots, rows_N),
            slot_U,
            listed.moves,
            listed.num_lookups,
            listed.num_hits,
            listed.num_rows,
            num_rows_hit=listed.num_rows - len(listed.moves.fetched_rows),
        )

    def release(self, held: Tensor) -> None:
        """As `SlotMap.release`."""
        release(self.tensors, held)

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

    def _try(self, rows_U: Tensor, numbers: Tensor, num_looked_at: int) -> tuple[Tensor, _Listed]:
        """Claim, and copy the result to the host in one piece."""
        num_looked_at = max(1, num_looked_at)
        slot_U, transfer = claim(self.tensors, rows_U, num_looked_at, first_slot=self.first_slot)
        *moves, has_found = transfer
        listed = torch.cat([has_found.long().view(1), numbers, *moves]).cpu().numpy()
        known, moved = listed[: 1 + len(numbers)], listed[1 + len(numbers) :].astype(np.int32)
        written_rows, written_at, rows, at = moved.reshape(4, -1)
        is_written, is_fetched = written_rows != NOWHERE, rows != NOWHERE
        moves_M = Moves(
            rows[is_fetched], at[is_fetched], written_rows[is_written], written_at[is_written]
        )
        is_enough, first_bad, num_lookups, num_hits, num_rows = known.tolist()
        return slot_U, _Listed(bool(is_enough), first_bad, num_lookups, num_hits, num_rows, moves_M)


class _Listed(NamedTuple):
    """The result of a claim, on the host."""

    is_enough: bool
    first_bad: int
    num_lookups: int
    num_hits: int
    num_rows: int
    moves: Moves


_NO_PLACE = torch.iinfo(torch.int64).max


def _first(is_meant: Tensor) -> Tensor:
    """The first place that is true, () int64; `_NO_PLACE` if none is."""
    places = torch.arange(len(is_meant) + 1, device=is_meant.device)
    places = torch.where(torch.nn.functional.pad(is_meant, (0, 1)), places, _NO_PLACE)
    return places.amin()


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


def claim(
    slots: TorchSlots, rows_U: Tensor, num_looked_at: int | None = None, *, first_slot: int = 0
) -> tuple[Tensor, Transfer]:
    """Give every row a slot, and count a ticket into all of them; all or nothing.

    Args:
        slots: Changed in place; at least one.
        rows_U: The result of `distinct_rows`.
        num_looked_at: W: the claim considers this many slots from the hand on; None for all.
        first_slot: All slots before it are pinned and not considered.

    Returns:
        The slot of each row, (U,), `NOWHERE` where there is no row, or not enough slots; and the
        rows to copy.
    """
    num_rows, num_slots = slots.num_rows, slots.num_slots
    is_row = rows_U >= 0
    known_U = slots.slot_of_row[torch.where(is_row, rows_U, num_rows)].long()
    is_missing = is_row & (known_U == NOWHERE)
    is_held = is_row & ~is_missing
    is_awaited = is_held & (known_U >= AWAITED)
    known_U = torch.where(is_awaited, known_U - AWAITED, known_U)
    # Counted at once, so that the hand passes over them; taken back if the others are not enough.
    known_U = torch.where(is_held, known_U, num_slots)
    _add(slots.num_claims, known_U, 1)
    num_others = num_slots - first_slot
    looked_at_W = torch.arange(min(num_looked_at or num_others, num_others), device=rows_U.device)
    hand = slots.hand.clamp(min=first_slot) - first_slot
    looked_at_W = first_slot + (looked_at_W + hand) % num_others
    order_W, rounds_W, is_free_W = _by_the_hand(slots, looked_at_W)
    num_missing = is_missing.sum()
    is_enough = num_missing <= is_free_W.sum()
    _add(slots.num_claims, known_U, torch.where(is_enough, 0, -1))
    # The k-th row that lacks a slot takes the k-th slot.
    number_U = (is_missing.cumsum(0) - 1).clamp(0, len(looked_at_W) - 1)
    taken_U = looked_at_W[order_W[number_U]]
    is_placed = is_missing & is_enough
    place_U = torch.where(is_placed, taken_U, num_slots)
    old_U = slots.row_of_slot[place_U].long()  # EMPTY at the place of none
    is_written = (old_U != EMPTY) & ((slots.flags[place_U] & DIRTY) > 0)
    _move_the_hand(slots, looked_at_W, order_W, rounds_W, is_free_W, num_missing, is_enough)
    slots.slot_of_row.index_fill_(0, torch.where(old_U == EMPTY, num_rows, old_U), NOWHERE)
    slots.row_of_slot.index_copy_(0, place_U, rows_U.int())
    slots.num_uses.index_fill_(0, place_U, 0)
    slots.flags.index_fill_(0, place_U, 0)
    slots.num_claims.index_fill_(0, place_U, 1)
    slot_U = torch.where(is_missing, taken_U, known_U)
    slot_U = torch.where(is_row & is_enough, slot_U, NOWHERE)
    held_U = torch.where(slot_U == NOWHERE, num_slots, slot_U)
    slots.slot_of_row.index_copy_(0, torch.where(slot_U == NOWHERE, num_rows, rows_U), held_U.int())
    uses_U = (slots.num_uses[held_U].long() + 1).clamp(max=_MOST_USES)
    slots.num_uses.index_copy_(0, held_U, uses_U.to(torch.uint8))
    _clear_last_places(slots)
    is_fetched = is_placed | (is_awaited & is_enough)
    return slot_U, Transfer(
        torch.where(is_written, old_U, NOWHERE),
        torch.where(is_written, place_U, NOWHERE),
        torch.where(is_fetched, rows_U, NOWHERE),
        torch.where(is_fetched, slot_U, NOWHERE),
        is_enough,
    )


def mark_dirty(slots: TorchSlots, slot_U: Tensor) -> None:
    """Note that rows are newer than in the cold store; negative numbers stand for no slot."""
    held_U = torch.where(slot_U < 0, slots.num_slots, slot_U)
    slots.flags.index_copy_(0, held_U, slots.flags[held_U] | DIRTY)
    _clear_last_places(slots)


def release(slots: TorchSlots, slot_U: Tensor) -> None:
    """Take a ticket out of the counts of its slots, as from `claim`."""
    _add(slots.num_claims, torch.where(slot_U == NOWHERE, slots.num_slots, slot_U), -1)
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


def _add(counts: Tensor, places_U: Tensor, number: int | Tensor) -> None:
    """Add to distinct places; the last place, which is none, may get any value."""
    counts.index_copy_(0, places_U, (counts[places_U] + number).to(counts.dtype))


def _by_the_hand(slots: TorchSlots, looked_at_W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The order in which the hand takes slots; the round in which it takes each; which it may take.

    Slots that it may not take come last.
    """
    num_looked_at = len(looked_at_W)
    flags_W, uses_W = slots.flags[looked_at_W], slots.num_uses[looked_at_W]
    is_free_W = (slots.num_claims[looked_at_W] == 0) & ((flags_W & PINNED) == 0)
    rounds_W = torch.frexp(uses_W.float()).exponent.long()  # bits of a number
    rounds_W = torch.where(slots.row_of_slot[looked_at_W] == EMPTY, 0, rounds_W)
    turn_W = rounds_W * num_looked_at + torch.arange(num_looked_at, device=looked_at_W.device)
    last = torch.iinfo(torch.int64).max
    return torch.where(is_free_W, turn_W, last).argsort(stable=True), rounds_W, is_free_W


def _move_the_hand(
    slots: TorchSlots,
    looked_at_W: Tensor,
    order_W: Tensor,
    rounds_W: Tensor,
    is_free_W: Tensor,
    num_taken: Tensor,
    is_enough: Tensor,
) -> None:
    """To the slot after the last one taken; halve the uses of the slots that it passes."""
    has_moved = is_enough & (num_taken > 0)
    # Not by brackets, which would wait to read a single number.
    last = order_W.take((num_taken - 1).clamp(0, len(looked_at_W) - 1))
    numbers_W = torch.arange(len(looked_at_W), device=looked_at_W.device)
    passes_W = rounds_W.take(last) + (numbers_W <= last).long()
    uses_W = slots.num_uses[looked_at_W].long()
    left_W = torch.where(is_free_W & has_moved, uses_W >> passes_W, uses_W)
    slots.num_uses.index_copy_(0, looked_at_W, left_W.to(torch.uint8))
    following = (looked_at_W.take(last) + 1) % slots.num_slots
    slots.hand.copy_(torch.where(has_moved, following, slots.hand))


def _clear_last_places(slots: TorchSlots) -> None:
    """Undo writes for no row, or no slot."""
    slots.slot_of_row[-1:].fill_(NOWHERE)
    slots.row_of_slot[-1:].fill_(EMPTY)
    for counts in (slots.num_claims, slots.num_uses, slots.flags):
        counts[-1:].zero_()
