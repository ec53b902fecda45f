"""When rows are updated, and by which optimizer: one update per step.

A `torch.optim.Optimizer` has the settings (`param_groups`) and the state. `row_update` updates all
tables of a dim in one call. The optimizer is a `FusedOptimizer`, or one of torch's that the user
has made; how it is read is in a `Translation`.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import torch
from torch import nn

from recsys._support.sizes import format_bytes, parse_bytes
from recsys._support.torch_compat import (
    DisableTorchFunctionSubclass,
    current_pass,
    is_node_in_pass,
    queue_callback,
)
from recsys.embeddings.update.group_updater import GroupUpdater, PreparedUpdate
from recsys.embeddings.update.tiering import divide_first, make_room, move_slots, move_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from weakref import ref

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.lookup.device_tables import AbstractTables
    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles
    from recsys.embeddings.tiers.residency import Residency
    from recsys.embeddings.tiers.table_tiers import Tiers
    from recsys.embeddings.update.translation import Translation

__all__ = ["Places", "RowUpdater"]

# Of each table of a module: its group, and its number there.
Places = Sequence[tuple["TableGroup", int]]
_SYNCED_AT_EXIT: WeakSet[RowUpdater] = WeakSet()


class RowUpdater:
    """Updates the rows of table groups, each row once per update.

    Args:
        groups: By the number of the optimizer's param group that has their tables.
        optimizer: Has the settings and the state.
        translation: How they are read.
        auto_apply: Whether rows are updated at the end of each backward pass.
        goes_along: Whether copies and pickles of a module have an updater of their own. Not where
            the optimizer is the user's: the user copies that, and it finds the gradients that
            backward leaves at the tables.

    Attributes:
        optimizer: As given.
        grad_anchor: Input of the autograd node of every lookup. The tables are no inputs, so a
            pooled vector requires a gradient because of it.
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
        self.grad_anchor = torch.empty(0, requires_grad=True, device="cpu")
        self._anchor_node: Any = None
        self._copied: _Copied | None = None
        for _, group in groups:
            group.bind()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which have no tables until modules `join`."""
        return self.__dict__ | {
            "_groups": [],
            "_files": None,
            "_anchor_node": None,
            "_copied": _Copied(
                self._groups,
                [len(each.group.tables) for each in self._groups],
                [self._places_of(group["params"]) for group in self.optimizer.param_groups],
            ),
        }

    def join(
        self, module: AbstractTables, places: Places, states: Sequence[dict[str, Any]]
    ) -> None:
        """Let a module that was copied together with this updater bring its tables.

        When all tables have come, the updater has them, and the modules are attached. A copy of a
        part of a model never comes so far: its modules stay without an updater.

        Args:
            module: The copy.
            places: Of its tables.
            states: The optimizer's state of each.
        """
        copied = self._copied
        if copied is None:  # a shallow copy, or a further module of the same tables
            module.attach(self, places)
            return
        copied.modules.append((module, places))
        for holder, (group, number), state in zip(module.holders(), places, states, strict=True):
            copied.tables[id(group), number] = cast("nn.Parameter", holder.weight), state
        if len(copied.tables) == sum(copied.num_tables):
            self._copied, self._groups = None, copied.groups
            self._begin_with(copied)

    def _begin_with(self, copied: _Copied) -> None:
        """Take the tables and their state."""
        state = self.optimizer.state
        for group, num_tables in zip(copied.groups, copied.num_tables, strict=True):
            brought = [copied.tables[id(group.group), number] for number in range(num_tables)]
            group.group.tables = [table for table, _ in brought]
            state.update({table: its_state for table, its_state in brought if its_state})
            if group.group.tiers is not None:
                group.group.tiers.make_empty_slots()
            group.group.forget_space()
            group.group.bind()
        for settings, params in zip(self.optimizer.param_groups, copied.params, strict=True):
            settings["params"] = [
                copied.groups[group].group.tables[number] for group, number in params
            ]
        self.follow_state()
        for module, places in copied.modules:
            module.attach(self, places)

    def _places_of(self, tables: Sequence[Tensor]) -> list[tuple[int, int]]:
        """The number of each table's group, and of the table there."""
        places = {
            id(table): (group, number)
            for group, each in enumerate(self._groups)
            for number, table in enumerate(each.group.tables)
        }
        return [places[id(table)] for table in tables]

    def states_of(self, tables: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        """The optimizer's state of some tables; empty of one that was never updated."""
        return [self.optimizer.state.get(table, {}) for table in tables]

    def give_memory(self, group: TableGroup, number: int, table: nn.Parameter) -> None:
        """Replace a table of the "meta" device by one that has memory, as `to_empty` makes it.

        Raises:
            ValueError: another updater has it, or it is no plain Parameter.
        """
        before = group.tables[number]
        group.give_memory(number, table)
        for settings in self.optimizer.param_groups:
            settings["params"] = [table if each is before else each for each in settings["params"]]
        if before in self.optimizer.state:
            self.optimizer.state[table] = self.optimizer.state.pop(before)

    def is_in_pass(self) -> bool:
        """In backward: whether the pass is about tables; `torch.autograd.grad` may not be."""
        if self._anchor_node is None:
            self._anchor_node = torch.autograd.graph.get_gradient_edge(self.grad_anchor).node
        return bool(is_node_in_pass(self._anchor_node))

    def join_pass(self) -> int:
        """Within a backward pass, for a lookup that activation checkpointing makes anew: the pass.

        The lookup's gradients belong to it, although the reentrant kind finds them in a pass of
        its own.
        """
        backward_pass: int = current_pass()
        self._begin(backward_pass)
        return backward_pass

    def begin_pass(self, joined: int | None = None) -> None:
        """In backward, before gradients go to the ledgers: update rows at its end, if they are.

        Args:
            joined: What `join_pass` returned when the lookup was made.
        """
        if self.auto_apply and (joined is None or joined != self._queued_for):
            self._begin(current_pass())

    def _begin(self, backward_pass: int) -> None:
        if not self.auto_apply or self._queued_for == backward_pass:
            return
        self._clear_ledgers()
        self._queued_for = backward_pass
        # After the whole pass: another lookup of it may add to the ledger.
        queue_callback(self.update_rows)

    def update_rows(self) -> None:
        """Update every row that gradients were collected for, once; forgets the gradients.

        Raises:
            NonFiniteGradient: the gradient of a row had nan or inf in it. Such rows were not
                updated, all others were.
            Exception: as `GroupUpdater.prepare`; no row of any group was updated then, and
                everything is still collected.
        """
        self._queued_for = None
        with DisableTorchFunctionSubclass():  # internal reads of tables
            prepared: list[tuple[GroupUpdater, PreparedUpdate]] = []
            update: PreparedUpdate | None = None
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
        """Where rows are updated at the end of each backward pass: after the last one inside, once.

        Where an error is raised, none is updated.
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
        """Forget what an earlier pass has left that an error ended.

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
        self._budget_bytes = parse_bytes(budget, "budget")
        self._files = files
        divided = divide_first(self._groups, self._budget_bytes, pinned, may_stay=files is None)
        if divided is None:
            warnings.warn(
                f"budget={budget!r}: all {format_bytes(self.resident_bytes())} of rows and state "
                "fit; no cold tier is needed",
                stacklevel=5,
            )
            if device is not None:
                for group in self._groups:
                    move_tables(group.group, device)
            return
        if files is not None:
            for group in self._groups:
                group.use_files(files, names)
            _SYNCED_AT_EXIT.add(self)
        for group, (num_slots, rows) in zip(self._groups, divided, strict=True):
            group.tier(num_slots, rows, device)
        if files is not None:
            files.keep_files()

    def move_slots(self, device: torch.device) -> None:
        """Have the slots of all tables on another device from now on.

        Raises:
            ValueError: slots are in use.
        """
        for group in self._groups:
            move_slots(group.group, device)

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
        """How many it updates the rows of."""
        return sum(len(each.group.names) for each in self._groups)

    @property
    def num_groups(self) -> int:
        """By how many kernel calls it updates them."""
        return len(self._groups)

    def make_room(
        self, short: ref[Residency], num_needed: int, num_distinct: Mapping[TableGroup, int]
    ) -> None:
        """Share out the budget anew; arguments and errors as for `tiering.make_room`."""
        make_room(self._groups, self._budget_bytes, short, num_needed, num_distinct)

    def follow_state(self) -> None:
        """Find state that others have put into the optimizer, by `load_state_dict`."""
        for group in self._groups:
            group.follow_state()

    def require_param_groups(self) -> None:
        """Refuse an optimizer that has lost tables whose rows are to be updated.

        Raises:
            ValueError: it has.
        """
        for group in self._groups:
            group.require_param_group()

    def flush(self) -> None:
        """Bring tables and state up to date, where rows are in slots."""
        for tiers in self.tiers():
            tiers.flush()

    def forget(self) -> None:
        """Forget the gradients collected since the last update; no row is updated."""
        with DisableTorchFunctionSubclass():  # internal reads of tables
            for group in self._groups:
                group.group.forget()

    def prepare_release(self) -> None:
        """Leave collected gradients at the tables.

        Raises:
            RuntimeError: gradients were overwritten since; they are forgotten.
            ValueError: a gradient is of rows that its table has no more, and stays collected.
        """
        for group in self._groups:
            group.group.open_ledger()

    def release(self) -> None:
        """Release the tables: they are plain Parameters again, collected gradients their `grad`.

        So are gradients of lookups that were made before. What is in files stays there, mapped; it
        counts as dirty, because later writes to it are not seen.

        Raises:
            RuntimeError: as `prepare_release`.
            ValueError: as `prepare_release`; nothing is released.
        """
        self.prepare_release()
        for group in self._groups:
            group.group.release()
        self._groups = []  # a backward still under way, or the end of `moving_once`, updates no row
        if self._files is not None:
            self._files.mark_dirty()
            self._files = None
            _SYNCED_AT_EXIT.discard(self)


class _Copied:
    """What a copy of an updater waits with for the tables that modules bring.

    Args:
        groups: The updater's.
        num_tables: Of each.
        params: Of each param group of the optimizer: the number of each table's group, and of the
            table there.
    """

    def __init__(
        self,
        groups: list[GroupUpdater],
        num_tables: list[int],
        params: list[list[tuple[int, int]]],
    ) -> None:
        self.groups, self.num_tables, self.params = groups, num_tables, params
        # By group and number: the table and its state.
        self.tables: dict[tuple[int, int], tuple[nn.Parameter, dict[str, Any]]] = {}
        self.modules: list[tuple[AbstractTables, Places]] = []


@atexit.register
def _sync_all() -> None:
    """A process that ends as it should leaves files that are whole."""
    errors = []
    for updater in list(_SYNCED_AT_EXIT):
        try:
            updater.sync()
        except Exception as error:  # the others are synced all the same
            errors.append(error)
    if errors:
        raise ExceptionGroup("files of rows were not synced, and are left as by a crash", errors)
