"""Which slot holds which row, in operations of torch: claiming the rows of a mini-batch.

The arrays of `kernels.slots` and their meaning, all of int64, with one place more than there are
rows or slots: what has none points there. Row numbers count over all tables.

    distinct_rows   the rows of a mini-batch, each once
    claim           counts a ticket into the slots of its rows, finds slots for rows that have none,
                    and says what has to be copied: all or nothing
    fetch, write_back   copy it
    mark_dirty, release

A clock's hand, which halves what was counted of a slot's uses whenever it passes and takes the
first slot of which nothing is left, comes to a slot of u uses for the last time in the round whose
number is the bits of u. So slots are taken in the order (round, distance from the hand), one sort
for all rows of a mini-batch, and the slots taken are those that `kernels.slots` takes.

Every array has a place for each lookup, `NOWHERE` in those that have no row, so nobody waits for
the device but who copies from and to the host's memory. Whether there were slots enough is a number
on the device, too.

Letters: R rows, S slots, N lookups, U places for distinct rows (N of them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys.embeddings.kernels.slots import AWAITED, DIRTY, EMPTY, NOWHERE, PINNED

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "TorchSlots",
    "Transfer",
    "claim",
    "distinct_rows",
    "fetch",
    "mark_dirty",
    "release",
    "write_back",
]

_MOST_USES = 255


class TorchSlots(NamedTuple):
    """Slots and what they hold.

    Attributes:
        slot_of_row: (R + 1,) int64.
        row_of_slot: (S + 1,) int64.
        num_claims: (S + 1,) int64.
        num_uses: (S + 1,) int64.
        flags: (S + 1,) int64.
        hand: The slot that is looked at first, () int64.
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

        def full(size: int, value: int) -> Tensor:
            return torch.full((size,), value, dtype=torch.int64, device=device)

        num_claims, num_uses, flags = (full(num_slots + 1, 0) for _ in range(3))
        slot_of_row, row_of_slot = full(num_rows + 1, NOWHERE), full(num_slots + 1, EMPTY)
        return cls(slot_of_row, row_of_slot, num_claims, num_uses, flags, full(1, 0).view(()))

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.slot_of_row) - 1

    @property
    def num_slots(self) -> int:
        """S."""
        return len(self.row_of_slot) - 1


class Transfer(NamedTuple):
    """What has to be copied for a claim, in this order; places of no row are `NOWHERE`.

    Attributes:
        written_rows: Rows that must be written back, (U,).
        written_slots: Where they lie.
        fetched_rows: Rows that must be fetched, (U,).
        fetched_slots: Where to.
        is_enough: Whether there were slots for all, () bool; if not, nothing has been changed.
    """

    written_rows: Tensor
    written_slots: Tensor
    fetched_rows: Tensor
    fetched_slots: Tensor
    is_enough: Tensor


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


def claim(slots: TorchSlots, rows_U: Tensor) -> tuple[Tensor, Transfer]:
    """Give every row a slot, and count a ticket into all of them; all or nothing.

    Args:
        slots: Changed in place; at least one.
        rows_U: Of `distinct_rows`.

    Returns:
        The slot of each row, (U,), `NOWHERE` where there is no row, or not enough slots; and what
        to copy.
    """
    num_rows, num_slots = slots.num_rows, slots.num_slots
    is_row = rows_U >= 0
    known_U = slots.slot_of_row[torch.where(is_row, rows_U, num_rows)]
    is_missing = is_row & (known_U == NOWHERE)
    is_held = is_row & ~is_missing
    is_awaited = is_held & (known_U >= AWAITED)
    known_U = torch.where(is_awaited, known_U - AWAITED, known_U)
    order_S, rounds_S, is_free_S = _by_the_hand(slots, torch.where(is_held, known_U, num_slots))
    num_missing = is_missing.sum()
    is_enough = num_missing <= is_free_S.sum()
    # The k-th row that lacks a slot takes the k-th slot.
    taken_U = order_S[(is_missing.cumsum(0) - 1).clamp(0, num_slots - 1)]
    is_placed = is_missing & is_enough
    place_U = torch.where(is_placed, taken_U, num_slots)
    old_U = slots.row_of_slot[place_U]  # EMPTY at the place of none
    is_written = (old_U != EMPTY) & ((slots.flags[place_U] & DIRTY) > 0)
    _move_the_hand(slots, order_S, rounds_S, is_free_S, num_missing, is_enough)
    slots.slot_of_row.index_fill_(0, torch.where(old_U == EMPTY, num_rows, old_U), NOWHERE)
    slots.row_of_slot.index_copy_(0, place_U, rows_U)
    slots.num_uses.index_fill_(0, place_U, 0)
    slots.flags.index_fill_(0, place_U, 0)
    slot_U = torch.where(is_missing, taken_U, known_U)
    slot_U = torch.where(is_row & is_enough, slot_U, NOWHERE)
    held_U = torch.where(slot_U == NOWHERE, num_slots, slot_U)
    slots.slot_of_row.index_copy_(0, torch.where(slot_U == NOWHERE, num_rows, rows_U), held_U)
    slots.num_claims.index_copy_(0, held_U, slots.num_claims[held_U] + 1)
    slots.num_uses.index_copy_(0, held_U, (slots.num_uses[held_U] + 1).clamp(max=_MOST_USES))
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
    """Note that rows were moved since they were fetched; slots as from `claim`."""
    held_U = torch.where(slot_U == NOWHERE, slots.num_slots, slot_U)
    slots.flags.index_copy_(0, held_U, slots.flags[held_U] | DIRTY)
    _clear_last_places(slots)


def release(slots: TorchSlots, slot_U: Tensor) -> None:
    """Count a ticket out of its slots, as from `claim`."""
    held_U = torch.where(slot_U == NOWHERE, slots.num_slots, slot_U)
    slots.num_claims.index_copy_(0, held_U, slots.num_claims[held_U] - 1)
    _clear_last_places(slots)


def fetch(cold_RD: Tensor, hot_SD: Tensor, rows_U: Tensor, slots_U: Tensor) -> None:
    """Copy rows into slots; waits until the host knows which.

    Args:
        cold_RD: Every row, in the host's memory.
        hot_SD: The slots.
        rows_U: Of a `Transfer`.
        slots_U: Of each.
    """
    rows, slots = _on_the_host(rows_U, slots_U)
    moved = cold_RD.index_select(0, rows)
    hot_SD.index_copy_(0, slots.to(hot_SD.device), moved.to(hot_SD.device))


def write_back(cold_RD: Tensor, hot_SD: Tensor, rows_U: Tensor, slots_U: Tensor) -> None:
    """Copy slots to where their rows lie; arguments as for `fetch`, waits as it does."""
    rows, slots = _on_the_host(rows_U, slots_U)
    moved = hot_SD.index_select(0, slots.to(hot_SD.device))
    cold_RD.index_copy_(0, rows, moved.to(cold_RD.device))


def _on_the_host(rows_U: Tensor, slots_U: Tensor) -> tuple[Tensor, Tensor]:
    """Both without the places that have no row."""
    rows, slots = torch.stack([rows_U, slots_U]).cpu()
    is_row = rows != NOWHERE
    return rows[is_row], slots[is_row]


def _by_the_hand(slots: TorchSlots, needed_U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All slots in the order in which the hand takes them, those that it may not take behind; in
    which round it takes each; which it may take.
    """  # noqa: D205  # one sentence
    num_slots = slots.num_slots
    is_needed = torch.zeros(num_slots + 1, dtype=torch.bool, device=needed_U.device)
    is_needed.index_fill_(0, needed_U, True)
    is_claimed = is_needed | (slots.num_claims > 0) | ((slots.flags & PINNED) > 0)
    is_free_S = ~is_claimed[:-1]
    rounds = torch.frexp(slots.num_uses.double()).exponent.long()  # bits of a number
    rounds_S = torch.where(slots.row_of_slot == EMPTY, 0, rounds)[:-1]
    turn_S = rounds_S * num_slots + _distances(slots)
    last = torch.iinfo(torch.int64).max
    return torch.where(is_free_S, turn_S, last).argsort(stable=True), rounds_S, is_free_S


def _move_the_hand(
    slots: TorchSlots,
    order_S: Tensor,
    rounds_S: Tensor,
    is_free_S: Tensor,
    num_taken: Tensor,
    is_enough: Tensor,
) -> None:
    """Behind the last slot taken; what it has passed has as many uses less."""
    has_moved = is_enough & (num_taken > 0)
    # Not by brackets, which would wait to read a single number.
    last = order_S.take((num_taken - 1).clamp(0, slots.num_slots - 1))
    distance_S = _distances(slots)
    passes_S = rounds_S.take(last) + (distance_S <= distance_S.take(last)).long()
    uses_S = slots.num_uses[:-1]
    uses_S.copy_(torch.where(is_free_S & has_moved, uses_S >> passes_S, uses_S))
    slots.hand.copy_(torch.where(has_moved, (last + 1) % slots.num_slots, slots.hand))


def _distances(slots: TorchSlots) -> Tensor:
    """From the hand, (S,)."""
    numbers = torch.arange(slots.num_slots, device=slots.hand.device)
    return (numbers - slots.hand) % slots.num_slots


def _clear_last_places(slots: TorchSlots) -> None:
    """Make what was written for no row, or no slot, undone."""
    slots.slot_of_row[-1:].fill_(NOWHERE)
    slots.row_of_slot[-1:].fill_(EMPTY)
    for counts in (slots.num_claims, slots.num_uses, slots.flags):
        counts[-1:].zero_()
