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

from dataclasses import dataclass
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
from recsys.embeddings.attach import numbers_of
from recsys.embeddings.optimizer import RowOptimizer, shown_optimizer
from recsys.embeddings.rows.grads import require_no_optimizer
from recsys.embeddings.tables_module import require_supported
from recsys.embeddings.update.in_backward import read_marks
from recsys.embeddings.update.translate import translate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.embeddings.tables_module import Table
    from recsys.embeddings.update.in_backward import InBackward
    from recsys.embeddings.update.translation import Translation

__all__ = ["ChosenTables", "Updater", "choose_tables"]

# From so many tables with sparse gradients, or numbers in those with dense ones, steps are shorter.
_WITHOUT_STATE = 24, 1 << 20
_WITH_STATE = 2, 1 << 17
_BY_LAUNCHES = (
    "on CUDA a launch for each module takes longer than in PyTorch; one collection looks up all "
    "tables at once"
)


@dataclass(frozen=True, eq=False)
class Updater:
    """What will update the rows of some tables.

    Attributes:
        tables: The tables, each once.
        numbers: The number of each table's param group.
        formula: The update rule by the current settings.
        optimizer: The torch optimizer whose step updates rows; None for the formula.
        translation: How that is read.
        marks: Optimizers of `apply_optimizer_in_backward` that the formula replaces, if any.
    """

    tables: Sequence[Table]
    numbers: Mapping[nn.Parameter, int]
    formula: RowOptimizer
    optimizer: torch.optim.Optimizer | None = None
    translation: Translation | None = None
    marks: InBackward | None = None

    @property
    def rule(self) -> str:
        """How updates differ from those of the optimizer, and why; usually ""."""
        return "" if self.translation is None else self.translation.rule

    @property
    def description(self) -> str:
        """What updates the rows."""
        if self.optimizer is None:
            return f"rows are updated at the end of each backward, by {self.formula}"
        return f"rows are updated in the step of {type(self.optimizer).__name__}"


class ChosenTables(NamedTuple):
    """What is replaced in a model.

    Attributes:
        found: The modules to replace, with their names in the model.
        tables: Their tables; a table that modules share is listed several times.
        updaters: What updates the rows; empty if that is left to the caller.
        unfit: The modules that cannot be replaced, and why.
        not_updated: The modules that no given optimizer updates, or that PyTorch trains faster.
        left: The names of all modules that are left.
    """

    found: dict[nn.Module, list[str]]
    tables: list[Table]
    updaters: list[Updater]
    unfit: dict[nn.Module, str]
    not_updated: dict[nn.Module, str]
    left: dict[nn.Module, list[str]]

    @property
    def updated(self) -> list[Table]:
        """The tables that the updaters have, which share a budget."""
        known = set(chain.from_iterable(updater.numbers for updater in self.updaters))
        return [table for table in self.tables if table.weight in known]


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
    updaters = _choose_updaters(_all_of(tables), optimizers, lazy_adam=lazy_adam)
    not_updated = _find_not_updated(tables, updaters) if given else {}
    if not always and (given or not updaters):
        wanted = {module: own for module, own in tables.items() if module not in not_updated}
        not_updated |= _find_slower(wanted, updaters)
    tables = {module: own for module, own in tables.items() if module not in not_updated}
    if not_updated:
        updaters = _choose_updaters(_all_of(tables), optimizers, lazy_adam=lazy_adam)
    left = {module: names[module] for module in unfit | not_updated}
    taken = {module: found[module] for module in tables}
    return ChosenTables(taken, _all_of(tables), updaters, unfit, not_updated, left)


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
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer, several of these, a formula of "
                f"recsys.embeddings (SGD, Adagrad, ...) or None, got {shown_optimizer(optimizer)}"
            )
    return several


def _all_of(tables: Mapping[nn.Module, Sequence[Table]]) -> list[Table]:
    return list(chain.from_iterable(tables.values()))


def _find_unfit(
    found: Mapping[nn.Module, Sequence[str]],
    tables: Mapping[nn.Module, Sequence[Table]],
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
        may_be_meta: As for `choose_tables`.

    Raises:
        ValueError: no module can be replaced; or recsys already updates a table.
    """
    left, errors = {}, []
    for module, own in tables.items():
        for table in own:
            require_no_optimizer(table.name, table.weight)
        try:
            _require_plain_instance(module, found[module][0], own)
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                require_supported(module)
            for table in own:
                _require_updatable(table, may_be_meta=may_be_meta)
                _require_translatable(table, optimizers, lazy_adam=lazy_adam)
        except ValueError as error:
            errors.append(error)
            left[module] = str(error)
    if tables and len(left) == len(tables):
        raise errors[0]
    return left


def _find_not_updated(
    tables: Mapping[nn.Module, Sequence[Table]], updaters: Sequence[Updater]
) -> dict[nn.Module, str]:
    """Find the modules whose weights require a gradient but are in no given optimizer.

    Args:
        tables: The tables of the modules that can be replaced.
        updaters: Those of the given optimizers.
    """
    updated = set(chain.from_iterable(updater.numbers for updater in updaters))
    return {
        module: "no given optimizer has its tables in a param group"
        for module, own in tables.items()
        if updated.isdisjoint(table.weight for table in own)
        and any(table.weight.requires_grad for table in own)
    }


def _require_plain_instance(module: nn.Module, name: str, tables: Sequence[Table]) -> None:
    """Refuse a module that has more than its class defines, or no table.

    Raises:
        ValueError: the module has no table; or its own forward, buffers, parameters or modules; or
            a hook on a table.
    """
    if not tables:
        raise ValueError(f"{name} has no tables")
    own = ["forward"] if "forward" in module.__dict__ else []
    own += [*module._buffers, *(name for name in module._parameters if name != "weight")]
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
    tables: Mapping[nn.Module, Sequence[Table]], updaters: Sequence[Updater]
) -> dict[nn.Module, str]:
    """Find the modules that plain PyTorch trains faster.

    Args:
        tables: The tables of the modules that can be replaced.
        updaters: What would update their rows in place of torch optimizers; empty if the gradients
            are left to the caller.
    """
    of_table: dict[nn.Parameter, str] = {}
    # Updates by another rule, such as lazy_adam, are wanted at any speed.
    ruled = {table for updater in updaters if updater.rule for table in updater.numbers}
    for updater in updaters:
        of_table |= dict.fromkeys(updater.numbers, _reason_of(updater, _all_of(tables)))
    reasons = {}
    for module, own in tables.items():
        is_apart = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.is_cuda
        is_apart &= not any(table.weight in ruled for table in own)
        of_tables = [of_table.get(table.weight, "") for table in own]
        reasons[module] = _BY_LAUNCHES if is_apart else next(filter(None, of_tables), "")
    # A table that modules share is left in all of them, or in none.
    kept = [own for module, own in tables.items() if not reasons[module]]
    taken = {table.weight for table in chain.from_iterable(kept)}
    return {
        module: f"{reasons[module]}; always=True takes them"
        for module, own in tables.items()
        if reasons[module] and taken.isdisjoint(table.weight for table in own)
    }


def _reason_of(updater: Updater, tables: Sequence[Table]) -> str:
    """Why PyTorch trains the tables of an optimizer faster; "" if it does not."""
    if updater.rule:  # the caller asks for another rule than PyTorch's
        return ""
    own = {table.weight: table for table in tables if table.weight in updater.numbers}
    num_sparse = sum(table.is_sparse for table in own.values())
    num_dense = sum(0 if table.is_sparse else table.weight.numel() for table in own.values())
    has_state = bool(updater.formula.state_sizes(1))
    least_tables, least_numbers = _WITH_STATE if has_state else _WITHOUT_STATE
    if num_sparse >= least_tables or num_dense >= least_numbers:
        return ""
    return (
        f"with {type(updater.formula).__name__}, steps are not shorter for fewer than "
        f"{least_tables} tables with sparse=True, or {least_numbers:,} numbers in tables with "
        "sparse=False"
    )


def _require_updatable(table: Table, *, may_be_meta: bool) -> None:
    """Check that the kernels support a table.

    Args:
        table: The table.
        may_be_meta: Whether it may be on the "meta" device, where it has no rows to update.

    Raises:
        ValueError: they do not.
    """
    weight: Any = table.weight
    named = f"table {table.name!r}"
    if type(weight) is not nn.Parameter:
        kind, hint = type(weight).__name__, "remove parametrizations (weight_norm, ...) first"
        if kind == "DTensor":  # of fully_shard, for example
            hint = (
                "this one is divided among processes; train in one process, without fully_shard, "
                "or divide the tables by recsys.distributed"
            )
        raise ValueError(f"{named}: weight must be a plain Parameter, got {kind}; {hint}")
    if weight.is_meta and not may_be_meta:
        raise ValueError(
            f"{named}: rows must have memory, and are on the meta device; first call "
            'to_empty(device="cpu") on the module, and load or reset its parameters'
        )
    if weight.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(
            f"{named}: rows must be on the CPU or on CUDA, got {weight.device}; move the module by "
            ".cpu() (other devices are not supported yet)"
        )
    dtypes = [torch.float32] if table.collection else [torch.float32, torch.float64]
    if weight.dtype not in dtypes:
        raise ValueError(
            f"{named}: rows must be one of {dtypes} here, got {weight.dtype}; convert them by "
            ".float() (others are not supported yet)"
        )
    if not weight.is_contiguous():
        raise ValueError(
            f"{named}: rows must be contiguous, got strides {weight.stride()}; set weight.data to "
            "weight.data.contiguous()"
        )
    if weight.data_ptr() % weight.element_size():
        raise ValueError(
            f"{named}: rows must begin at a multiple of {weight.element_size()} bytes in memory, "
            f"got address {weight.data_ptr():#x}; use a clone of them"
        )


def _require_translatable(
    table: Table, optimizers: Sequence[torch.optim.Optimizer], *, lazy_adam: bool
) -> None:
    """Check that the torch optimizers that have a table can be translated.

    Raises:
        ValueError: one cannot be translated.
    """
    for optimizer in optimizers:
        number = numbers_of(optimizer).get(table.weight)
        if number is None:
            continue
        translation = translate(optimizer, [(table.name, number)], lazy_adam=lazy_adam)
        if translation.is_for_sparse and not table.is_sparse:
            kind = type(optimizer).__name__
            raise ValueError(
                f"table {table.name!r}: sparse must be True with {kind}, which updates elements, "
                "not rows, of a table with a dense gradient; build it with sparse=True"
            )


def _choose_updaters(
    in_modules: Sequence[Table],
    optimizers: tuple[torch.optim.Optimizer, ...] | RowOptimizer | None,
    *,
    lazy_adam: bool,
) -> list[Updater]:
    """Choose what updates which tables; an empty list leaves gradients to torch.

    Args:
        in_modules: Tables of every module; a shared table is listed several times.
        optimizers: As for `accelerate`.
        lazy_adam: As for `accelerate`.

    Raises:
        ValueError: an optimizer cannot update the rows, or a table has no optimizer or several.
    """
    tables = list({table.weight: table for table in reversed(in_modules)}.values())[::-1]
    marked = [table for table in tables if hasattr(table.weight, "_optimizer_classes")]
    marks = None
    if marked:  # raises if an optimizer is given, too
        given = optimizers[0] if isinstance(optimizers, tuple) else optimizers
        marks = read_marks([(table.name, table.weight) for table in marked], given)
    if isinstance(optimizers, tuple):
        found = [_updater_of(optimizer, tables, lazy_adam=lazy_adam) for optimizer in optimizers]
        updaters = [updater for updater in found if updater is not None]
        _require_owners(tables, updaters, optimizers)
        rule = "in the optimizer's param groups"
    else:
        formula = optimizers if marks is None else marks.formula
        if formula is None:
            return []
        updated = tables if marks is None else marked
        numbers = dict.fromkeys((table.weight for table in updated), 0)
        updaters = [Updater(updated, numbers, formula, marks=marks)]
        rule = "marked by apply_optimizer_in_backward"
    for updater in updaters:
        _require_whole_collections(in_modules, updater.numbers, rule)
    return updaters


def _updater_of(
    optimizer: torch.optim.Optimizer, tables: Sequence[Table], *, lazy_adam: bool
) -> Updater | None:
    numbers = numbers_of(optimizer)
    updated = [table for table in tables if table.weight in numbers]
    if not updated:
        return None
    own = {table.weight: numbers[table.weight] for table in updated}
    named = [(table.name, own[table.weight]) for table in updated]
    translation = translate(optimizer, named, lazy_adam=lazy_adam)
    formula = translation.formula(optimizer.param_groups[named[0][1]])
    return Updater(updated, own, formula, optimizer, translation)


def _require_owners(
    tables: Sequence[Table],
    updaters: Sequence[Updater],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Check that each table has one optimizer, unless others have one."""
    for table in tables:
        num_owners = sum(table.weight in updater.numbers for updater in updaters)
        if num_owners > 1:
            raise ValueError(
                f"table {table.name!r}: one optimizer must have it in a param group, and "
                f"{num_owners} of the given ones do; remove it from the others"
            )
        if not updaters and table.weight.requires_grad:  # frozen tables need no optimizer
            kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise ValueError(
                f"table {table.name!r}: an optimizer must have it in a param group, and {kinds} "
                "has none of the model's tables; give the one that has them"
            )


def _require_whole_collections(
    tables: Sequence[Table], updated: Mapping[nn.Parameter, int], rule: str
) -> None:
    """Check that an optimizer has all tables of a collection or none: one call looks them up."""
    partly = {table.collection: table.name for table in tables if table.weight in updated}
    for table in tables:
        if table.collection in partly and table.collection and table.weight not in updated:
            raise ValueError(
                f"table {table.name!r}: all tables of a collection must be {rule} or none; "
                f"{partly[table.collection]!r} is and this one is not; add this one, too, and if "
                "its rows are to stay, set its requires_grad to False"
            )
