"""Residency: moves rows between the tiers, so that each row has one current copy (C1).

    claim      gives every row of a mini-batch a slot; returns a ticket that holds these slots
    wait       waits until the ticket's rows have been fetched; then the mini-batch can be computed
    release    frees the ticket's slots

A claim gets all slots that it needs, or none. A slot that is neither held by a ticket nor pinned
may be given to another row; if its row was updated since the fetch, it is written back first. A row
without a slot is fetched for the next ticket that needs it. Fetches and write-backs go through one
ordered queue, so no row is fetched before its own write-back.

A device that copies rows by itself (`DeviceCopies`) needs no list of them on the host. If the
slots suffice for the most rows that all tickets can need, releases, a claim and its transfer are
then only queued on the device, in the order of transfers: what computes meanwhile waits for none of
them. If they may not suffice, the host reads how many rows the claims queued earlier have (`Holds`)
and judges again. If they still may not, the host waits for the result of the new claim, as it must
to copy rows itself, to unpin rows, and to refuse a claim. Everything else that reads or changes the
records of slots waits for all transfers.

Evaluation claims no slots. When no transfer is pending, the current copy of a row is in its slot
or, if it has none, in the cold store.

A clock's hand finds the rows to evict: it halves the use count of each row that it passes, and
takes the first row whose count is zero. So frequently used rows stay, without a sorted list.
"""

from __future__ import annotations

from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.cuda.replays import are_replaying
from recsys._support.interrupts import interrupts_held_back
from recsys._support.user_warnings import warn_caller
from recsys.embeddings.kernels.cpu.slots import Moves, Shortage
from recsys.embeddings.kernels.torch.slots import most_rows as count_most_rows
from recsys.embeddings.tiers.counts import ClaimCounter
from recsys.embeddings.tiers.holds import MOST_HELD, Hold, Holds, Need
from recsys.embeddings.tiers.ticket import NotEnoughSlots, Ticket, Transferred
from recsys.embeddings.tiers.transfers import TransferClock, TransferQueue
from recsys.embeddings.tiers.written_rows import WrittenRows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.cpu.slots import SlotClaim
    from recsys.embeddings.kernels.torch.slots import QueuedClaim
    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.rows.row_space import RowSpace
    from recsys.embeddings.tiers.cold.device_copies import DeviceCopies
    from recsys.embeddings.tiers.cold.host_store import ColdStore
    from recsys.embeddings.tiers.counts import TierCounts
    from recsys.embeddings.tiers.slots import Slots
    from recsys.embeddings.update.changed_rows import ChangedRows

__all__ = ["Residency"]


class Residency:
    """Moves the rows of one row space between its tiers.

    Args:
        hot: The slots.
        cold: Every row.
        copies: Copies rows of the cold store, if the slots' device reaches it.

    Attributes:
        hot: The slots.
        counter: Counts since the tiers were made.
        times: The time spent waiting for transfers.
        queue: The queue of transfers.
        changed_rows: Records the rows that are written to the cold store; None for no record.
    """

    def __init__(self, hot: Slots, cold: ColdStore, copies: DeviceCopies | None = None) -> None:
        self.hot, self._cold, self._copies = hot, cold, copies
        self.counter = ClaimCounter()
        self.times = TransferClock()
        self.queue = TransferQueue()
        self.changed_rows: ChangedRows | None = None
        self._holds = Holds()
        self._written = WrittenRows()
        self._has_warned = False

    @property
    def is_reached(self) -> bool:
        """Whether the slots' device may copy rows of the cold store by itself."""
        return self._copies is not None

    @property
    def counts(self) -> TierCounts:
        """Counts since the tiers were made; the host may wait for a device."""
        self.hot.after_transfers()
        return self.counter.read()

    def claim(
        self,
        lookups: Lookups,
        bags: Any,
        *,
        in_background: bool = False,
        may_unpin: bool = True,
        may_wait: bool = True,
        batch: int | None = None,
    ) -> Ticket:
        """Claim a slot for every row of a mini-batch, and fetch the rows that have none yet.

        Args:
            lookups: Which features are looked up in which tables; each feature in at most one.
            bags: The input, in the type of the slots' device.
            in_background: Whether the queue's thread must fetch the rows. If False and no transfer
                is pending, the rows are fetched before this returns.
            may_unpin: Whether rows of a plan may be unpinned for the claim.
            may_wait: Whether the host may wait for the claim, if a device copies rows by itself.
                The device then has nothing left to do. If False, the host may still wait for
                claims of other mini-batches: as a rule they were queued a step ago, and the device
                has had that step to do since.
            batch: The number of the mini-batch in `AheadQueue`; None for one of its own.

        Raises:
            NoSuchRow: a value is not a row of its table; nothing was claimed.
            NotEnoughSlots: nothing was claimed, but rows of a plan may have been unpinned. If the
                host may not wait, there may be enough.
            TiersFailed: a transfer has failed.
            RuntimeError: a slot cannot count more tickets; nothing was claimed.
        """
        self._written.mark()
        if (num_held := len(self._holds)) >= MOST_HELD:
            raise RuntimeError(
                f"{num_held} lookups hold rows in fast memory, which is the maximum; delete "
                "losses and outputs that need no backward, or look up under torch.no_grad()"
            )
        self.queue.require_intact()
        copies = self._device_copies()
        if copies is not None:
            # A queued claim releases these in `in_order`, so after the caller's last use of them.
            self._holds.take_released()
            most_rows = count_most_rows(self.hot.map, lookups, bags)
            if self._holds.leave(most_rows, self.hot, None if may_wait else batch):
                return self._queue_claim(lookups, bags, most_rows, batch)
            if not may_wait:
                raise NotEnoughSlots(self, self.hot.num_slots + 1)
        self._collect()
        claim = self._claim_and_wait(lookups, bags, may_unpin=may_unpin)
        bound = claim.num_rows if copies is None else most_rows
        hold = self._hold(claim, Need(bound, claim.num_rows))
        after_hits, moves = self._transferred(copies is not None), claim.moves
        if len(moves.fetched_rows):
            self._move(moves, self.hot.in_order(), copies, in_background=in_background)
        after, fetched = self._transferred(copies is not None), moves.fetched_slots
        return Ticket(hold, lookups, claim.slot_of_value, after, after_hits, fetched)

    def _queue_claim(
        self, lookups: Lookups, bags: Any, most_rows: int, batch: int | None
    ) -> Ticket:
        """Queue releases, a claim and its transfer on the device, in the order of transfers.

        Args:
            lookups: As for `claim`.
            bags: As for `claim`.
            most_rows: The most rows that the claim can need; there are slots for them.
            batch: As for `claim`.
        """
        self.hot.prepare(lookups, bags)
        found: list[tuple[QueuedClaim, Hold, Any]] = []

        def run() -> None:
            with self.hot.in_order():
                found.append(self._claim_in_order(lookups, bags, most_rows, batch))

        # A failure half-way ends the queue: rows may have got slots without being copied there.
        self.queue.put(run, in_background=False)
        [(claim, hold, after_claim)] = found
        after = self._transferred(True)
        hits = after if after_claim is None else Transferred(0, after_claim)
        hold.event = hits.event
        return Ticket(hold, lookups, claim.slot_of_value, after, hits, claim.moves.fetched_slots)

    def _claim_in_order(
        self, lookups: Lookups, bags: Any, most_rows: int, batch: int | None
    ) -> tuple[QueuedClaim, Hold, Any]:
        """See `_queue_claim`; the caller is in the order of transfers.

        Returns:
            The claim, its slots, and the event between claim and copies; None for one after both.
        """
        copies = self._copies
        assert copies is not None
        is_one = are_replaying()  # then everything is the replay of one graph
        dropped = self._holds.dropped
        last = dropped.pop() if is_one and dropped else None
        self._release()
        copies.keep()
        # By bounds, which equal steps have in common: a graph is for one number. There are slots
        # for this claim, so the others need at most the rest.
        num_left = self.hot.num_slots - self.hot.map.num_pinned - most_rows
        claim = self.hot.queue_claim(
            lookups,
            bags,
            most_rows,
            min(self._holds.bound, num_left),
            last,
            copies if is_one else None,
        )
        hold = self._hold(claim, Need(most_rows, most_rows, claim.counts, batch))
        after_claim = None if is_one else self.hot.record_transfers()
        if not is_one:
            copies.launch(claim.moves)
        if self.changed_rows is not None:
            self._written.add(claim.moves.written_rows, self.changed_rows)
        return claim, hold, after_claim

    def _hold(self, claim: SlotClaim | QueuedClaim, need: Need) -> Hold:
        """Count a claim, and note the slots that it holds."""
        hold = Hold(self, claim.held)
        self._holds.add(hold, need)
        self.counter.add(claim)
        return hold

    def _claim_and_wait(self, lookups: Lookups, bags: Any, *, may_unpin: bool) -> SlotClaim:
        """Claim slots; on a device, the host waits for the result. See `claim`."""
        try:
            return self.hot.claim(lookups, bags, may_unpin=may_unpin)
        except Shortage as shortage:
            raise NotEnoughSlots(self, shortage.num_needed) from None
        except (RuntimeError, MemoryError) as error:  # rows may have got slots without a copy
            self.queue.fail(error)
            self.queue.require_intact()
            raise
        finally:
            self._warn_of_unpinned()

    def _transferred(self, by_device: bool) -> Transferred:
        """The point after all transfers so far."""
        return Transferred(self.queue.last, self.hot.last_transfer if by_device else None)

    def look_up(self, tables: RowSpace, lookups: Lookups, bags: Any, result: Tensor) -> int:
        """Pool rows from their slots or from the tables; no slot is claimed, and no row moves.

        Args:
            tables: The tables of the cold store.
            lookups: Which features are looked up in which tables.
            bags: The input, in the type of the slots' device.
            result: Receives the pooled rows; see `pooled_lookup`.

        Returns:
            The position of the first value that is not a row of its table, or -1.

        Raises:
            TiersFailed: a transfer has failed.
        """
        copies = self._device_copies()
        if copies is None:
            self.settle()
        else:  # the device reads rows after its own transfers, for which the host does not wait
            self.queue.settle()
            self.hot.after_transfers()
        self.queue.require_intact()
        return self.hot.look_up(tables, self._cold, copies, lookups, bags, result)

    def read_rows(self, rows: NDArray[np.int64]) -> Tensor:
        """Copy rows from where they are; see `Tiers.read_rows`. No row moves."""
        self._settle()
        return self.hot.read_rows(self._cold, rows)

    def settle(self) -> None:
        """Wait until no transfer is pending."""
        with self.times.waiting():
            self.queue.settle()
            self.hot.after_transfers()
            if self._copies is not None:
                self._copies.wait()
        self._written.mark(is_complete=True)

    def pin_popular(self, share: float, num_left: int) -> tuple[int, int]:
        """Pin the rows that are used most, besides those of a plan, until the next call.

        Rows are chosen by the use counts of the clock's hand. Each call halves the counts of the
        rows that it pins, so rows that are no longer used get unpinned. If a mini-batch lacks
        slots, these rows are unpinned before rows of a plan.

        Args:
            share: The maximum share of slots to pin, including those of the plan.
            num_left: Number of slots to leave for mini-batches.

        Returns:
            The numbers of rows that this call pinned and unpinned.
        """
        self._collect()
        return self.hot.pin_popular(self._most_pinned(share, num_left))

    def pin_as_popular(self, rows: NDArray[np.int64], share: float, num_left: int) -> None:
        """Pin `rows`, as far as they fit; see `pin_popular` and `Slots.pin_as_popular`."""
        self._collect()
        self.hot.pin_as_popular(rows, self._most_pinned(share, num_left))

    def _most_pinned(self, share: float, num_left: int) -> int:
        num_slots = self.hot.num_slots
        return max(0, min(int(share * num_slots), num_slots - num_left))

    @property
    def num_claimed(self) -> int:
        """Number of slots that tickets hold."""
        self._collect()
        return self.hot.num_claimed

    def mark_updated(self, ticket: Ticket, only: Sequence[range] | None = None) -> None:
        """Mark the rows of a ticket as updated.

        Args:
            ticket: The ticket.
            only: Mark only rows in these ranges, counted over all tables; None for all.
        """
        slots = ticket.held
        assert slots is not None
        self.hot.map.mark_dirty(slots if only is None else self.hot.of_rows(slots, only))

    def flush(self, only: range | None = None) -> None:
        """Write back every row that was updated; rows stay in their slots.

        Args:
            only: Write back only rows in this range, counted over all tables; None for all.

        Raises:
            TiersFailed: the write-back or an earlier transfer failed.
        """
        self._settle()
        self._collect()
        rows, slots = self.hot.dirty()
        if only is not None:
            is_chosen = (rows >= only.start) & (rows < only.stop)
            rows, slots = rows[is_chosen], slots[is_chosen]
        if len(slots):
            self._move_now(Moves(_NONE, _NONE, rows, slots))
            self.hot.mark_clean(slots)
            self.counter.add_written_back(len(slots))

    def reload(self) -> None:
        """Replace the rows in slots by those of the cold store, after the tables were written to.

        Rows that tickets need are fetched now, all others when a ticket needs them.

        Raises:
            TiersFailed: the fetch or an earlier transfer failed.
        """
        with interrupts_held_back():
            self._settle()
            self._collect()
            rows, slots = self.hot.claimed()
            if len(slots):
                self._move_now(Moves(rows, slots, _NONE, _NONE))
            self.hot.drop_unclaimed()

    def _settle(self) -> None:
        """Wait until no transfer is pending, and check that none has failed."""
        self.settle()
        self.queue.require_intact()

    def _device_copies(self) -> DeviceCopies | None:
        """What copies rows on the device; None if the host does, which it then always does."""
        copies = self._copies
        if copies is None or copies.are_current():
            return copies
        self.settle()
        self._copies = None
        if copies.renew():
            self._copies = copies
        return self._copies

    def _move_now(self, moves: Moves) -> None:
        """Copy rows on the caller's stream, and wait for them; no transfer is pending."""
        copies = self._device_copies()
        self._move(moves, nullcontext(), copies, in_background=False)
        if copies is not None:
            self.settle()

    def _move(
        self,
        moves: Moves,
        in_order: AbstractContextManager[None],
        copies: DeviceCopies | None,
        *,
        in_background: bool,
    ) -> None:
        """Queue a transfer, or run it.

        Args:
            moves: The rows to copy.
            in_order: A context for the transfer, from `Slots.in_order`.
            copies: Copies the rows on the device; None if the host copies them.
            in_background: Whether the queue's thread must run it, if the host copies the rows.
        """
        if self.changed_rows is not None and len(moves.written_rows):
            self.changed_rows.mark_rows(moves.written_rows)

        def run() -> None:
            with in_order:
                if copies is not None:
                    copies.write_back(moves.written_rows, moves.written_slots)
                    copies.fetch(moves.fetched_rows, moves.fetched_slots)
                    return
                if len(moves.written_rows):
                    begin = perf_counter()
                    self.hot.write_back(self._cold, moves.written_rows, moves.written_slots)
                    self.times.wrote_back(begin, perf_counter())
                if len(moves.fetched_rows):
                    self.hot.fetch(self._cold, moves.fetched_rows, moves.fetched_slots)

        is_awaited = copies is None and not in_background
        with self.times.waiting() if is_awaited else nullcontext():
            self.queue.put(run, in_background=in_background and copies is None)

    def _collect(self) -> None:
        """Release what was dropped; the slots can be read and changed after that."""
        self.hot.after_transfers()
        self._holds.take_released()
        self._release()

    def release_unneeded(self) -> bool:
        """Release slots that shared claims need no longer; see `Holds.drop_unneeded`."""
        self._collect()
        return self._holds.drop_unneeded()

    def _release(self) -> None:
        """Release what was taken out of the counts, on the current stream."""
        dropped = self._holds.dropped
        while dropped:
            self.hot.release(dropped[-1])
            dropped.pop()

    def _warn_of_unpinned(self) -> None:
        """Warn once after rows of a plan were unpinned."""
        if self.hot.num_unpinned and not self._has_warned:
            self._has_warned = True
            warn_caller(
                f"the budget's {self.hot.num_slots} slots of embedding_dim "
                f"{self.hot.rows.shape[1]} cannot hold the plan's rows and those of a mini-batch: "
                f"{self.hot.num_unpinned} of the plan's rows were unpinned; plan with a larger "
                "budget",
            )


_NONE: NDArray[np.int32] = np.empty(0, np.int32)
