"""`Fetcher`: claims slots for mini-batches, now or ahead, and has their rows fetched.

A claim is a hint: it gives slots to as many rows as it can, cannot fail, and is never released. A
generation numbers mini-batches; slots of older generations than the current one may be taken:

    claim_ahead   marks slots with a new generation, and fetches in the background
    begin         this claim's mini-batch is computed now: waits for its rows; older ones are over
    a lookup      of a mini-batch that was not claimed, or not wholly, claims what is missing now
    update        ends the generation

Lookups and updates find each row wherever it is then. Two rules keep them apart from transfers in
the background:

    1. A lookup that meets a row on its way returns `IN_FLIGHT`; then it waits for all transfers,
       and is repeated. So a lookup is right whatever was claimed.
    2. A transfer that was started after a lookup may move its rows. If there is one after any of
       its lookups, an update first waits for all transfers. In `TrainPipeline` there is none,
       because it claims between update and lookup.

A third keeps transfers apart: the slots of a claim are not taken while its own transfer may still
run, even if its mini-batch was dropped.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys._support.torch_compat import versions_of
from recsys._support.user_code import warn_caller
from recsys.embeddings.kernels.cpu.claim import (
    FETCHED,
    NUM_COUNTS,
    PLANNED,
    POPULAR,
    WITHOUT_SLOT,
    WRITTEN,
    claim,
    drop_all,
)
from recsys.embeddings.kernels.cpu.row_map import ARRIVING, EMPTY, make_marks
from recsys.embeddings.rows.bags import Bags, Lookups, addresses
from recsys.embeddings.rows.grads import bind_table, group_of
from recsys.embeddings.tiers.queue import TransferQueue
from recsys.embeddings.tiers.table_access import TieredParameter
from recsys.embeddings.tiers.transfer import Transfer
from recsys.embeddings.tiers.write_back import write_back
from recsys.errors import ConflictingWrite, TiersFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.ledger import Entry
    from recsys.embeddings.rows.tables import TableGroup

__all__ = ["Claim", "Claims", "Counts", "Fetcher", "HitRates", "claim_together"]

_NO_ROWS: NDArray[np.int32] = np.empty(0, np.int32)
_MOST_VIEWS = 256  # of tables, which a caller may have kept
_LEAST_USES = 2  # of a popular row; one that a single mini-batch looked up has one use


class Claim(NamedTuple):
    """A claim that was made ahead.

    Attributes:
        generation: Number of the mini-batch.
        transfer: The last one that fetches its rows; None on a device.
        counts: As of a `Transfer`.
        lookups: What it claimed rows for.
    """

    generation: int
    transfer: Transfer | None
    counts: NDArray[np.int64]
    lookups: Set[Lookups] = frozenset()


class Counts(NamedTuple):
    """Sums over mini-batches. A row that a later one has claimed ahead already counts for that one.

    Attributes:
        lookups: Ids looked up.
        hits: Those whose row had a slot when its mini-batch claimed slots.
        rows: Distinct rows of each mini-batch.
        rows_hit: Those that had a slot.
        left: Rows that were used in the cold tier, because slots were too few.
        fetched: Rows fetched.
        written: Rows written back.
    """

    lookups: int
    hits: int
    rows: int
    rows_hit: int
    left: int
    fetched: int
    written: int


class HitRates(NamedTuple):
    """What was in fast memory when mini-batches claimed slots, since the slots were made.

    Attributes:
        lookups: Share of the lookups whose row was there.
        distinct_rows: The same with every row counted once for each mini-batch.
    """

    lookups: float
    distinct_rows: float

    @classmethod
    def of(cls, fetchers: Iterable[Fetcher]) -> HitRates:
        """The rates of several fetchers together; 0 before the first lookup."""
        sums = np.sum([fetcher.counts for fetcher in fetchers], axis=0)
        lookups, hits, rows, rows_hit = sums[:4].tolist()
        return cls(hits / max(1, lookups), rows_hit / max(1, rows))


class Fetcher:
    """Moves rows of one table group into slots, which it gives the group.

    Args:
        group: The tables.
        num_slots: S.
        planned: Rows that do not leave their slots, counted over all tables, (P,) int32.

    Attributes:
        planned: As given.
        marks: Where rows are.
        queue: Moves rows.
        num_started: Transfers started in the background.
        sums: The numbers of `counts`, and others after them.
        waited: Seconds that callers waited for rows.
        popular: Other rows that do not leave their slots until `pin` or `pin_popular`, the most
            used first.
        lock: Held while kernels read or change where rows are: one thread trains, and others may
            evaluate meanwhile.
    """

    def __init__(
        self, group: TableGroup, num_slots: int, planned: NDArray[np.int32] = _NO_ROWS
    ) -> None:
        self._group, self.lock = group, threading.RLock()
        self.sums: Any = np.zeros(NUM_COUNTS, np.int64)
        self.marks, self.queue = self._make(int(group.first_rows[-1]), num_slots)
        self.num_started, self.waited = 0, 0.0
        # Generations: the oldest one that is not over, and the last one that was claimed ahead.
        self._needed = self._last = 1
        self._views: list[Tensor] = []  # of `weight.data`, whose versions are others
        self._versions: list[int] | None = None  # None: what is found next is accepted
        # Lookups of the current mini-batch that were claimed wholly; those that were claimed.
        self._covered: Set[Lookups] = frozenset()
        self._counted: Set[Lookups] = frozenset()
        self._short = 0  # the last generation for which slots were too few
        self._has_warned = False
        self.planned, self.popular = planned, _NO_ROWS
        self._must_pin = True
        group.give_slots(num_slots, self)
        for number, table in enumerate(group.tables):
            if group_of(table) is not group:
                bind_table(group, number, is_sparse=True)
            table.__class__ = TieredParameter
        self.accept_writes()

    def __del__(self) -> None:
        """A caller may have kept a table of a module that was deleted."""
        if hasattr(self, "_must_pin") and not sys.is_finalizing():
            with suppress(TiersFailed, ConflictingWrite):  # said where it happened
                write_back(self._group)

    def claim_ahead(self, wanted: Sequence[tuple[Lookups, Bags]]) -> Claim | None:
        """Claim slots for a later mini-batch, and fetch its rows in the background.

        Args:
            wanted: All its lookups in the group.

        Returns:
            The claim; None if a mini-batch before this one is still short of slots.
        """
        if self._short >= self._needed:
            return None
        self._last = max(self._last, self._needed) + 1
        self.num_started += 1
        with self.lock:
            found = [self._claim(lookups, bags, self._last) for lookups, bags in wanted]
            self.queue.start()
        counts = np.sum([claimed.counts for claimed in found], axis=0)
        if counts[WITHOUT_SLOT]:
            self._short = self._last
        return found[-1]._replace(counts=counts, lookups={lookups for lookups, _ in wanted})

    def begin(self, claimed: Claim | None, *, is_waiting: bool = True) -> None:
        """Begin to compute a mini-batch.

        Args:
            claimed: Its claim; None if it was not claimed ahead.
            is_waiting: Whether to wait for all its rows. If not, a lookup of one that is on its way
                waits.
        """
        self._covered = self._counted = frozenset()
        if claimed is None and self._last <= self._needed:
            self._needed += 1  # the last one may have had no update
        if claimed is not None:
            self._needed = max(self._needed, claimed.generation)
            if is_waiting:
                self._finish(claimed.transfer)
            self._counted = claimed.lookups
            self._covered = frozenset() if claimed.counts[WITHOUT_SLOT] else claimed.lookups
            self.sums[:WITHOUT_SLOT] += claimed.counts[:WITHOUT_SLOT]

    def before_lookup(self, lookups: Lookups, bags: Bags) -> None:
        """Claim slots for a lookup in training, unless it was claimed ahead."""
        if lookups in self._covered:
            return
        with self.lock:
            self.queue.note_arrivals()  # of rows that `prefetch` has fetched
            is_pinning = self._must_pin
            _, transfer, counts, _ = self._claim(lookups, bags, self._needed)
            if is_pinning or counts[FETCHED] or counts[WRITTEN]:
                self._finish(transfer)
            else:
                self.queue.drop_last()
        if lookups not in self._counted:
            self.sums[:WITHOUT_SLOT] += counts[:WITHOUT_SLOT]
        self.sums[WITHOUT_SLOT] += counts[WITHOUT_SLOT]
        if counts[WITHOUT_SLOT] and not self._has_warned:
            self._warn_of_left()

    def begin_update(self, entries: Sequence[Entry]) -> None:
        """Let no transfer touch these rows; writes are our own until `accept_writes`."""
        with self.lock:  # not while a lookup of another thread asks for writes
            if self.queue and any(entry.call.num_started != self.num_started for entry in entries):
                self.settle()
            self._versions = None

    def end_generation(self) -> None:
        """Let the slots of the current mini-batch be taken."""
        self._needed += 1
        self._covered = self._counted = frozenset()

    def settle(self) -> None:
        """Wait until no row is on its way."""
        if self.queue:
            self._finish()

    def _finish(self, last: Transfer | None = None) -> None:
        begin = perf_counter()
        with self.lock:
            self.queue.finish(last)
        self.waited += perf_counter() - begin

    def unpinned_samples(self, lookups: Lookups, bags: Bags) -> Tensor:
        """Which samples look up a row that is not pinned, (B,) bool; invalid ids do not count.

        Args:
            lookups: Some lookups.
            bags: Their input.
        """
        with self.lock:
            if self._must_pin:
                self._pin()
            self.settle()
        slot_of_row, pins = map(torch.as_tensor, (self.marks.slot_of_row, self.marks.pins))
        is_unpinned = torch.zeros(bags.num_samples, dtype=torch.bool, device=bags.ids.device)
        if not bags.ids.numel():
            return is_unpinned
        length = bags.ids.numel() // max(bags.num_bags, 1)
        whole = torch.arange(0, bags.ids.numel() + 1, max(length, 1), device=bags.ids.device)
        ends = whole if bags.offsets is None else bags.offsets
        for table, position, _ in lookups.locations:
            first, last = position * bags.num_samples, (position + 1) * bags.num_samples
            bounds = ends[first : last + 1].long()
            if len(bounds) <= bags.num_samples:  # without the end of the last bag
                bounds = torch.cat([bounds, bounds.new_tensor([bags.ids.numel()])])
            ids = bags.ids.reshape(-1)[int(bounds[0]) : int(bounds[-1])].long()
            rows = int(self._group.first_rows[table]) + ids
            slots = slot_of_row[rows.clamp(0, len(slot_of_row) - 1)].long()
            is_pinned = (slots >= 0) & (pins[slots.clamp(min=0)] != 0)
            counts = (~is_pinned).cumsum(0)
            upto = torch.cat([counts.new_zeros(1), counts])[bounds - bounds[0]]
            is_unpinned |= upto.diff() > 0
        return is_unpinned

    def empty_slots(self, *, is_written_back: bool) -> None:
        """Empty all slots.

        Args:
            is_written_back: Whether changed rows are written back first. If not, they are dropped,
                because the cold tier is newer.
        """
        with self.lock:
            if is_written_back:
                write_back(self._group)
            self.settle()
            self._drop_all()
            self.accept_writes()
            self._must_pin = True

    def pin_popular(self, most: int) -> tuple[int, int]:
        """Pin the rows that are used most, in place of those in `popular`.

        Of rows with equal use counts, all are pinned or none. A row's count is halved when it is
        pinned, so one that is used no more is not pinned again.

        Args:
            most: The most rows that are pinned, with those of a plan.

        Returns:
            The numbers of rows that are pinned now and were not, and that were and are not.
        """
        with self.lock:
            _, row_of_slot, _, uses, *_, pins = self.marks
            may_be, was = (row_of_slot != EMPTY) & (pins != PLANNED), pins == POPULAR
            most -= int((pins == PLANNED).sum())
            # By use count: rows with as many uses or more.
            with_uses = np.bincount(uses[may_be], minlength=256)[::-1].cumsum()[::-1]
            least = max(_LEAST_USES, int((with_uses > most).sum()))
            chosen = may_be & (uses >= least)
            pins[was], pins[chosen] = 0, POPULAR
            slots = np.flatnonzero(chosen)
            self.popular = row_of_slot[slots[np.argsort(-uses[slots].astype(int), kind="stable")]]
            uses[slots] >>= 1
        return int((chosen & ~was).sum()), int((was & ~chosen).sum())

    def pin(self, rows: NDArray[np.int32], most: int) -> None:
        """Pin rows from the next claim on, in place of those in `popular`.

        Args:
            rows: Distinct rows, counted over all tables, (P,); the first ones have precedence.
            most: As for `pin_popular`.
        """
        with self.lock:
            self.marks.pins[self.marks.pins == POPULAR] = 0
            rows = rows[~np.isin(rows, self.planned)]
            self.popular = rows[: max(0, most - len(self.planned))]
            self._must_pin = True

    @property
    def counts(self) -> Counts:
        """What mini-batches found, since the slots were made."""
        return Counts(*self.sums[: len(Counts._fields)].tolist())

    def watch(self, view: Tensor) -> Tensor:
        """Notice writes to a view of a table that has a version of its own; returns the view."""
        self._views = [*self._views[-_MOST_VIEWS:], view]
        self.accept_writes()
        return view

    def is_written(self) -> bool:
        """Whether a caller has written to a table or its state since `accept_writes`."""
        if self._versions is None:
            return False
        return versions_of((*self._group.tensors, *self._views)) != self._versions

    def accept_writes(self) -> None:
        """Take the tables and their state as known."""
        with self.lock:
            self._versions = versions_of((*self._group.tensors, *self._views))

    def notice_writes(self) -> None:
        """Let rows leave their slots if a caller has written to the tables.

        Raises:
            ConflictingWrite: slots have newer rows than the tables that were written to.
        """
        if not self.is_written():
            return
        if self.marks.is_dirty.any() or self.queue.is_writing():
            raise ConflictingWrite(
                f"a table of {self._group.names} or its optimizer state was written to by a tensor "
                "kept from before (of detach(), data or state_dict()) while newer values of some "
                "rows are in fast memory; one of the two would be lost. Write through the module's "
                "weight, which writes the newer values back first (with torch.no_grad(): "
                "module.weight.clamp_(...)); to continue now, load a checkpoint"
            )
        self.empty_slots(is_written_back=False)

    def _warn_of_left(self) -> None:
        self._has_warned = True
        counts = self.counts
        warn_caller(
            f"tables {self._group.names}: {counts.left / max(1, counts.rows):.0%} of the rows of "
            "mini-batches so far were used in the cold tier, because the budget has room for "
            f"{self._group.num_slots} rows; results are the same, but later. Raise budget=, or "
            "make mini-batches smaller"
        )

    def _make(self, num_rows: int, num_slots: int) -> tuple[Any, Any]:
        """The marks, and the queue."""
        marks = make_marks(num_rows, num_slots)
        return marks, TransferQueue(marks.slot_of_row)

    def _drop_all(self) -> None:
        slot_of_row, row_of_slot, generations, _, is_dirty, _, pins = self.marks
        drop_all(slot_of_row, row_of_slot, generations, is_dirty, pins)

    def _claim(self, lookups: Lookups, bags: Bags, generation: int) -> Claim:
        self.notice_writes()
        if self._must_pin:
            self._pin()
        lookups_5L = self._group.locate(lookups).lookups_5L
        of_table = np.searchsorted(lookups.arrays[0], np.arange(len(self._group.tables) + 1))
        # A feature that is looked up in several tables has more rows than ids.
        most = bags.ids.numel() * lookups.most_repeats
        return self._claim_slots(lookups_5L, of_table, bags, most, generation)

    def _pin(self) -> None:
        """Claim slots for planned and popular rows, and pin those that have one then."""
        self._must_pin = False
        marks, of_kinds = self.marks, [self.planned, self.popular]
        rows = np.concatenate(of_kinds)
        kinds = np.repeat(np.array([PLANNED, POPULAR], np.uint8), list(map(len, of_kinds)))
        # As one table with all rows.
        whole_5L = np.array([[0], [len(marks.slot_of_row)], [0], [0], [0]], np.uint64)
        bags = Bags(torch.from_numpy(rows), None, None, len(rows), len(rows))
        self._claim_slots(whole_5L, np.array([0, 1]), bags, len(rows), self._needed)
        found = marks.slot_of_row[rows]
        slots = np.where(found < 0, ARRIVING - found, found)  # negative if there is none
        has_slot = slots >= 0
        marks.pins[slots[has_slot]] = kinds[has_slot]

    def _claim_slots(
        self,
        lookups_5L: NDArray[np.uint64],
        of_table: NDArray[np.int64],
        bags: Bags,
        most: int,
        generation: int,
    ) -> Claim:
        group = self._group
        transfer = Transfer(group, min(most, group.num_slots), generation)
        needed = min(self._needed, self.queue.oldest_generation(self._needed))
        self.queue.add(transfer)  # before it is filled; see `TransferQueue`
        given = addresses(bags, 0, is_mean=False)
        claim(
            self.marks,
            generation,
            needed,
            lookups_5L,
            of_table,
            given,
            transfer.moves_4M,
            transfer.counts,
        )
        self.sums[WITHOUT_SLOT + 1 :] += transfer.counts[WITHOUT_SLOT + 1 :]
        return Claim(generation, transfer, transfer.counts)


Claims = list[tuple[Fetcher, Claim | None]]  # of the groups of a mini-batch


def claim_together(wanted: Sequence[tuple[tuple[TableGroup, Lookups], Bags]]) -> Claims:
    """Claim slots for all lookups of a later mini-batch, in all groups."""
    by_fetcher: dict[Fetcher, list[tuple[Lookups, Bags]]] = {}
    for (group, lookups), bags in wanted:
        if group.fetcher is not None:
            by_fetcher.setdefault(group.fetcher, []).append((lookups, bags))
    return [(fetcher, fetcher.claim_ahead(lookups)) for fetcher, lookups in by_fetcher.items()]
