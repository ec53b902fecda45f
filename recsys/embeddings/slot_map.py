"""The map of the slots: which row is in which, who needs it, and which have to go for others.

A residency asks one of it, and moves what it is told to. `HostSlotMap` works by numba's kernels,
for slots in the CPU's memory; `DeviceSlotMap` by operations of torch, for slots on a device. What
goes through the residency's hands, a claim's `slot_of_value` and `held`, is an array of the map's
kind; what is to be copied is a list of the host's in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from recsys.embeddings.forecast import Forecast
from recsys.embeddings.kernels.slots import (
    AWAITED,
    DIRTY,
    EMPTY,
    MARKED,
    MIN_POPULAR_USES,
    NOWHERE,
    PINNED,
    POPULAR,
    Claim,
    Requests,
    claim_rows,
    mark_dirty,
    place_rows,
    release_slots,
    resolve,
    take_back,
)
from recsys.embeddings.kernels.tiered_lookup import tiered_lookup
from recsys.embeddings.row_space import RowSpace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.cold_store import ColdStore
    from recsys.embeddings.hot_tier import HotTier
    from recsys.embeddings.kernels.pooled_lookup import Bags, Lookups

__all__ = [
    "HostSlotMap",
    "Moves",
    "NoSuchRow",
    "Shortage",
    "SlotClaim",
    "SlotMap",
    "fewest_uses",
]


class NoSuchRow(Exception):  # never leaves this package: callers say which id it is
    """A value is no row of its table."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class Shortage(Exception):  # nor does this
    """Too few slots are free of others' rows for those of a mini-batch.

    Attributes:
        num_needed: As many in all would do.
    """

    def __init__(self, num_needed: int) -> None:
        super().__init__(num_needed)
        self.num_needed = num_needed


class Moves(NamedTuple):
    """What has to be copied for a claim: what goes first, then what comes.

    Attributes:
        fetched_rows: Rows that come, counted over all tables, (M,).
        fetched_slots: Where to.
        written_rows: Rows that have to be written back, (K,).
        written_slots: Where they are.
    """

    fetched_rows: NDArray[np.int32]
    fetched_slots: NDArray[np.int32]
    written_rows: NDArray[np.int32]
    written_slots: NDArray[np.int32]


class SlotClaim(NamedTuple):
    """One mini-batch's claim.

    Attributes:
        slot_of_value: (N,); of values that were not asked for, any slot.
        held: The slots that are counted into, for `release` and `mark_dirty`.
        moves: What has to be copied before it may be computed on.
        num_lookups: Values that were asked for.
        num_hits: Those whose row was in its slot.
        num_rows: Distinct rows.
        num_rows_hit: Those that were in their slot.
    """

    slot_of_value: Any
    held: Any
    moves: Moves
    num_lookups: int
    num_hits: int
    num_rows: int
    num_rows_hit: int


class SlotMap(Protocol):
    """Which row is in which slot. Rows count over all tables of the row space.

    Attributes:
        num_unpinned: A plan's rows that had to give way to mini-batches, since the beginning.
    """

    num_unpinned: int

    @property
    def forecast(self) -> Forecast | None:
        """Follows what twice the memory would do; None where it is not known."""

    @property
    def num_claimed(self) -> int:
        """Slots that somebody needs."""

    def claim(self, lookups: Lookups, bags: Any, *, may_unpin: bool = True) -> SlotClaim:
        """Give every row of a mini-batch a slot, and count into all of them; all or nothing.

        Args:
            lookups: What is looked up where.
            bags: The input, as kernels of the slots' device take it.
            may_unpin: Whether pinned rows that nobody needs give way where slots are few: those
                pinned by their uses first, then the plan's, the least popular first.

        Raises:
            NoSuchRow: a value is no row of its table.
            Shortage: too few slots are free of rows that others need, or that are pinned.
        """

    def undo(self, moves: Moves, *, has_written: bool) -> None:
        """After moves that failed: as if the rows had never been asked for, but for the counts.

        Args:
            moves: Of a claim, and none of a later one is left to be undone.
            has_written: Whether those to be written back have been.
        """

    def are_among(self, slot_of_value: Any, slots: NDArray[np.int32]) -> Tensor:
        """Which values' slots are some of these, (N,) bool, where the slots are."""

    def pin_popular(self, num_slots: int) -> tuple[int, int]:
        """See `Residency.pin_popular`.

        Args:
            num_slots: So many pinned ones at most; a plan's are among them.
        """

    def release(self, held: Any) -> None:
        """Count out of slots."""

    def of_rows(self, held: Any, only: Sequence[range]) -> Any:
        """Those of some slots that have one of these rows, counted over all tables."""

    def mark_dirty(self, held: Any) -> None:
        """Note that rows were moved since they came."""

    def dirty(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Rows that have been moved since they came, and where they are."""

    def mark_clean(self, slots: NDArray[np.int32]) -> None:
        """Note that these are in the cold store as they are here."""

    def needed(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Rows in slots that somebody needs, and where they are."""

    def forget_others(self) -> None:
        """Let the rows go that nobody needs, as they are; pinned ones keep their empty slots."""

    def look_up(
        self, tables: RowSpace, cold: ColdStore, lookups: Lookups, bags: Any, result: Tensor
    ) -> int:
        """Pool rows where they are; see `Residency.look_up`."""

    def where(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slot of each row, (M,); -1 of one that is in the cold store alone."""


class HostSlotMap:
    """The map of slots in the CPU's memory; see `SlotMap`.

    Args:
        hot: Has the slots.
    """

    def __init__(self, hot: HotTier) -> None:
        self._hot, self._slots = hot, hot.slots
        self.num_unpinned = 0
        self._hand = 0
        # Neither claimed nor pinned.
        self._num_idle = hot.num_slots - int(((hot.slots.flags & PINNED) > 0).sum())
        num_more = hot.slots_with(2 * hot.num_bytes) - hot.num_slots
        self.forecast: Forecast | None = Forecast(
            hot.slots, self._num_idle, self._num_idle + num_more
        )
        self._both: tuple[RowSpace, RowSpace] | None = None  # the tables, and they with the slots
        self._requests: dict[tuple[Lookups, int], Requests] = {}

    @property
    def num_claimed(self) -> int:
        """As in `SlotMap`, and so are all that follow."""
        return int((self._slots.num_claims > 0).sum())

    def claim(self, lookups: Lookups, bags: Bags, *, may_unpin: bool = True) -> SlotClaim:
        """See `SlotMap`."""
        slots, requests = self._slots, self._requests_of(lookups, bags)
        slot_of_value, claim, bad = claim_rows(slots, requests, bags.values)
        num_missing, num_woken = int(claim.num_missing.sum()), int(claim.num_woken.sum())
        if bad >= 0:
            take_back(slots, claim)
            raise NoSuchRow(bad)
        if may_unpin and num_missing > self._num_idle - num_woken:
            self._unpin(num_missing + num_woken - self._num_idle)
        if num_missing > self._num_idle - num_woken:
            num_needed = self.num_claimed + num_missing
            take_back(slots, claim)
            raise Shortage(num_needed)
        found = _segments(claim, claim.held, claim.num_held)
        awaited = _segments(claim, claim.awaited, claim.num_awaited)
        slot_of_missing, written_slots, written_rows, self._hand = place_rows(
            slots, claim, self._hand
        )
        placed = _segments(claim, slot_of_missing, claim.num_missing)
        resolve(slots, requests, claim, slot_of_value, slot_of_missing)
        self._num_idle -= num_woken + num_missing
        fetched = np.concatenate([awaited, placed])
        moves = Moves(slots.row_of_slot[fetched], fetched, written_rows, written_slots)
        if self.forecast is not None:
            self.forecast.add(requests, bags.values)
        return SlotClaim(
            slot_of_value,
            np.concatenate([found, placed]),
            moves,
            num_lookups=int(claim.starts[-1]),
            num_hits=int(claim.num_hits.sum()),
            num_rows=len(found) + num_missing,
            num_rows_hit=len(found) - len(awaited),
        )

    def undo(self, moves: Moves, *, has_written: bool) -> None:
        """See `SlotMap`."""
        slots, rows, fetched = self._slots, moves.fetched_rows, moves.fetched_slots
        is_own = slots.row_of_slot[fetched] == rows
        is_pinned = is_own & ((slots.flags[fetched] & PINNED) > 0)
        slots.slot_of_row[rows] = np.where(is_pinned, fetched + AWAITED, NOWHERE)
        slots.row_of_slot[fetched[is_own & ~is_pinned]] = EMPTY
        if not has_written:
            slots.row_of_slot[moves.written_slots] = moves.written_rows
            slots.slot_of_row[moves.written_rows] = moves.written_slots
            slots.flags[moves.written_slots] |= DIRTY

    def are_among(self, slot_of_value: NDArray[np.int32], slots: NDArray[np.int32]) -> Tensor:
        """See `SlotMap`."""
        flags = self._slots.flags
        flags[slots] |= np.uint8(MARKED)
        found = torch.from_numpy(flags[slot_of_value] & np.uint8(MARKED) > 0)
        flags[slots] &= np.uint8(255 - MARKED)
        return found

    def pin_popular(self, num_slots: int) -> tuple[int, int]:
        """See `SlotMap`."""
        slots, flags, uses = self._slots, self._slots.flags, self._slots.num_uses
        was_popular = (flags & POPULAR) > 0
        may_be = (slots.row_of_slot != EMPTY) & (was_popular | ((flags & PINNED) == 0))
        num_planned = int(((flags & PINNED) > 0).sum() - was_popular.sum())
        counts = np.bincount(uses[may_be], minlength=256)
        is_popular = may_be & (uses >= fewest_uses(counts, num_slots - num_planned))
        given_up = np.flatnonzero(was_popular & ~is_popular)
        flags[is_popular] |= np.uint8(PINNED | POPULAR)
        uses[is_popular] >>= np.uint8(1)
        self._let_go(given_up)
        if is_popular.any():
            self.forecast = None  # it follows slots that are not pinned, and these come and go
        self._num_idle = int(((slots.num_claims == 0) & ((flags & PINNED) == 0)).sum())
        return int((is_popular & ~was_popular).sum()), len(given_up)

    def release(self, held: NDArray[np.int32]) -> None:
        """See `SlotMap`."""
        self._num_idle += release_slots(self._slots, held)

    def of_rows(self, held: NDArray[np.int32], only: Sequence[range]) -> NDArray[np.int32]:
        """See `SlotMap`."""
        rows = self._slots.row_of_slot[held]
        is_meant = np.zeros(len(rows), np.bool_)
        for each in only:
            is_meant |= (rows >= each.start) & (rows < each.stop)
        return held[is_meant]

    def mark_dirty(self, held: NDArray[np.int32]) -> None:
        """See `SlotMap`."""
        mark_dirty(self._slots, held)

    def dirty(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """See `SlotMap`."""
        slots = np.flatnonzero(self._slots.flags & DIRTY).astype(np.int32)
        return self._slots.row_of_slot[slots], slots

    def mark_clean(self, slots: NDArray[np.int32]) -> None:
        """See `SlotMap`."""
        self._slots.flags[slots] &= np.uint8(255 - DIRTY)

    def needed(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """See `SlotMap`."""
        self._both = None
        is_needed = (self._slots.num_claims > 0) & (self._slots.row_of_slot != EMPTY)
        slots = np.flatnonzero(is_needed).astype(np.int32)
        return self._slots.row_of_slot[slots], slots

    def forget_others(self) -> None:
        """See `SlotMap`."""
        slots = self._slots
        if self.forecast is not None:
            self.forecast.forget()
        slots.flags[:] &= np.uint8(255 - DIRTY)
        is_gone = (slots.num_claims == 0) & (slots.row_of_slot != EMPTY)
        is_pinned = is_gone & ((slots.flags & PINNED) > 0)
        pinned = np.flatnonzero(is_pinned).astype(np.int32)
        slots.slot_of_row[slots.row_of_slot[is_gone]] = NOWHERE
        slots.slot_of_row[slots.row_of_slot[pinned]] = pinned + AWAITED
        slots.row_of_slot[is_gone & ~is_pinned] = EMPTY

    def look_up(
        self, tables: RowSpace, cold: ColdStore, lookups: Lookups, bags: Bags, result: Tensor
    ) -> int:
        """See `SlotMap`; `cold` is not asked, for the tables are in memory, or mapped there."""
        if self._both is None or self._both[0] is not tables:
            self._both = tables, RowSpace([*tables.tables, self._hot.rows])
        return tiered_lookup(
            self._both[1], self._slots.slot_of_row, self._hot.first_rows, lookups, bags, result
        )

    def where(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `SlotMap`."""
        slots = self._slots.slot_of_row[rows].astype(np.int64)
        return np.where((slots >= 0) & (slots < AWAITED), slots, NOWHERE)

    def _unpin(self, count: int) -> None:
        slots = self._slots
        pinned = np.flatnonzero(((slots.flags & PINNED) > 0) & (slots.num_claims == 0))
        is_popular = (slots.flags[pinned] & POPULAR) > 0
        # The first of a plan's rows is its most popular, and has the first slot.
        given_up = np.concatenate([pinned[is_popular], pinned[~is_popular][::-1]])[:count]
        self.num_unpinned += max(0, len(given_up) - int(is_popular.sum()))
        self._let_go(given_up)
        self._num_idle += len(given_up)

    def _let_go(self, given_up: NDArray[np.int64]) -> None:
        """Pin slots no more; the counting of those that are idle is the caller's."""
        slots = self._slots
        slots.flags[given_up] &= np.uint8(255 - PINNED - POPULAR)
        empty = given_up[slots.slot_of_row[slots.row_of_slot[given_up]] >= AWAITED]
        slots.slot_of_row[slots.row_of_slot[empty]] = NOWHERE
        slots.row_of_slot[empty] = EMPTY

    def _requests_of(self, lookups: Lookups, bags: Bags) -> Requests:
        firsts = lookups.positions.astype(np.int64) * bags.batch_size
        tables, first_rows = lookups.tables.tolist(), self._hot.first_rows
        if bags.offsets is not None:
            begins, ends = bags.offsets[firsts], bags.offsets[firsts + bags.batch_size]
            return Requests.sort(tables, begins, ends, first_rows)
        key = lookups, bags.batch_size
        if key not in self._requests:
            if len(self._requests) > _MOST_KEPT:
                self._requests.clear()
            self._requests[key] = Requests.sort(
                tables, firsts, firsts + bags.batch_size, first_rows
            )
        return self._requests[key]


_MOST_KEPT = 64


def fewest_uses(counts: NDArray[np.int64], num_slots: int) -> int:
    """How often a row must have been used to be among the popular ones.

    Args:
        counts: Of rows, by uses.
        num_slots: As many rows at most, of which all with as many uses are, or none.
    """
    num_with = counts[::-1].cumsum()[::-1]  # so many uses or more
    fitting = np.flatnonzero(num_with <= num_slots)
    return max(MIN_POPULAR_USES, int(fitting[0]) if len(fitting) else len(counts))


def _segments(
    claim: Claim, found: NDArray[np.int32], counts: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Every table's part of an array, one behind the other."""
    starts = claim.starts.astype(np.int64)
    parts = [
        found[start : start + count]
        for start, count in zip(starts.tolist(), counts.tolist(), strict=False)
        if count
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
