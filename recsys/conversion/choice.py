"""What `accelerate` takes over in a model, what it leaves and why, and the budget.

Nothing is changed here. All checks that need no memory of the tables are made. `estimate` asks the
same.

Modules that plain PyTorch trains faster are left to it. The limits are measured on one CPU core,
with one linear layer after tables of 16 columns and 128 samples a step, which gain least. Ratios
are those of a plain step to one of recsys.

    SGD, sparse gradients         1 table 0.6, 8 tables 0.8, 20 tables 0.9 to 1.0, 26 tables 1.0
    SGD, dense gradients          0.6 to 0.9 up to 640,000 numbers in all tables, 4 for 1,600,000
    Adagrad, sparse gradients     1 table 0.9, 2 tables 1.0, 4 tables 1.2
    Adagrad, dense gradients      0.6 to 0.7 up to 16,000 numbers in all tables, 1.6 for 160,000
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from recsys._support.torch_compat import has_gradient_hooks
from recsys.conversion.exchange import (
    find_of_other_classes,
    find_replaceable,
    named_tables_in,
    tables_of,
)
from recsys.conversion.model_plan import plan_of_model
from recsys.embeddings.lookup.one_table.bag_lookup import require_supported
from recsys.embeddings.optimizer import RowOptimizer, shown_optimizer
from recsys.embeddings.rows.table_parameter import require_no_updater
from recsys.embeddings.tiers.budget import NEEDS_OPTIMIZER
from recsys.embeddings.updaters import choose_updaters, require_translatable, require_updatable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.embeddings.popularity.counts import PopularityProfile
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.updaters import NamedTable, UpdaterSpec

__all__ = ["ChosenTables", "choose_budget", "choose_tables"]

# From so many tables with sparse gradients, or numbers in those with dense ones, steps are shorter.
_WITHOUT_STATE = 24, 1 << 20
_WITH_STATE = 2, 1 << 17
_BY_LAUNCHES = (
    "on CUDA a launch for each module takes longer than in PyTorch; one collection looks up all "
    "tables at once"
)


class ChosenTables(NamedTuple):
    """What is replaced in a model.

    Attributes:
        found: The modules to replace, with their names in the model.
        tables: Their tables; a table that modules share is listed several times.
        specs: What updates the rows; empty if that is left to the caller.
        unfit: The modules that cannot be replaced, and why.
        not_updated: The modules that no given optimizer updates, or that PyTorch trains faster.
        left: The names of all modules that are left.
    """

    found: dict[nn.Module, list[str]]
    tables: list[NamedTable]
    specs: list[UpdaterSpec]
    unfit: dict[nn.Module, str]
    not_updated: dict[nn.Module, str]
    left: dict[nn.Module, list[str]]

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
    others = find_of_other_classes(model)
    names = found | others
    tables = named_tables_in(found)
    given = optimizers if isinstance(optimizers, tuple) else ()
    unfit = _find_unfit(found, tables, given, lazy_adam=lazy_adam, may_be_meta=may_be_meta)
    for module in others:
        kind = f"{type(module).__name__} is a subclass unknown to recsys"
        unfit[module] = f"{kind}, which may compute other values than torch's"
    found, tables = _without(unfit, found, tables)
    specs = choose_updaters(tables, optimizers, lazy_adam=lazy_adam)
    not_updated = _find_not_updated(found, specs) if given else {}
    found, tables = _without(not_updated, found, tables)
    if not always and (given or not specs):
        slower = _find_slower(found, specs)
        not_updated |= slower
        found, tables = _without(slower, found, tables)
        specs = choose_updaters(tables, optimizers, lazy_adam=lazy_adam)
    left = {module: names[module] for module in unfit | not_updated}
    return ChosenTables(found, tables, specs, unfit, not_updated, left)


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
        ValueError: there is no optimizer, or more than one; or as for `plan_of_model`.
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
    return plan_of_model(chosen.updated, chosen.specs[0].formula, budget, plan, profile)


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
    left: Mapping[nn.Module, str],
    found: Mapping[nn.Module, list[str]],
    tables: Sequence[NamedTable],
) -> tuple[dict[nn.Module, list[str]], list[NamedTable]]:
    """Modules and tables that are not left alone."""
    rest = {module: names for module, names in found.items() if module not in left}
    keys = {table.key for module, names in rest.items() for table in tables_of(module, names[0])}
    return rest, [table for table in tables if table.key in keys]


def _find_unfit(
    found: Mapping[nn.Module, list[str]],
    tables: Sequence[NamedTable],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    lazy_adam: bool,
    may_be_meta: bool,
) -> dict[nn.Module, str]:
    """Find the modules that cannot be replaced.

    Args:
        found: Modules of a class that can be replaced, with their names.
        tables: All tables of these modules.
        optimizers: The torch optimizers that were given.
        lazy_adam: As for `accelerate`.
        may_be_meta: As for `require_updatable`.

    Raises:
        ValueError: no module of `found` can be replaced; or recsys already updates a table.
    """
    left, errors = {}, []
    for module, names in found.items():
        keys = {table.key for table in tables_of(module, names[0])}
        its_tables = [table for table in tables if table.key in keys]
        for table in its_tables:
            require_no_updater(table.name, table.weight)
        try:
            _require_plain_instance(module, names[0])
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                require_supported(module)
            for table in its_tables:
                require_updatable(table, may_be_meta=may_be_meta)
                require_translatable(table, optimizers, lazy_adam=lazy_adam)
        except ValueError as error:
            errors.append(error)
            left[module] = str(error)
    if found and len(left) == len(found):
        raise errors[0]
    return left


def _find_not_updated(
    found: Mapping[nn.Module, list[str]], specs: Sequence[UpdaterSpec]
) -> dict[nn.Module, str]:
    """Find the modules whose weights require a gradient but are in no given optimizer.

    Args:
        found: Modules that can be replaced, with their names.
        specs: The updaters of the given optimizers.
    """
    left, reason = {}, "no given optimizer has its tables in a param group"
    for module, names in found.items():
        weights = [table.weight for table in tables_of(module, names[0])]
        is_updated = any(id(each) in spec.param_groups for each in weights for spec in specs)
        if not is_updated and any(each.requires_grad for each in weights):
            left[module] = reason
    return left


def _require_plain_instance(module: nn.Module, name: str) -> None:
    """Refuse a module that has more than its class defines, or no table.

    Raises:
        ValueError: the module has no table; or its own forward, buffers, parameters or modules; or
            a hook on a table.
    """
    tables = list(tables_of(module, name))
    if not tables:
        raise ValueError(f"{name} has no tables")
    own = ["forward"] if "forward" in module.__dict__ else []
    own += [*module._buffers, *(each for each in module._parameters if each != "weight")]
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        own += module._modules
    if own:
        raise ValueError(f"{name} has its own {own[0]!r}, which its replacement would not have")
    for table in tables:
        if has_gradient_hooks(table.weight):
            raise ValueError(
                f"table {table.name!r} has a hook for its gradient, which is not called when "
                "recsys updates the rows; remove the hook by its handle, and with a torch "
                "optimizer change weight.grad between backward and step instead"
            )


def _find_slower(
    found: Mapping[nn.Module, list[str]], specs: Sequence[UpdaterSpec]
) -> dict[nn.Module, str]:
    """Find the modules that plain PyTorch trains faster.

    Args:
        found: Modules that can be replaced, with their names.
        specs: What would update their rows in place of torch optimizers; empty if the gradients
            are left to the caller.
    """
    tables = {module: list(tables_of(module, names[0])) for module, names in found.items()}
    of_table: dict[int, str] = {}
    # Updates by another rule, such as lazy_adam, are wanted at any speed.
    ruled = {table for spec in specs if spec.rule for table in spec.param_groups}
    for spec in specs:
        updated = [each for of_module in tables.values() for each in of_module]
        of_table |= dict.fromkeys(spec.param_groups, _reason_of(spec, updated))
    reasons = {}
    for module in found:
        is_apart = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.is_cuda
        is_apart &= not any(id(table.weight) in ruled for table in tables[module])
        of_tables = [of_table.get(id(table.weight), "") for table in tables[module]]
        reasons[module] = _BY_LAUNCHES if is_apart else next(filter(None, of_tables), "")
    # A table that modules share is left in all of them, or in none.
    taken = {
        id(table.weight) for module in found if not reasons[module] for table in tables[module]
    }
    return {
        module: f"{reasons[module]}; always=True takes them"
        for module in found
        if reasons[module] and not any(id(table.weight) in taken for table in tables[module])
    }


def _reason_of(spec: UpdaterSpec, tables: Sequence[NamedTable]) -> str:
    """Why PyTorch trains the tables of an optimizer faster; "" if it does not."""
    if spec.rule:  # the caller asks for another rule than PyTorch's
        return ""
    is_sparse: dict[int, bool] = {}
    num_dense = 0
    for table in tables:
        key = id(table.weight)
        if key in spec.param_groups and key not in is_sparse:
            is_sparse[key] = table.is_sparse
            num_dense += 0 if table.is_sparse else table.weight.numel()
    has_state = bool(spec.formula.state_sizes(1))
    least_tables, least_numbers = _WITH_STATE if has_state else _WITHOUT_STATE
    if sum(is_sparse.values()) >= least_tables or num_dense >= least_numbers:
        return ""
    return (
        f"with {type(spec.formula).__name__}, steps are not shorter for fewer than {least_tables} "
        f"tables with sparse=True, or {least_numbers:,} numbers in tables with sparse=False"
    )
