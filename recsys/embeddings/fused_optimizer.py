"""`FusedOptimizer`: `torch.optim`'s face of a formula of ours, for the rows of one module."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from recsys.embeddings.row_updater import RowUpdater
from recsys.embeddings.translation import Translation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.table_group import TableGroup

__all__ = ["FusedOptimizer"]


class FusedOptimizer(torch.optim.Optimizer):
    """The optimizer of a module's rows: `param_groups` for schedulers, `step`, `state_dict`.

    Copied or pickled, it has the tables and the state of those modules that are copied with it.

    Args:
        tables: By `state_dict` key of the table: the table, and what its state's names begin with.
        groups: The tables again, as they are updated.
        formula: How rows move. Its fields are the settings, to be changed in `param_groups`.
        auto_apply: Whether rows move at the end of each backward pass; `step` then has nothing
            left to do.
        stochastic_rounding: Of tables of 16 bits: whether rows are rounded so that they are right
            on average; else to nearest. Kept in `param_groups`, as is the next.
        rounding_seed: What that rounding depends on, beside the place of a number and the step.
    """

    def __init__(
        self,
        tables: Mapping[str, tuple[nn.Parameter, str]],
        groups: Sequence[TableGroup],
        formula: RowOptimizer,
        *,
        auto_apply: bool,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
    ) -> None:
        settings = {field.name: getattr(formula, field.name) for field in fields(formula)}
        settings |= {"stochastic_rounding": stochastic_rounding, "rounding_seed": rounding_seed}
        super().__init__([table for table, _ in tables.values()], settings)
        self._prefixes = {key: prefix for key, (_, prefix) in tables.items()}
        self._kind = type(formula)
        translation = Translation(
            formula=self._formula_of,
            state_names={},
            learning_rate=_read_lr,
            counts_steps=formula.rate_and_eps(1.0, 1) != formula.rate_and_eps(1.0, 2),
        )
        self.updater = RowUpdater(
            [(0, group) for group in groups],
            self,
            translation,
            auto_apply=auto_apply,
            goes_along=True,
        )

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: modules bring their tables and the state of these themselves."""
        own = {name: self.__dict__[name] for name in ("_prefixes", "_kind", "updater")}
        stand_ins = self.updater.stand_ins()
        [group] = self.param_groups
        group = group | {"params": [stand_ins[table] for table in group["params"]]}
        return super().__getstate__() | {"state": defaultdict(dict), "param_groups": [group]} | own

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move the rows looked up since the last step.

        Args:
            closure: Computes the loss and its gradients anew; called first.

        Returns:
            What `closure` returned.
        """
        # Naming every step to a profiler that is not there would take a third as long as moving
        # the rows of a small mini-batch.
        if closure is None and not self._is_watched():
            self.updater.update_rows()
            return None
        return self._named_step(closure)

    def _is_watched(self) -> bool:
        """Whether a profiler or a hook of step is to be told of it."""
        return bool(
            _profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )

    @torch.optim.Optimizer.profile_hook_step
    def _named_step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.updater.update_rows()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # or the base class would wrap it

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The tables are those of the module; there is no other group.

        Raises:
            ValueError: always, after construction.
        """
        if self.param_groups:
            raise ValueError(
                "add_param_group: this optimizer has the tables of one module and no others; give "
                "the parameters to an optimizer of their own"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients collected since the last step."""
        self.updater.forget()

    def state_dict(self) -> dict[str, Any]:
        """The state by TorchRec's names, `{table key: {table.momentum1: ...}}`; no copies."""
        self.updater.follow_tables()
        self.updater.flush()
        [group] = self.param_groups
        state = {
            key: {self._prefixes[key] + name: value for name, value in self.state[table].items()}
            for key, table in zip(self._prefixes, group["params"], strict=True)
        }
        settings = {name: value for name, value in group.items() if name != "params"}
        return {"state": state, "param_groups": [settings | {"params": list(self._prefixes)}]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state of the same tables.

        Raises:
            ValueError: a table is missing or unknown, or a state's size is another.
        """
        self.updater.follow_tables()
        self.updater.flush()
        [group] = self.param_groups
        states = state_dict["state"]
        if set(states) != set(self._prefixes):
            missing = sorted(set(self._prefixes) - set(states))
            unknown = sorted(set(states) - set(self._prefixes))
            raise ValueError(f"optimizer state: tables {missing} are missing, {unknown} unknown")
        loaded: dict[Tensor, dict[str, Any]] = {}
        for key, table in zip(self._prefixes, group["params"], strict=True):
            prefix = self._prefixes[key]
            loaded[table] = {
                name.removeprefix(prefix): _copy_state(f"{key}: {name}", value, len(table))
                for name, value in states[key].items()
            }
        self.state.update(loaded)
        for name, value in state_dict["param_groups"][0].items():
            if name != "params":
                group[name] = value
        self.updater.follow_state()

    def _formula_of(self, settings: Mapping[str, Any]) -> RowOptimizer:
        return self._kind(**{field.name: settings[field.name] for field in fields(self._kind)})


def _read_lr(settings: Mapping[str, Any], step: int) -> float:
    lr: float = settings["lr"]
    return lr


def _copy_state(place: str, value: Any, num_rows: int) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if len(value) != num_rows:
        raise ValueError(f"{place}: must have {num_rows} rows, got {len(value)}")
    return value.clone()
