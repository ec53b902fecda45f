"""The update of one table group: settings and state read from an optimizer, rows moved by a kernel.

A `torch.optim.Optimizer` has the settings (`param_groups`) and the state; how they are read is in a
`Translation`.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from recsys.embeddings.budget import SpaceSize
from recsys.embeddings.exchanged_tables import heirs, require_own
from recsys.embeddings.interrupts import interrupts_held_back
from recsys.embeddings.kernels.ledger import tables_in
from recsys.embeddings.kernels.rounding import TO_NEAREST, table_key
from recsys.embeddings.memory import empty_rows
from recsys.embeddings.row_space import compute_dtype
from recsys.embeddings.state_arrays import StateArrays, require_state
from recsys.embeddings.table_parameter import move_table, plain_grad
from recsys.embeddings.tiers import Tiers
from recsys.embeddings.translation import SettingsReader
from recsys.embeddings.update import Update
from recsys.errors import BudgetTooSmall, ColdTierError, NonFiniteGradient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import nn

    from recsys.embeddings.cold_files import ColdFiles
    from recsys.embeddings.kernels.ledger import LedgerEntry
    from recsys.embeddings.kernels.row_update import BadRow
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.row_space import RowSpace
    from recsys.embeddings.table_group import TableGroup
    from recsys.embeddings.translation import Translation

__all__ = ["GroupUpdater"]


_NO_STATE: dict[str, Any] = {}  # stands for a table that never moved; never written to


class GroupUpdater:
    """Moves the rows of one table group.

    Args:
        group: Has the tables and their ledger.
        optimizer: Has their settings and state.
        number: Of the param group that they are in.
        translation: How settings and state are read.

    Attributes:
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
        self._weights: Sequence[nn.Parameter] = group.weights()
        self._states: list[StateArrays] = []
        self._states_of: RowSpace | None = None
        self._numbers: list[int] = []
        self._state_then: list[Any] = []  # all that the optimizer had when it was last looked into
        self._found_then: list[dict[str, Any]] = []  # of these tables
        self._settings = SettingsReader(translation, group.dim, len(self._weights))
        self.least_slots = 1
        self._files: ColdFiles | None = None
        self._names: list[str] = []  # of the tables there

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, whose memory is elsewhere; see `TableGroup`."""
        stand_ins = [each.weight for each in self.group.stand_ins()]
        own = {"_weights": stand_ins, "_states": [], "_states_of": None, "_files": None}
        own |= {"_state_then": [], "_found_then": []}
        return self.__dict__ | own

    def stand_ins(self) -> dict[Tensor, Tensor]:
        """By table: what has its place in copies."""
        self.follow_tables()
        stand_ins = [cast("Tensor", each.weight) for each in self.group.stand_ins()]
        return dict(zip(self._weights, stand_ins, strict=True))

    def state_of(self, table: int) -> dict[str, Any]:
        """A table's state, for the module that takes it along."""
        self.follow_tables()
        known: dict[str, Any] = self._optimizer.state.get(self._weights[table], {})
        return known

    def take_in(self, table: int, state: dict[str, Any]) -> None:
        """Keep the state that a module which was copied along brings."""
        if state:
            self._optimizer.state[self._weights[table]] = state
        self.follow_tables()
        self.follow_state()

    def prepare(self) -> Update | None:
        """Take what was collected, and make sure that nothing speaks against the update of rows.

        Returns:
            For `update_rows`; None where nothing was collected.

        Raises:
            BudgetTooSmall: there are too few slots for the rows.
            ConflictingWrite: a table, or its state, was written to by others meanwhile.
            ValueError: settings or state are such that rows cannot be updated by them. After each
                of these, everything is still collected.
        """
        self.group.close_calls()
        weights = self.group.follow()
        self.follow_tables(weights)
        ledger = self.group.take_ledger(weights)
        if not ledger:
            return None
        try:
            return self._prepared(tables_in(ledger), ledger)
        except Exception:
            self.give_back(ledger)
            raise

    def give_back(self, ledger: Sequence[LedgerEntry]) -> None:
        """Collect again what `prepare` has taken: after a correction, the next step means it."""
        self.group.ledger[:0] = ledger

    def update_rows(self, update: Update) -> NonFiniteGradient | None:
        """Update every row that gradients were collected for, once.

        Returns:
            What to raise after the step, where a row was not updated.
        """
        for table, step in zip(update.moved, update.steps, strict=False):
            update.by_table[table]["step"] = step
        for table in update.new:
            self._optimizer.state[self._weights[table]] = update.by_table[table]
        row_update, tiers = self.group.kernels.row_update, self.group.tiers
        changed = self._weights
        if len(update.moved) < len(changed):
            changed = [self._weights[table] for table in update.moved]
        # As an in-place operation of torch's raises versions: who has kept a table for backward
        # will know.
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
                tiers.mark_updated(update.ledger, update.moved)
        return None if bad is None else self._bad_gradient(bad)

    def _bad_gradient(self, bad: BadRow) -> NonFiniteGradient:
        return NonFiniteGradient(
            f"table {self.group.names[bad.table]!r}: the gradient of row {bad.row} has nan or inf "
            "in it. Rows with such a gradient were not updated, all others were; find what "
            "computes it (a learning rate too high, log(0), float16 without GradScaler)"
        )

    def space_size(self) -> SpaceSize:
        """What there is to keep in slots."""
        num_rows = sum(len(weight) for weight in self._weights)
        return SpaceSize(num_rows, self.group.dim, self._weights[0].dtype, self._state_sizes())

    def tier(self, num_slots: int, pinned: NDArray[np.int32], device: torch.device | None) -> None:
        """Keep rows in as many slots from now on, some of them always.

        Tables on a device wait in the host's memory from now on, and so does their state.

        Args:
            num_slots: S.
            pinned: Rows with a slot of their own, counted over all tables.
            device: Where slots are to be; None for where the tables are.
        """
        sizes = [len(weight) for weight in self._weights]
        dtype = self._weights[0].dtype
        states = self._state_sizes()
        device = self._weights[0].device if device is None else device
        self.move_tables(torch.device("cpu"))
        self.group.keep_in(
            Tiers(
                self.group.names,
                sizes,
                self.group.dim,
                dtype,
                states,
                num_slots,
                pinned,
                device,
                self._files,
            )
        )
        self.follow_state()
        self.group.watch()

    def move_tables(self, device: torch.device) -> None:
        """Have the tables elsewhere from now on; state follows in the next step."""
        for weight in self._weights:
            move_table(weight, device)
        self.group.forget_space()

    def move_slots(self, device: torch.device) -> None:
        """Have the slots on another device from now on.

        Raises:
            ValueError: slots are in use.
        """
        tiers = self.group.tiers
        assert tiers is not None
        if tiers.device == device:
            return
        if num_claimed := tiers.residency.num_claimed:
            raise ValueError(
                f"rows in fast memory on '{tiers.device}' cannot be moved to '{device}' while "
                f"{num_claimed} of them are in use; let go of what was computed before (its loss "
                "and outputs)"
            )
        tiers.move_to(device)
        self.group.forget_space()

    def use_files(self, files: ColdFiles, names: Mapping[nn.Parameter, str]) -> None:
        """Have state in files from now on, as tables are; what is there goes on.

        Args:
            files: Have the tables.
            names: Of all tables, there.

        Raises:
            ColdTierError: there is state of another optimizer.
        """
        self._files = files
        self._names = [names[weight] for weight in self._weights]
        wanted = list(self._state_sizes())
        for weight, name in zip(self._weights, self._names, strict=True):
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
        for weight, name in zip(self._weights, self._names, strict=True):
            state = self._optimizer.state.get(weight, _NO_STATE)
            arrays = self._files.state_names(name) if self._files is not None else []
            found[name] = {
                key: value if isinstance(value, int) else float(value)
                for key, value in state.items()
                if key not in arrays
            }
        return found

    def growth(self, num_slots: int) -> int:
        """How many slots more than now so many are."""
        assert self.group.tiers is not None
        return num_slots - self.group.tiers.hot.num_slots

    def resize(self, num_slots: int) -> None:
        """Go on with another number of slots.

        Raises:
            BudgetTooSmall: slots are in use.
        """
        tiers = self.group.tiers
        assert tiers is not None
        if tiers.hot.num_slots == num_slots:
            return
        if num_claimed := tiers.residency.num_claimed:
            raise BudgetTooSmall(
                f"budget: another mini-batch needs the memory of rows of embedding_dim "
                f"{self.group.dim}, and {num_claimed} of them are in use; give a larger budget, or "
                "let go of what was computed before (its loss and outputs)"
            )
        tiers.resize(num_slots)

    def follow_state(self) -> None:
        """Find state that others have put into the optimizer."""
        if self.group.tiers is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            self.follow_tables()
            by_table, _ = self._state_by_table(())
            self._states_of = None
            self._state_spaces(self.group.space(), self._state_sizes(), (), by_table)

    def _state_sizes(self) -> dict[str, int]:
        settings, _ = self._settings.read(self._optimizer.param_groups[self._number])
        return settings.state_sizes

    def _prepared(self, moved: Sequence[int], ledger: Sequence[LedgerEntry]) -> Update:
        """What `update_rows` takes; no step is counted yet."""
        settings = self._optimizer.param_groups[self._number]
        (formula, sizes, _, _), rates_T2 = self._settings.read(settings)
        space = self.group.space(weights=self._weights)
        for entry in ledger:
            entry.require_rows_in(space.tables)
        if self.group.tiers is not None:
            self.group.tiers.reload_if_tables_changed(space)
        is_by_chance = space.is_narrow and settings.get("stochastic_rounding", True)
        counts_steps = self._translation.counts_steps or is_by_chance
        if not (counts_steps or sizes):
            states = self._state_spaces(space, sizes, moved, ()) if self._states else []
            return Update(ledger, moved, space, states, formula, rates_T2, TO_NEAREST)
        by_table, new = self._state_by_table(moved)
        keys_T: NDArray[Any] = TO_NEAREST
        steps: list[Any] = []
        if counts_steps:
            rates_T2, keys_T, steps = self._rates_and_keys(
                settings, formula, moved, by_table, is_by_chance=is_by_chance
            )
        states = self._state_spaces(space, sizes, moved, by_table)
        return Update(ledger, moved, space, states, formula, rates_T2, keys_T, by_table, steps, new)

    def _state_by_table(self, moved: Sequence[int]) -> tuple[list[dict[str, Any]], list[int]]:
        """The optimizer's state of every table, and which tables move that had none until now."""
        known = self._optimizer.state
        # A table hashes itself in Python: who knows what is there need not ask for each.
        now = [self._weights, *known.keys(), *known.values()]
        if len(now) != len(self._state_then) or not all(map(is_, now, self._state_then)):
            self._state_then = now
            self._found_then = [known.get(weight, _NO_STATE) for weight in self._weights]
        found = list(self._found_then)
        new = [table for table in moved if found[table] is _NO_STATE]
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

    def follow_tables(self, weights: Sequence[nn.Parameter] | None = None) -> None:
        """Give settings and state of a table to the one that has taken its place, if any.

        Args:
            weights: What the group has just said that the tables are; None to ask it.
        """
        weights = weights or self.group.weights()
        if weights is self._weights:
            return
        both = zip(self._weights, weights, strict=True)
        if taken := {old: new for old, new in both if new is not old}:
            require_own(weights, self.group)
            for group in self._optimizer.param_groups:
                group["params"] = [taken.get(known, known) for known in group["params"]]
            states = self._optimizer.state
            for old, new in heirs(self._weights, weights):
                if old in states:
                    states[new] = states.pop(old)
        self._weights = weights

    def require_param_group(self) -> None:
        """Refuse an optimizer that has put a table that is to move elsewhere, or away.

        Raises:
            ValueError: it has.
        """
        groups, number = self._optimizer.param_groups, self._number
        known = set(map(id, groups[number]["params"] if number < len(groups) else ()))
        waiting = tables_in(self.group.ledger)
        for table, weight in enumerate(self._weights):
            is_to_move = table in waiting or plain_grad(weight) is not None
            if is_to_move and id(weight) not in known:
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
                for table, weight in enumerate(self._weights)
            ]
        return self._numbers[table]

    def _state_spaces(
        self,
        rows: RowSpace,
        sizes: Mapping[str, int],
        moved: Sequence[int],
        by_table: Sequence[dict[str, Any]],
    ) -> list[RowSpace]:
        if (
            rows is self._states_of
            and [state.name for state in self._states] == list(sizes)
            and all(state.is_of(by_table, moved) for state in self._states)
        ):
            return [state.space for state in self._states]
        if self.group.tiers is not None:
            # A file that is begun anew is neither written to nor read by transfers of before.
            self.group.tiers.flush()
            self.group.tiers.residency.settle()
        before, self._states = (
            self._states,
            [self._make_state(name, size, moved, by_table) for name, size in sizes.items()],
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
        self, name: str, size: int, moved: Sequence[int], by_table: Sequence[dict[str, Any]]
    ) -> StateArrays:
        settings, _ = self._settings.read(self._optimizer.param_groups[self._number])
        columns = () if name in settings.row_states else (size,)
        arrays = [
            self._state_of(table, by_table[table], name, columns, is_needed=table in moved)
            for table in range(len(self._weights))
        ]
        require_state(name, columns, self._weights, arrays)
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

        Made where there is none, of a table that moves: as with torch, the others' state is made
        when they do.
        """
        weight = self._weights[table]
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
