"""Residency: how a row gets to where it is used, and that it has one copy that counts (C1).

    prefetch -> ticket     every row of a mini-batch has a slot, which is the ticket's until
    wait                   rows have come; then the mini-batch may be computed on
    release                the ticket is given back

A ticket's claim is all or nothing. A slot that no ticket needs, and no plan has pinned, may be
given to another row; if its row was moved since it came, it is written back first. A row that is
nowhere but in the cold store is fetched by whoever needs it next. Both go through one ordered
queue, so that no row is fetched before its own write-back.

Who only reads claims nothing: with nothing under way, a row's slot has its newest value, and that
of a row without one is in the cold store.

Which row has to go is found by a clock's hand: it halves what has been counted of a row's uses
whenever it passes, and takes the first row of which nothing is left. So rows used often stay,
without a list in order and whatever the stream is.
"""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys.embeddings.kernels.slots import (
    AWAITED,
    DIRTY,
    EMPTY,
    NOWHERE,
    PINNED,
    Claim,
    claim_rows,
    mark_dirty,
    place_rows,
    release_slots,
    resolve,
    take_back,
)
from recsys.embeddings.kernels.tiered_lookup import tiered_lookup
from recsys.embeddings.row_space import RowSpace
from recsys.embeddings.transfers import TransferQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.cold_store import ColdStore
    from recsys.embeddings.hot_tier import HotTier
    from recsys.embeddings.kernels.pooled_lookup import Bags, Lookups
    from recsys.embeddings.kernels.slots import Requests

__all__ = ["NoSuchRow", "NotEnoughSlots", "Residency", "Ticket", "TierCounts"]


class NoSuchRow(Exception):  # never leaves this package: callers say which id it is
    """A value is no row of its table."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class NotEnoughSlots(Exception):  # nor does this: callers know what the budget was
    """Rows of a mini-batch, together with those of tickets, are more than there are slots.

    Attributes:
        residency: Has the slots.
        num_needed: As many would do.
    """

    def __init__(self, residency: Residency, num_needed: int) -> None:
        super().__init__(num_needed)
        self.residency, self.num_needed = residency, num_needed


class TierCounts(NamedTuple):
    """What has happened since the beginning.

    Attributes:
        num_lookups: Values looked up.
        num_hits: Those whose row was in its slot.
        num_rows: Distinct rows of each ticket, over all tickets.
        num_rows_hit: Those that were in their slot.
        num_fetched: Rows copied from the cold store.
        num_written_back: Rows copied to it.
    """

    num_lookups: int = 0
    num_hits: int = 0
    num_rows: int = 0
    num_rows_hit: int = 0
    num_fetched: int = 0
    num_written_back: int = 0


class Ticket:
    """One mini-batch's claim on slots, until it is released or nobody has it any more.

    Attributes:
        slot_of_value: (N,) int32; of values that were not asked for, 0.
    """

    def __init__(
        self,
        residency: Residency,
        slot_of_value: NDArray[np.int32],
        held: NDArray[np.int32],
        after: int,
    ) -> None:
        self.slot_of_value = slot_of_value
        self.held: NDArray[np.int32] | None = held
        self._residency, self._after = residency, after

    def wait(self) -> None:
        """Wait until every row has come.

        Raises:
            BaseException: what a transfer raised that this ticket rests on; it holds nothing then
                that could be computed on.
        """
        with self._residency.waiting():
            self._residency.queue.wait(self._after)

    def release(self) -> None:
        """Give the slots back; a second time does nothing."""
        held, self.held = self.held, None
        if held is not None:
            # Whoever drops the last reference may be any thread, in the middle of anything.
            self._residency.released.append(held)

    def __del__(self) -> None:
        held, self.held = self.held, None  # no call that Ctrl-C could come in
        if held is not None:
            self._residency.released.append(held)


class Residency:
    """Moves the rows of one row space between its tiers.

    Args:
        hot: The slots.
        cold: Every row.

    Attributes:
        counts: What has happened since the beginning.
        exposed_seconds: How long somebody waited for rows.
        queue: Of transfers.
        released: What tickets held that have been released since the last call.
    """

    def __init__(self, hot: HotTier, cold: ColdStore) -> None:
        self.hot, self._cold = hot, cold
        self.counts = TierCounts()
        self.exposed_seconds = 0.0
        self.queue = TransferQueue()
        self.released: deque[NDArray[np.int32]] = deque()
        self._hand = 0
        # Neither claimed nor pinned.
        self._num_idle = hot.num_slots - int(((hot.slots.flags & PINNED) > 0).sum())
        self._has_warned = False
        self._both: tuple[RowSpace, RowSpace] | None = None  # the tables, and they with the slots

    def prefetch(
        self,
        requests: Requests,
        values: NDArray[Any],
        *,
        in_background: bool = False,
        may_unpin: bool = True,
    ) -> Ticket:
        """Claim a slot for every row of a mini-batch, and have those fetched that are not here.

        Args:
            requests: Which values are rows of which table.
            values: Rows of tables, (N,) int32 or int64.
            in_background: Whether to return before the rows are here.
            may_unpin: Whether rows of a plan may be given up for it.

        Raises:
            NoSuchRow: a value is no row of its table; nothing has been claimed.
            NotEnoughSlots: nothing has been claimed, but rows of a plan may have been unpinned.
            OSError: a row could not be fetched or written back; nothing has been claimed.
        """
        self._collect()
        self.queue.settle()
        hot = self.hot
        slot_of_value, claim, bad = claim_rows(hot.slots, requests, values)
        num_missing, num_woken = int(claim.num_missing.sum()), int(claim.num_woken.sum())
        if bad >= 0:
            take_back(hot.slots, claim)
            raise NoSuchRow(bad)
        if may_unpin and num_missing > self._num_idle - num_woken:
            self._unpin(num_missing + num_woken - self._num_idle)
        if num_missing > self._num_idle - num_woken:
            num_needed = int((hot.slots.num_claims > 0).sum()) + num_missing
            take_back(hot.slots, claim)
            raise NotEnoughSlots(self, num_needed)
        found = _segments(claim, claim.held, claim.num_held)
        awaited = _segments(claim, claim.awaited, claim.num_awaited)
        slot_of_missing, dirty_slots, dirty_rows, self._hand = place_rows(
            hot.slots, claim, self._hand
        )
        placed = _segments(claim, slot_of_missing, claim.num_missing)
        resolve(hot.slots, requests, claim, slot_of_value, slot_of_missing)
        self._num_idle -= num_woken + num_missing
        held = np.concatenate([found, placed])
        ticket = Ticket(self, slot_of_value, held, self.queue.last)
        self._count(claim, num_missing, len(awaited), len(dirty_slots))
        if num_missing or len(awaited):
            fetched = np.concatenate([awaited, placed])
            move = _Move(self.hot, self._cold, fetched, dirty_slots, dirty_rows)
            with self.waiting():
                self.queue.put(move.run, move.undo, in_background=in_background)
            ticket._after = self.queue.last
        elif not in_background:
            ticket.wait()
        return ticket

    def look_up(self, tables: RowSpace, lookups: Lookups, bags: Bags, result: Tensor) -> int:
        """Pool rows where they are, in slots or in tables; nothing is claimed, and nothing moves.

        Args:
            tables: The cold store's, where they lie now.
            lookups: What is looked up where.
            bags: The input.
            result: As for `pooled_lookup`, and so is what is returned.
        """
        self._settle()
        hot = self.hot
        if self._both is None or self._both[0] is not tables:
            self._both = tables, RowSpace([*tables.tables, hot.rows])
        return tiered_lookup(
            self._both[1], hot.slots.slot_of_row, hot.first_rows, lookups, bags, result
        )

    def renormalize(
        self, rows: Tensor, first_row: int, values: Tensor, max_norm: float, norm_type: float
    ) -> None:
        """Scale rows down to a norm, each where it is, by `torch.embedding_renorm_`.

        Args:
            rows: Of the table, in the cold store.
            first_row: Where they begin among those of all tables.
            values: Which, (N,).
            max_norm: At most.
            norm_type: The p of that norm.
        """
        self._settle()
        slots = self.hot.slots.slot_of_row[values.numpy().astype(np.int64) + first_row]
        is_here = (slots >= 0) & (slots < AWAITED)
        here, elsewhere = torch.from_numpy(slots[is_here]), values[torch.from_numpy(~is_here)]
        torch.embedding_renorm_(self.hot.rows, here, max_norm, norm_type)
        mark_dirty(self.hot.slots, here.numpy())
        torch.embedding_renorm_(rows, elsewhere, max_norm, norm_type)

    def _settle(self) -> None:
        """Wait until nothing is under way, and undo what has failed: slots hold what they say."""
        with self.waiting():
            self.queue.settle(is_all=True)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent inside as time spent in waiting for rows."""
        begin = perf_counter()
        try:
            yield
        finally:
            self.exposed_seconds += perf_counter() - begin

    @property
    def num_claimed(self) -> int:
        """Slots that tickets hold."""
        self._collect()
        return int((self.hot.slots.num_claims > 0).sum())

    def mark_moved(self, ticket: Ticket) -> None:
        """Note that the rows of a ticket have been moved."""
        assert ticket.held is not None
        mark_dirty(self.hot.slots, ticket.held)

    def flush(self) -> None:
        """Write back every row that has been moved; all stay where they are.

        Raises:
            OSError: they cannot be written; none has been forgotten.
        """
        self._collect()
        self.queue.settle(is_all=True)
        flags = self.hot.slots.flags
        slots = np.flatnonzero(flags & DIRTY).astype(np.int32)
        if len(slots):
            self._cold.write_back(self.hot, self.hot.slots.row_of_slot[slots], slots)
            flags[slots] &= np.uint8(255 - DIRTY)
            self.counts = self.counts._replace(
                num_written_back=self.counts.num_written_back + len(slots)
            )

    def reload(self) -> None:
        """Take every row from the cold store anew: somebody else has written there.

        Rows that tickets need are fetched into their slots, all others when they are asked for.

        Raises:
            OSError: they cannot be fetched; call it again.
        """
        self._collect()
        self._both = None
        self.queue.settle(is_all=True)
        slots = self.hot.slots
        is_claimed = slots.num_claims > 0
        kept = np.flatnonzero(is_claimed & (slots.row_of_slot != EMPTY)).astype(np.int32)
        self._cold.fetch(self.hot, slots.row_of_slot[kept], kept)
        slots.flags[:] &= np.uint8(255 - DIRTY)
        is_gone = ~is_claimed & (slots.row_of_slot != EMPTY)
        is_pinned = is_gone & ((slots.flags & PINNED) > 0)
        pinned = np.flatnonzero(is_pinned).astype(np.int32)
        slots.slot_of_row[slots.row_of_slot[is_gone]] = NOWHERE
        slots.slot_of_row[slots.row_of_slot[pinned]] = pinned + AWAITED
        slots.row_of_slot[is_gone & ~is_pinned] = EMPTY

    def _collect(self) -> None:
        while self.released:
            self._num_idle += release_slots(self.hot.slots, self.released.popleft())

    def _unpin(self, count: int) -> None:
        """Let go of pinned rows that no ticket needs, the least popular first."""
        slots = self.hot.slots
        pinned = np.flatnonzero(((slots.flags & PINNED) > 0) & (slots.num_claims == 0))
        given_up = pinned[len(pinned) - min(count, len(pinned)) :]
        slots.flags[given_up] &= np.uint8(255 - PINNED)
        empty = given_up[slots.slot_of_row[slots.row_of_slot[given_up]] >= AWAITED]
        slots.slot_of_row[slots.row_of_slot[empty]] = NOWHERE
        slots.row_of_slot[empty] = EMPTY
        self._num_idle += len(given_up)
        if len(given_up) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the budget's {self.hot.num_slots} slots of embedding_dim "
                f"{self.hot.rows.shape[1]} cannot hold the plan's rows and those of a mini-batch: "
                f"{len(given_up)} of the plan's are not kept any more; plan with a larger budget",
                stacklevel=2,
            )

    def _count(self, claim: Claim, num_missing: int, num_awaited: int, num_dirty: int) -> None:
        old = self.counts
        num_found = int(claim.num_held.sum())
        self.counts = TierCounts(
            num_lookups=old.num_lookups + int(claim.starts[-1]),
            num_hits=old.num_hits + int(claim.num_hits.sum()),
            num_rows=old.num_rows + num_found + num_missing,
            num_rows_hit=old.num_rows_hit + num_found - num_awaited,
            num_fetched=old.num_fetched + num_missing + num_awaited,
            num_written_back=old.num_written_back + num_dirty,
        )


class _Move:
    """A transfer: rows that have to go, then rows that come."""

    def __init__(
        self,
        hot: HotTier,
        cold: ColdStore,
        fetched: NDArray[np.int32],
        dirty_slots: NDArray[np.int32],
        dirty_rows: NDArray[np.int32],
    ) -> None:
        self._hot, self._cold, self._fetched = hot, cold, fetched
        # Read now: by the time it is made, a slot may have been given to another row again.
        self._rows = self._hot.slots.row_of_slot[fetched]
        self._dirty_slots, self._dirty_rows = dirty_slots, dirty_rows
        self._has_written = False

    def run(self) -> None:
        if len(self._dirty_slots):
            self._cold.write_back(self._hot, self._dirty_rows, self._dirty_slots)
        self._has_written = True
        self._cold.fetch(self._hot, self._rows, self._fetched)

    def undo(self) -> None:
        """As if the rows had never been asked for; tickets that claim their slots still do."""
        slots = self._hot.slots
        is_own = slots.row_of_slot[self._fetched] == self._rows
        is_pinned = is_own & ((slots.flags[self._fetched] & PINNED) > 0)
        slots.slot_of_row[self._rows] = np.where(is_pinned, self._fetched + AWAITED, NOWHERE)
        slots.row_of_slot[self._fetched[is_own & ~is_pinned]] = EMPTY
        if not self._has_written:
            slots.row_of_slot[self._dirty_slots] = self._dirty_rows
            slots.slot_of_row[self._dirty_rows] = self._dirty_slots
            slots.flags[self._dirty_slots] |= DIRTY


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
