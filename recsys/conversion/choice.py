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

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from recsys._support.torch_compat import has_gradient_hooks
from recsys.conversion.exchange import (
    find_of_other_classes,
    find_replaceable,
    named_tables_in,
)
from recsys.embeddings.lookup.one_table.bag_lookup import require_supported
from recsys.embeddings.optimizer import RowOptimizer, shown_optimizer
from recsys.embeddings.rows.table_parameter import require_no_updater
from recsys.embeddings.updaters import choose_updaters, require_translatable, require_updatable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.embeddings.updaters import NamedTable, UpdaterSpec

__all__ = ["ChosenTables", "choose_tables"]

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
    tables = {module: tables[module] for module in found if module not in unfit}
    for module in others:
        kind = f"{type(module).__name__} is a subclass unknown to recsys"
        unfit[module] = f"{kind}, which may compute other values than torch's"
    specs = choose_updaters(_all_of(tables), optimizers, lazy_adam=lazy_adam)
    not_updated = _find_not_updated(tables, specs) if given else {}
    if not always and (given or not specs):
        wanted = {module: own for module, own in tables.items() if module not in not_updated}
        not_updated |= _find_slower(wanted, specs)
    tables = {module: own for module, own in tables.items() if module not in not_updated}
    if not_updated:
        specs = choose_updaters(_all_of(tables), optimizers, lazy_adam=lazy_adam)
    left = {module: names[module] for module in unfit | not_updated}
    taken = {module: found[module] for module in tables}
    return ChosenTables(taken, _all_of(tables), specs, unfit, not_updated, left)


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


def _all_of(tables: Mapping[nn.Module, Sequence[NamedTable]]) -> list[NamedTable]:
    return list(chain.from_iterable(tables.values()))


def _find_unfit(
    found: Mapping[nn.Module, Sequence[str]],
    tables: Mapping[nn.Module, Sequence[NamedTable]],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    lazy_adam: bool,
    may_be_meta: bool,
) -> dict[nn.Module, str]:
    """Find the modules that cannot be replaced.

    Args:
        found: The modules of a class that can be replaced, with their names in the model.
        tables: The tables of each.
        optimizers: The torch optimizers that were given.
        lazy_adam: As for `accelerate`.
        may_be_meta: As for `require_updatable`.

    Raises:
        ValueError: no module can be replaced; or recsys already updates a table.
    """
    left, errors = {}, []
    for module, own in tables.items():
        for table in own:
            require_no_updater(table.name, table.weight)
        try:
            _require_plain_instance(module, found[module][0], own)
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                require_supported(module)
            for table in own:
                require_updatable(table, may_be_meta=may_be_meta)
                require_translatable(table, optimizers, lazy_adam=lazy_adam)
        except ValueError as error:
            errors.append(error)
            left[module] = str(error)
    if tables and len(left) == len(tables):
        raise errors[0]
    return left


def _find_not_updated(
    tables: Mapping[nn.Module, Sequence[NamedTable]], specs: Sequence[UpdaterSpec]
) -> dict[nn.Module, str]:
    """Find the modules whose weights require a gradient but are in no given optimizer.

    Args:
        tables: The tables of the modules that can be replaced.
        specs: The updaters of the given optimizers.
    """
    updated = set(chain.from_iterable(spec.param_groups for spec in specs))
    return {
        module: "no given optimizer has its tables in a param group"
        for module, own in tables.items()
        if updated.isdisjoint(id(table.weight) for table in own)
        and any(table.weight.requires_grad for table in own)
    }


def _require_plain_instance(module: nn.Module, name: str, tables: Sequence[NamedTable]) -> None:
    """Refuse a module that has more than its class defines, or no table.

    Raises:
        ValueError: the module has no table; or its own forward, buffers, parameters or modules; or
            a hook on a table.
    """
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
    tables: Mapping[nn.Module, Sequence[NamedTable]], specs: Sequence[UpdaterSpec]
) -> dict[nn.Module, str]:
    """Find the modules that plain PyTorch trains faster.

    Args:
        tables: The tables of the modules that can be replaced.
        specs: What would update their rows in place of torch optimizers; empty if the gradients
            are left to the caller.
    """
    of_table: dict[int, str] = {}
    # Updates by another rule, such as lazy_adam, are wanted at any speed.
    ruled = {table for spec in specs if spec.rule for table in spec.param_groups}
    for spec in specs:
        of_table |= dict.fromkeys(spec.param_groups, _reason_of(spec, _all_of(tables)))
    reasons = {}
    for module, own in tables.items():
        is_apart = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.is_cuda
        is_apart &= not any(id(table.weight) in ruled for table in own)
        of_tables = [of_table.get(id(table.weight), "") for table in own]
        reasons[module] = _BY_LAUNCHES if is_apart else next(filter(None, of_tables), "")
    # A table that modules share is left in all of them, or in none.
    kept = [own for module, own in tables.items() if not reasons[module]]
    taken = {id(table.weight) for table in chain.from_iterable(kept)}
    return {
        module: f"{reasons[module]}; always=True takes them"
        for module, own in tables.items()
        if reasons[module] and taken.isdisjoint(id(table.weight) for table in own)
    }


def _reason_of(spec: UpdaterSpec, tables: Sequence[NamedTable]) -> str:
    """Why PyTorch trains the tables of an optimizer faster; "" if it does not."""
    if spec.rule:  # the caller asks for another rule than PyTorch's
        return ""
    own = {id(table.weight): table for table in tables if id(table.weight) in spec.param_groups}
    num_sparse = sum(table.is_sparse for table in own.values())
    num_dense = sum(0 if table.is_sparse else table.weight.numel() for table in own.values())
    has_state = bool(spec.formula.state_sizes(1))
    least_tables, least_numbers = _WITH_STATE if has_state else _WITHOUT_STATE
    if num_sparse >= least_tables or num_dense >= least_numbers:
        return ""
    return (
        f"with {type(spec.formula).__name__}, steps are not shorter for fewer than {least_tables} "
        f"tables with sparse=True, or {least_numbers:,} numbers in tables with sparse=False"
    )
