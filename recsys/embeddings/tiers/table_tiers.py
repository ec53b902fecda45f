"""The tiers of a table group: connects its lookups and tables to slots and the cold store.

A lookup with a backward gets a ticket: its ids become slot numbers, and kernels use the slots like
a resident table. A lookup without a backward (evaluation) claims no slots: it reads each row from
its slot or from the cold store.

`weight` and the optimizer's state are the cold store, in memory or mapped from files. A read
through `weight` returns every row's newest value, because `TieredParameter` first writes rows back.
After a write through it, the next lookup fetches rows again.

A write through another tensor on the same memory (a `detach()` that was kept, an optimizer's state
array) increments that memory's version. If every row was written back before, the next lookup
fetches rows again. If slots hold updated rows, either they or the write would be lost, so this is
an error.

After a failed transfer, every use of the tiers raises `TiersFailed`.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from recsys._support.interrupts import interrupts_held_back
from recsys._support.memory import lasting_tensors
from recsys._support.torch_compat import outside_graphs
from recsys.embeddings.rows.row_space import RowSpace
from recsys.embeddings.rows.table_versions import TableVersions, Written
from recsys.embeddings.tiers.ahead import AheadQueue
from recsys.embeddings.tiers.ahead_claims import claim_for_one, claim_for_several
from recsys.embeddings.tiers.cold.file_store import arrays_of
from recsys.embeddings.tiers.ticket import NotEnoughSlots
from recsys.embeddings.tiers.tier_spec import KeptParts, TierSpec
from recsys.errors import ConflictingWrite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.ledger import LedgerEntry
    from recsys.embeddings.rows.lookups import Bags, Lookups
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles
    from recsys.embeddings.tiers.ticket import Ticket

__all__ = ["Tiers"]


# Tiers of a forked process get new locks: another thread of its parent may hold them.
_ALL_TIERS: weakref.WeakSet[Tiers] = weakref.WeakSet()


class _ColdSpaces:
    """The tables and their state arrays. Calling it returns the tables, then each state array.

    The tiers and what moves their rows share it. So neither refers to the other, and a deleted
    model frees its memory at once.

    Attributes:
        tables: The tables; None before the first lookup.
        states: Each state array of all tables.
    """

    def __init__(self, states: Sequence[RowSpace]) -> None:
        self.tables: RowSpace | None = None
        self.states = states

    def __call__(self) -> Sequence[RowSpace]:
        """The arrays where they lie now: `share_memory_` moves a storage in place."""
        assert self.tables is not None
        return [
            space if space.holds(space.tables) else RowSpace(space.tables)
            for space in (self.tables, *self.states)
        ]


def _locked(method: FunctionType) -> Callable[..., Any]:
    @outside_graphs  # torch.compile has no lock
    @wraps(method)
    def locked(self: Tiers, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


class Tiers:
    """The tiers of one table group. Several threads may call its methods; each waits its turn.

    So a second thread may evaluate during training with a budget: it reads rows where they are,
    while training moves and updates them.

    Args:
        spec: The tables, the slots and their device.
        files: The files of tables and state; None if they are in memory.

    Attributes:
        lock: Held by each public method; for callers that need several methods without another
            thread between them.
        files: As given.
        names, sizes, dtype: Those of `spec`.
        device: Device of the slots and of lookups.
        hot: The slots.
        cold: The tables and state of the cold store.
        residency: Moves rows between the slots and the cold store.
        ahead: Tickets that wait for their lookups.
        is_exposed: Whether the tables may be written to undetected; then the next lookup fetches
            rows again.
    """

    def __init__(self, spec: TierSpec, files: ColdFiles | None = None) -> None:
        self.lock: Any = threading.RLock()
        _ALL_TIERS.add(self)
        self.files = files
        self.names, self.sizes, self.dtype = spec.names, spec.sizes, spec.dtype
        self.ahead = AheadQueue()
        self.cold = _ColdSpaces(
            [
                RowSpace([torch.empty(0, size, device="cpu") for _ in spec.sizes])
                for size in spec.state_sizes.values()
            ]
        )
        self._make(spec)
        self._versions = TableVersions()
        self.is_exposed = False
        self._updated: set[int] = set()  # tables whose slots may be newer than the cold store

    @lasting_tensors()
    def _make(self, spec: TierSpec, kept: KeptParts | None = None) -> None:
        """Make empty slots, and the residency that moves rows.

        Args:
            spec: The arguments of the tiers.
            kept: Parts of the previous residency, to continue with.
        """
        self._spec = spec
        self.hot = spec.make_slots()
        self.device = self.hot.rows.device
        self.residency = spec.make_residency(self.hot, self.files, self.cold)
        if kept is not None:
            kept.give_to(self.residency)

    @property
    def pinned(self) -> NDArray[np.int32]:
        """The rows that a plan pins, counted over all tables, the most popular first."""
        return self._spec.pinned

    @property
    def are_reached(self) -> bool:
        """Whether the device may copy rows by itself; then the cold store is in own pages."""
        return self.residency.is_reached

    @property
    def may_claim_later(self) -> bool:
        """Whether a lookup may read rows where they are, and leave the claim to the update."""
        with self.lock:  # another thread may make claims ahead
            return self.are_reached and not self.ahead

    def claim(self, tables: RowSpace, lookups: Lookups, bags: Bags) -> list[Ticket]:
        """Claim slots for a lookup, and wait until its rows have been fetched.

        Args:
            tables: The tables of the cold store.
            lookups: Which features are looked up in which tables.
            bags: The input.

        Returns:
            One ticket; more if a feature is looked up in several tables.

        Raises:
            ColdTierError: rows are in files that another process has opened.
            ConflictingWrite: tables were written to while slots held updated rows.
            NoSuchRow: a value is not a row of its table.
            NotEnoughSlots: the mini-batch needs more slots than are free.
            TiersFailed: a transfer has failed.
        """
        with interrupts_held_back():
            self._require_owner()
            self.reload_if_tables_changed(tables, lookups.distinct_tables)
            tickets = []
            for layer in lookups.layers():
                taken = self.ahead.take(layer, bags)
                tickets.append(taken or self._claim_now(layer, bags))
        for ticket in tickets:
            ticket.wait()
        return tickets

    def claim_ahead(
        self, tables: RowSpace, looked_up: Sequence[tuple[Lookups, Bags]]
    ) -> list[Ticket]:
        """Claim slots for later lookups, and fetch their rows in the background.

        Only `claim` with exactly the same ids takes these tickets.

        Args:
            tables: The tables of the cold store.
            looked_up: Which features will be looked up in which tables, and the input. If there are
                several, they make one claim; see `claim_for_several`.

        Raises:
            ColdTierError: rows are in files that another process has opened.
            ConflictingWrite: tables were written to while slots held updated rows.
            NoSuchRow: a value is not a row of its table.
            NotEnoughSlots: the mini-batch needs more slots than are free; no row was unpinned.
            TiersFailed: a transfer has failed.
        """
        with interrupts_held_back():
            self._require_owner()
            used = [table for lookups, _ in looked_up for table in lookups.distinct_tables]
            self._reload_before_lookup(tables, used)
            if len(looked_up) == 1:
                return claim_for_one(self.residency, self.ahead, *looked_up[0])
            return claim_for_several(self.residency, self.ahead, looked_up)

    def _require_owner(self) -> None:
        """Check that files are those of this process; see `ColdFiles.require_owner`."""
        if self.files is not None:
            self.files.require_owner()

    def settle(self) -> None:
        """Release all tickets made ahead, and wait until no transfer is pending."""
        self.ahead.give_up_all()
        self.residency.settle()

    def _claim_now(self, lookups: Lookups, bags: Bags) -> Ticket:
        """Claim slots; if too few are free, release tickets made ahead, then unpin rows."""
        while True:
            has_others = bool(self.ahead)
            try:
                ticket = self.residency.claim(lookups, bags, may_unpin=not has_others)
            except NotEnoughSlots:
                self.ahead.give_up_last()
                if not self.residency.release_unneeded() and not has_others:
                    raise
            else:
                ticket.bags = bags.at_slots(ticket.slot_of_value)
                return ticket

    def look_up(self, tables: RowSpace, lookups: Lookups, bags: Bags, result: Tensor) -> int:
        """Pool rows from their slots or from the tables; see `Residency.look_up`."""
        self.reload_if_tables_changed(tables, lookups.distinct_tables)
        if self.files is not None:
            self.files.expect(lookups=True)
        return self.residency.look_up(tables, lookups, bags, result)

    def read_rows(self, tables: RowSpace, rows: NDArray[np.int64]) -> Tensor:
        """Copy rows from their slots or the cold store, (M, D), to the device of the slots.

        Args:
            tables: The tables of the cold store.
            rows: Row numbers, counted over all tables, (M,).

        Raises:
            ConflictingWrite: tables were written to while slots held updated rows.
            TiersFailed: a transfer has failed.
        """
        self._reload_before_lookup(tables)
        return self.residency.read_rows(rows)

    def resize(self, num_slots: int) -> None:
        """Replace the slots by another number of empty ones; no ticket may be held."""
        num_dropped = max(0, len(self.pinned) - num_slots)
        self._remake(self._spec._replace(num_slots=num_slots))
        self.hot.num_unpinned += num_dropped

    def move_to(self, device: torch.device) -> None:
        """Replace the slots by empty ones on another device; no ticket may be held."""
        self._remake(self._spec._replace(device=device))

    def _remake(self, spec: TierSpec) -> None:
        """Free the slots, then make new ones, so that both never exist at once (C3)."""
        assert not self.ahead
        self.flush()
        before, kept = self._spec, KeptParts.of(self.residency)
        del self.residency, self.hot
        try:
            self._make(spec._replace(pinned=spec.pinned[: spec.num_slots]), kept)
        except BaseException:
            self._make(before, kept)
            raise

    def reload_if_tables_changed(self, tables: RowSpace, used: Sequence[int] | None = None) -> None:
        """Fetch rows again if tables were replaced, or they or their state may have been written.

        Args:
            tables: The tables of the cold store.
            used: Numbers of the tables that are used now; None for all. A step looks at all.

        Raises:
            ColdTierError: a table is not in its file any more.
            ConflictingWrite: tables were written to while slots held updated rows.
            TiersFailed: a transfer has failed.
        """
        self.residency.queue.require_intact()
        is_same = tables is self.cold.tables
        if is_same and not self.is_exposed and not self._versions.have_changed(used):
            return
        if self.files is not None and not is_same:
            arrays_of(self.files, tables.tables)  # raises now instead of in a transfer
        if self.cold.tables is not None:
            self.flush()
            self.is_exposed = True  # so that a failed reload is repeated
            if self.residency.changed_rows is not None:
                self.residency.changed_rows.mark_all()
            with interrupts_held_back():
                self.residency.settle()  # pending transfers use the old tables
                self.cold.tables = tables
                self.residency.reload()
        self.cold.tables, self.is_exposed = tables, False
        self._versions.watch(tables, self._named_states())

    def _reload_before_lookup(self, tables: RowSpace, used: Sequence[int] | None = None) -> None:
        """As `reload_if_tables_changed`; tables that are exposed stay so.

        Code that has a reference to them may still write to them before the next lookup.
        """
        is_exposed = self.is_exposed
        try:
            self.reload_if_tables_changed(tables, used)
        finally:
            self.is_exposed = self.is_exposed or is_exposed

    def mark_updated(self, ledger: Iterable[LedgerEntry], tables: Iterable[int]) -> None:
        """Note that the rows of a ledger were updated, and accept the tables' new versions.

        Args:
            ledger: The entries of the update.
            tables: Numbers of the updated tables.
        """
        self._updated.update(tables)
        if not self.hot.are_marked_by_updates:
            self._mark_slots(ledger)
        self._versions.accept()

    def _mark_slots(self, ledger: Iterable[LedgerEntry]) -> None:
        """Mark the slots of the rows in a ledger as updated."""
        for entry in ledger:
            ticket, updated, claimed = entry.ticket, entry.lookups, entry.claimed
            assert ticket is not None
            assert claimed is not None
            if entry.is_cut or ticket.is_shared:
                self.hot.map.mark_dirty(entry.bags.values)
                continue
            is_whole = updated is claimed or updated.distinct_tables == claimed.distinct_tables
            # Rows of a frozen table were not updated. Writing them back would undo writes to the
            # table.
            self.residency.mark_updated(
                ticket, None if is_whole else self._ranges_of(updated.distinct_tables)
            )

    def keep_state_in(self, states: Sequence[RowSpace], *, are_others: bool) -> None:
        """Set the tables' state arrays.

        Args:
            states: One row space per state array.
            are_others: Whether other arrays were used before; then rows fetch their state again.
        """
        if are_others:
            self.flush()
        self.cold.states = states
        if self.cold.tables is None:
            return
        if are_others:
            self.residency.reload()
        if self._versions.have_changed():
            self.is_exposed = True  # the next lookup fetches rows again
        self._versions.watch(self.cold.tables, self._named_states())

    def flush(self) -> None:
        """Write back every row that was updated.

        Raises:
            ConflictingWrite: tables or their state were written to while slots held updated rows.
            TiersFailed: a transfer has failed.
        """
        self.residency.queue.require_intact()
        if not self._updated:
            return
        for conflict in self._conflicts():
            raise conflict.error(self.names[conflict.table])
        self.residency.flush()
        self._updated.clear()

    def complete_cold_store(self, tables: RowSpace) -> None:
        """Write every updated row back, so that the cold store can be copied; slots keep rows.

        Args:
            tables: The tables of the cold store.

        Raises:
            ConflictingWrite: tables or their state were written to while slots held updated rows.
            TiersFailed: a transfer has failed.
        """
        self._reload_before_lookup(tables)
        self.flush()

    def forget_slots(self) -> None:
        """Drop the rows in slots, updated or not, because the cold store is overwritten next.

        The next lookup fetches rows again.

        Raises:
            ColdTierError: rows are in files that another process has opened.
            ConflictingWrite: lookups hold slots.
            TiersFailed: a transfer has failed.
        """
        self._require_owner()
        self.settle()
        self.residency.queue.require_intact()
        if num_claimed := self.residency.num_claimed:
            raise ConflictingWrite(
                f"rows of {', '.join(self.names)} cannot be overwritten while "
                f"{num_claimed} of them are in use by lookups; delete the loss and the outputs of "
                "these lookups first"
            )
        self.residency.hot.drop_unclaimed()
        self._updated.clear()
        self.is_exposed = True

    def expose(self, overwritten: int | None = None) -> None:
        """Write rows back before a caller gets access to the tables' memory.

        The next lookup fetches rows again.

        Args:
            overwritten: Number of a table that is about to be overwritten as a whole. Conflicting
                writes to its rows are then ignored, so that a checkpoint can be loaded after a
                `ConflictingWrite`.

        Raises:
            ConflictingWrite: tables or their state were written to while slots held updated rows.
            TiersFailed: a transfer has failed.
        """
        conflicts = self._conflicts()
        if overwritten is None or not conflicts:
            self.flush()
        else:
            for conflict in conflicts:
                if conflict.table == overwritten and conflict.state is not None:
                    raise conflict.error(self.names[conflict.table])
            [rows] = self._ranges_of([overwritten])
            self.residency.flush(rows)  # the rows are overwritten, but their state is needed
            self._updated.discard(overwritten)
        if self.files is not None:
            self.files.expect(lookups=False)
        self.residency.settle()  # a device may be yet to read the tables, for lookups it has queued
        self.is_exposed = True

    def data_of(self, weight: Tensor, table: int) -> Tensor:
        """The tensor that `weight.data` returns; writes to it are detected.

        Args:
            weight: A table.
            table: Its number.
        """
        return self._versions.data_of(weight, table)

    @contextmanager
    def only_read(self) -> Iterator[None]:
        """A context in which the tables are only read."""
        self.flush()
        before = self.is_exposed
        try:
            yield
        finally:
            self.is_exposed = before

    def _ranges_of(self, tables: Iterable[int]) -> list[range]:
        """The ranges of the tables' rows, counted over all tables."""
        first_rows = self.hot.first_rows.tolist()
        return [range(first_rows[table], first_rows[table + 1]) for table in tables]

    def _conflicts(self) -> list[Written]:
        """The tables and states that were written to while slots held updated rows."""
        if not self._updated:
            return []
        return [each for each in self._versions.written() if each.table in self._updated]

    def _named_states(self) -> dict[str, RowSpace]:
        return dict(zip(self._spec.state_sizes, self.cold.states, strict=True))


for _name, _method in list(vars(Tiers).items()):
    if isinstance(_method, FunctionType) and not _name.startswith("_"):
        setattr(Tiers, _name, _locked(_method))


def _renew_locks() -> None:
    for tiers in _ALL_TIERS:
        tiers.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
