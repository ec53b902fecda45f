"""What `accelerate` takes over in a model, and the budget of it; `estimate` asks the same.

Nothing is changed here. All checks that need no memory of the tables are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from recsys.conversion.exchange import find_replaceable, named_tables_in, tables_of
from recsys.conversion.left_alone import find_not_updated, find_unfit
from recsys.conversion.model_plan import plan_of_model
from recsys.conversion.slower import find_slower
from recsys.embeddings.optimizer import RowOptimizer, shown_optimizer
from recsys.embeddings.tiers.budget import NEEDS_OPTIMIZER
from recsys.embeddings.updaters import choose_updaters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from recsys.conversion.accelerated import LeftAlone
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.popularity.profile import PopularityProfile
    from recsys.embeddings.updaters import NamedTable, UpdaterSpec

__all__ = ["ChosenTables", "choose_budget", "choose_tables", "planned_budget", "shared_device"]


class ChosenTables(NamedTuple):
    """What is replaced in a model.

    Attributes:
        found: The modules to replace, with their names in the model.
        tables: Their tables; a table that modules share is listed several times.
        specs: What updates the rows; empty if that is left to the caller.
        unfit: The modules that cannot be replaced.
        not_updated: The modules that no given optimizer updates, or that PyTorch trains faster.
    """

    found: dict[nn.Module, list[str]]
    tables: list[NamedTable]
    specs: list[UpdaterSpec]
    unfit: dict[nn.Module, LeftAlone]
    not_updated: dict[nn.Module, LeftAlone]

    @property
    def updated(self) -> list[NamedTable]:
        """The tables that the specs update, which share a budget."""
        return [
            table
            for table in self.tables
            if any(id(table.weight) in spec.param_groups for spec in self.specs)
        ]


def choose_tables(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | RowOptimizer | None,
    *,
    lazy_adam: bool,
    always: bool,
    may_be_meta: bool = False,
) -> ChosenTables:
    """Choose what is replaced, and what updates it.

    Args:
        model: The model.
        optimizer: As for `accelerate`.
        lazy_adam: As for `accelerate`.
        always: Whether modules that PyTorch trains faster are replaced, too.
        may_be_meta: Whether tables may be on the "meta" device.

    Raises:
        TypeError: `optimizer` has another type.
        ValueError: the model has nothing to replace, or something that cannot be replaced.
    """
    optimizers = _as_tuple(optimizer)
    found = find_replaceable(model)
    tables = named_tables_in(found)
    given = optimizers if isinstance(optimizers, tuple) else ()
    unfit = find_unfit(model, found, tables, given, lazy_adam=lazy_adam, may_be_meta=may_be_meta)
    found, tables = _without(unfit, found, tables)
    specs = choose_updaters(tables, optimizers, lazy_adam=lazy_adam)
    not_updated = find_not_updated(found, specs) if given else {}
    found, tables = _without(not_updated, found, tables)
    slower = {}
    if not always and (given or not specs):
        slower = find_slower(found, specs)
        found, tables = _without(slower, found, tables)
        specs = choose_updaters(tables, optimizers, lazy_adam=lazy_adam)
    return ChosenTables(found, tables, specs, unfit, not_updated | slower)


def choose_budget(
    chosen: ChosenTables,
    budget: int | str | None,
    plan: HotPlan | None,
    profile: PopularityProfile | None,
) -> tuple[int, dict[nn.Parameter, Any]] | None:
    """The bytes of fast memory, and the rows to be pinned; None if all rows are resident.

    Args:
        chosen: The tables that share it.
        budget: As for `accelerate`.
        plan: As for `accelerate`.
        profile: As for `accelerate`.

    Raises:
        BudgetTooSmall, ConfigError, ProfileError: as for `plan_of_model`.
        ValueError: there is no optimizer, or more than one; or tables are on several devices.
    """
    if budget is None and plan is None:
        return None
    if not chosen.specs:
        raise ValueError(NEEDS_OPTIMIZER)
    if len(chosen.specs) > 1:
        raise ValueError(
            f"budget: tables that share it must have one optimizer, got {len(chosen.specs)}; give "
            "only one of them, which leaves the other tables alone, or leave out budget="
        )
    return planned_budget(chosen.updated, chosen.specs[0].formula, budget, plan, profile)


def planned_budget(
    tables: Sequence[NamedTable],
    formula: RowOptimizer,
    budget: int | str | None,
    plan: HotPlan | None,
    profile: PopularityProfile | None,
) -> tuple[int, dict[nn.Parameter, Any]]:
    """The bytes of fast memory, and the rows to be pinned; arguments as for `plan_of_model`.

    Raises:
        BudgetTooSmall, ConfigError, ProfileError: as for `plan_of_model`.
        ValueError: the tables are on several devices.
    """
    planned = plan_of_model(tables, formula, budget, plan, profile)
    shared_device(tables)  # raises for several devices
    return planned


def shared_device(tables: Sequence[NamedTable]) -> torch.device:
    """The device of tables that share a budget.

    Raises:
        ValueError: they are on several devices.
    """
    devices = {table.weight.device: table.name for table in tables}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(
            f"budget: tables that share it must be on one device, got {places}; move the model by "
            ".to(), or leave out budget="
        )
    return next(iter(devices))


def _as_tuple(optimizer: Any) -> tuple[torch.optim.Optimizer, ...] | RowOptimizer | None:
    """Torch optimizers as a tuple; a formula and None as given.

    Raises:
        TypeError: `optimizer` has another type.
    """
    if optimizer is None or isinstance(optimizer, RowOptimizer):
        return optimizer
    several = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if not several:
        raise TypeError("optimizer must not be an empty list; leave it out, or give at least one")
    for each in several:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer, several of these, a formula of "
                f"recsys.embeddings (SGD, Adagrad, ...) or None, got {shown_optimizer(each)}"
            )
    return several


def _without(
    left: Mapping[nn.Module, LeftAlone],
    found: Mapping[nn.Module, list[str]],
    tables: Sequence[NamedTable],
) -> tuple[dict[nn.Module, list[str]], list[NamedTable]]:
    """Modules and tables that are not left alone."""
    rest = {module: names for module, names in found.items() if module not in left}
    keys = {table.key for module, names in rest.items() for table in tables_of(module, names[0])}
    return rest, [table for table in tables if table.key in keys]
