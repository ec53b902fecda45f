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
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np
import torch

from recsys.embeddings.slot_map import Shortage
from recsys.embeddings.transfer_clock import TransferClock
from recsys.embeddings.transfers import TransferQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.cold_store import ColdStore
    from recsys.embeddings.hot_tier import AbstractHotTier
    from recsys.embeddings.kernels.pooled_lookup import Lookups
    from recsys.embeddings.row_space import RowSpace
    from recsys.embeddings.slot_map import Moves

__all__ = ["MOST_HELD", "NotEnoughSlots", "Residency", "Ticket", "TierCounts"]


# Tickets at once: a slot of a device counts those that it is held by in 16 bits, with a sign.
MOST_HELD = 2**15 - 1


class NotEnoughSlots(Exception):  # never leaves this package: callers know what the budget was
    """Rows of a mini-batch, together with those of tickets, are more than there are slots.

    Attributes:
        residency: Has the slots; a weak reference, because they go before others are made.
        num_needed: As many would do.
    """

    def __init__(self, residency: Residency, num_needed: int) -> None:
        super().__init__(num_needed)
        self.residency, self.num_needed = ref(residency), num_needed


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

    Args:
        residency: Whose slots they are.
        slot_of_value: As below.
        hold: Its slots, which other tickets may have, too.
        after: The transfer that it waits for.

    Attributes:
        slot_of_value: (N,), an array or a tensor where the slots are; of values that were not asked
            for, any slot.
    """

    def __init__(self, residency: Residency, slot_of_value: Any, hold: _Hold, after: int) -> None:
        self.slot_of_value = slot_of_value
        self._residency, self._after = residency, after
        self._hold: _Hold | None = hold
        self._after_hits, self._missing = after, np.empty(0, np.int32)
        self._waits_for: Any = None

    @property
    def held(self) -> Any:
        """Its slots, as the map has them; None once they are given back."""
        return None if self._hold is None else self._hold.slots

    def expect(self, transfer: int, slots: NDArray[np.int32]) -> None:
        """Rows are on their way to it.

        Args:
            transfer: Which brings them.
            slots: Where to.
        """
        self._after, self._missing = transfer, slots

    def wait(self) -> None:
        """Wait until every row has come.

        Raises:
            BaseException: what a transfer raised that this ticket rests on; it holds nothing then
                that could be computed on.
        """
        with self._residency.times.waiting():
            self._residency.queue.wait(self._after)
        self._residency.hot.after_transfers()

    @property
    def is_here(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._residency.queue.is_done(self._after)

    def was_missing(self) -> Tensor:
        """Which values' rows had to be fetched for it, (N,) bool, where the slots are."""
        return self._residency.map.are_among(self.slot_of_value, self._missing)

    def share(self, places: Tensor, *, was_missing: bool) -> Ticket:
        """A ticket of some of its values, which keeps all of its slots.

        Args:
            places: Which values, (M,) int64, where the slots are.
            was_missing: Whether one of their rows was in no slot; if none was, nobody has to wait
                for those that were.
        """
        assert self._hold is not None
        after = self._after if was_missing else self._after_hits
        part = Ticket(self._residency, _at(self.slot_of_value, places), self._hold, after)
        part._after_hits, part._missing = self._after_hits, self._missing
        part._waits_for = self._waits_for
        if not was_missing and part._waits_for is None:
            are_missing = self._residency.map.are_among(self.held, self._missing)
            part._waits_for = _at(self.held, (~are_missing).nonzero().flatten())
        return part

    @property
    def waits_for(self) -> Any:
        """Those of its slots whose rows have come when it has waited."""
        return self.held if self._waits_for is None else self._waits_for

    def release(self) -> None:
        """Give the slots back; a second time does nothing."""
        self._hold = None


def _at(slots: Any, places: Tensor) -> Any:
    """Some of an array or a tensor of slots."""
    return slots[places] if isinstance(slots, torch.Tensor) else slots[places.numpy()]


class _Hold:
    """Slots that a ticket has, or several; given back when none of them is left."""

    def __init__(self, slots: Any, released: deque[Any]) -> None:
        self.slots, self._released = slots, released

    def __del__(self) -> None:
        # Whoever drops the last reference may be any thread, in the middle of anything: no call
        # that Ctrl-C could come in.
        self._released.append(self.slots)


class Residency:
    """Moves the rows of one row space between its tiers.

    Args:
        hot: The slots.
        cold: Every row.

    Attributes:
        hot: As given.
        map: Which row is in which slot.
        counts: What has happened since the beginning.
        times: What moving rows takes, and how long somebody waited for it.
        queue: Of transfers.
        released: What tickets held that have been released since the last call.
    """

    def __init__(self, hot: AbstractHotTier, cold: ColdStore) -> None:
        self.hot, self._cold = hot, cold
        self.map = hot.make_map()
        self.counts = TierCounts()
        self.times = TransferClock()
        self.queue = TransferQueue()
        self.released: deque[Any] = deque()
        self._num_held = 0
        self._has_warned = False

    def prefetch(
        self, lookups: Lookups, bags: Any, *, in_background: bool = False, may_unpin: bool = True
    ) -> Ticket:
        """Claim a slot for every row of a mini-batch, and have those fetched that are not here.

        Args:
            lookups: What is looked up where; a value in one table at most.
            bags: The input, as kernels on the slots' device take it.
            in_background: Whether to return before the rows are here.
            may_unpin: Whether rows of a plan may be given up for it.

        Raises:
            NoSuchRow: a value is no row of its table; nothing has been claimed.
            NotEnoughSlots: nothing has been claimed, but rows of a plan may have been unpinned.
            OSError: a row could not be fetched or written back; nothing has been claimed.
            RuntimeError: too many tickets are held for a slot to count; nothing has been claimed.
        """
        self._collect()
        if self._num_held >= MOST_HELD:
            raise RuntimeError(
                f"{self._num_held} lookups hold rows in fast memory, and a slot counts no more; "
                "let go of what was computed without backward (losses, outputs), or look up under "
                "torch.no_grad()"
            )
        self.queue.settle()
        try:
            claim = self.map.claim(lookups, bags, may_unpin=may_unpin)
        except Shortage as shortage:
            raise NotEnoughSlots(self, shortage.num_needed) from None
        finally:
            self._tell_of_unpinned()
        hold = _Hold(claim.held, self.released)
        self._num_held += 1
        ticket = Ticket(self, claim.slot_of_value, hold, self.queue.last)
        moves, old = claim.moves, self.counts
        self.counts = TierCounts(
            num_lookups=old.num_lookups + claim.num_lookups,
            num_hits=old.num_hits + claim.num_hits,
            num_rows=old.num_rows + claim.num_rows,
            num_rows_hit=old.num_rows_hit + claim.num_rows_hit,
            num_fetched=old.num_fetched + len(moves.fetched_rows),
            num_written_back=old.num_written_back + len(moves.written_rows),
        )
        if len(moves.fetched_rows):
            move = _Move(self, moves)
            with nullcontext() if in_background else self.times.waiting():
                self.queue.put(move.run, move.undo, in_background=in_background)
            ticket.expect(self.queue.last, moves.fetched_slots)
        elif not in_background:
            ticket.wait()
        return ticket

    def look_up(self, tables: RowSpace, lookups: Lookups, bags: Any, result: Tensor) -> int:
        """Pool rows where they are, in slots or in tables; nothing is claimed, and nothing moves.

        Args:
            tables: The cold store's, where they lie now.
            lookups: What is looked up where.
            bags: The input, as for `prefetch`.
            result: As for `pooled_lookup`, and so is what is returned.
        """
        self.settle()
        return self.map.look_up(tables, self._cold, lookups, bags, result)

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
        self.settle()
        distinct = np.unique(values.cpu().numpy()).astype(np.int64)
        slots = self.map.where(distinct + first_row)
        here, elsewhere = slots[slots >= 0], distinct[slots < 0]
        hot = self.hot.rows
        torch.embedding_renorm_(hot, torch.from_numpy(here).to(hot.device), max_norm, norm_type)
        self.map.mark_dirty(here)
        torch.embedding_renorm_(rows, torch.from_numpy(elsewhere), max_norm, norm_type)

    def settle(self) -> None:
        """Wait until nothing is under way, and undo what has failed: slots hold what they say."""
        with self.times.waiting():
            self.queue.settle(is_all=True)
        self.hot.after_transfers()

    def pin_popular(self, share: float, num_left: int) -> tuple[int, int]:
        """Keep the rows that are used most until the next call, beside those of a plan.

        Which they are is told by the uses that are counted for the clock's hand; of rows kept they
        are halved at each call, so that those that are used no more are let go. Where a mini-batch
        needs their slots, they give way to its rows, and before those of a plan.

        Args:
            share: Of the slots, at most, with those of the plan.
            num_left: Slots that are left to mini-batches.

        Returns:
            How many rows are kept now that were not before, and how many not any more.
        """
        self._collect()
        self.settle()  # a row that does not come after all must not keep the slot of another one
        num_slots = self.hot.num_slots
        return self.map.pin_popular(max(0, min(int(share * num_slots), num_slots - num_left)))

    @property
    def num_claimed(self) -> int:
        """Slots that tickets hold."""
        self._collect()
        return self.map.num_claimed

    def mark_moved(self, ticket: Ticket, only: Sequence[range] | None = None) -> None:
        """Note that the rows of a ticket have been updated.

        Args:
            ticket: That.
            only: Of these rows, counted over all tables; None for all.
        """
        assert ticket.held is not None
        slots = ticket.waits_for
        self.map.mark_dirty(slots if only is None else self.map.of_rows(slots, only))

    def flush(self, only: range | None = None) -> None:
        """Write back every row that has been moved; all stay where they are.

        Args:
            only: Of these rows, counted over all tables; None for all.

        Raises:
            OSError: they cannot be written; none has been forgotten.
        """
        self._collect()
        self.settle()
        rows, slots = self.map.dirty()
        if only is not None:
            is_meant = (rows >= only.start) & (rows < only.stop)
            rows, slots = rows[is_meant], slots[is_meant]
        if len(slots):
            with self.times.waiting():
                begin = perf_counter()
                self.hot.write_back(self._cold, rows, slots)
                self.times.wrote_back(begin, perf_counter())
            self.map.mark_clean(slots)
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
        self.settle()
        rows, slots = self.map.needed()
        with self.times.waiting():
            begin = perf_counter()
            self.hot.fetch(self._cold, rows, slots)
            self.times.fetched(begin, perf_counter())
        self.map.forget_others()

    def _collect(self) -> None:
        while self.released:
            self._num_held -= 1
            self.map.release(self.released.popleft())

    def _tell_of_unpinned(self) -> None:
        """Once, when rows of a plan have had to give way."""
        if self.map.num_unpinned and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the budget's {self.hot.num_slots} slots of embedding_dim "
                f"{self.hot.rows.shape[1]} cannot hold the plan's rows and those of a mini-batch: "
                f"{self.map.num_unpinned} of the plan's are not kept any more; plan with a larger "
                "budget",
                stacklevel=3,
            )


class _Move:
    """A transfer: rows that have to go, then rows that come."""

    def __init__(self, residency: Residency, moves: Moves) -> None:
        self._hot, self._map, self._cold = residency.hot, residency.map, residency._cold
        self._moves, self._times = moves, residency.times
        self._in_order = residency.hot.in_order()
        self._has_written = False

    def run(self) -> None:
        moves, begin = self._moves, perf_counter()
        with self._in_order:
            if len(moves.written_rows):
                self._hot.write_back(self._cold, moves.written_rows, moves.written_slots)
                begin, before = perf_counter(), begin
                self._times.wrote_back(before, begin)
            self._has_written = True
            self._hot.fetch(self._cold, moves.fetched_rows, moves.fetched_slots)
            self._times.fetched(begin, perf_counter())

    def undo(self) -> None:
        self._map.undo(self._moves, has_written=self._has_written)
