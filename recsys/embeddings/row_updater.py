"""When rows move, and by what: one update per step.

A `torch.optim.Optimizer` has the settings (`param_groups`) and the state; the rows are moved by
`row_update`, all tables of a dim in one call. The optimizer is a `FusedOptimizer` or one of torch's
that the user has made already; what is read from it is in a `Translation`.
"""

from __future__ import annotations

import atexit
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch._C import (
    DisableTorchFunctionSubclass,
    _current_graph_task_id,
    _will_engine_execute_node,
)
from torch.autograd import Variable

from recsys.embeddings.budget import divide_budget, order_pinned
from recsys.embeddings.exchanged_tables import require_own_memory
from recsys.embeddings.group_updater import GroupUpdater
from recsys.errors import BudgetTooSmall
from recsys.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from recsys.embeddings.cold_files import ColdFiles
    from recsys.embeddings.found import Found
    from recsys.embeddings.kernels.ledger import LedgerEntry
    from recsys.embeddings.residency import Residency
    from recsys.embeddings.table_group import TableGroup
    from recsys.embeddings.tiers import Tiers
    from recsys.embeddings.translation import Translation
    from recsys.embeddings.update import Update

__all__ = ["RowUpdater"]

_NO_PASS = -1  # what torch says outside of backward
_SYNCED_AT_EXIT: WeakSet[RowUpdater] = WeakSet()


class RowUpdater:
    """Moves the rows of table groups, each row once per update.

    Args:
        groups: By the number of the optimizer's param group that has their tables.
        optimizer: The one whose settings and state are used.
        translation: How they are read.
        auto_apply: Whether rows move at the end of each backward pass.
        goes_along: Whether copies and pickles of a module have an updater of their own. Not where
            the optimizer is the user's: that goes its own ways, and finds what backward leaves at
            the tables.

    Attributes:
        optimizer: As given.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, TableGroup]],
        optimizer: torch.optim.Optimizer,
        translation: Translation,
        *,
        auto_apply: bool,
        goes_along: bool,
    ) -> None:
        self._groups = [
            GroupUpdater(group, optimizer, number, translation) for number, group in groups
        ]
        self.optimizer = optimizer
        self.auto_apply, self.goes_along = auto_apply, goes_along
        self._queued_for: int | None = None
        self._budget_bytes = 0
        self._files: ColdFiles | None = None
        # Tables are no inputs of autograd's: a pooled vector asks for a gradient on behalf of all
        # of them by this one.
        self.asks_gradient = torch.empty(0, requires_grad=True, device="cpu")
        self._asks_node: Any = None
        for _, group in groups:
            group.watch()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which have another graph."""
        return self.__dict__ | {"_asks_node": None, "_files": None}

    def is_asked(self) -> bool:
        """In backward: whether the pass is about tables; `torch.autograd.grad` may not be."""
        if self._asks_node is None:
            self._asks_node = torch.autograd.graph.get_gradient_edge(self.asks_gradient).node
        return bool(_will_engine_execute_node(self._asks_node))

    def join_pass(self) -> int | None:
        """The backward pass that a lookup is made in, by activation checkpointing; else None.

        Its gradients belong to that pass, although the reentrant kind finds them in one of its own.
        """
        backward_pass: int = _current_graph_task_id()
        if backward_pass == _NO_PASS:
            return None
        self._begin(backward_pass)
        return backward_pass

    def keep(self, entries: Sequence[tuple[Found, LedgerEntry]], joined: int | None = None) -> None:
        """Add to the ledgers what one lookup's backward found.

        Args:
            entries: By kernel call.
            joined: What `join_pass` said when the lookup was made.
        """
        if joined is None or joined != self._queued_for:
            self.begin_pass()
        for found, entry in entries:
            found.group.keep(entry, found.parameters)

    def begin_pass(self) -> None:
        """In backward, before gradients go to the ledgers: update rows at its end, if they are."""
        self._begin(_current_graph_task_id())

    def _begin(self, backward_pass: int) -> None:
        if not self.auto_apply or self._queued_for == backward_pass:
            return
        self._clear_ledgers()
        self._queued_for = backward_pass
        # Behind the whole pass: another lookup of it may add to the ledger.
        Variable._execution_engine.queue_callback(self.update_rows)

    def update_rows(self) -> None:
        """Update every row that gradients were collected for, once; forgets the gradients.

        Raises:
            NonFiniteGradient: the gradient of a row had nan or inf in it. Such rows were not
                updated, all others were.
            Exception: as `GroupUpdater.prepare`; no row of any group was updated then, and
                everything is still collected.
        """
        self._queued_for = None
        with DisableTorchFunctionSubclass():  # it is us who read the tables
            prepared: list[tuple[GroupUpdater, Update]] = []
            update: Update | None = None
            try:
                for group in self._groups:
                    update = group.prepare()
                    if update is not None:
                        prepared.append((group, update))
            except Exception:
                for group, update in prepared:
                    group.give_back(update.ledger)
                prepared.clear()  # or an error that is kept would keep the slots
                del update
                raise
            errors = [group.update_rows(update) for group, update in prepared]
            prepared.clear()  # as above
            update = None
        for error in errors:
            if error is not None:
                raise error

    @contextmanager
    def moving_once(self) -> Iterator[None]:
        """Where rows move at the end of each backward pass: behind the last one inside, for all.

        Where an error is raised, none moves.
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
        """What an earlier pass has left behind, ended by an error, is no part of the next one.

        `grad` stays: the next pass may have reached tables otherwise already.
        """
        for group in self._groups:
            group.group.ledger.clear()

    def tier(
        self,
        budget: int | str,
        pinned: Mapping[nn.Parameter, tuple[NDArray[np.int64], NDArray[np.int64]]] | None = None,
        *,
        files: ColdFiles | None = None,
        names: Mapping[nn.Parameter, str] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Keep rows in slots from now on, and all of them in the cold store, the tables.

        Where all fit, and are in memory, nothing is changed, and a warning says so. Where an error
        is raised, files that were made for this are gone.

        Args:
            budget: What slots and row maps may take, in bytes or with a unit.
            pinned: By table: rows to have slots of their own, and how often each is looked up.
            files: Have the tables, if files do.
            names: Of the tables there.
            device: Where rows are to be looked up; None for where the tables are.

        Raises:
            BudgetTooSmall: there is not even room for the row maps.
            ValueError: a table is a part of a larger tensor.
            ColdTierError: files have another optimizer's state.
            ConfigError: it is no budget.
        """
        try:
            self._tier(budget, pinned or {}, files, names or {}, device)
        except BaseException:
            if files is not None:
                files.discard()
            raise

    def _tier(
        self,
        budget: int | str,
        pinned: Mapping[nn.Parameter, tuple[NDArray[np.int64], NDArray[np.int64]]],
        files: ColdFiles | None,
        names: Mapping[nn.Parameter, str],
        device: torch.device | None,
    ) -> None:
        tables = [group.group for group in self._groups]
        for each in tables:
            if each.kernels.errors is None:  # from a device, tables move to memory of their own
                require_own_memory(each.names, each.weights())
        sizes = [group.space_size() for group in self._groups]
        self._budget_bytes = parse_bytes(budget, "budget")
        rows = [order_pinned(each.weights(), pinned) for each in tables]
        self._files = files
        try:
            slots = self._divide([len(each) + 1 for each in rows], may_stay=files is None)
        except BudgetTooSmall:  # the plan was made for less state, or for more memory
            slots = self._divide([1] * len(sizes), may_stay=files is None)
        if slots is None:
            resident = format_bytes(sum(size.resident_bytes for size in sizes))
            warnings.warn(
                f"budget={budget!r}: all {resident} of rows and state fit; no cold tier is needed",
                stacklevel=5,
            )
            if device is not None:
                for group in self._groups:
                    group.move_tables(device)
            return
        if files is not None:
            for group in self._groups:
                group.use_files(files, names)
            _SYNCED_AT_EXIT.add(self)
        for group, num_slots, its_rows in zip(self._groups, slots, rows, strict=True):
            group.tier(num_slots, its_rows[: num_slots - 1], device)
        if files is not None:
            files.take_over()

    def _divide(self, least: Sequence[int], *, may_stay: bool) -> list[int] | None:
        sizes = [group.space_size() for group in self._groups]
        return divide_budget(self._budget_bytes, sizes, least, may_stay=may_stay)

    def move_slots(self, device: torch.device) -> None:
        """Have the slots of all tables on another device from now on.

        Raises:
            ValueError: slots are in use.
        """
        for group in self._groups:
            group.move_slots(device)

    def sync(self) -> None:
        """Bring tables and state up to date, and to the disk where they are in files.

        Raises:
            OSError: the disk refuses.
        """
        self.flush()
        if self._files is not None:
            numbers = [group.numbers() for group in self._groups]
            self._files.sync({name: known for each in numbers for name, known in each.items()})

    def tiers(self) -> list[Tiers]:
        """Those of every group that has some."""
        found = [group.group.tiers for group in self._groups]
        return [tiers for tiers in found if tiers is not None]

    def resident_bytes(self) -> int:
        """What all rows and their state take, wherever they are."""
        return sum(group.space_size().resident_bytes for group in self._groups)

    @property
    def num_tables(self) -> int:
        """How many it moves the rows of."""
        return sum(len(each.group.names) for each in self._groups)

    @property
    def num_groups(self) -> int:
        """By how many kernel calls it updates them."""
        return len(self._groups)

    def make_room(
        self, short: ref[Residency], num_needed: int, num_distinct: Mapping[TableGroup, int]
    ) -> None:
        """Share out the budget anew, for a mini-batch that found too few slots of one row space.

        Args:
            short: Has too few.
            num_needed: As many would do.
            num_distinct: How many rows of each group the mini-batch needs.

        Raises:
            BudgetTooSmall: there is no room for all; or slots that would have to be given up are
                needed by other mini-batches under way.
        """
        for each in self.tiers():
            each.ahead.give_up_all()
        needs = []
        for group in self._groups:
            tiers = group.group.tiers
            assert tiers is not None
            is_short = tiers.residency is short()
            needs.append(num_needed if is_short else num_distinct.get(group.group, 0))
        least = [
            max(group.least_slots, need) for group, need in zip(self._groups, needs, strict=True)
        ]
        # Rows in slots stay in slots. A copy of a file tier has its tables in memory, and there the
        # budget may be enough for all rows without slots, and too small for as many slots.
        try:
            slots = self._divide(least, may_stay=False)
        except BudgetTooSmall:  # not for what others have needed before
            least, slots = needs, self._divide(needs, may_stay=False)
        assert slots is not None
        divided = zip(self._groups, slots, least, strict=True)
        # Those that give slots up come first, so that memory never exceeds the budget.
        for group, num_slots, count in sorted(divided, key=lambda each: each[0].growth(each[1])):
            group.resize(num_slots)
            group.least_slots = count

    def follow_state(self) -> None:
        """Find state that others have put into the optimizer, by `load_state_dict`."""
        for group in self._groups:
            group.follow_state()

    def require_param_groups(self) -> None:
        """Refuse an optimizer that has put tables that are to move elsewhere, or away.

        Raises:
            ValueError: it has.
        """
        self.follow_tables()
        for group in self._groups:
            group.require_param_group()

    def flush(self) -> None:
        """Bring tables and state up to date, where rows are in slots."""
        for tiers in self.tiers():
            tiers.flush()

    def forget(self) -> None:
        """Forget the gradients collected since the last update; no row moves."""
        for group in self._groups:
            group.group.forget()

    def follow_tables(self) -> None:
        """Find tables that others have taken the place of: `load_state_dict(assign=True)` does it.

        The optimizer's settings and state go along.
        """
        for group in self._groups:
            group.follow_tables()

    def state_of(self, group: TableGroup, table: int) -> dict[str, Any]:
        """A table's state, for the module that takes it along."""
        return self._of(group).state_of(table)

    def take_in(
        self, holder: nn.Module, group: TableGroup, table: int, state: dict[str, Any]
    ) -> None:
        """Let a module that was copied along bring its table, and the table's state."""
        group.take_in(holder, table)
        self._of(group).take_in(table, state)

    def stand_ins(self) -> dict[Tensor, Tensor]:
        """By table: what has its place in copies until its module takes it."""
        return {table: each for group in self._groups for table, each in group.stand_ins().items()}

    def _of(self, group: TableGroup) -> GroupUpdater:
        [found] = [each for each in self._groups if each.group is group]
        return found

    def prepare_release(self) -> None:
        """Leave collected gradients at the tables, and the optimizer with those that are there.

        Raises:
            RuntimeError: gradients were overwritten since; they are forgotten.
            ValueError: a gradient is of rows that its table has no more, and stays collected; or
                what has come in the place of a table is another's.
        """
        self.follow_tables()
        for group in self._groups:
            group.group.open_ledger()

    def release(self) -> None:
        """Let go of the tables: they are plain parameters again, collected gradients their grad.

        So are gradients of lookups that were made before. What is in files stays there, mapped;
        nobody can say any more whether it is whole.

        Raises:
            RuntimeError: as `prepare_release`.
            ValueError: as `prepare_release`; nothing is let go of.
        """
        self.prepare_release()
        for group in self._groups:
            group.group.unwatch()
        self._groups = []  # a backward still under way, or the end of `moving_once`, moves no row
        if self._files is not None:
            self._files.mark_dirty()
            self._files = None
            _SYNCED_AT_EXIT.discard(self)


@atexit.register
def _sync_all() -> None:
    """A process that ends as it should leaves files that are whole."""
    errors = []
    for updater in list(_SYNCED_AT_EXIT):
        try:
            updater.sync()
        except Exception as error:  # the others' rows are none of its business
            errors.append(error)
    if errors:
        raise ExceptionGroup("files of rows were not synced, and are left as by a crash", errors)
