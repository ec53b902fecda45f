"""Which slot holds which row, in operations of torch: claiming the rows of a mini-batch.

The arrays of `kernels.slots`, their dtypes and their meaning, with one place more than there are
rows or slots: what has none points there. Row numbers count over all tables.

    distinct_rows   the rows of a mini-batch, each once
    claim           counts a ticket into the slots of its rows, finds slots for rows that have none,
                    and says what has to be copied: all or nothing
    mark_dirty, release
    unpin           makes room where pinned rows leave too little

A clock's hand, which halves what was counted of a slot's uses whenever it passes and takes the
first slot of which nothing is left, comes to a slot of u uses for the last time in the round whose
number is the bits of u. So slots are taken in the order (round, distance from the hand), one sort
for all rows of a mini-batch. Where all slots are looked at, those are taken that `kernels.slots`
takes. Where fewer are, the hand goes round among these: a claim's time and memory then do not grow
with the number of slots.

Every array has a place for each lookup, `NOWHERE` in those that have no row, so nobody waits for
the device but who wants to know what to copy. Whether there were slots enough is a number on the
device, too.

Letters: R rows, S slots, W slots looked at, N lookups, U places for distinct rows (N of them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys.embeddings.kernels.slots import AWAITED, DIRTY, EMPTY, NOWHERE, PINNED, POPULAR

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "TorchSlots",
    "Transfer",
    "claim",
    "distinct_rows",
    "first_unpinned",
    "let_go",
    "mark_dirty",
    "num_needed",
    "release",
    "slots_of",
    "unpin",
]

_MOST_USES = 255


class TorchSlots(NamedTuple):
    """Slots and what they hold.

    Attributes:
        slot_of_row: (R + 1,) int32.
        row_of_slot: (S + 1,) int32.
        num_claims: (S + 1,) int16.
        num_uses: (S + 1,) uint8.
        flags: (S + 1,) uint8.
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


def slots_of(slots: TorchSlots, rows: Tensor) -> Tensor:
    """The slot that each row is in, `NOWHERE` of one that is in none.

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
        rows_U: Of `distinct_rows`.
        num_looked_at: W: from the hand on, so many slots may be taken; None for all.
        first_slot: All slots before are known to be pinned, and not looked at.

    Returns:
        The slot of each row, (U,), `NOWHERE` where there is no row, or not enough slots; and what
        to copy.
    """
    num_rows, num_slots = slots.num_rows, slots.num_slots
    is_row = rows_U >= 0
    known_U = slots.slot_of_row[torch.where(is_row, rows_U, num_rows)].long()
    is_missing = is_row & (known_U == NOWHERE)
    is_held = is_row & ~is_missing
    is_awaited = is_held & (known_U >= AWAITED)
    known_U = torch.where(is_awaited, known_U - AWAITED, known_U)
    # Counted at once, so that the hand passes over them; taken back if the rest is not enough.
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
    """Note that rows were moved since they were fetched; slots as from `claim`."""
    held_U = torch.where(slot_U == NOWHERE, slots.num_slots, slot_U)
    slots.flags.index_copy_(0, held_U, slots.flags[held_U] | DIRTY)
    _clear_last_places(slots)


def release(slots: TorchSlots, slot_U: Tensor) -> None:
    """Count a ticket out of its slots, as from `claim`."""
    _add(slots.num_claims, torch.where(slot_U == NOWHERE, slots.num_slots, slot_U), -1)
    _clear_last_places(slots)


def num_needed(slots: TorchSlots, rows_U: Tensor) -> int:
    """How many slots tickets and rows of `distinct_rows` need together; waits for the device."""
    is_missing, is_needed = _needs(slots, rows_U)
    return int(is_missing.sum() + is_needed.sum())


def first_unpinned(slots: TorchSlots) -> int:
    """The first slot that is not pinned, or the last of all; the host waits for it."""
    is_pinned = (slots.flags & PINNED) > 0
    return min(int(is_pinned.long().cumprod(0).sum()), slots.num_slots - 1)


def unpin(slots: TorchSlots, rows_U: Tensor) -> int:
    """Let go of as many pinned rows as make room: those pinned by their uses, then the plan's.

    Args:
        slots: Changed in place.
        rows_U: Of `distinct_rows`, which are to stay.

    Returns:
        How many of the plan's it were; the host waits for that.
    """
    is_missing, is_needed = _needs(slots, rows_U)
    is_pinned = ((slots.flags & PINNED) > 0)[:-1]
    num_idle = (~is_needed & ~is_pinned).sum()
    num_lacking = max(0, int(is_missing.sum() - num_idle))
    pinned = (is_pinned & ~is_needed).nonzero().flatten()
    is_popular = (slots.flags[pinned] & POPULAR) > 0
    # The first of a plan's rows is its most popular, and has the first slot.
    in_order = torch.cat([pinned[is_popular], pinned[~is_popular].flip(0)])
    given_up = in_order[:num_lacking]
    let_go(slots, given_up)
    return max(0, len(given_up) - int(is_popular.sum()))


def let_go(slots: TorchSlots, given_up: Tensor) -> None:
    """Pin slots no more.

    Args:
        slots: Changed in place.
        given_up: Which, (M,).
    """
    slots.flags[given_up] &= 255 - PINNED - POPULAR
    rows = slots.row_of_slot[given_up].long()
    is_empty = slots.slot_of_row[rows] >= AWAITED
    slots.slot_of_row[rows[is_empty]] = NOWHERE
    slots.row_of_slot[given_up[is_empty]] = EMPTY


def _needs(slots: TorchSlots, rows_U: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows are in no slot, (U,); which slots are needed, by tickets or by the rows, (S,)."""
    is_row = rows_U >= 0
    known_U = slots.slot_of_row[torch.where(is_row, rows_U, slots.num_rows)].long()
    is_missing = is_row & (known_U == NOWHERE)
    held_U = torch.where(known_U >= AWAITED, known_U - AWAITED, known_U)
    is_needed = slots.num_claims > 0
    is_needed.index_fill_(0, torch.where(known_U == NOWHERE, slots.num_slots, held_U), True)
    return is_missing, is_needed[:-1]


def _add(counts: Tensor, places_U: Tensor, number: int | Tensor) -> None:
    """To distinct places; at the last place, which is none, anything may come out."""
    counts.index_copy_(0, places_U, (counts[places_U] + number).to(counts.dtype))


def _by_the_hand(slots: TorchSlots, looked_at_W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The order in which the hand takes slots, those that it may not take behind; in which round
    it takes each; which it may take.
    """  # noqa: D205  # one sentence
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
    """Behind the last slot taken; what it has passed has as many uses less."""
    has_moved = is_enough & (num_taken > 0)
    # Not by brackets, which would wait to read a single number.
    last = order_W.take((num_taken - 1).clamp(0, len(looked_at_W) - 1))
    numbers_W = torch.arange(len(looked_at_W), device=looked_at_W.device)
    passes_W = rounds_W.take(last) + (numbers_W <= last).long()
    uses_W = slots.num_uses[looked_at_W].long()
    left_W = torch.where(is_free_W & has_moved, uses_W >> passes_W, uses_W)
    slots.num_uses.index_copy_(0, looked_at_W, left_W.to(torch.uint8))
    behind = (looked_at_W.take(last) + 1) % slots.num_slots
    slots.hand.copy_(torch.where(has_moved, behind, slots.hand))


def _clear_last_places(slots: TorchSlots) -> None:
    """Make what was written for no row, or no slot, undone."""
    slots.slot_of_row[-1:].fill_(NOWHERE)
    slots.row_of_slot[-1:].fill_(EMPTY)
    for counts in (slots.num_claims, slots.num_uses, slots.flags):
        counts[-1:].zero_()
