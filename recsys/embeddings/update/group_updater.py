"""Updates one table group: reads an optimizer's settings, and calls the kernel.

A `torch.optim.Optimizer` has the settings, in `param_groups`. A `Translation` says how to read
them.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import increment_version

from recsys._support.interrupts import interrupts_held_back
from recsys._support.torch_compat import DisableTorchFunctionSubclass, plain_grad
from recsys.embeddings.kernels.cpu.rounding import TO_NEAREST, table_key
from recsys.embeddings.rows.ledger import tables_in
from recsys.embeddings.tiers.budget import SpaceSize
from recsys.embeddings.tiers.table_tiers import Tiers
from recsys.embeddings.tiers.tier_spec import TierSpec
from recsys.embeddings.update.group_state import GroupState
from recsys.embeddings.update.tiering import move_tables
from recsys.errors import NonFiniteGradient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import nn

    from recsys.embeddings.kernels.cpu.row_update import BadRow
    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.rows.ledger import LedgerEntry
    from recsys.embeddings.rows.row_space import RowSpace
    from recsys.embeddings.update.translation import Settings, Translation

__all__ = ["GroupUpdater", "PreparedUpdate"]


_OF_TABLES = ("params", "param_names")  # entries of a param group that are not settings


class PreparedUpdate(NamedTuple):
    """The checked arguments of one `row_update`.

    Attributes:
        ledger: The gradients.
        updated: Numbers of the tables with gradients.
        space: The tables.
        states: The state arrays of the tables.
        formula: The update rule of the rows.
        rates: Rate and eps of every table, (T, 2).
        keys: Keys for stochastic rounding, for every table.
        by_table: The optimizer's state of every table; empty if the optimizer needs none.
        steps: The new step of each table in `updated`, if steps are counted.
        new: Tables that get their first state by this update.
    """

    ledger: Sequence[LedgerEntry]
    updated: Sequence[int]
    space: RowSpace
    states: Sequence[RowSpace]
    formula: RowOptimizer
    rates: NDArray[np.float64]
    keys: NDArray[Any]
    by_table: Sequence[dict[str, Any]] = ()
    steps: Sequence[Any] = ()
    new: Sequence[int] = ()


class _ReadSettings(NamedTuple):
    """A param group as last read, and its translation."""

    names: list[str]
    values: list[Any]
    settings: Settings
    rates: NDArray[np.float64]  # do not write to it


class GroupUpdater:
    """Updates the rows of one table group.

    Args:
        group: Has the tables and their ledger.
        optimizer: Has their settings and state.
        number: Number of the tables' param group.
        translation: How to read settings and state.

    Attributes:
        group: As given.
        state: The optimizer's state of the group.
        least_slots: With tiers, the most slots that a mini-batch has needed.
    """

    def __init__(
        self,
        group: TableGroup,
        optimizer: torch.optim.Optimizer,
        number: int,
        translation: Translation,
    ) -> None:
        self.group = group
        self._optimizer, self._number, self._translation = optimizer, number, translation
        self.state = GroupState(group, optimizer)
        self.least_slots = 1
        self._read: _ReadSettings | None = None
        self._numbers: list[int] = []

    def prepare(self) -> PreparedUpdate | None:
        """Take the ledger, and do every check that may refuse the update.

        After an error the ledger still has all gradients.

        Returns:
            The argument of `update_rows`; None if there are no gradients.

        Raises:
            BudgetTooSmall: there are too few slots for the rows.
            ConflictingWrite: the caller wrote to a table or its state while slots had newer rows.
            ValueError: settings or state do not fit the tables or the formula.
        """
        ledger = self.group.take_ledger()
        if not ledger:
            return None
        updated = ledger[0].lookups.distinct_tables if len(ledger) == 1 else tables_in(ledger)
        try:
            read = self._read_settings()
            formula, columns, rates_T2 = read.settings.formula, read.settings.columns, read.rates
            space = self.group.space()
            for entry in ledger:
                if entry.tables is not space.tables:
                    entry.require_rows_in(space.tables)
            if self.group.tiers is not None:
                self.group.tiers.reload_if_tables_changed(space)
            param_group = self._optimizer.param_groups[self._number]
            is_stochastic = space.is_narrow and param_group.get("stochastic_rounding", False)
            counts_steps = self._translation.counts_steps or is_stochastic
            by_table: Sequence[dict[str, Any]] = ()
            new: Sequence[int] = ()
            if counts_steps or columns:
                by_table, new = self.state.by_table(updated)
            keys_T: NDArray[Any] = TO_NEAREST
            steps: Sequence[Any] = ()
            if counts_steps:
                rates_T2, keys_T, steps = self._rates_and_keys(
                    param_group, formula, updated, by_table, is_stochastic=is_stochastic
                )
            states = self.state.spaces(space, columns, by_table, updated)
            return PreparedUpdate(
                ledger, updated, space, states, formula, rates_T2, keys_T, by_table, steps, new
            )
        except Exception:
            self.give_back(ledger)
            raise

    def give_back(self, ledger: Sequence[LedgerEntry]) -> None:
        """Put back the ledger that `prepare` took, so that the next step uses it."""
        self.group.ledger[:0] = ledger

    def update_rows(self, update: PreparedUpdate) -> NonFiniteGradient | None:
        """Update every row in the ledger once.

        Returns:
            The error to raise after the step if a row was not updated.
        """
        changed: Sequence[nn.Parameter] = self.group.tables
        for table, step in zip(update.updated, update.steps, strict=False):
            update.by_table[table]["step"] = step
        for table in update.new:
            self._optimizer.state[changed[table]] = update.by_table[table]
        row_update, tiers = self.group.kernels.row_update, self.group.tiers
        if len(update.updated) < len(changed):
            changed = [changed[table] for table in update.updated]
        # Versions increase as after torch's in-place operations, so that autograd refuses a
        # backward that saved a table before this update.
        space, states, ledger = update.space, update.states, update.ledger
        if self.group.staleness is not None:
            ledger = self.group.staleness.before_update(ledger)
        more = update.formula, update.rates, ledger, update.keys
        if tiers is None:
            changed_rows = self.group.changed_rows
            if changed_rows is not None:
                changed_rows.mark(ledger)
            bad = row_update(space, states, *more)
            increment_version(changed)
            if changed_rows is not None:
                changed_rows.accept()
        else:
            hot = tiers.hot
            # Threads and signals wait: an updated row that is not marked would be lost.
            with tiers.lock, interrupts_held_back():
                hot.use()
                bad = row_update(hot.space, hot.state_spaces, *more)
                increment_version(changed)
                tiers.mark_updated(ledger, update.updated)
        return None if bad is None else self._bad_gradient(bad)

    def _bad_gradient(self, bad: BadRow) -> NonFiniteGradient:
        return NonFiniteGradient(
            f"table {self.group.names[bad.table]!r}: the gradient of row {bad.row} has nan or inf "
            "in it. Rows with such a gradient were not updated, all others were; find what "
            "computes it (a learning rate too high, log(0), float16 without GradScaler)"
        )

    @property
    def learning_rate(self) -> float:
        """The current learning rate of the tables' param group."""
        return float(self._optimizer.param_groups[self._number]["lr"])

    @property
    def settings(self) -> Settings:
        """The current settings of the tables' param group."""
        return self._read_settings().settings

    def space_size(self) -> SpaceSize:
        """The size of all rows and their state."""
        return SpaceSize.of(self.group.tables, self.settings.state_sizes)

    def tier(self, num_slots: int, pinned: NDArray[np.int32], device: torch.device | None) -> None:
        """Give the group tiers.

        Tables on a device move to the host's memory, and so does their state.

        Args:
            num_slots: S.
            pinned: Rows with a permanent slot, numbered over all tables.
            device: Device of the slots; None for that of the tables.
        """
        group, state_sizes = self.group, self.settings.state_sizes
        sizes, dtype = [len(table) for table in group.tables], group.tables[0].dtype
        device = group.tables[0].device if device is None else device
        move_tables(group, torch.device("cpu"))
        spec = TierSpec(
            group.names, sizes, group.dim, dtype, state_sizes, num_slots, pinned, device
        )
        group.set_tiers(Tiers(spec, self.state.files))
        self.reload_state()
        group.bind()

    def reload_state(self) -> None:
        """Use the state that `load_state_dict` put into the optimizer."""
        if self.group.tiers is not None:
            with DisableTorchFunctionSubclass():
                self.state.reload(self.group.space(), self.settings.columns)

    def _read_settings(self) -> _ReadSettings:
        """The translated settings; read again when one of them is another object."""
        known, group = self._read, self._optimizer.param_groups[self._number]
        names, values = list(group), list(group.values())
        if known is not None and known.names == names and all(map(is_, known.values, values)):
            return known
        settings = self._translation.read(group, self.group.dim)
        rates_T2 = np.tile(settings.rate_and_eps, (len(self.group.tables), 1))
        found = _ReadSettings(names, values, settings, rates_T2)
        # A tensor may change in place and stay the same object, so it is never cached.
        are_fixed = all(_is_fixed(group[name]) for name in names if name not in _OF_TABLES)
        self._read = found if are_fixed else None
        return found

    def _rates_and_keys(
        self,
        param_group: Mapping[str, Any],
        formula: RowOptimizer,
        counted: Sequence[int],
        by_table: Sequence[dict[str, Any]],
        *,
        is_stochastic: bool,
    ) -> tuple[NDArray[np.float64], NDArray[Any], list[Any]]:
        """Rates and rounding keys of the tables that count their steps, and the new steps."""
        translation = self._translation
        rates_T2 = np.zeros((len(by_table), 2))
        keys_T = np.zeros(len(by_table), np.uint64) if is_stochastic else TO_NEAREST
        steps: list[Any] = []
        of_step: dict[int, tuple[float, float]] = {}
        for table in counted:
            steps.append(by_table[table].get("step", translation.no_step) + 1)
            step = int(steps[-1])  # some of torch's optimizers keep it as a tensor
            if step not in of_step:
                lr = translation.learning_rate(param_group, step)
                of_step[step] = formula.rate_and_eps(lr, step)
            rates_T2[table] = of_step[step]
            if is_stochastic:
                seed = param_group.get("rounding_seed", 0)
                keys_T[table] = table_key(seed, step, self._number_of(table))
        return rates_T2, keys_T, steps

    def require_param_group(self) -> None:
        """Check that the optimizer still has every table that this step would update.

        Raises:
            ValueError: a table is in no param group any more.
        """
        groups, number = self._optimizer.param_groups, self._number
        known = set(map(id, groups[number]["params"] if number < len(groups) else ()))
        waiting = tables_in(self.group.ledger)
        for table, weight in enumerate(self.group.tables):
            is_to_update = table in waiting or plain_grad(weight) is not None
            if is_to_update and id(weight) not in known:
                raise ValueError(
                    f"a table of shape {tuple(weight.shape)} was in param group {number} of the "
                    "optimizer when the model was accelerated, and no longer is; call "
                    "recsys.restore(model), then recsys.accelerate again"
                )

    def _number_of(self, table: int) -> int:
        """A table's position in the optimizer: unique, however the tables are grouped."""
        if not self._numbers:
            known = [weight for group in self._optimizer.param_groups for weight in group["params"]]
            places = {id(weight): number for number, weight in enumerate(known)}
            self._numbers = [
                places.get(id(weight), len(known) + table)  # a frozen table may be in none
                for table, weight in enumerate(self.group.tables)
            ]
        return self._numbers[table]


def _is_fixed(value: Any) -> bool:
    """Whether a setting cannot change in place."""
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, int | float | str | None) for each in values)
