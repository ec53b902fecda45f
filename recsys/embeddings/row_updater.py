"""When rows move, and by what: one update per step.

A `torch.optim.Optimizer` has the settings (`param_groups`) and the state; the rows are moved by
`row_update`, all tables of a dim in one call. The optimizer is a `FusedOptimizer` or one of torch's
that the user has made already; what is read from it is in a `Translation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Variable

from recsys.embeddings.kernels.rounding import TO_NEAREST, table_key
from recsys.embeddings.kernels.row_update import row_update
from recsys.embeddings.memory import empty_rows
from recsys.embeddings.row_space import RowSpace, compute_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import nn

    from recsys.embeddings.kernels.ledger import LedgerEntry
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.table_group import TableGroup

__all__ = ["RowUpdater", "Translation"]

_NO_STATE: dict[str, Any] = {}  # stands for a table that never moved; never written to
_NO_PASS = -1  # what torch says outside of backward


@dataclass(frozen=True, kw_only=True)
class Translation:
    """How an optimizer's `param_groups` and `state` are read.

    Attributes:
        formula: From a param group to how its rows move.
        state_names: Under which name the optimizer keeps each of the formula's state arrays; what
            is not here has the formula's own name.
        learning_rate: Of a param group at a step, the first being 1.
        counts_steps: Whether `state[table]["step"]` is kept. Of rows that are rounded by chance it
            is in any case.
    """

    formula: Callable[[Mapping[str, Any]], RowOptimizer]
    state_names: Mapping[str, str]
    learning_rate: Callable[[Mapping[str, Any], int], float]
    counts_steps: bool


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
            _GroupUpdater(group, optimizer, number, translation) for number, group in groups
        ]
        self._auto_apply, self.goes_along = auto_apply, goes_along
        self._queued_for: int | None = None
        # Tables are no inputs of autograd's: a pooled vector asks for a gradient on behalf of all
        # of them by this one.
        self.asks_gradient = torch.empty(0, requires_grad=True)
        self._asks_node: Any = None
        for _, group in groups:
            group.watch()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which have another graph."""
        return self.__dict__ | {"_asks_node": None}

    def is_asked(self) -> bool:
        """In backward: whether the pass is about tables; `torch.autograd.grad` may not be."""
        if self._asks_node is None:
            self._asks_node = torch.autograd.graph.get_gradient_edge(self.asks_gradient).node
        return bool(torch._C._will_engine_execute_node(self._asks_node))

    def join_pass(self) -> int | None:
        """The backward pass that a lookup is made in, by activation checkpointing; else None.

        Its gradients belong to that pass, although the reentrant kind finds them in one of its own.
        """
        backward_pass: int = torch._C._current_graph_task_id()
        if backward_pass == _NO_PASS:
            return None
        self._begin(backward_pass)
        return backward_pass

    def keep(
        self, entries: Sequence[tuple[TableGroup, LedgerEntry]], joined: int | None = None
    ) -> None:
        """Add to the ledgers what one lookup's backward found.

        Args:
            entries: By group.
            joined: What `join_pass` said when the lookup was made.
        """
        if joined is None or joined != self._queued_for:
            self._begin(torch._C._current_graph_task_id())
        for group, entry in entries:
            group.keep(entry)

    def _begin(self, backward_pass: int) -> None:
        if not self._auto_apply or self._queued_for == backward_pass:
            return
        # What an earlier pass has left behind, ended by an error, is no part of this one. `grad`
        # stays: this pass may have reached tables otherwise already.
        for group in self._groups:
            group.group.ledger.clear()
        self._queued_for = backward_pass
        # Behind the whole pass: another lookup of it may add to the ledger.
        Variable._execution_engine.queue_callback(self.update_rows)

    def update_rows(self) -> None:
        """Move every row that gradients were collected for, once; forgets the gradients."""
        self._queued_for = None
        for group in self._groups:
            group.update_rows()

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

    def _of(self, group: TableGroup) -> _GroupUpdater:
        [found] = [each for each in self._groups if each.group is group]
        return found

    def release(self) -> None:
        """Let go of the tables: they are plain parameters again, collected gradients their grad."""
        for group in self._groups:
            group.group.unwatch()


class _GroupUpdater:
    """One group's part: its state arrays, and its settings as the kernel takes them."""

    def __init__(
        self,
        group: TableGroup,
        optimizer: torch.optim.Optimizer,
        number: int,
        translation: Translation,
    ) -> None:
        self.group = group
        self._optimizer, self._number, self._translation = optimizer, number, translation
        self._weights = group.weights()
        self._states: list[_State] = []
        self._states_of: RowSpace | None = None
        self._numbers: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, whose memory is elsewhere; see `TableGroup`."""
        stand_ins = [each.weight for each in self.group.stand_ins()]
        return self.__dict__ | {"_weights": stand_ins, "_states": [], "_states_of": None}

    def stand_ins(self) -> dict[Tensor, Tensor]:
        """By table: what has its place in copies."""
        self.follow_tables()
        stand_ins = [cast("Tensor", each.weight) for each in self.group.stand_ins()]
        return dict(zip(self._weights, stand_ins, strict=True))

    def state_of(self, table: int) -> dict[str, Any]:
        self.follow_tables()
        known: dict[str, Any] = self._optimizer.state.get(self._weights[table], {})
        return known

    def take_in(self, table: int, state: dict[str, Any]) -> None:
        if state:
            self._optimizer.state[self._weights[table]] = state
        self.follow_tables()

    def update_rows(self) -> None:
        self.follow_tables()
        ledger = self.group.take_ledger()
        if not ledger:
            return
        moved = ledger[0].lookups.distinct_tables
        if len(ledger) > 1:
            moved = sorted({table for entry in ledger for table in entry.lookups.distinct_tables})
        try:
            space, states, formula, rates_T2, keys_T = self._prepared(moved)
        except Exception:
            # Whoever corrects what was wrong and steps again means these gradients.
            self.group.ledger[:0] = ledger
            raise
        row_update(space, states, formula, rates_T2, ledger, keys_T)
        # As an in-place operation of torch's does: who has kept a table for backward will know.
        torch.autograd.graph.increment_version([self._weights[table] for table in moved])

    def _prepared(
        self, moved: Sequence[int]
    ) -> tuple[RowSpace, list[RowSpace], RowOptimizer, NDArray[np.float64], NDArray[Any]]:
        """What `row_update` takes; steps are counted when nothing can be refused any more."""
        settings = self._optimizer.param_groups[self._number]
        formula = self._translation.formula(settings)
        space = self.group.space()
        is_by_chance = space.is_narrow and settings.get("stochastic_rounding", True)
        counts_steps = self._translation.counts_steps or is_by_chance
        by_table, new = [_NO_STATE] * len(self._weights), list[int]()
        if counts_steps or formula.state_sizes(self.group.dim):
            by_table, new = self._state_by_table(moved)
        rates_T2, keys_T, steps = self._rates_and_keys(
            settings, formula, moved if counts_steps else (), by_table, is_by_chance=is_by_chance
        )
        states = self._state_spaces(space, formula, moved, by_table)
        for table, step in zip(moved, steps, strict=False):
            by_table[table]["step"] = step
        for table in new:
            self._optimizer.state[self._weights[table]] = by_table[table]
        return space, states, formula, rates_T2, keys_T

    def _state_by_table(self, moved: Sequence[int]) -> tuple[list[dict[str, Any]], list[int]]:
        """The optimizer's state of every table, and which tables move that had none until now."""
        known = self._optimizer.state
        found = [known.get(weight, _NO_STATE) for weight in self._weights]
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
        """What `row_update` takes for each table, and the steps of those that count them."""
        translation = self._translation
        rates_T2 = np.zeros((len(by_table), 2))
        if not counted:
            rates_T2[:] = formula.rate_and_eps(translation.learning_rate(settings, 1), 1)
            return rates_T2, TO_NEAREST, []
        keys_T = np.zeros(len(by_table), np.uint64) if is_by_chance else TO_NEAREST
        steps: list[Any] = []
        of_step: dict[int, tuple[float, float]] = {}
        for table in counted:
            steps.append(by_table[table].get("step", 0) + 1)
            step = int(steps[-1])  # a tensor where torch keeps one
            if step not in of_step:
                lr = translation.learning_rate(settings, step)
                of_step[step] = formula.rate_and_eps(lr, step)
            rates_T2[table] = of_step[step]
            if is_by_chance:
                seed = settings.get("rounding_seed", 0)
                keys_T[table] = table_key(seed, step, self._number_of(table))
        return rates_T2, keys_T, steps

    def follow_tables(self) -> None:
        """Give settings and state of a table to the one that has taken its place, if any."""
        weights = self.group.weights()
        if all(map(is_, weights, self._weights)):
            return
        for old, new in zip(self._weights, weights, strict=True):
            if new is not old:
                for group in self._optimizer.param_groups:
                    group["params"] = [new if known is old else known for known in group["params"]]
                if old in self._optimizer.state:
                    self._optimizer.state[new] = self._optimizer.state.pop(old)
        self._weights = weights

    def _number_of(self, table: int) -> int:
        """Where the optimizer has a table: no other has the number, however tables are grouped."""
        if not self._numbers:
            known = [weight for group in self._optimizer.param_groups for weight in group["params"]]
            places = {id(weight): number for number, weight in enumerate(known)}
            self._numbers = [places[id(weight)] for weight in self._weights]
        return self._numbers[table]

    def _state_spaces(
        self,
        rows: RowSpace,
        formula: RowOptimizer,
        moved: Sequence[int],
        by_table: Sequence[dict[str, Any]],
    ) -> list[RowSpace]:
        sizes = {
            self._translation.state_names.get(name, name): size
            for name, size in formula.state_sizes(self.group.dim).items()
        }
        if (
            rows is self._states_of
            and [state.name for state in self._states] == list(sizes)
            and all(state.is_of(by_table, moved) for state in self._states)
        ):
            return [state.space for state in self._states]
        self._states = [
            self._make_state(name, size, moved, by_table) for name, size in sizes.items()
        ]
        self._states_of = rows
        return [state.space for state in self._states]

    def _make_state(
        self, name: str, size: int, moved: Sequence[int], by_table: Sequence[dict[str, Any]]
    ) -> _State:
        arrays = [
            self._state_of(weight, by_table[table], name, size, is_needed=table in moved)
            for table, weight in enumerate(self._weights)
        ]
        self._require_sizes(name, size, arrays)
        return _State(name, [state.get(name) for state in by_table], arrays, RowSpace(arrays))

    def _require_sizes(self, name: str, size: int, states: Sequence[Tensor]) -> None:
        """Refuse state that is another table's or another formula's, before a kernel writes there.

        Raises:
            ValueError: it is.
        """
        for weight, state in zip(self._weights, states, strict=True):
            wanted = (len(weight), size) if size > 1 else (len(weight),)
            if state.numel() and (len(state), state.numel()) != (len(weight), len(weight) * size):
                raise ValueError(
                    f"optimizer state {name!r} of a table of shape {tuple(weight.shape)} must be "
                    f"{wanted}, got {tuple(state.shape)}; load the state of the same table and "
                    "optimizer, or delete it from the optimizer's state to begin anew"
                )

    def _state_of(
        self, weight: Tensor, state: dict[str, Any], name: str, size: int, *, is_needed: bool
    ) -> Tensor:
        """A table's state array, (E, size) or, of size 1, (E,).

        Made where there is none, of a table that moves: as with torch, the others' state is made
        when they do.
        """
        columns = (size,) if size > 1 else ()
        dtype = compute_dtype(weight.dtype)
        known: Tensor | None = state.get(name)
        if known is None:
            if not is_needed:
                return weight.new_empty(0, *columns, dtype=dtype)
            state[name] = known = empty_rows(len(weight), *columns, dtype=dtype).zero_()
        elif known.dtype != dtype or not known.is_contiguous():
            state[name] = known = known.to(dtype).contiguous()
        return known


class _State(NamedTuple):
    """One state array of every table, as a row space."""

    name: str
    found: list[Tensor | None]  # what the optimizer has; None of a table that never moved
    arrays: list[Tensor]  # nothing in place of None
    space: RowSpace

    def is_of(self, by_table: Sequence[dict[str, Any]], moved: Sequence[int]) -> bool:
        """Whether the optimizer has these very arrays, and one of each table that moves."""
        found = [state.get(self.name) for state in by_table]
        return (
            all(map(is_, found, self.found))
            and all(found[table] is not None for table in moved)
            and self.space.holds(self.arrays)
        )
