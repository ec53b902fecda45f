"""Decides when rows are updated: one update per step, for all table groups of an optimizer.

A `torch.optim.Optimizer` has the settings (`param_groups`) and the state. `row_update` updates all
tables of a dim in one call. The optimizer is a `FusedOptimizer` or a torch optimizer that the user
made. A `Translation` says how to read it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recsys._support.sizes import parse_bytes
from recsys._support.torch_compat import (
    DisableTorchFunctionSubclass,
    current_pass,
    is_node_in_pass,
    outside_graphs,
    queue_callback,
)
from recsys.embeddings.tiers.budget import require_room_beside_rows
from recsys.embeddings.update.group_updater import GroupUpdater, PreparedUpdate
from recsys.embeddings.update.late_claims import claim_slots
from recsys.embeddings.update.tiering import (
    divide_again,
    divide_first,
    make_room,
    move_slots,
    stay_resident,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from weakref import ref

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles
    from recsys.embeddings.tiers.residency import Residency
    from recsys.embeddings.tiers.table_tiers import Tiers
    from recsys.embeddings.update.tiering import Pinned
    from recsys.embeddings.update.translation import Translation

__all__ = ["Places", "RowUpdater"]

# For each table of a module: its group, and its number in the group.
Places = Sequence[tuple["TableGroup", int]]

_SCHEDULING = threading.RLock()  # of any updater: it is held for a microsecond


class _BackwardPass:
    """A backward pass that will update rows. Only autograd refers to it, until the pass ends.

    Attributes:
        is_over: Whether the rows were updated, or the update failed.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._thread = threading.get_ident()

    def require_same_thread(self) -> None:
        """Check that another pass, which is part of this one, runs in its thread.

        On CUDA, autograd runs the passes of all threads in one, so this finds none of them.

        Raises:
            RuntimeError: it runs in another thread. Its gradients would be added to this pass, or
                lost.
        """
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "backward in another thread is updating the rows of the same tables; train them "
                "in one thread (evaluation under torch.no_grad() may run beside it), or give each "
                "thread a module of its own"
            )

    def end(self, updater: RowUpdater) -> None:
        """Update the rows."""
        try:
            updater.update_rows()
        finally:
            self.is_over = True


class RowUpdater:
    """Updates the rows of table groups, each row once per update.

    Args:
        groups: Table groups, each with the number of its param group in the optimizer.
        optimizer: Has the settings and the state.
        translation: How to read settings and state.
        auto_apply: Whether rows are updated at the end of each backward pass.

    Attributes:
        rule: How updates differ from those of the optimizer, and why; usually "".
        is_sharded: Whether each process updates rows of its own, so that no update is shared.
            `recsys.distributed` sets it. Otherwise `DistributedDataParallel` is refused.
        grad_anchor: Input of the autograd node of every lookup. The tables are not inputs, so
            this tensor is the reason that a pooled vector requires a gradient.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, TableGroup]],
        optimizer: torch.optim.Optimizer,
        translation: Translation,
        *,
        auto_apply: bool,
    ) -> None:
        self._groups = [
            GroupUpdater(group, optimizer, number, translation) for number, group in groups
        ]
        self.optimizer, self.auto_apply, self.rule = optimizer, auto_apply, translation.rule
        self.is_sharded = False
        self._queued_for: int | None = None  # the pass at whose end rows are updated
        self._pass: ref[_BackwardPass] | None = None  # that pass, until it ends
        self._budget_bytes = self._reserved_bytes = 0
        self.grad_anchor = torch.empty(0, requires_grad=True, device="cpu")
        self._anchor_node: Any = None
        for _, group in groups:
            group.bind()

    def give_memory(self, group: TableGroup, number: int, table: nn.Parameter) -> None:
        """Replace a table on the "meta" device by one with memory, as `to_empty` makes it.

        Raises:
            ValueError: another updater has the new table, or it is not a plain Parameter.
        """
        before = group.tables[number]
        group.give_memory(number, table)
        for settings in self.optimizer.param_groups:
            settings["params"] = [table if each is before else each for each in settings["params"]]
        if before in self.optimizer.state:
            self.optimizer.state[table] = self.optimizer.state.pop(before)

    def is_in_pass(self) -> bool:
        """In backward: whether this pass computes gradients of tables.

        `torch.autograd.grad` and `backward(inputs=...)` do not.
        """
        if self._anchor_node is None:
            self._anchor_node = torch.autograd.graph.get_gradient_edge(self.grad_anchor).node
        return bool(is_node_in_pass(self._anchor_node))

    def join_pass(self) -> int:
        """The current backward pass, for a lookup that activation checkpointing recomputes in it.

        The lookup's gradients belong to this pass, although reentrant checkpointing computes them
        in a nested pass.
        """
        backward_pass: int = current_pass()
        self._schedule_update(backward_pass)
        return backward_pass

    def begin_pass(self, joined: int | None = None) -> None:
        """Schedule the update of `auto_apply`, in backward, before gradients go to ledgers.

        Args:
            joined: Result of `join_pass` at the lookup, if it was recomputed.
        """
        if self.auto_apply and (joined is None or joined != self._queued_for):
            self._schedule_update(current_pass())

    def _schedule_update(self, backward_pass: int) -> None:
        if not self.auto_apply or self._queued_for == backward_pass:
            return
        with _SCHEDULING:
            outer = None if self._pass is None else self._pass()
            if outer is not None and not outer.is_over:
                outer.require_same_thread()
                if self._queued_for is not None:
                    # A hook called backward. As in plain PyTorch, the outer pass updates for both.
                    return
            self._clear_ledgers()
            # After the whole pass, because other lookups may still add to the ledger. When the pass
            # ends, also with an error, autograd drops the callback, and so `running`.
            running = _BackwardPass()
            self._queued_for, self._pass = backward_pass, weakref.ref(running)
        queue_callback(partial(running.end, self))

    def step(self) -> None:
        """Update the rows as `update_rows`, without gradients of a backward pass that failed."""
        if self.auto_apply and self._queued_for is not None:
            if self._pass is not None and self._pass() is not None:
                return  # the end of this pass updates the rows
            self._clear_ledgers()
        self.update_rows()

    @outside_graphs
    def update_rows(self) -> None:
        """Update every row in the ledgers once, then empty the ledgers.

        Raises:
            NonFiniteGradient: a row's gradient contains nan or inf; all other rows were updated.
            Exception: an error of `claim_slots` or `GroupUpdater.prepare`. No row of any group was
                updated, and the ledgers still have all gradients.
        """
        self._queued_for = None
        with DisableTorchFunctionSubclass():  # internal reads of tables
            prepared: list[tuple[GroupUpdater, PreparedUpdate]] = []
            update: PreparedUpdate | None = None
            if self._budget_bytes:
                claim_slots([group.group for group in self._groups], self.make_room)
            try:
                for group in self._groups:
                    update = group.prepare()
                    if update is not None:
                        prepared.append((group, update))
            except Exception:
                for group, update in prepared:
                    group.give_back(update.ledger)
                prepared.clear()  # otherwise a stored traceback would keep the slots claimed
                del update
                raise
            errors = [group.update_rows(update) for group, update in prepared]
            prepared.clear()  # as above
            update = None
        for error in filter(None, errors):
            raise error

    @contextmanager
    def update_once(self) -> Iterator[None]:
        """Update rows once at the end of the block instead of after each backward pass in it.

        If the block raises, no row is updated. Without `auto_apply` this does nothing.
        """
        if not self.auto_apply:
            yield
            return
        self.auto_apply = False
        self._clear_ledgers()
        try:
            yield
            self.update_rows()
        finally:
            self.auto_apply = True
            self._clear_ledgers()

    def _clear_ledgers(self) -> None:
        """Drop gradients of a pass that failed. `grad` stays: this pass may have written to it."""
        for group in self._groups:
            group.group.ledger.clear()

    def tier(
        self,
        budget: int | str,
        pinned: Pinned,
        *,
        files: ColdFiles | None,
        names: Mapping[nn.Parameter, str],
        device: torch.device | None,
    ) -> None:
        """Give the tables two tiers: slots for the rows in use, and the tables as the cold store.

        If all rows fit and are in memory, a warning says so.

        Args:
            budget: Limit for slots and row maps, in bytes or with a unit.
            pinned: For tables of a plan: the rows with a permanent slot, and how often each is
                looked up.
            files: The files of the tables, if the cold store is on disk.
            names: Names of the tables in `files`.
            device: Device of the slots; None for that of the tables.

        Raises:
            BudgetTooSmall: the budget is smaller than the row maps.
            ValueError: a table is a part of a larger tensor.
            ColdTierError: the disk has no room for the state.
            ConfigError: `budget` cannot be read.
        """
        self._budget_bytes = parse_bytes(budget, "budget")
        divided = divide_first(self._groups, self._budget_bytes, pinned, may_stay=files is None)
        if divided is None:
            stay_resident(self._groups, budget, self.resident_bytes(), device)
            return
        for group, (num_slots, rows) in zip(self._groups, divided, strict=True):
            if files is not None:
                group.state.use_files(files, names)
            group.tier(num_slots, rows, device)

    def move_slots(self, device: torch.device) -> None:
        """Move the slots of all tables to another device.

        Raises:
            ValueError: slots are in use.
        """
        for group in self._groups:
            move_slots(group.group, device)
        self.reload_state()  # a GPU must reach the state, too

    def tiers(self) -> list[Tiers]:
        """The tiers of every group that is not resident."""
        return [each.group.tiers for each in self._groups if each.group.tiers is not None]

    @property
    def budget_bytes(self) -> int:
        """The budget of fast memory; 0 if there is none."""
        return self._budget_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the budget that `reserve` has left for a tracker."""
        return self._reserved_bytes

    def resident_bytes(self) -> int:
        """Bytes of all rows and their state, in fast memory or not."""
        return sum(group.space_size().resident_bytes for group in self._groups)

    @property
    def groups(self) -> Sequence[GroupUpdater]:
        """The updaters of all table groups; each is updated by one kernel call."""
        return self._groups

    def make_room(
        self, short: ref[Residency], num_needed: int, num_distinct: Mapping[TableGroup, int]
    ) -> None:
        """Divide the budget again; arguments and errors as for `tiering.make_room`."""
        budget, reserved = self._budget_bytes, self._reserved_bytes
        with ExitStack() as stack:
            for tiers in self.tiers():  # no other thread may claim slots that are to be removed
                stack.enter_context(tiers.lock)
            make_room(self._groups, budget, short, num_needed, num_distinct, reserved)

    def reserve(self, num_bytes: int) -> None:
        """Leave bytes of the budget for a tracker instead of slots; 0 gives them back to the slots.

        Raises:
            BudgetTooSmall: the rest of the budget is too small, or slots are in use; nothing was
                reserved or given back.
        """
        if self.tiers():
            divide_again(self._groups, self._budget_bytes, num_bytes)
            self._reserved_bytes = num_bytes
        elif self._budget_bytes and num_bytes:
            require_room_beside_rows(self._budget_bytes, self.resident_bytes(), num_bytes)

    def drop_reserve(self) -> None:
        """Give reserved bytes back to the slots when the budget is next divided."""
        self._reserved_bytes = 0

    def reload_state(self) -> None:
        """Use the state that `load_state_dict` put into the optimizer."""
        for group in self._groups:
            group.reload_state()

    def require_param_groups(self) -> None:
        """Check that the optimizer still has every table that this step would update.

        Raises:
            ValueError: a table is in no param group any more.
        """
        for group in self._groups:
            group.require_param_group()

    def flush(self) -> None:
        """Write rows and state in slots back to the cold store."""
        for tiers in self.tiers():
            tiers.flush()

    def forget(self) -> None:
        """Drop the gradients collected since the last update; no row is updated."""
        with DisableTorchFunctionSubclass():  # internal reads of tables
            for group in self._groups:
                group.group.forget()

    def prepare_release(self) -> None:
        """Turn the ledgers into the tables' `grad`.

        Raises:
            RuntimeError: a gradient was overwritten after its backward; the ledger is emptied.
            ValueError: a gradient has rows that its table no longer has; the ledger is kept.
        """
        for group in self._groups:
            group.group.ledger_to_grads()

    def release(self) -> None:
        """Release the tables: they become plain Parameters, and ledgers become their `grad`.

        Lookups from before leave their gradients in `grad`, too. Tables in files stay mapped.

        Raises:
            Exception: as for `prepare_release`; nothing is released.
        """
        self.prepare_release()
        for group in self._groups:
            group.group.release()
        self._groups = []  # so a pending backward, or the end of `update_once`, updates no row
