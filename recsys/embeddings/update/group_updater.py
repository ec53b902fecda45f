"""Updates one table group: reads an optimizer's settings and state, and calls the kernel.

A `torch.optim.Optimizer` has the settings (`param_groups`) and the state. A `Translation` says how
to read them.
"""

from __future__ import annotations

from math import prod
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.autograd.graph import increment_version

from recsys._support.interrupts import interrupts_held_back
from recsys._support.memory import empty_rows
from recsys._support.own_pages import empty_in_own_pages, in_own_pages
from recsys._support.torch_compat import DisableTorchFunctionSubclass, plain_grad
from recsys.embeddings.kernels.cpu.rounding import TO_NEAREST
from recsys.embeddings.rows.ledger import tables_in
from recsys.embeddings.rows.rounding import table_key
from recsys.embeddings.rows.row_space import compute_dtype
from recsys.embeddings.tiers.budget import SpaceSize
from recsys.embeddings.update.state_arrays import StateArrays, require_state
from recsys.embeddings.update.tiering import make_tiers
from recsys.errors import ColdTierError, NonFiniteGradient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from recsys.embeddings.kernels.cpu.row_update import BadRow
    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.rows.ledger import LedgerEntry
    from recsys.embeddings.rows.row_space import RowSpace
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles
    from recsys.embeddings.update.translation import Settings, Translation

__all__ = ["GroupUpdater", "PreparedUpdate"]


_NO_STATE: dict[str, Any] = {}  # state of a table that was never updated; do not write to it
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
        self.least_slots = 1
        self._reset()

    def _reset(self) -> None:
        """Forget all cached settings, state arrays and files."""
        self._states: list[StateArrays] = []
        self._states_of: RowSpace | None = None
        self._numbers: list[int] = []
        # The tables and all of the optimizer's state when it was last read, and each table's state.
        self._last_state_objects: list[Any] = []
        self._last_state_by_table: list[dict[str, Any]] = []
        self._read: _ReadSettings | None = None
        self._files: ColdFiles | None = None
        self._names: list[str] = []  # of the tables in `_files`

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, without caches of memory addresses."""
        kept = ("group", "_optimizer", "_number", "_translation", "least_slots")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

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
            (formula, sizes, _, _), rates_T2 = read.settings, read.rates
            space = self.group.space()
            for entry in ledger:
                if entry.tables is not space.tables:
                    entry.require_rows_in(space.tables)
            if self.group.tiers is not None:
                self.group.tiers.reload_if_tables_changed(space)
            settings = self._optimizer.param_groups[self._number]
            is_stochastic = space.is_narrow and settings.get("stochastic_rounding", False)
            counts_steps = self._translation.counts_steps or is_stochastic
            if not (counts_steps or sizes):
                states = self._state_spaces(space, sizes, updated, ()) if self._states else []
                return PreparedUpdate(ledger, updated, space, states, formula, rates_T2, TO_NEAREST)
            by_table, new = self._state_by_table(updated)
            keys_T: NDArray[Any] = TO_NEAREST
            steps: list[Any] = []
            if counts_steps:
                rates_T2, keys_T, steps = self._rates_and_keys(
                    settings, formula, updated, by_table, is_stochastic=is_stochastic
                )
            states = self._state_spaces(space, sizes, updated, by_table)
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
    def formula(self) -> RowOptimizer:
        """The update rule of the rows, by the current settings."""
        return self._read_settings().settings.formula

    def space_size(self) -> SpaceSize:
        """The size of all rows and their state."""
        return SpaceSize.of(self.group.tables, self._state_sizes())

    def tier(self, num_slots: int, pinned: NDArray[np.int32], device: torch.device | None) -> None:
        """Give the group tiers; arguments as for `make_tiers`."""
        make_tiers(self.group, self._state_sizes(), num_slots, pinned, device, self._files)
        self.reload_state()
        self.group.bind()

    def use_files(self, files: ColdFiles, names: Mapping[nn.Parameter, str]) -> None:
        """Keep the state in files, beside the tables; continue from state that the files have.

        Args:
            files: The files of the tables.
            names: Names of all tables in `files`.

        Raises:
            ColdTierError: the files have the state of another optimizer.
        """
        self._files = files
        self._names = [names[weight] for weight in self.group.tables]
        columns = self.state_columns()
        for weight, name in zip(self.group.tables, self._names, strict=True):
            arrays = {each: files.array(name, each) for each in files.state_names(name)}
            found = {
                each: tuple(array.shape) for each, array in arrays.items() if array is not None
            }
            wanted = {each: (len(weight), *columns[each]) for each in columns}
            # One number per row may be stored as (E,) or (E, 1).
            sizes = [{each: prod(known[each]) for each in known} for known in (found, wanted)]
            if found and sizes[0] != sizes[1]:
                raise ColdTierError(
                    f"{files.folder}: table {name!r} has the state {_shapes(found)}, and this "
                    f"optimizer's is {_shapes(wanted)}; use the optimizer that it was trained "
                    "with, or load a checkpoint into a new cold_path"
                )
            numbers = files.numbers.get(name, {})
            if arrays or numbers:
                self._optimizer.state[weight] = {**arrays, **numbers}

    def name_in_files(self, table: int) -> str:
        """A table's name in the files of `use_files`."""
        return self._names[table]

    def numbers(self) -> dict[str, dict[str, float]]:
        """The numbers in each table's state, such as its step, by the table's name in files."""
        found = {}
        for weight, name in zip(self.group.tables, self._names, strict=True):
            state = self._optimizer.state.get(weight, _NO_STATE)
            arrays = self._files.state_names(name) if self._files is not None else []
            found[name] = {
                key: value if isinstance(value, int) else float(value)
                for key, value in state.items()
                if key not in arrays
            }
        return found

    def reload_state(self) -> None:
        """Use the state that `load_state_dict` put into the optimizer."""
        if self.group.tiers is None:
            return
        with DisableTorchFunctionSubclass():
            by_table, _ = self._state_by_table(())
            self._states_of = None
            self._state_spaces(self.group.space(), self._state_sizes(), (), by_table)

    def state_columns(self) -> dict[str, tuple[int, ...]]:
        """The shape of one row's state, () or (size,), by the optimizer's name for the array."""
        settings = self._read_settings().settings
        return {
            name: () if name in settings.row_states else (size,)
            for name, size in settings.state_sizes.items()
        }

    def _state_sizes(self) -> dict[str, int]:
        return self._read_settings().settings.state_sizes

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

    def _state_by_table(self, updated: Sequence[int]) -> tuple[list[dict[str, Any]], list[int]]:
        """The optimizer's state of every table, and the tables that had none before this update."""
        known = self._optimizer.state
        # Parameters hash in Python, which is slow, so they are looked up only after a change.
        now = [self.group.tables, *known.keys(), *known.values()]
        if len(now) != len(self._last_state_objects) or not all(
            map(is_, now, self._last_state_objects)
        ):
            self._last_state_objects = now
            self._last_state_by_table = [
                known.get(weight, _NO_STATE) for weight in self.group.tables
            ]
        found = list(self._last_state_by_table)
        new = [table for table in updated if found[table] is _NO_STATE]
        for table in new:
            found[table] = {}
        return found, new

    def _rates_and_keys(
        self,
        settings: Mapping[str, Any],
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
                lr = translation.learning_rate(settings, step)
                of_step[step] = formula.rate_and_eps(lr, step)
            rates_T2[table] = of_step[step]
            if is_stochastic:
                seed = settings.get("rounding_seed", 0)
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

    def _state_spaces(
        self,
        rows: RowSpace,
        sizes: Mapping[str, int],
        updated: Sequence[int],
        by_table: Sequence[dict[str, Any]],
    ) -> list[RowSpace]:
        """Each state array of all tables as a row space; made again if the optimizer has others.

        Tables in `updated` get all arrays; others may have none yet.
        """
        if (
            rows is self._states_of
            and [state.name for state in self._states] == list(sizes)
            and all(state.is_of(by_table, updated) for state in self._states)
        ):
            return [state.space for state in self._states]
        if self.group.tiers is not None:
            # Pending transfers must end before a state file is made again.
            self.group.tiers.flush()
            self.group.tiers.residency.settle()
        before = self._states
        self._states = [self._make_state(*each, updated, by_table) for each in sizes.items()]
        self._states_of = rows
        spaces = [state.space for state in self._states]
        if self.group.tiers is not None:
            pairs = zip(before, self._states, strict=False)
            are_others = any(new.replaces(old) for old, new in pairs)
            self.group.tiers.keep_state_in(spaces, are_others=are_others)
        return spaces

    def _make_state(
        self, name: str, size: int, updated: Sequence[int], by_table: Sequence[dict[str, Any]]
    ) -> StateArrays:
        columns = () if name in self._read_settings().settings.row_states else (size,)
        arrays = [
            self._state_of(table, by_table[table], name, columns, is_needed=table in updated)
            for table in range(len(self.group.tables))
        ]
        require_state(name, columns, self.group.tables, arrays)
        space = self.group.make_space(arrays)
        found = [state.get(name) for state in by_table]
        return StateArrays(name, found, all(each is not None for each in found), arrays, space)

    def _state_of(
        self,
        table: int,
        state: dict[str, Any],
        name: str,
        columns: tuple[int, ...],
        *,
        is_needed: bool,
    ) -> Tensor:
        """A table's state array, (E, *columns); one number per row may also be stored as (E, 1).

        As in torch, the state is made at the first update of the table.
        """
        weight, tiers = self.group.tables[table], self.group.tiers
        is_reached = tiers is not None and tiers.are_reached
        dtype = compute_dtype(weight.dtype)
        known: Tensor | None = state.get(name)
        if known is None:
            if not is_needed:
                return weight.new_empty(0, *columns, dtype=dtype)
            if is_reached:
                known = empty_in_own_pages((len(weight), *columns), dtype)
            elif self._files is None:
                known = empty_rows(len(weight), *columns, dtype=dtype, device=weight.device).zero_()
            else:
                known = self._files.make(self._names[table], name, (len(weight), *columns), dtype)
            if self.group.changed_rows is not None:
                self.group.changed_rows.note_new_state(known)
        elif known.dtype != dtype or known.device != weight.device or not known.is_contiguous():
            known = known.to(weight.device, dtype).contiguous()
        if known.shape == weight.shape[:1] and columns == (1,):
            known = known.unsqueeze(1)  # as earlier checkpoints have it
        if self._files is not None and self._files.find(known) is None and len(known):
            known = self._files.keep(self._names[table], name, known)
        if is_reached:
            known = in_own_pages(known)
        state[name] = known
        return known


def _shapes(arrays: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in sorted(arrays.items())) or "none"


def _is_fixed(value: Any) -> bool:
    """Whether a setting cannot change in place."""
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, int | float | str | None) for each in values)
