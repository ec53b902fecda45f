"""`TableUpdate`: owns the optimizer's state of a table group, and updates its rows once a step.

`fused_optimizer`, or a hook of the user's own optimizer (`attach`), calls it. Invariant: all groups
are checked before any row changes, and each row changes once.

A `torch.optim.Optimizer` has the settings in `param_groups` and each table's state in `state`. A
`Translation` says how to read them.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import repeat
from math import prod
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np
from torch import Tensor
from torch.autograd.graph import increment_version

from recsys._support.torch_compat import DisableTorchFunctionSubclass
from recsys.embeddings.kernels.cpu.rounding import TO_NEAREST, table_key
from recsys.embeddings.rows.grads import take_grads
from recsys.errors import NonFiniteGradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.rows.ledger import Entry
    from recsys.embeddings.rows.tables import TableGroup
    from recsys.embeddings.update.changed_rows import ChangedRows
    from recsys.embeddings.update.translation import Translation

__all__ = ["PreparedUpdate", "TableUpdate", "require_state", "update_all"]

_NO_STATE: dict[str, Any] = {}  # of a table that was never updated; do not write to it


class _Settings(NamedTuple):
    """The settings of a param group: formula, its state sizes, and the rates of its first step."""

    formula: RowOptimizer
    sizes: dict[str, int]
    rates_T2: NDArray[np.float64]


class PreparedUpdate(NamedTuple):
    """The checked arguments of one update.

    Attributes:
        entries: The ledger, in the order of lookups.
        updated: Numbers of the tables with gradients.
        formula: The update rule of the rows.
        rates_T2: Rate and eps of every table.
        keys_T: Keys for stochastic rounding, for every table.
        steps: The new step of each table in `updated`, if steps are counted.
    """

    entries: Sequence[Entry]
    updated: Sequence[int]
    formula: RowOptimizer
    rates_T2: NDArray[np.float64]
    keys_T: NDArray[Any]
    steps: Sequence[Any]


class TableUpdate:
    """The optimizer's state of one table group, and the update of its rows.

    Args:
        group: The tables.
        optimizer: Has settings and state.
        number: The number of the tables' param group.
        rule: How to read them.

    Attributes:
        group: As given.
        changed: Records the rows that updates change; None for no record.
    """

    def __init__(
        self, group: TableGroup, optimizer: torch.optim.Optimizer, number: int, rule: Translation
    ) -> None:
        self.group = group
        self._optimizer = ref(optimizer)  # a FusedOptimizer keeps its updates
        self.changed: ChangedRows | None = None
        self._number, self._rule = number, rule
        known = [table for param_group in optimizer.param_groups for table in param_group["params"]]
        positions = {id(table): position for position, table in enumerate(known)}
        # Unique, however tables are grouped; a frozen table may be in no param group.
        self._numbers = [
            positions.get(id(table), len(known) + position)
            for position, table in enumerate(group.tables)
        ]
        self._has_warned = False
        self._settings: _Settings | None = None
        self._setting_values: list[Any] = []
        self._values: list[Any] = []  # of the optimizer's state, when it was last read
        self._states: list[dict[str, Any]] = [_NO_STATE] * len(group.tables)
        self._arrays: list[list[Tensor | None]] = []
        self._dtype = group.compute_dtype  # of the arrays

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Has settings and state."""
        found = self._optimizer()
        assert found is not None
        return found

    def formula(self) -> RowOptimizer:
        """The update rule of the rows, by the settings of now."""
        return self._read(self.optimizer.param_groups[self._number]).formula

    def prepare(self) -> PreparedUpdate | None:
        """Do every check that may refuse the update; no row has changed, and the ledger is whole.

        Returns:
            For `apply`; None if there are no gradients.

        Raises:
            ConflictingWrite: a table was written to while slots had newer rows.
            RuntimeError: a gradient was overwritten since its backward, or a table replaced.
            ValueError: settings or state do not fit the tables or the formula.
        """
        group = self.group
        dense = take_grads(group)
        if dense and not self._has_warned:
            self._warn_of(dense)
        entries = group.ledger.in_order()
        if not entries:
            return None
        group.notice_moved_tables()
        if any(entry.gradient.dtype is not group.compute_dtype for entry in entries):
            entries = [entry.to(group.compute_dtype) for entry in entries]
        if group.fetcher is not None:
            group.fetcher.notice_writes()
        updated = entries[0].call.lookups.tables
        if len(entries) > 1:
            updated = sorted({table for entry in entries for table in entry.call.lookups.tables})
        settings, rule = self.optimizer.param_groups[self._number], self._rule
        formula, sizes, rates_T2 = self._read(settings)
        is_stochastic = group.dtype != group.compute_dtype and settings.get("stochastic_rounding")
        counts_steps = rule.counts_steps or is_stochastic
        if counts_steps or sizes:
            self._read_states(updated)
        steps: list[Any] = []
        keys_T: NDArray[Any] = TO_NEAREST
        if counts_steps:
            rates_T2 = rates_T2.copy()
            keys_T = np.zeros(len(group.tables), np.uint64) if is_stochastic else TO_NEAREST
            for table in updated:
                steps.append(self._states[table].get("step", rule.no_step) + 1)
                step = int(steps[-1])
                rates_T2[table] = formula.rate_and_eps(rule.learning_rate(settings, step), step)
                if is_stochastic:
                    seed = settings.get("rounding_seed", 0)
                    keys_T[table] = table_key(seed, step, self._numbers[table])
        if sizes:
            self._lay_out(formula, sizes, updated)
        return PreparedUpdate(entries, updated, formula, rates_T2, keys_T, steps)

    def read_state(self) -> None:
        """Use the tables and the optimizer's state as they are now; `prepare` does, too.

        Raises:
            RuntimeError: a table has another number of rows now.
            ValueError: an array belongs to another table or another formula.
        """
        self.group.notice_moved_tables()
        self._read_states(())
        if any(self._states):
            formula, sizes, _ = self._read(self.optimizer.param_groups[self._number])
            self._lay_out(formula, sizes, ())

    def state_sizes(self) -> dict[str, int]:
        """Numbers per row of each state array, by the optimizer's names."""
        _, sizes, _ = self._read(self.optimizer.param_groups[self._number])
        return {self._rule.state_names.get(name, name): size for name, size in sizes.items()}

    def new_array(self, number: int, name: str, columns: tuple[int, ...]) -> Tensor:
        """A state array of zeros for a table, (E, *columns), in a file if its rows are."""
        group = self.group
        shape = len(group.tables[number]), *columns
        if group.files is not None:
            return group.files.make(f"{group.names[number]}.{name}", shape, group.compute_dtype)  # type: ignore[no-any-return]
        return group.new_rows(*shape, dtype=group.compute_dtype)

    def apply(self, prepared: PreparedUpdate) -> NonFiniteGradient | None:
        """Update every row in the ledger once, and empty the ledger.

        A signal in Python comes before the kernel or after it. So what ends the step comes first:
        an interrupted step may leave a group as it was, and never updates it twice.

        Returns:
            An error that names a row with a gradient that is not finite. Such rows were not
            updated, all others were.
        """
        group, (entries, updated, formula, rates_T2, keys_T, steps) = self.group, prepared
        if group.fetcher is not None:
            group.fetcher.begin_update(entries)
        if group.before_update is not None:
            entries = group.before_update(entries)
        filled = [entry for entry in entries if entry.call.num_samples]
        joined = group.join(filled) if filled else None
        if self.changed is not None:
            self.changed.mark(joined)
        group.drop_ledger()
        for table, step in zip(updated, steps, strict=False):
            self._states[table]["step"] = step
        # As after torch's in-place operations: autograd refuses a backward that saved a table.
        are_all = len(updated) == len(group.tables)
        increment_version(group.tables if are_all else [group.tables[table] for table in updated])
        bad = None
        # Others may evaluate meanwhile; without slots they may see half of an update, as in torch.
        lock = nullcontext() if group.fetcher is None else group.fetcher.lock
        if joined is not None:
            with lock:
                bad = group.update(joined, formula, rates_T2, keys_T)
        if self.changed is not None:
            self.changed.accept()
        if group.fetcher is not None:
            group.fetcher.accept_writes()
        if bad is None:
            return None
        return NonFiniteGradient(
            f"table {group.names[bad.table]!r}: the gradient of row {bad.row} has nan or inf in "
            "it. Rows with such a gradient were not updated, all others were; find what computes "
            "it (a learning rate too high, log(0), float16 without GradScaler)"
        )

    def _warn_of(self, dense: Sequence[int]) -> None:
        self._has_warned = True
        warnings.warn(
            f"table {self.group.names[dense[0]]!r}: its gradient has all rows, because it is used "
            "in other ways than by lookups (an L2 penalty over all rows?) or was set, so steps are "
            "slower; penalize the rows that were looked up, or leave the table to torch "
            "(recsys.restore)",
            stacklevel=2,
        )

    def _read(self, settings: dict[str, Any]) -> _Settings:
        """The settings; translated again when one is another object, or may change in place."""
        values = [*settings.values()]
        known = self._setting_values
        if self._settings is None or len(values) != len(known) or not all(map(is_, values, known)):
            formula = self._rule.formula(settings)
            rate = float(self._rule.learning_rate(settings, 1))
            rates_T2 = np.tile(formula.rate_and_eps(rate, 1), (len(self.group.tables), 1))
            found = _Settings(formula, formula.state_sizes(self.group.dim), rates_T2)
            if any(isinstance(value, Tensor) for value in values):
                return found
            self._settings, self._setting_values = found, values
        return self._settings

    def _read_states(self, updated: Sequence[int]) -> None:
        """Read the state of every table, and give updated tables one."""
        known = self.optimizer.state
        # Parameters hash in Python, which is slow, so they are looked up only after a change.
        values = [*known.values()]
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            self._states = [known.get(table, _NO_STATE) for table in self.group.tables]
            self._values = values
        new = [table for table in updated if self._states[table] is _NO_STATE]
        for table in new:
            self._states[table] = known[self.group.tables[table]] = {}
        if new:
            self._values = [*known.values()]

    def _lay_out(
        self, formula: RowOptimizer, sizes: dict[str, int], updated: Sequence[int]
    ) -> None:
        """Give the group its state arrays, if the optimizer has others than before.

        Raises:
            ValueError: an array belongs to another table or another formula.
        """
        group, rule = self.group, self._rule
        names = [rule.state_names.get(name, name) for name in sizes]
        found = [list(map(dict.get, self._states, repeat(name))) for name in names]
        known = self._arrays
        if (
            self._dtype is group.compute_dtype
            and len(found) == len(known)
            and all(
                all(map(is_, now, before)) and all(now[table] is not None for table in updated)
                for now, before in zip(found, known, strict=True)
            )
        ):
            return
        if group.fetcher is not None:  # rows leave their slots with the state that they have there
            group.fetcher.empty_slots(is_written_back=True)
        states = []
        for name, (own, size), arrays in zip(names, sizes.items(), found, strict=True):
            is_flat = own in formula.row_states and not rule.has_columns
            for table, state in enumerate(self._states):
                is_new = arrays[table] is None
                if not is_new or table in updated:
                    columns = () if is_flat else (size,)
                    arrays[table] = state[name] = array = self._array_of(table, name, columns)
                    if is_new and self.changed is not None:
                        self.changed.accept_new(array)
            states.append((arrays, size))
        self._arrays, self._dtype = found, group.compute_dtype
        group.set_states(states)
        if group.fetcher is not None:
            group.fetcher.accept_writes()

    def _array_of(self, table: int, name: str, columns: tuple[int, ...]) -> Tensor:
        """A table's state array, (E, *columns), zeros if it is new."""
        weight, dtype, files = self.group.tables[table], self.group.compute_dtype, self.group.files
        known: Tensor | None = self._states[table].get(name)
        if known is None:
            return self.new_array(table, name, columns)
        require_state(name, columns, weight, known)
        if known.shape == weight.shape[:1] and columns == (1,):
            known = known.unsqueeze(1)  # as earlier checkpoints have it
        known = self.group.reachable(known.to(weight.device, dtype).contiguous())
        if files is not None:
            known = files.keep(f"{self.group.names[table]}.{name}", known)
        return known


def update_all(updates: Sequence[TableUpdate]) -> None:
    """Update the rows of all groups, or none if one of them is refused.

    Raises:
        NonFiniteGradient: a row has a gradient with nan or inf; all others were updated.
        Exception: as for `TableUpdate.prepare`.
    """
    with DisableTorchFunctionSubclass():  # internal reads of tables
        prepared = [(update, update.prepare()) for update in updates]
        errors = [update.apply(checked) for update, checked in prepared if checked is not None]
    for error in filter(None, errors):
        raise error


def require_state(name: str, columns: tuple[int, ...], weight: Tensor, state: Tensor) -> None:
    """Check the shape of a state array. Without this a kernel could write out of bounds.

    Args:
        name: The optimizer's name for the state.
        columns: Shape of one row's state, (D,) or ().
        weight: The table.
        state: The array.

    Raises:
        ValueError: the array belongs to another table or another formula.
    """
    if len(state) != len(weight) or state.numel() != len(weight) * prod(columns):
        raise ValueError(
            f"optimizer state {name!r} of a table of shape {tuple(weight.shape)} must be "
            f"{(len(weight), *columns)}, got {tuple(state.shape)}; load the state of the same "
            "table and optimizer, or delete it from the optimizer's state to start from zero"
        )
