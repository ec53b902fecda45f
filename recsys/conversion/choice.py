"""What `accelerate` takes over in a model, what it leaves and why, and the budget.

Nothing is changed here. All checks that need no memory of the tables are made. `estimate` asks the
same.

Modules that plain PyTorch trains faster are left to it. The limits are measured on one CPU core,
with one linear layer after tables of 16 columns and 128 samples a step, which gain least. Ratios
are those of a plain step to one of recsys.

    SGD, sparse gradients         nn.EmbeddingBag: 1 table 0.8, 8 tables 0.9, 16 1.0, 26 1.1
                                  nn.Embedding: 1 table 0.65, 26 tables 0.9
    SGD, dense gradients          0.75 to 0.9 for 160,000 numbers in all tables, 1.0 to 1.2 for
                                  500,000, 1.5 for 1,100,000
    Adagrad, sparse gradients     1 table 0.9 to 1.0, 2 tables 1.0 to 1.1, 3 tables 1.1 to 1.3
    Adagrad, dense gradients      0.9 to 1.0 for 32,000 numbers in all tables, 1.1 to 1.2 for 64,000
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recsys._support.sizes import parse_bytes
from recsys._support.torch_compat import has_gradient_hooks
from recsys.embeddings.attach import numbers_of
from recsys.embeddings.optimizer import RowOptimizer, shown_optimizer
from recsys.embeddings.rows.grads import require_no_optimizer
from recsys.embeddings.table import TableConfig
from recsys.embeddings.tables_module import OneTable, Table, TableModule, require_supported
from recsys.embeddings.update.apply_in_backward import read_marks
from recsys.embeddings.update.translate import translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.update.apply_in_backward import InBackward
    from recsys.embeddings.update.translation import Translation

__all__ = [
    "KEPT",
    "ChosenTables",
    "Updater",
    "choose_tables",
    "find_recsys",
    "find_replaceable",
    "named_tables_in",
    "names_of",
    "plan_of_model",
    "require_module",
    "tables_of",
]

KEPT = "_accelerated_from"  # entry of a recsys module: the module that it replaced

# From so many tables with sparse gradients, or numbers in those with dense ones, steps are shorter.
_WITHOUT_STATE = 24, 1 << 19
_WITH_STATE = 2, 1 << 16
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
        rule: How updates differ from those of the optimizer, and why; usually "".
    """

    tables: Sequence[Table]
    numbers: Mapping[nn.Parameter, int]
    formula: RowOptimizer
    optimizer: torch.optim.Optimizer | None = None
    translation: Translation | None = None
    marks: InBackward | None = None
    rule: str = ""


class ChosenTables(NamedTuple):
    """What is replaced in a model.

    Attributes:
        found: The modules to replace, with their names in the model.
        tables: Their tables; a table that modules share is listed several times.
        updaters: What updates the rows; empty if that is left to the caller.
        left: By the names of modules that are left to PyTorch: why.
    """

    found: dict[nn.Module, list[str]]
    tables: list[Table]
    updaters: list[Updater]
    left: dict[str, str]

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
    given = optimizers if isinstance(optimizers, tuple) else ()
    found, others = find_replaceable(model), find_of_other_classes(model)
    tables, errors = named_tables_in(found), dict[nn.Module, ValueError]()
    for table in _all_of(tables):
        require_no_optimizer(table.name, table.weight)
    for module, own in tables.items():
        try:
            _require_fit(module, found[module][0], own, may_be_meta=may_be_meta)
            _updaters_of(given, own, lazy_adam=lazy_adam)  # raises if one cannot be translated
        except ValueError as error:
            errors[module] = error
    if len(errors) == len(found):
        raise next(iter(errors.values()))
    left = {module: str(error) for module, error in errors.items()}
    tables = _without(left, tables)
    updaters = _choose_updaters(_all_of(tables), optimizers, lazy_adam=lazy_adam)
    updated = set(chain.from_iterable(updater.numbers for updater in updaters))
    for module, own in tables.items() if given else ():
        is_updated = any(table.weight in updated for table in own)
        if not is_updated and any(table.weight.requires_grad for table in own):
            left[module] = "no given optimizer has its tables in a param group"
    if not always and (given or not updaters):
        left |= _find_slower(_without(left, tables), updaters)
    tables = _without(left, tables)
    for module in others:
        kind = f"{type(module).__name__} is a subclass unknown to recsys"
        left[module] = f"{kind}, which may compute other values than torch's"
    return ChosenTables(
        {module: found[module] for module in tables},
        _all_of(tables),
        _choose_updaters(_all_of(tables), optimizers, lazy_adam=lazy_adam),
        {name: why for module, why in left.items() for name in (found | others)[module]},
    )


def plan_of_model(
    tables: Sequence[Table],
    formulas: Sequence[RowOptimizer | None],
    budget: int | str | None,
    plan: HotPlan | None,
) -> tuple[int, dict[nn.Parameter, tuple[NDArray[np.int64], NDArray[np.int64]]]] | None:
    """The bytes of fast memory, and the rows to be pinned; None if all rows are resident.

    A bag's table has the bag's name in a plan, a collection's its name there, or its path in the
    model if another table has that name, too. A table that modules share has its first name.

    Args:
        tables: The tables that share the budget; a shared table occurs once for each of its
            modules.
        formulas: The update rules of their rows; None for rows that have none.
        budget: As for `accelerate`.
        plan: A plan of these tables, in any order.

    Returns:
        The budget, and for each table its pinned rows and their counts.

    Raises:
        ConfigError: `budget` cannot be read.
        ProfileError: the plan has other tables.
        ValueError: there is no optimizer, or more than one; or the tables are on several devices.
    """
    if budget is None and plan is None:
        return None
    if not formulas or None in formulas:
        raise ValueError(
            "budget= (or plan=) keeps some rows in slow memory, and recsys must update them; give "
            "optimizer=, too: a formula (recsys.embeddings.SGD, Adagrad, RowWiseAdagrad, ...) or "
            "the model's torch optimizer"
        )
    devices = {str(table.weight.device) for table in tables}
    if len(formulas) > 1 or len(devices) > 1:
        raise ValueError(
            "budget: tables that share it must have one optimizer and be on one device, got "
            f"{len(formulas)} optimizers and {sorted(devices)}; give only one optimizer, which "
            "leaves the other tables alone, move the model by .to(), or leave out budget="
        )
    if plan is None:
        return parse_bytes(cast("int | str", budget), "budget"), {}
    firsts = {table.weight: table for table in reversed(tables)}
    uses = Counter(table.planned_as for table in firsts.values())
    named = {
        table.name if table.collection and uses[table.planned_as] > 1 else table.planned_as: weight
        for weight, table in firsts.items()
    }
    order = [*plan.tables, *sorted(named)]
    configs = [
        TableConfig(name=name, num_embeddings=len(named[name]), embedding_dim=named[name].shape[1])
        for name in sorted(named, key=order.index)
    ]
    plan = plan.of_tables(configs, budget)
    pinned = zip(plan.tables, plan.pinned_by_table(), strict=True)
    return plan.budget_bytes, {named[name]: rows for name, rows in pinned}


def _as_tuple(optimizer: Any) -> tuple[torch.optim.Optimizer, ...] | RowOptimizer | None:
    """Torch optimizers as a tuple; a formula and None as given.

    Raises:
        TypeError: `optimizer` has another type.
    """
    if optimizer is None or isinstance(optimizer, RowOptimizer):
        return optimizer
    several = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    wrong = [one for one in several if not isinstance(one, torch.optim.Optimizer)]
    if wrong or not several:
        shown = shown_optimizer(wrong[0]) if wrong else "an empty list"
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer, several of these, a formula of "
            f"recsys.embeddings (SGD, Adagrad, ...) or None, got {shown}"
        )
    return several


def _all_of(tables: Mapping[nn.Module, Sequence[Table]]) -> list[Table]:
    return list(chain.from_iterable(tables.values()))


def _without(
    left: Mapping[nn.Module, str], tables: Mapping[nn.Module, list[Table]]
) -> dict[nn.Module, list[Table]]:
    return {module: own for module, own in tables.items() if module not in left}


def _find_slower(
    tables: Mapping[nn.Module, Sequence[Table]], updaters: Sequence[Updater]
) -> dict[nn.Module, str]:
    """Find the modules that plain PyTorch trains faster.

    A table that modules share has one reason, so it is left in all of them, or in none.

    Args:
        tables: The tables of the modules that can be replaced.
        updaters: What would update their rows in place of torch optimizers; empty if the gradients
            are left to the caller.
    """
    every = _all_of(tables)
    together = {table.weight for table in every if table.collection}
    apart = {table.weight for table in every if table.weight.is_cuda} - together
    reasons = dict.fromkeys(apart, _BY_LAUNCHES)
    for updater in updaters:
        reason = _reason_of(updater, every)
        for weight in updater.numbers:
            # Updates by another rule, such as lazy_adam, are wanted at any speed.
            reasons[weight] = "" if updater.rule else reasons.get(weight, reason)
    return {
        module: f"{reasons[own[0].weight]}; always=True takes them"
        for module, own in tables.items()
        if reasons.get(own[0].weight)
    }


def _reason_of(updater: Updater, tables: Sequence[Table]) -> str:
    """Why PyTorch trains the tables of an optimizer faster; "" if it does not."""
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


def _require_fit(
    module: nn.Module, name: str, tables: Sequence[Table], *, may_be_meta: bool
) -> None:
    """Refuse a module that has more than its class defines, or tables that kernels do not support.

    Args:
        module: The module.
        name: Its name in the model.
        tables: Its tables.
        may_be_meta: As for `choose_tables`.

    Raises:
        ValueError: a rule is broken.
    """
    own = ["forward"] if "forward" in module.__dict__ else []
    own += [*module._buffers, *(key for key in module._parameters if key != "weight")]
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        own += module._modules
        require_supported(module)
    if own or not tables:
        has = f"its own {own[0]!r}, which its replacement would not have" if own else "no tables"
        raise ValueError(f"{name} has {has}")
    for table in tables:
        weight: Any = table.weight
        dtypes = [torch.float32] if table.collection else [torch.float32, torch.float64]
        rules = (
            (
                type(weight) is nn.Parameter,
                f"weight must be a plain Parameter, got {type(weight).__name__}; remove "
                "parametrizations (weight_norm, ...), or divide tables among processes by "
                "recsys.distributed in place of fully_shard",
            ),
            (
                may_be_meta or not weight.is_meta,
                "rows must have memory, and are on the meta device; first call "
                'to_empty(device="cpu") on the module, and load or reset its parameters',
            ),
            (
                weight.device.type in ("cpu", "cuda", "meta"),
                f"rows must be on the CPU or on CUDA, got {weight.device}; move the module by "
                ".cpu() (other devices are not supported yet)",
            ),
            (
                weight.dtype in dtypes,
                f"rows must be one of {dtypes} here, got {weight.dtype}; convert them by .float() "
                "(others are not supported yet)",
            ),
            (
                weight.is_contiguous(),
                f"rows must be contiguous, got strides {weight.stride()}; set weight.data to "
                "weight.data.contiguous()",
            ),
            (
                not has_gradient_hooks(weight),
                "it has a hook for its gradient, which is not called when recsys updates the rows; "
                "remove the hook by its handle, and with a torch optimizer change weight.grad "
                "between backward and step instead",
            ),
        )
        for is_kept, rule in rules:
            if not is_kept:
                raise ValueError(f"table {table.name!r}: {rule}")


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
        updaters = _updaters_of(optimizers, tables, lazy_adam=lazy_adam)
        for table in tables:  # one optimizer has each, unless others have one
            num_owners = sum(table.weight in updater.numbers for updater in updaters)
            # Frozen tables need no optimizer.
            if num_owners > 1 or (not updaters and table.weight.requires_grad):
                kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
                raise ValueError(
                    f"table {table.name!r}: one optimizer must have it in a param group, and "
                    f"{num_owners} of the given ones ({kinds}) have it; give the one that has the "
                    "model's tables, and remove them from others"
                )
    else:
        formula = optimizers if marks is None else marks.formula
        if formula is None:
            return []
        updated = tables if marks is None else marked
        numbers = dict.fromkeys((table.weight for table in updated), 0)
        updaters = [Updater(updated, numbers, formula, marks=marks)]
    for updater in updaters:  # one call looks up all tables of a collection
        partly = {table.collection for table in in_modules if table.weight in updater.numbers}
        for table in in_modules:
            if (
                table.collection
                and table.collection in partly - {""}
                and (table.weight not in updater.numbers)
            ):
                raise ValueError(
                    f"table {table.name!r}: all tables of a collection must have one optimizer "
                    "or none, and others of this one have one; add this one, too, and if its rows "
                    "are to stay, set its requires_grad to False"
                )
    return updaters


def _updaters_of(
    optimizers: Sequence[torch.optim.Optimizer], tables: Sequence[Table], *, lazy_adam: bool
) -> list[Updater]:
    """The updaters of those torch optimizers that have some of the tables.

    Raises:
        ValueError: one cannot be translated.
    """
    updaters = []
    for optimizer in optimizers:
        numbers = numbers_of(optimizer)
        updated = [table for table in tables if table.weight in numbers]
        if updated:
            own = {table.weight: numbers[table.weight] for table in updated}
            named = [(table.name, own[table.weight]) for table in updated]
            translation = translate(optimizer, named, lazy_adam=lazy_adam)
            dense = [table.name for table in updated if not table.is_sparse]
            if translation.is_for_sparse and dense:
                raise ValueError(
                    f"table {dense[0]!r}: sparse must be True with {type(optimizer).__name__}, "
                    "which updates elements, not rows, of a table with a dense gradient; build it "
                    "with sparse=True"
                )
            formula = translation.formula(optimizer.param_groups[named[0][1]])
            rule = translation.rule
            updaters.append(Updater(updated, own, formula, optimizer, translation, rule=rule))
    return updaters


def require_module(model: object) -> None:
    """Raise TypeError unless `model` is an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")


def find_replaceable(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Find the modules that can be replaced, with their names in the model.

    Raises:
        ValueError: there is none, or the model cannot be changed.
    """
    for name, module in model.named_modules():
        location = f"module {name!r}" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(  # noqa: TRY004  # its type is right, its place is wrong
                f"{location} must not be wrapped by DistributedDataParallel, which gathers "
                "gradients: rows that recsys updates leave none; accelerate in one process, or "
                "before it is wrapped and without optimizer=, so that the tables' gradients are "
                "gathered"
            )
        if KEPT in module.__dict__:
            raise ValueError(f"{location} is accelerated already; call recsys.restore(model) first")
    if _is_replaceable(model):
        raise ValueError(
            f"the model is itself an {type(model).__name__}, which cannot be replaced in place; "
            "use from_torch or from_torchrec of the class of recsys.embeddings that has the name "
            f"HotCold{type(model).__name__}"
        )
    found = names_of(model, _is_replaceable)
    if not found:
        reason = "".join(
            f"; {names[0]} is a {type(module).__name__}, a subclass unknown to recsys"
            for module, names in find_of_other_classes(model).items()
        )
        raise ValueError(
            "the model must have an nn.EmbeddingBag, an nn.Embedding or a collection of torchrec "
            f"inside, and has none{reason}"
        )
    return found


def find_recsys(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Find the user's modules of `recsys.embeddings`, with names; a model may be one itself."""
    if isinstance(model, TableModule):
        return {model: ["model"]}
    return names_of(
        model, lambda module: isinstance(module, TableModule) and KEPT not in module.__dict__
    )


def find_of_other_classes(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Find the modules with a table whose class recsys does not know."""
    return names_of(
        model,
        lambda module: (
            isinstance(module, nn.EmbeddingBag | nn.Embedding)
            and not isinstance(module, OneTable)
            and not _is_replaceable(module)
        ),
    )


def names_of(
    model: nn.Module, is_wanted: Callable[[nn.Module], bool]
) -> dict[nn.Module, list[str]]:
    """Find wanted modules, with all their names; not those inside a wanted or a recsys module."""
    found: dict[nn.Module, list[str]] = {}
    outer = "."
    for name, module in model.named_modules(remove_duplicate=False):
        if name and not f"{name}.".startswith(outer):
            if is_wanted(module):
                found.setdefault(module, []).append(name)
            if is_wanted(module) or isinstance(module, TableModule):
                outer = f"{name}."
    return found


def named_tables_in(
    found: Mapping[nn.Module, list[str]],
) -> dict[nn.Module, list[Table]]:
    """The tables of each module; a table that modules share is in the list of each."""
    tables = {module: list(tables_of(module, names[0])) for module, names in found.items()}
    # The sum of a sparse and a dense gradient is dense.
    dense = {table.weight for own in tables.values() for table in own if not table.is_sparse}
    return {
        module: [table._replace(is_sparse=table.weight not in dense) for table in own]
        for module, own in tables.items()
    }


def tables_of(module: nn.Module, name: str) -> Iterator[Table]:
    """The tables of a module; `name` is its name in the model."""
    if isinstance(module, nn.EmbeddingBag | nn.Embedding):
        yield Table(name, f"{name}.weight", "", module, module.sparse, "", name, (name,))
        return
    is_pooled = hasattr(module, "embedding_bags")
    attribute = "embedding_bags" if is_pooled else "embeddings"
    found: Any = module
    known = found.embedding_bag_configs() if is_pooled else found.embedding_configs()
    configs = {config.name: config for config in known}
    for table, bag in getattr(found, attribute).items():
        full_name = f"{name}.{attribute}.{table}"
        features = tuple(configs[table].feature_names)
        key, prefix = f"{full_name}.weight", f"{table}."
        yield Table(full_name, key, prefix, bag, bag.sparse, name, table, features)


def _is_replaceable(module: nn.Module) -> bool:
    if type(module) in (nn.EmbeddingBag, nn.Embedding):
        return True
    # Importing TorchRec takes seconds. A module of its class exists only if it is imported.
    library = sys.modules.get("torchrec.modules.embedding_modules")
    return library is not None and type(module) in (
        library.EmbeddingBagCollection,
        library.EmbeddingCollection,
    )
