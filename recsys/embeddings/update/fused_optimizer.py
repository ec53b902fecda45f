"""`FusedOptimizer`: a recsys formula as a torch optimizer, for the rows of one module."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recsys._support.torch_compat import (
    GLOBAL_STEP_POST_HOOKS,
    GLOBAL_STEP_PRE_HOOKS,
    is_profiler_enabled,
)
from recsys.embeddings.optimizer import require_formula
from recsys.embeddings.rows.grads import drop_grads
from recsys.embeddings.tiers.write_back import write_back
from recsys.embeddings.update.translation import Translation
from recsys.embeddings.update.update_rows import TableUpdate, require_state, update_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.rows.tables import TableGroup

__all__ = ["FusedOptimizer"]


class FusedOptimizer(torch.optim.Optimizer):
    """The optimizer of a module's rows: `param_groups` for schedulers, `step`, `state_dict`.

    Args:
        tables: The tables by `state_dict` key, each with the prefix of its state's names.
        groups: Table groups of the same tables.
        formula: The update rule. Its fields are the settings, which `param_groups` can change.
        stochastic_rounding: For bfloat16 tables: whether to round up or down at random, so that
            rows are right on average, or to nearest. A setting in `param_groups`.
        rounding_seed: Seed of that rounding. A setting in `param_groups`.

    Attributes:
        updates: Those of the groups.
        steps_in_backward: Whether rows are updated at the end of each backward.
        num_blocks: How often `update_once` was entered.

    Raises:
        TypeError: the optimizer is not a formula.
    """

    def __init__(
        self,
        tables: Mapping[str, tuple[nn.Parameter, str]],
        groups: Sequence[TableGroup],
        formula: RowOptimizer,
        *,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
    ) -> None:
        require_formula(formula)
        settings: dict[str, Any] = {
            field.name: getattr(formula, field.name) for field in fields(formula)
        }
        settings |= {"stochastic_rounding": stochastic_rounding, "rounding_seed": rounding_seed}
        super().__init__([table for table, _ in tables.values()], settings)
        self._prefixes = {key: prefix for key, (_, prefix) in tables.items()}
        self._kind = type(formula)
        self._rule = Translation(
            formula=partial(_formula_of, type(formula)),
            learning_rate=_read_lr,
            counts_steps=formula.rate_and_eps(1.0, 1) != formula.rate_and_eps(1.0, 2),
            state_names={},
        )
        self.steps_in_backward, self._is_deferred, self.num_blocks = True, False, 0
        self.updates = [TableUpdate(group, self, 0, self._rule) for group in groups]

    def begin(self, tables: Sequence[nn.Parameter], groups: Sequence[TableGroup]) -> None:
        """Use Parameters that have replaced those without memory, in the same order."""
        for before, table in zip(self.param_groups[0]["params"], tables, strict=True):
            if before in self.state:
                self.state[table] = self.state.pop(before)
        self.param_groups[0]["params"] = list(tables)
        self.updates = [TableUpdate(group, self, 0, self._rule) for group in groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the rows with gradients since the last step.

        Args:
            closure: Computes the loss and its gradients again; called first.

        Returns:
            The result of `closure`.

        Raises:
            NonFiniteGradient: a row has a gradient with nan or inf; all others were updated (on
                CUDA none).
            RuntimeError: a gradient was overwritten since its backward, or a table replaced.
            ValueError: settings or state do not fit the tables or the formula.
        """
        # torch's wrapper names every step for a profiler. Without hooks or a profiler it would
        # cost a tenth of the step of a small mini-batch.
        if (
            closure is not None
            or is_profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or GLOBAL_STEP_PRE_HOOKS
            or GLOBAL_STEP_POST_HOOKS
        ):
            return self._named_step(closure)
        update_all(self.updates)
        return None

    step.hooked = True  # type: ignore[attr-defined]  # otherwise the base class wraps it

    @torch.optim.Optimizer.profile_hook_step
    def _named_step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update_all(self.updates)
        return loss

    def end_pass(self) -> None:
        """Update rows at the end of a backward pass, unless `update_once` does so later.

        An update that is refused is not made later: the next pass is one of its own.
        """
        if self._is_deferred:
            return
        try:
            self.step()
        except BaseException:
            self.zero_grad()
            raise

    def drop_failed_pass(self, block: int) -> None:
        """Drop the gradients of a backward pass that failed.

        Args:
            block: `num_blocks` when it began.

        Raises:
            RuntimeError: it was one of several passes with one update.
        """
        self.zero_grad()
        if self._is_deferred and block == self.num_blocks:
            raise RuntimeError(
                "a backward pass failed before this one, and both are parts of one update; let "
                "its error end the block of update_once"
            )

    @contextmanager
    def update_once(self) -> Iterator[None]:
        """Update rows once for all backward passes inside; after an error not at all."""
        if self.steps_in_backward:
            self.zero_grad()  # a pass before may have failed
        self._is_deferred, self.num_blocks = True, self.num_blocks + 1
        try:
            yield
        except BaseException:
            self.zero_grad()
            raise
        finally:
            self._is_deferred = False
        self.step()

    @property
    def formula(self) -> RowOptimizer:
        """The update rule, by the settings in `param_groups`."""
        return _formula_of(self._kind, self.param_groups[0])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse other groups: the tables are those of the module.

        Raises:
            ValueError: always, after construction.
        """
        if self.param_groups:
            raise ValueError(
                "add_param_group: this optimizer has the tables of one module and no others; give "
                "the parameters to another optimizer"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients collected since the last step."""
        for update in self.updates:
            drop_grads(update.group)

    def state_dict(self) -> dict[str, Any]:
        """The state by TorchRec's names, `{table key: {table.momentum1: ...}}`; no copies."""
        for update in self.updates:
            write_back(update.group)
        [group] = self.param_groups
        state = {
            key: {self._prefixes[key] + name: value for name, value in self.state[table].items()}
            for key, table in zip(self._prefixes, group["params"], strict=True)
            if table in self.state
        }
        settings = {name: value for name, value in group.items() if name != "params"}
        return {"state": state, "param_groups": [settings | {"params": list(self._prefixes)}]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a state of the same tables; arrays of the same shape and dtype in place.

        Raises:
            ValueError: a table is unknown, or a state is of another table or another formula.
                Nothing was changed.
        """
        [group] = self.param_groups
        states, settings = state_dict["state"], state_dict["param_groups"][0]
        tables = dict(zip(self._prefixes, group["params"], strict=True))
        unknown = sorted(set(states) - set(tables))
        if unknown:
            raise ValueError(f"optimizer state: tables {unknown} are unknown, of {list(tables)}")
        loaded = {}
        for key, table in tables.items():
            prefix = self._prefixes[key]
            own = {name.removeprefix(prefix): value for name, value in states.get(key, {}).items()}
            self._require_state(key, table, own)
            # Clones, because `state_dict` makes no copies: the state of two tables may be swapped.
            # A checkpoint has written to the arrays themselves.
            known = self.state.get(table, {})
            loaded[table] = {
                name: value if value is known.get(name) else copy.deepcopy(value)
                for name, value in own.items()
            }
        for update in self.updates:
            if update.group.fetcher is not None:
                update.group.fetcher.empty_slots(is_written_back=True)
        group.update({name: value for name, value in settings.items() if name != "params"})
        for table, own in loaded.items():
            known = self.state.pop(table, {})
            for name, value in own.items():
                before = known.get(name)
                is_array = isinstance(value, Tensor) and isinstance(before, Tensor)
                is_other = is_array and value is not before
                if is_other and (before.shape, before.dtype) == (value.shape, value.dtype):
                    own[name] = before.copy_(value)
            if own:
                self.state[table] = own

    def _require_state(self, key: str, table: Tensor, state: Mapping[str, Any]) -> None:
        """Check the arrays of a table's state before anything is changed.

        Raises:
            ValueError: names or shapes are not those of the formula.
        """
        formula = self.formula
        sizes = formula.state_sizes(table.shape[1])
        arrays = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.dim()
        }
        if arrays and set(arrays) != set(sizes):
            raise ValueError(
                f"optimizer state of {key!r} has the arrays {sorted(arrays)}, and those of "
                f"{self._kind.__name__} are {sorted(sizes) or 'none'}; load the state of the same "
                "optimizer"
            )
        for name, value in arrays.items():
            columns = () if name in formula.row_states else (sizes[name],)
            require_state(f"{key}: {name}", columns, table, value)


def _formula_of(kind: type[RowOptimizer], settings: Mapping[str, Any]) -> RowOptimizer:
    return kind(**{field.name: settings[field.name] for field in fields(kind)})


def _read_lr(settings: Mapping[str, Any], step: int) -> float:
    lr: float = settings["lr"]
    return lr
