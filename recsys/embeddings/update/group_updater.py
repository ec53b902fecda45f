"""The update of one table group: settings and state from an optimizer, rows updated by a kernel.

A `torch.optim.Optimizer` has the settings (`param_groups`) and the state; how they are read is in a
`Translation`.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.autograd.graph import increment_version

from recsys._support.interrupts import interrupts_held_back
from recsys._support.memory import empty_rows
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


_NO_STATE: dict[str, Any] = {}  # stands for a table that was never updated; never written to
_OF_TABLES = ("params", "param_names")  # in a param group, what says nothing of the formula


class PreparedUpdate(NamedTuple):
    """What one update takes, after everything that may refuse it; see `row_update`.

    Attributes:
        ledger: What was collected.
        updated: Numbers of the tables that it is for.
        space: The tables.
        states: Their state.
        formula: How rows are updated.
        rates: Of every table, (T, 2).
        keys: Of every table, for stochastic rounding.
        by_table: The optimizer's state of every table, if there is some.
        steps: Of each table in `updated`, where steps are counted; to be noted.
        new: Tables whose state is to be noted for the first time.
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
    """Settings when they were last read, and what they said."""

    names: list[str]
    values: list[Any]
    settings: Settings
    rates: NDArray[np.float64]  # not to be written to


class GroupUpdater:
    """Updates the rows of one table group.

    Args:
        group: Has the tables and their ledger.
        optimizer: Has their settings and state.
        number: Of the param group that they are in.
        translation: How settings and state are read.

    Attributes:
        group: As given.
        least_slots: What a mini-batch has needed, where rows are kept in slots.
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
        self._begin()

    def _begin(self) -> None:
        """Begin with nothing read, and with tables in memory."""
        self._states: list[StateArrays] = []
        self._states_of: RowSpace | None = None
        self._numbers: list[int] = []
        self._state_then: list[Any] = []  # all that the optimizer had when it was last looked into
        self._found_then: list[dict[str, Any]] = []  # of these tables
        self._read: _ReadSettings | None = None
        self._files: ColdFiles | None = None
        self._names: list[str] = []  # of the tables there

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, whose memory is elsewhere."""
        kept = ("group", "_optimizer", "_number", "_translation", "least_slots")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def prepare(self) -> PreparedUpdate | None:
        """Take what was collected, and make sure that nothing refuses the update of rows.

        Returns:
            For `update_rows`; None where nothing was collected.

        Raises:
            BudgetTooSmall: there are too few slots for the rows.
            ConflictingWrite: a table, or its state, was written to by others meanwhile.
            ValueError: settings or state are such that rows cannot be updated by them. After each
                of these, everything is still collected.
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
            is_by_chance = space.is_narrow and settings.get("stochastic_rounding", True)
            counts_steps = self._translation.counts_steps or is_by_chance
            if not (counts_steps or sizes):
                states = self._state_spaces(space, sizes, updated, ()) if self._states else []
                return PreparedUpdate(ledger, updated, space, states, formula, rates_T2, TO_NEAREST)
            by_table, new = self._state_by_table(updated)
            keys_T: NDArray[Any] = TO_NEAREST
            steps: list[Any] = []
            if counts_steps:
                rates_T2, keys_T, steps = self._rates_and_keys(
                    settings, formula, updated, by_table, is_by_chance=is_by_chance
                )
            states = self._state_spaces(space, sizes, updated, by_table)
            return PreparedUpdate(
                ledger, updated, space, states, formula, rates_T2, keys_T, by_table, steps, new
            )
        except Exception:
            self.give_back(ledger)
            raise

    def give_back(self, ledger: Sequence[LedgerEntry]) -> None:
        """Collect again what `prepare` has taken: after a correction, the next step uses it."""
        self.group.ledger[:0] = ledger

    def update_rows(self, update: PreparedUpdate) -> NonFiniteGradient | None:
        """Update every row that gradients were collected for, once.

        Returns:
            What to raise after the step, where a row was not updated.
        """
        changed: Sequence[nn.Parameter] = self.group.tables
        for table, step in zip(update.updated, update.steps, strict=False):
            update.by_table[table]["step"] = step
        for table in update.new:
            self._optimizer.state[changed[table]] = update.by_table[table]
        row_update, tiers = self.group.kernels.row_update, self.group.tiers
        if len(update.updated) < len(changed):
            changed = [changed[table] for table in update.updated]
        # As an in-place operation of torch's raises versions: a caller that has kept a table for
        # backward will see it.
        space, states = update.space, update.states
        more = update.formula, update.rates, update.ledger, update.keys
        if tiers is None:
            bad = row_update(space, states, *more)
            increment_version(changed)
        else:
            hot = tiers.hot
            with interrupts_held_back():  # rows that are updated and not known to be would be lost
                bad = row_update(hot.space, hot.state_spaces, *more)
                increment_version(changed)
                tiers.mark_updated(update.ledger, update.updated)
        return None if bad is None else self._bad_gradient(bad)

    def _bad_gradient(self, bad: BadRow) -> NonFiniteGradient:
        return NonFiniteGradient(
            f"table {self.group.names[bad.table]!r}: the gradient of row {bad.row} has nan or inf "
            "in it. Rows with such a gradient were not updated, all others were; find what "
            "computes it (a learning rate too high, log(0), float16 without GradScaler)"
        )

    def space_size(self) -> SpaceSize:
        """What there is to keep in slots."""
        num_rows = sum(len(weight) for weight in self.group.tables)
        return SpaceSize(num_rows, self.group.dim, self.group.tables[0].dtype, self._state_sizes())

    def tier(self, num_slots: int, pinned: NDArray[np.int32], device: torch.device | None) -> None:
        """Keep rows in slots from now on; arguments as for `make_tiers`."""
        make_tiers(self.group, self._state_sizes(), num_slots, pinned, device, self._files)
        self.follow_state()
        self.group.bind()

    def use_files(self, files: ColdFiles, names: Mapping[nn.Parameter, str]) -> None:
        """Have state in files from now on, as tables are; what is there goes on.

        Args:
            files: Have the tables.
            names: Of all tables, there.

        Raises:
            ColdTierError: there is state of another optimizer.
        """
        self._files = files
        self._names = [names[weight] for weight in self.group.tables]
        wanted = list(self._state_sizes())
        for weight, name in zip(self.group.tables, self._names, strict=True):
            known = files.state_names(name)
            if known and sorted(known) != sorted(wanted):
                raise ColdTierError(
                    f"{files.folder}: table {name!r} has state {known}, and this optimizer's is "
                    f"{wanted or 'none'}; use the optimizer that it was trained with, or load a "
                    "checkpoint into a new cold_path"
                )
            numbers = files.numbers.get(name, {})
            if known or numbers:
                arrays = {each: files.array(name, each) for each in known}
                self._optimizer.state[weight] = {**arrays, **numbers}

    def numbers(self) -> dict[str, dict[str, float]]:
        """By table in files: what its state has besides arrays."""
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

    def follow_state(self) -> None:
        """Find state that others have put into the optimizer."""
        if self.group.tiers is None:
            return
        with DisableTorchFunctionSubclass():
            by_table, _ = self._state_by_table(())
            self._states_of = None
            self._state_spaces(self.group.space(), self._state_sizes(), (), by_table)

    def _state_sizes(self) -> dict[str, int]:
        return self._read_settings().settings.state_sizes

    def _read_settings(self) -> _ReadSettings:
        """What the settings say now; read anew when one of them is another object."""
        known, group = self._read, self._optimizer.param_groups[self._number]
        names, values = list(group), list(group.values())
        if known is not None and known.names == names and all(map(is_, known.values, values)):
            return known
        settings = self._translation.read(group, self.group.dim)
        rates_T2 = np.tile(settings.rate_and_eps, (len(self.group.tables), 1))
        found = _ReadSettings(names, values, settings, rates_T2)
        # What may be changed in place, as a tensor may, is the same object afterwards.
        are_fixed = all(_is_fixed(group[name]) for name in names if name not in _OF_TABLES)
        self._read = found if are_fixed else None
        return found

    def _state_by_table(self, updated: Sequence[int]) -> tuple[list[dict[str, Any]], list[int]]:
        """The optimizer's state of every table, and which tables had none until this update."""
        known = self._optimizer.state
        # Tables hash themselves in Python, so they are looked up only where something has changed.
        now = [self.group.tables, *known.keys(), *known.values()]
        if len(now) != len(self._state_then) or not all(map(is_, now, self._state_then)):
            self._state_then = now
            self._found_then = [known.get(weight, _NO_STATE) for weight in self.group.tables]
        found = list(self._found_then)
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
        is_by_chance: bool,
    ) -> tuple[NDArray[np.float64], NDArray[Any], list[Any]]:
        """What `row_update` takes for each table that counts its steps, and the steps."""
        translation = self._translation
        rates_T2 = np.zeros((len(by_table), 2))
        keys_T = np.zeros(len(by_table), np.uint64) if is_by_chance else TO_NEAREST
        steps: list[Any] = []
        of_step: dict[int, tuple[float, float]] = {}
        for table in counted:
            steps.append(by_table[table].get("step", translation.no_step) + 1)
            step = int(steps[-1])  # a tensor where torch keeps one
            if step not in of_step:
                lr = translation.learning_rate(settings, step)
                of_step[step] = formula.rate_and_eps(lr, step)
            rates_T2[table] = of_step[step]
            if is_by_chance:
                seed = settings.get("rounding_seed", 0)
                keys_T[table] = table_key(seed, step, self._number_of(table))
        return rates_T2, keys_T, steps

    def require_param_group(self) -> None:
        """Refuse an optimizer that has lost a table whose rows are to be updated.

        Raises:
            ValueError: it has.
        """
        groups, number = self._optimizer.param_groups, self._number
        known = set(map(id, groups[number]["params"] if number < len(groups) else ()))
        waiting = tables_in(self.group.ledger)
        for table, weight in enumerate(self.group.tables):
            is_to_update = table in waiting or plain_grad(weight) is not None
            if is_to_update and id(weight) not in known:
                raise ValueError(
                    f"a table of shape {tuple(weight.shape)} was in param group {number} of the "
                    "optimizer when the model was accelerated, and is not any more; call "
                    "recsys.restore(model), then recsys.accelerate anew"
                )

    def _number_of(self, table: int) -> int:
        """Where the optimizer has a table: no other has the number, however tables are grouped."""
        if not self._numbers:
            known = [weight for group in self._optimizer.param_groups for weight in group["params"]]
            places = {id(weight): number for number, weight in enumerate(known)}
            self._numbers = [
                places.get(id(weight), len(known) + table)  # one that is frozen may be in none
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
        if (
            rows is self._states_of
            and [state.name for state in self._states] == list(sizes)
            and all(state.is_of(by_table, updated) for state in self._states)
        ):
            return [state.space for state in self._states]
        if self.group.tiers is not None:
            # A file that is begun anew is neither written to nor read by transfers of before.
            self.group.tiers.flush()
            self.group.tiers.residency.settle()
        before, self._states = (
            self._states,
            [self._make_state(name, size, updated, by_table) for name, size in sizes.items()],
        )
        self._states_of = rows
        spaces = [state.space for state in self._states]
        if self.group.tiers is not None:
            are_others = any(
                new.replaces(old) for old, new in zip(before, self._states, strict=False)
            )
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
        """A table's state array, (E, *columns); one number per row stays (E, 1) where it is that.

        Made where there is none, of a table that is updated: as with torch, others' state is made
        when they are.
        """
        weight = self.group.tables[table]
        dtype = compute_dtype(weight.dtype)
        known: Tensor | None = state.get(name)
        if known is None:
            if not is_needed:
                return weight.new_empty(0, *columns, dtype=dtype)
            if self._files is None:
                known = empty_rows(len(weight), *columns, dtype=dtype, device=weight.device).zero_()
            else:
                known = self._files.make(self._names[table], name, (len(weight), *columns), dtype)
        elif known.dtype != dtype or known.device != weight.device or not known.is_contiguous():
            known = known.to(weight.device, dtype).contiguous()
        if known.shape == weight.shape[:1] and columns == (1,):
            known = known.unsqueeze(1)  # as it was written once
        if self._files is not None and self._files.find(known) is None and len(known):
            known = self._files.keep(self._names[table], name, known)
        state[name] = known
        return known


def _is_fixed(value: Any) -> bool:
    """Whether a setting has the same value as long as it is the same object."""
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, int | float | str | None) for each in values)
