"""`FusedOptimizer`: a recsys formula as a torch optimizer, for the rows of one module."""

from __future__ import annotations

import weakref
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recsys._support.torch_compat import (
    GLOBAL_STEP_POST_HOOKS,
    GLOBAL_STEP_PRE_HOOKS,
    is_profiler_enabled,
)
from recsys.embeddings.optimizer import require_formula
from recsys.embeddings.update.group_state import require_state
from recsys.embeddings.update.row_updater import RowUpdater
from recsys.embeddings.update.translation import Translation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.optimizer import RowOptimizer

__all__ = ["FusedOptimizer"]


class FusedOptimizer(torch.optim.Optimizer):
    """The optimizer of a module's rows: `param_groups` for schedulers, `step`, `state_dict`.

    The module keeps the optimizer, and the optimizer not the module, so that memory is free as soon
    as the module is deleted. Without its module the optimizer refuses to work. It cannot be copied.

    `with_updater` makes one.
    """

    def __init__(
        self,
        tables: Mapping[str, tuple[nn.Parameter, str]],
        formula: RowOptimizer,
        **settings: object,
    ) -> None:
        require_formula(formula)
        settings |= {field.name: getattr(formula, field.name) for field in fields(formula)}
        super().__init__([table for table, _ in tables.values()], settings)
        self._prefixes = {key: prefix for key, (_, prefix) in tables.items()}
        self._kind = type(formula)
        self._updater: Callable[[], RowUpdater | None] = _no_updater

    @classmethod
    def with_updater(
        cls,
        tables: Mapping[str, tuple[nn.Parameter, str]],
        groups: Sequence[TableGroup],
        formula: RowOptimizer,
        *,
        auto_apply: bool,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
    ) -> tuple[FusedOptimizer, RowUpdater]:
        """Make an optimizer, and the updater of its tables, which the caller keeps.

        Args:
            tables: The tables by `state_dict` key, each with the prefix of its state's names.
            groups: Table groups of the same tables.
            formula: The update rule. Its fields are the settings, which `param_groups` can change.
            auto_apply: Whether rows are updated at the end of each backward pass; `step` then makes
                an update that was refused, or one of a `weight.grad` that was set, and is else not
                needed.
            stochastic_rounding: For bfloat16 tables: whether to round up or down at random, so
                that rows are right on average, or to nearest. A setting in `param_groups`.
            rounding_seed: Seed of that rounding. A setting in `param_groups`.
        """
        optimizer = cls(
            tables, formula, stochastic_rounding=stochastic_rounding, rounding_seed=rounding_seed
        )
        translation = Translation(
            formula=optimizer._formula_of,
            state_names={},
            learning_rate=_read_lr,
            counts_steps=formula.rate_and_eps(1.0, 1) != formula.rate_and_eps(1.0, 2),
        )
        updater = RowUpdater(
            [(0, group) for group in groups],
            optimizer,
            translation,
            auto_apply=auto_apply,
        )
        optimizer._updater = weakref.ref(updater)
        return optimizer, updater

    @property
    def updater(self) -> RowUpdater:
        """What updates the rows; the module keeps it.

        Raises:
            RuntimeError: the module was deleted.
        """
        updater = self._updater()
        if updater is None:
            raise RuntimeError(
                "this optimizer has no tables: its module was deleted; keep the module"
            )
        return updater

    def keep(self, updater: RowUpdater) -> None:
        """Keep an updater that has released its tables, so that their state can be read."""
        self._updater = lambda: updater

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a recsys optimizer cannot be copied or pickled; save its state_dict(), and copy the "
            "model alone: its copy has plain tables"
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the rows with gradients since the last step.

        With `auto_apply`, those of a backward that failed are dropped.

        Args:
            closure: Computes the loss and its gradients again; called first.

        Returns:
            The result of `closure`.

        Raises:
            RuntimeError: as for `updater`.
        """
        # torch's wrapper names every step for a profiler. Without hooks or a profiler it would
        # cost a third of the update of a small mini-batch.
        if (
            closure is not None
            or is_profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or GLOBAL_STEP_PRE_HOOKS
            or GLOBAL_STEP_POST_HOOKS
        ):
            return self._named_step(closure)
        self.updater.step()
        return None

    @torch.optim.Optimizer.profile_hook_step
    def _named_step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.updater.step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # otherwise the base class wraps it

    @property
    def formula(self) -> RowOptimizer:
        """The update rule, by the settings in `param_groups`."""
        return self._formula_of(self.param_groups[0])

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
        self.updater.forget()

    def state_dict(self) -> dict[str, Any]:
        """The state by TorchRec's names, `{table key: {table.momentum1: ...}}`; no copies.

        Raises:
            RuntimeError: as for `updater`.
        """
        self.updater.flush()
        [group] = self.param_groups
        state = {
            key: {self._prefixes[key] + name: value for name, value in self.state[table].items()}
            for key, table in zip(self._prefixes, group["params"], strict=True)
        }
        settings = {name: value for name, value in group.items() if name != "params"}
        return {"state": state, "param_groups": [settings | {"params": list(self._prefixes)}]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a state of the same tables, one table after the other.

        Arrays of the same shape and dtype are copied in place. Tensors of `state_dict` are not
        kept.

        Raises:
            ColdTierError: the state is in files, and the disk has no room for a new array.
            ValueError: a table is missing or unknown, or a state is of another table or another
                formula. Nothing was changed.
            RuntimeError: as for `updater`.
        """
        [group] = self.param_groups
        states, settings = state_dict["state"], state_dict["param_groups"][0]
        if set(states) != set(self._prefixes):
            missing = sorted(set(self._prefixes) - set(states))
            unknown = sorted(set(states) - set(self._prefixes))
            raise ValueError(f"optimizer state: tables {missing} are missing, {unknown} unknown")
        tables = dict(zip(self._prefixes, group["params"], strict=True))
        for key, table in tables.items():
            self._require_state(key, table, states[key])
        loaded = self._without_aliases(tables, states)
        # Write rows and state in slots back now; they are fetched again after the copies.
        tiers = self.updater.tiers()
        for each in tiers:
            each.expose()
        group.update({name: value for name, value in settings.items() if name != "params"})
        has_files = any(each.files is not None for each in tiers)
        for key, table in tables.items():
            known = self.state.get(table, {})
            self.state[table] = {
                name: _copy_state(value, known.get(name)) for name, value in loaded[key].items()
            }
            if has_files:  # move clones to files before the next table's are made
                self.updater.reload_state()
        self.updater.reload_state()

    def _require_state(self, key: str, table: Tensor, state: Mapping[str, Any]) -> None:
        """Check the arrays of a table's state before anything is changed.

        Raises:
            ValueError: names or shapes are not those of the formula.
        """
        formula = self.formula
        sizes = formula.state_sizes(table.shape[1])
        arrays = {
            name.removeprefix(self._prefixes[key]): value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.dim()
        }
        for name, value in arrays.items():
            if len(value) != len(table):
                in_state = self._prefixes[key] + name
                raise ValueError(
                    f"{key}: {in_state}: must have {len(table)} rows, got {len(value)}"
                )
        if arrays and set(arrays) != set(sizes):
            raise ValueError(
                f"optimizer state of {key!r} has the arrays {sorted(arrays)}, and those of "
                f"{self._kind.__name__} are {sorted(sizes) or 'none'}; load the state of the same "
                "optimizer"
            )
        for name, value in arrays.items():
            columns = () if name in formula.row_states else (sizes[name],)
            require_state(name, columns, [table], [value])

    def _without_aliases(
        self, tables: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """The state without prefixes, with clones of arrays that this optimizer has elsewhere.

        `state_dict` makes no copies. If a caller swaps the state of two tables, loading would
        otherwise overwrite an array before reading it.
        """
        held = {
            value.untyped_storage().data_ptr()
            for table in tables.values()
            for value in self.state.get(table, {}).values()
            if isinstance(value, Tensor)
        }
        loaded: dict[str, dict[str, Any]] = {}
        for key, table in tables.items():
            known, prefix = self.state.get(table, {}), self._prefixes[key]
            loaded[key] = {}
            for name, value in states[key].items():
                own = name.removeprefix(prefix)
                is_alias = (
                    isinstance(value, Tensor)
                    and value is not known.get(own)
                    and value.untyped_storage().data_ptr() in held
                )
                loaded[key][own] = value.clone() if is_alias else value
        return loaded

    def _formula_of(self, settings: Mapping[str, Any]) -> RowOptimizer:
        return self._kind(**{field.name: settings[field.name] for field in fields(self._kind)})


def _no_updater() -> None:
    return None


def _read_lr(settings: Mapping[str, Any], step: int) -> float:
    lr: float = settings["lr"]
    return lr


def _copy_state(value: Any, known: Any) -> Any:
    """A copy of a state's value; in place of the known array if shape and dtype are the same."""
    if not isinstance(value, Tensor) or not value.dim() or value is known:
        return value
    if isinstance(known, Tensor) and (known.shape, known.dtype) == (value.shape, value.dtype):
        return known.copy_(value.detach())
    return value.detach().clone()
