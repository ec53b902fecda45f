"""Residency: how a row gets to where it is used, and that it has one copy that counts (C1).

    claim   -> ticket     every row of a mini-batch has a slot, which the ticket keeps until release
    wait                  the rows were fetched; the mini-batch may be computed on
    release               the ticket gives its slots back

A claim is all or nothing. A slot that no ticket needs, and that no plan has pinned, may be given to
another row; if its row was updated since the fetch, it is written back first. A row that only the
cold store has is fetched for the next ticket that needs it. Fetches and write-backs go through one
ordered queue, so no row is fetched before its own write-back.

A lookup that only reads claims nothing. With no transfer under way, a row's slot has its newest
value, and the cold store has that of a row without a slot.

A clock's hand finds the rows to evict: it halves the count of a row's uses as it passes, and takes
the first row without uses. So rows used often stay, without a sorted list and for any stream.
"""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import nullcontext
from copy import copy
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np
import torch

from recsys._support.interrupts import interrupts_held_back
from recsys.embeddings.kernels.cpu.slots import Moves, Shortage
from recsys.embeddings.tiers.transfers import TransferClock, TransferQueue

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.rows.row_space import RowSpace
    from recsys.embeddings.tiers.ahead import AheadQueue, InputIds
    from recsys.embeddings.tiers.cold.host_store import ColdStore
    from recsys.embeddings.tiers.slots import Slots

__all__ = ["MOST_HELD", "NotEnoughSlots", "Residency", "Ticket", "TierCounts"]


# Tickets at once: a slot counts them in 16 bits, with a sign.
MOST_HELD = 2**15 - 1


class NotEnoughSlots(Exception):  # stays inside this package: callers name the budget
    """The rows of a mini-batch, together with those of other tickets, exceed the slots.

    Attributes:
        residency: Has the slots; a weak reference, because they go before others are made.
        num_needed: With so many slots, the claim would succeed.
    """

    def __init__(self, residency: Residency, num_needed: int) -> None:
        super().__init__(num_needed)
        self.residency, self.num_needed = ref(residency), num_needed


class TierCounts(NamedTuple):
    """Counts since the tiers were made.

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
    """Says which slots have the rows of some lookups, and keeps these slots until its release.

    A ticket that is dropped is released. The parts of a split ticket share its slots, which stay
    claimed until the last part is released.

    Args:
        hold: Its slots.
        lookups: As below.
        slot_of_value: As below.
        after: The transfer that it waits for.
        after_hits: The transfer after which the rows are there that needed no fetch.
        fetched: Slots whose rows were fetched for it.

    Attributes:
        lookups: What is looked up where; each value in one table at most.
        slot_of_value: The slot of each value, (N,), an array or a tensor where the slots are; any
            slot for a value that is not looked up.
        bags: The input of the lookup with slots in place of rows; None until the lookup comes.
        ids: Of a ticket made ahead: a copy of the ids that its lookup will have.
        queue: Where such a ticket waits for that lookup.
        is_taken: Whether that lookup has come, or parts have replaced the ticket. They have the
            slots then, and this ticket has none.
    """

    def __init__(
        self,
        hold: _Hold,
        lookups: Lookups,
        slot_of_value: Any,
        after: int,
        after_hits: int,
        fetched: NDArray[np.int32],
    ) -> None:
        self.lookups, self.slot_of_value = lookups, slot_of_value
        self.bags: Any = None
        self.ids: InputIds | None = None
        self.queue: AheadQueue | None = None
        self.is_taken = False
        self._hold: _Hold | None = hold
        self._after, self._after_hits, self._fetched = after, after_hits, fetched

    @property
    def is_held(self) -> bool:
        """Whether it still has its slots."""
        return self._hold is not None

    @property
    def held(self) -> Any:
        """Its slots, as the map of slots has them; None after its release."""
        return None if self._hold is None else self._hold.slots

    def wait(self) -> None:
        """Wait until every row was fetched.

        Raises:
            TiersFailed: a transfer has failed.
        """
        residency = self._residency
        with residency.times.waiting():
            residency.queue.wait(self._after)
        residency.hot.after_transfers()

    @property
    def is_here(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._hold is None or self._residency.queue.is_done(self._after)

    @property
    def batch_size(self) -> int:
        """B of a ticket made ahead."""
        assert self.ids is not None
        return self.ids.batch_size

    def is_for(self, lookups: Lookups, bags: Any) -> bool:
        """Whether it was made ahead for these lookups of exactly these ids."""
        own = self.lookups
        is_same = own is lookups or (
            np.array_equal(own.tables, lookups.tables)
            and np.array_equal(own.positions, lookups.positions)
        )
        return is_same and self.ids is not None and self.ids.are_of(bags)

    def missing_samples(self) -> Tensor:
        """Which samples had a row that was fetched for it, (B,) bool, on the CPU."""
        if self._hold is None:
            return torch.zeros(self.batch_size, dtype=torch.bool)
        assert self.ids is not None
        was_fetched_N = self._hold.residency.hot.are_among(self.slot_of_value, self._fetched)
        return self.ids.samples_with(was_fetched_N, self.lookups.positions.tolist()).cpu()

    def take(self, bags: Any) -> Ticket:
        """Pass its slots on to a ticket for the lookup that has come.

        Args:
            bags: The input of that lookup, by rows.
        """
        taken = copy(self)
        taken.bags, taken.ids, taken.queue = bags.at_slots(self.slot_of_value), None, None
        self.is_taken, self._hold = True, None
        return taken

    def split(self, parts: Sequence[tuple[Tensor, bool]]) -> list[Ticket]:
        """Replace it in its queue by tickets for some of its samples each, which share its slots.

        Args:
            parts: Samples, (M,) int64 on the CPU, and whether some of them are `missing_samples`.
                A part without such samples does not wait for rows that were fetched for others.
        """
        assert self.ids is not None
        assert self.queue is not None
        tickets = []
        for samples, was_missing in parts:
            places, ids = self.ids.select(samples)
            tickets.append(self._part(places, ids, was_missing=was_missing))
        self.queue.replace(self, tickets)
        self.is_taken, self._hold = True, None
        return tickets

    def _part(self, places: Tensor, ids: InputIds | None, *, was_missing: bool) -> Ticket:
        """A ticket for the values at some places; arguments as for `split`."""
        part = copy(self)
        part.ids = ids
        is_tensor = isinstance(self.slot_of_value, torch.Tensor)
        part.slot_of_value = self.slot_of_value[places if is_tensor else places.numpy()]
        part._after = self._after if was_missing else self._after_hits
        return part

    def release(self) -> None:
        """Give the slots back; a second time does nothing."""
        self._hold = None

    @property
    def _residency(self) -> Residency:
        # A ticket that has no slots must not keep the memory of those it had.
        assert self._hold is not None
        return self._hold.residency


class _Hold:
    """The slots of a ticket or several; it releases them when none of these has it any more."""

    def __init__(self, residency: Residency, slots: Any) -> None:
        self.residency, self.slots = residency, slots
        self._released = residency.released

    def __del__(self) -> None:
        # Any thread may drop the last reference at any time, so this makes no call in which Ctrl-C
        # could come.
        self._released.append(self.slots)


class Residency:
    """Moves the rows of one row space between its tiers.

    Args:
        hot: The slots.
        cold: Every row.

    Attributes:
        hot: As given.
        counts: What has happened since the tiers were made.
        times: How long transfers take, and how long they were waited for.
        queue: Of transfers.
        released: Slots of tickets that were released since the last call.
    """

    def __init__(self, hot: Slots, cold: ColdStore) -> None:
        self.hot, self._cold = hot, cold
        self.counts = TierCounts()
        self.times = TransferClock()
        self.queue = TransferQueue()
        self.released: deque[Any] = deque()
        self._num_held = 0
        self._has_warned = False

    def claim(
        self, lookups: Lookups, bags: Any, *, in_background: bool = False, may_unpin: bool = True
    ) -> Ticket:
        """Claim a slot for every row of a mini-batch, and fetch the rows that are in none.

        Args:
            lookups: What is looked up where; a value in one table at most.
            bags: The input, as kernels on the slots' device take it.
            in_background: Whether to leave the fetch to the queue's thread. If not, and nothing
                else is under way, the rows are there on return; else the ticket waits for them.
            may_unpin: Whether rows of a plan may be given up for it.

        Raises:
            NoSuchRow: a value is no row of its table; nothing was claimed.
            NotEnoughSlots: nothing was claimed, but rows of a plan may have been unpinned.
            TiersFailed: a transfer has failed.
            RuntimeError: a slot cannot count more tickets; nothing was claimed.
        """
        self._collect()
        if self._num_held >= MOST_HELD:
            raise RuntimeError(
                f"{self._num_held} lookups hold rows in fast memory, and a slot counts no more; "
                "let go of what was computed without backward (losses, outputs), or look up under "
                "torch.no_grad()"
            )
        self.queue.require_intact()
        try:
            claim = self.hot.claim(lookups, bags, may_unpin=may_unpin)
        except Shortage as shortage:
            raise NotEnoughSlots(self, shortage.num_needed) from None
        finally:
            self._warn_of_unpinned()
        hold = _Hold(self, claim.held)
        self._num_held += 1
        moves, old, after_hits = claim.moves, self.counts, self.queue.last
        self.counts = TierCounts(
            num_lookups=old.num_lookups + claim.num_lookups,
            num_hits=old.num_hits + claim.num_hits,
            num_rows=old.num_rows + claim.num_rows,
            num_rows_hit=old.num_rows_hit + claim.num_rows_hit,
            num_fetched=old.num_fetched + len(moves.fetched_rows),
            num_written_back=old.num_written_back + len(moves.written_rows),
        )
        if len(moves.fetched_rows):
            self._move(moves, self.hot.in_order(), in_background=in_background)
        return Ticket(
            hold, lookups, claim.slot_of_value, self.queue.last, after_hits, moves.fetched_slots
        )

    def look_up(self, tables: RowSpace, lookups: Lookups, bags: Any, result: Tensor) -> int:
        """Pool rows from their slots or from the tables; nothing is claimed, and no row moves.

        Args:
            tables: The cold store's, where they lie now.
            lookups: What is looked up where.
            bags: The input, as for `claim`.
            result: As for `pooled_lookup`, and so is what is returned.

        Raises:
            TiersFailed: a transfer has failed.
        """
        self._settle()
        return self.hot.look_up(tables, self._cold, lookups, bags, result)

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

        Raises:
            TiersFailed: a transfer has failed.
        """
        self._settle()
        distinct = np.unique(values.cpu().numpy()).astype(np.int64)
        slots = self.hot.where(distinct + first_row)
        here, elsewhere = slots[slots >= 0], distinct[slots < 0]
        hot = self.hot.rows
        torch.embedding_renorm_(hot, torch.from_numpy(here).to(hot.device), max_norm, norm_type)
        self.hot.map.mark_dirty(here)
        torch.embedding_renorm_(rows, torch.from_numpy(elsewhere), max_norm, norm_type)

    def settle(self) -> None:
        """Wait until no transfer is under way."""
        with self.times.waiting():
            self.queue.settle()
        self.hot.after_transfers()

    def pin_popular(self, share: float, num_left: int) -> tuple[int, int]:
        """Keep the rows that are used most, besides those of a plan, until the next call.

        The uses counted for the clock's hand decide. Each call halves those of the rows it keeps,
        so rows that are used no more are let go. Popular rows give way to a mini-batch that needs
        their slots, before rows of a plan do.

        Args:
            share: Of the slots, at most, with those of the plan.
            num_left: Slots that are left to mini-batches.

        Returns:
            How many rows are kept now that were not before, and how many not any more.
        """
        self._collect()
        num_slots = self.hot.num_slots
        return self.hot.pin_popular(max(0, min(int(share * num_slots), num_slots - num_left)))

    @property
    def num_claimed(self) -> int:
        """Slots that tickets hold."""
        self._collect()
        return self.hot.num_claimed

    def mark_updated(self, ticket: Ticket, only: Sequence[range] | None = None) -> None:
        """Note that the rows of a ticket were updated.

        Args:
            ticket: Has their slots.
            only: Of these rows, counted over all tables; None for all.
        """
        slots = ticket.held
        assert slots is not None
        self.hot.map.mark_dirty(slots if only is None else self.hot.of_rows(slots, only))

    def flush(self, only: range | None = None) -> None:
        """Write back every row that was updated; all stay in their slots.

        Args:
            only: Of these rows, counted over all tables; None for all.

        Raises:
            TiersFailed: they cannot be written, or an earlier transfer has failed.
        """
        self._collect()
        self._settle()
        rows, slots = self.hot.dirty()
        if only is not None:
            is_meant = (rows >= only.start) & (rows < only.stop)
            rows, slots = rows[is_meant], slots[is_meant]
        if len(slots):
            self._move(Moves(_NONE, _NONE, rows, slots), nullcontext(), in_background=False)
            self.hot.mark_clean(slots)
            self.counts = self.counts._replace(
                num_written_back=self.counts.num_written_back + len(slots)
            )

    def reload(self) -> None:
        """Take every row from the cold store again, because it was written to from outside.

        Rows that tickets need are fetched into their slots now, all others when they are needed.

        Raises:
            TiersFailed: they cannot be fetched, or an earlier transfer has failed.
        """
        self._collect()
        with interrupts_held_back():
            self._settle()
            rows, slots = self.hot.claimed()
            if len(slots):
                self._move(Moves(rows, slots, _NONE, _NONE), nullcontext(), in_background=False)
            self.hot.drop_unclaimed()

    def _settle(self) -> None:
        """Wait until no transfer is under way, and slots have the rows that the map says."""
        self.settle()
        self.queue.require_intact()

    def _move(
        self, moves: Moves, in_order: AbstractContextManager[None], *, in_background: bool
    ) -> None:
        """Put in a transfer.

        Args:
            moves: What it copies.
            in_order: A context for it, by which it runs after what the caller has queued by now.
            in_background: As for `claim`.
        """

        def run() -> None:
            begin = perf_counter()
            with in_order:
                if len(moves.written_rows):
                    self.hot.write_back(self._cold, moves.written_rows, moves.written_slots)
                    begin, before = perf_counter(), begin
                    self.times.wrote_back(before, begin)
                if len(moves.fetched_rows):
                    self.hot.fetch(self._cold, moves.fetched_rows, moves.fetched_slots)
                    self.times.fetched(begin, perf_counter())

        with nullcontext() if in_background else self.times.waiting():
            self.queue.put(run, in_background=in_background)

    def _collect(self) -> None:
        while self.released:
            self._num_held -= 1
            self.hot.map.release(self.released.popleft())

    def _warn_of_unpinned(self) -> None:
        """Once, when rows of a plan have given way."""
        if self.hot.num_unpinned and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the budget's {self.hot.num_slots} slots of embedding_dim "
                f"{self.hot.rows.shape[1]} cannot hold the plan's rows and those of a mini-batch: "
                f"{self.hot.num_unpinned} of the plan's are not kept any more; plan with a larger "
                "budget",
                stacklevel=3,
            )


_NONE: NDArray[np.int32] = np.empty(0, np.int32)
