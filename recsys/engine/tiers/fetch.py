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
    2. A transfer that was started after a lookup may move its rows. If there is one, the update of
       the lookup first waits for all transfers. In `TrainPipeline` there is none, because it claims
       between update and lookup.

A third keeps transfers apart: the slots of a claim are not taken while its own transfer may still
run, even if its mini-batch was dropped.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from recsys._support.torch_compat import versions_of
from recsys.engine.kernels.cpu.claim import HITS, LEFT, LOOKUPS, claim, drop_all
from recsys.engine.rows.bags import Bags, Lookups, addresses
from recsys.engine.rows.grads import bind_table, group_of
from recsys.engine.tiers.host_store import Transfer
from recsys.engine.tiers.queue import TransferQueue
from recsys.engine.tiers.row_map import make_marks
from recsys.engine.tiers.table_access import TieredParameter
from recsys.engine.tiers.write_back import write_back
from recsys.errors import ConflictingWrite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.engine.rows.ledger import Entry
    from recsys.engine.rows.tables import TableGroup

__all__ = ["Claim", "Claims", "Counts", "Fetcher", "claim_together"]

_NEVER_OVER = 2**31 - 1


class Claim(NamedTuple):
    """A claim that was made ahead.

    Attributes:
        generation: Number of the mini-batch.
        transfer: The last one that fetches its rows.
        is_whole: Whether every row got a slot.
    """

    generation: int
    transfer: Transfer
    is_whole: bool


class Counts(NamedTuple):
    """What claims found: ids looked up, those whose row had a slot, and rows left without one."""

    lookups: int
    hits: int
    left: int


class Fetcher:
    """Moves rows of one table group into slots, which it gives the group.

    Args:
        group: The tables.
        num_slots: S.
        pinned: For each table, rows that never leave their slots, int64; as many as slots hold.

    Attributes:
        marks: Where rows are.
        queue: Moves rows.
        num_ahead: Transfers started in the background.
        counts: Sums over all claims.
        lock: Held while kernels read or change where rows are: one thread trains, and others may
            evaluate meanwhile.
    """

    def __init__(self, group: TableGroup, num_slots: int, pinned: Sequence[Tensor] = ()) -> None:
        self._group, self.lock = group, threading.RLock()
        self.marks = make_marks(int(group.first_rows[-1]), num_slots)
        self.queue = TransferQueue(self.marks.slot_of_row)
        self.num_ahead, self.counts = 0, Counts(0, 0, 0)
        self._needed = self._last = 1
        self._views: list[Tensor] = []  # of `weight.data`, whose versions are others
        self._versions: list[int] | None = None  # None: what is found next is accepted
        self._is_covered = False  # whether the current mini-batch was claimed wholly
        self._short = 0  # the last generation for which slots were too few
        self._pinned = pinned
        self._must_pin = bool(pinned)
        group.give_slots(num_slots, self)
        for number, table in enumerate(group.tables):
            if group_of(table) is not group:
                bind_table(group, number, is_sparse=True)
            table.__class__ = TieredParameter
        self.accept_writes()

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
        self.num_ahead += 1
        with self.lock:
            found = [self._claim(lookups, bags, self._last) for lookups, bags in wanted]
            self.queue.start()
        is_whole = all(claimed.is_whole for claimed in found)
        if not is_whole:
            self._short = self._last
        return found[-1]._replace(is_whole=is_whole)

    def begin(self, claimed: Claim | None) -> None:
        """Begin to compute a mini-batch: its claim, or None if it was not claimed ahead."""
        self._is_covered = False
        if claimed is not None:
            self._needed = max(self._needed, claimed.generation)
            with self.lock:
                self.queue.finish(claimed.transfer)
            self._is_covered = claimed.is_whole

    def before_lookup(self, lookups: Lookups, bags: Bags) -> None:
        """Claim slots for a lookup in training, unless its mini-batch was claimed ahead."""
        if not self._is_covered:
            with self.lock:
                self.settle()
                self._claim(lookups, bags, self._needed)
                self.settle()

    def before_update(self, entries: Sequence[Entry]) -> None:
        """Let no transfer touch these rows; writes are our own until `accept_writes`."""
        self._versions = None
        if self.queue and any(entry.call.num_ahead != self.num_ahead for entry in entries):
            self.settle()

    def end_generation(self) -> None:
        """Let the slots of the current mini-batch be taken."""
        self._needed += 1
        self._is_covered = False

    def settle(self) -> None:
        """Wait until no row is on its way."""
        if self.queue:
            with self.lock:
                self.queue.finish()

    def empty_slots(self, *, is_written_back: bool) -> None:
        """Empty all slots.

        Args:
            is_written_back: Whether changed rows are written back; else cold memory is newer.
        """
        with self.lock:
            if is_written_back:
                write_back(self._group)
            self.settle()
            marks = self.marks
            drop_all(marks.slot_of_row, marks.row_of_slot, marks.generations, marks.is_dirty)
            self.accept_writes()
            self._must_pin = bool(self._pinned)

    def watch(self, view: Tensor) -> Tensor:
        """Notice writes to a view of a table that has a version of its own; returns the view."""
        self._views = [*self._views[-len(self._group.tables) :], view]
        self.accept_writes()
        return view

    def is_written(self) -> bool:
        """Whether a caller has written to a table or its state since `accept_writes`."""
        if self._versions is None:
            return False
        return versions_of((*self._group.tensors, *self._views)) != self._versions

    def accept_writes(self) -> None:
        """Take the tables and their state as known."""
        self._versions = versions_of((*self._group.tensors, *self._views))

    def require_unwritten(self) -> None:
        """Let rows leave their slots if a caller has written to the tables.

        Raises:
            ConflictingWrite: slots have newer rows than the tables that were written to.
        """
        if not self.is_written():
            return
        if self.marks.is_dirty.any():
            raise ConflictingWrite(
                f"a table of {self._group.names} or its optimizer state was written to by a tensor "
                "kept from before (of detach(), data or state_dict()) while newer values of some "
                "rows are in fast memory; one of the two would be lost. Write through the module's "
                "weight, which writes the newer values back first (with torch.no_grad(): "
                "module.weight.clamp_(...)); to continue now, load a checkpoint"
            )
        self.empty_slots(is_written_back=False)

    def _pin(self) -> None:
        """Claim slots for the pinned rows, by a generation that is never over."""
        self._must_pin, counts = False, self.counts
        ends = torch.tensor([0, *map(len, self._pinned)]).cumsum(0)
        bags = Bags(torch.cat(list(self._pinned)), ends, None, 1, len(self._pinned))
        locations = [(table, table, 0) for table in range(len(self._pinned))]
        self._claim(Lookups(locations, is_mean=False), bags, _NEVER_OVER)
        self.counts = counts

    def _claim(self, lookups: Lookups, bags: Bags, generation: int) -> Claim:
        self.require_unwritten()
        if self._must_pin:
            self._pin()
        group = self._group
        lookups_5L = group.place(lookups).lookups_5L
        # A feature that is looked up in several tables has more rows than ids.
        most = min(bags.ids.numel() * lookups.most_repeats, group.num_slots)
        transfer = Transfer(group, most, generation)
        needed = min(self._needed, self.queue.oldest_generation(self._needed))
        self.queue.add(transfer)  # before it is filled; see `TransferQueue`
        of_table = np.searchsorted(lookups.arrays[0], np.arange(len(group.tables) + 1))
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
        found, known = transfer.counts, self.counts
        self.counts = Counts(
            known.lookups + int(found[LOOKUPS]),
            known.hits + int(found[HITS]),
            known.left + int(found[LEFT]),
        )
        return Claim(generation, transfer, not found[LEFT])


Claims = list[tuple[Fetcher, Claim | None]]  # of the groups of a mini-batch


def claim_together(wanted: Sequence[tuple[tuple[TableGroup, Lookups], Bags]]) -> Claims:
    """Claim slots for all lookups of a later mini-batch, in all groups."""
    by_fetcher: dict[Fetcher, list[tuple[Lookups, Bags]]] = {}
    for (group, lookups), bags in wanted:
        if group.fetcher is not None:
            by_fetcher.setdefault(group.fetcher, []).append((lookups, bags))
    return [(fetcher, fetcher.claim_ahead(lookups)) for fetcher, lookups in by_fetcher.items()]
