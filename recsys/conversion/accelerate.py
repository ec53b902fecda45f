"""`accelerate` replaces the embeddings of an existing model; `restore` puts them back.

    nn.EmbeddingBag                   -> HotColdEmbeddingBag
    nn.Embedding                      -> HotColdEmbedding
    torchrec.EmbeddingBagCollection   -> HotColdEmbeddingBagCollection
    torchrec.EmbeddingCollection      -> HotColdEmbeddingCollection

Modules are replaced inside the model; the Parameters stay the same objects. All checks come before
the first replacement.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from recsys._support.sizes import parse_bytes
from recsys.conversion.accelerated import (
    Accelerated,
    LeftAlone,
    Replacement,
    describe_outlook,
)
from recsys.conversion.exchange import (
    KEPT,
    counterpart,
    exchange,
    find_replaceable,
    names_of,
    tables_in,
    tables_of,
)
from recsys.conversion.left_alone import find_not_updated, find_unfit
from recsys.conversion.model_plan import plan_of_model, require_arguments
from recsys.embeddings.attach import Link, NamedTable, UpdaterSpec, attach, choose_updaters
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.optimizer import RowOptimizer, shown_optimizer
from recsys.embeddings.tiers.budget import NEEDS_OPTIMIZER
from recsys.embeddings.tiers.cold.cold_files import open_cold_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from recsys.embeddings.lookup.device_tables import AbstractTables
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.popularity.profile import PopularityProfile
    from recsys.embeddings.tiers.cold.cold_files import ColdFiles

__all__ = ["Accelerated", "LeftAlone", "Replacement", "accelerate", "restore"]


def accelerate(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | RowOptimizer | None = None,
    lazy_adam: bool = False,
    budget: int | str | None = None,
    plan: HotPlan | None = None,
    profile: PopularityProfile | None = None,
    cold_tier: str = "host",
    cold_path: Path | str | None = None,
) -> Accelerated:
    """Replace a model's embeddings by those of recsys, in place.

    This replaces every `nn.EmbeddingBag`, `nn.Embedding` and TorchRec `EmbeddingBagCollection` and
    `EmbeddingCollection` inside the model, at any depth. Parameters stay the same objects, so
    optimizers and checkpoints stay valid. Hooks, `training` and `requires_grad` are kept. After an
    error nothing has been replaced.

    With a formula as optimizer, a copy or a pickle of the whole model updates its own rows. A copy
    of a part of the model has plain tables and warns at its first lookup. With a torch optimizer, a
    copy leaves gradients at the tables, as plain PyTorch does.

    The tables are fixed until `restore`: if a Parameter is replaced (`load_state_dict(...,
    assign=True)`, `torch.func.functional_call`), the next lookup raises. `load_state_dict` and
    `weight.data = ...` keep the Parameter.

    Differences from plain PyTorch, for updated rows:

    - `backward(inputs=...)` and `torch.autograd.grad` compute no gradients of rows.
    - If a row's gradient contains nan or inf, `step` raises `NonFiniteGradient`. Such rows are not
      updated, all other rows are, and the optimizer's other parameters are not.
    - Step hooks that are registered later see a closure.
    - With a budget, `weight` is written back when it is read, and `optimizer.state` by
      `state_dict()`. Lookups by several threads at once are not supported. A write through a tensor
      kept from before (`weight.detach()`, `weight.data`, a `state_dict()`) raises
      `ConflictingWrite` if rows were updated since; write through `weight`. A write through a kept
      numpy array is not seen.

    Args:
        model: Has its tables on the CPU or on CUDA; not inside `DistributedDataParallel`.
        optimizer: Updates the rows.
            A torch optimizer (SGD, Adagrad, SparseAdam, TorchRec's RowWiseAdagrad, RWSAdagrad of
            facebookresearch/dlrm; without momentum and weight decay), or several for different
            tables: its `step` updates the rows, with its `param_groups` and its state. Schedulers,
            `GradScaler`, clipping and accumulation continue to work. `step` clears gradients of
            rows, as `zero_grad` does. A module with tables of none of them is not replaced.
            A formula (`recsys.embeddings.SGD`, ...): rows are updated at the end of each backward.
            None: gradients are left at the tables, sparse or dense as `sparse` of the bag says. If
            `apply_optimizer_in_backward` gave tables an optimizer, recsys updates them by its
            formula, and keeps its hooks and state until `restore`.
        lazy_adam: Whether `torch.optim.Adam` and `AdamW` (without weight decay) may update rows by
            the rule of SparseAdam, which keeps a row and its moments if it is not looked up. A
            warning describes the difference.
        budget: Fast memory in bytes or as "2GiB", for rows, their state and row maps. Rows that do
            not fit stay in the tables, the cold store. Results are the same to the last bit. A
            budget needs an optimizer. None takes the budget of `plan`, or keeps all rows in fast
            memory. Tables on a device, and their state, move to the host's memory permanently, and
            rows in fast memory are on the device; `model.to(device)` moves only these.
        plan: Rows that never leave fast memory, as a plan of the updated tables. A bag's table has
            the bag's name in the model ("tables.0"), a collection's table its name there. If two
            tables have the same name, the collection's has its path in the model, such as
            "left.embedding_bags.t_0". Without a plan, rows in frequent use stay in fast memory.
        profile: Lookups of these tables, or of the features of a collection's tables. Makes a plan
            for `budget`, as `plan_hot_rows` does.
        cold_tier: Cold store: "host" in memory, or "file" in a folder on disk. "file" moves tables
            and state to the folder and frees their memory.
        cold_path: Folder of the cold tier "file"; it must not have tables yet.

    Returns:
        What was replaced, what was not and why, and what speed to expect; print it.

    Raises:
        TypeError: `model`, `optimizer`, `plan` or `profile` has another type.
        BudgetTooSmall: the budget is smaller than the row maps.
        ProfileError: `plan` or `profile` is for other tables.
        ColdTierError: the folder cannot be used, or already has tables.
        ValueError: the model has nothing to replace, or something that cannot be replaced.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    optimizers = _as_tuple(optimizer)
    require_arguments(budget, plan, profile)
    found = find_replaceable(model)
    tables = tables_in(found)
    given = optimizers if isinstance(optimizers, tuple) else ()
    left = find_unfit(model, found, tables, given, lazy_adam=lazy_adam)
    found, tables = _without(left, found, tables)
    specs = choose_updaters(tables, optimizers, lazy_adam=lazy_adam)
    rules = tuple(dict.fromkeys(each.rule for each in specs if each.rule))
    for message in [*rules, *(f"{x.names[0]} is not replaced: {x.reason}" for x in left.values())]:
        warnings.warn(message, stacklevel=2)  # before any replacement, because a warning may raise
    if given:
        left |= find_not_updated(found, specs)
        found, tables = _without(left, found, tables)
    tiering = _choose_tiering(tables, specs, budget, plan, profile, cold_tier, cold_path)
    counterparts = {module: counterpart(module) for module in found}
    links: list[Link] = []
    link_of: dict[nn.Module, Link] = {}
    try:
        for spec in specs:
            link, modules = attach(spec, list(counterparts.values()))
            links.append(link)
            link_of |= dict.fromkeys(modules, link)
        for old, new in counterparts.items():
            new.__dict__[KEPT] = _Original(old, link_of.get(new))
        exchange(model, counterparts)
        if tiering is not None:
            tiering.begin(links[0])
    except BaseException:
        _undo(model, counterparts, links)
        raise
    return Accelerated(
        _describe(found, counterparts),
        tuple(left.values()),
        tuple(each.description for each in specs) or (_LEFT_TO_CALLER,),
        rules,
        None if len(links) != 1 else links[0].row_optimizer,
        *describe_outlook([link.updater for link in links]),
    )


def restore(model: nn.Module) -> Accelerated:
    """Put back the modules that `accelerate` replaced.

    Rows and optimizer state are as trained. Gradients that no step has used become each table's
    `grad`.

    Returns:
        What was replaced.

    Raises:
        RuntimeError: a gradient was overwritten before its rows were updated.
        ValueError: the model is not accelerated, or is only a part of what was accelerated, or a
            gradient has rows that its table no longer has.
    """
    names = names_of(model, lambda module: KEPT in module.__dict__)
    if not names:
        raise ValueError("the model has no module that recsys.accelerate replaced")
    kept: dict[AbstractTables, _Original] = {
        cast("AbstractTables", module): module.__dict__[KEPT] for module in names
    }
    links = dict.fromkeys(each.link for each in kept.values() if each.link is not None)
    for link in links:
        found = sum(each.link is link for each in kept.values())
        if found != link.num_modules:
            raise ValueError(
                f"the model has {found} of the {link.num_modules} modules that recsys.accelerate "
                "replaced together, and one optimizer updates the rows of all; call recsys.restore "
                "on the whole model"
            )
    for link in links:  # may raise, so before the first cut
        link.updater.prepare_release()
    for link in links:
        link.cut()
    originals: dict[nn.Module, nn.Module] = {}
    for module, each in kept.items():
        module.detach()
        originals[module] = each.module
        each.module.training = module.training
        for ours, theirs in zip(module.holders(), _holders(each.module), strict=True):
            theirs._parameters["weight"] = ours._parameters["weight"]
        del module.__dict__[KEPT]
    exchange(model, originals)
    return Accelerated(_describe(names, originals), (), (_LEFT_TO_CALLER,), ())


@dataclass(frozen=True, eq=False)
class _Original:
    """The module that a recsys module replaced; wrapped, so that it is not a submodule."""

    module: nn.Module
    link: Link | None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles."""
        is_copied = self.link is not None and self.link.updater.is_copied
        return {"module": self.module, "link": self.link if is_copied else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Count the copied modules, so that `restore` also works for a copy of a part."""
        self.__dict__.update(state)
        if self.link is not None:
            self.link.num_modules += 1


def _holders(module: nn.Module) -> list[nn.Module]:
    """The modules whose `weight`s are the tables of a torch or TorchRec module."""
    for name in ("embedding_bags", "embeddings"):
        if hasattr(module, name):
            return list(getattr(module, name).values())
    return [module]


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


_LEFT_TO_CALLER = "gradients are left to the caller's optimizer"


def _without(
    left: Mapping[nn.Module, LeftAlone],
    found: Mapping[nn.Module, list[str]],
    tables: Sequence[NamedTable],
) -> tuple[dict[nn.Module, list[str]], list[NamedTable]]:
    """Modules and tables that are not left alone."""
    rest = {module: names for module, names in found.items() if module not in left}
    keys = {table.key for module, names in rest.items() for table in tables_of(module, names[0])}
    return rest, [table for table in tables if table.key in keys]


def _undo(
    model: nn.Module, counterparts: Mapping[nn.Module, AbstractTables], links: Sequence[Link]
) -> None:
    """Undo all replacements after an error."""
    for link in links:
        link.cut()
    for new in counterparts.values():
        new.detach()
    exchange(model, {new: old for old, new in counterparts.items()})


@dataclass(frozen=True)
class _Tiering:
    """The checked arguments of tiers; nothing has changed yet."""

    budget_bytes: int
    pinned: dict[nn.Parameter, Any] | None
    names: dict[nn.Parameter, str]
    files: ColdFiles | None
    device: torch.device

    def begin(self, link: Link) -> None:
        """Give the tables tiers; after an error, the tables are as before."""
        before = {weight: weight.data for weight in self.names}
        try:
            if self.files is not None:
                for weight, name in self.names.items():
                    weight.data = self.files.begin_with(name, weight.detach())
            link.updater.tier(
                self.budget_bytes,
                self.pinned,
                files=self.files,
                names=self.names,
                device=self.device,
            )
        except BaseException:
            for weight, rows in before.items():
                weight.data = rows
            raise


def _choose_tiering(
    tables: Sequence[NamedTable],
    specs: Sequence[UpdaterSpec],
    budget: int | str | None,
    plan: HotPlan | None,
    profile: PopularityProfile | None,
    cold_tier: str,
    cold_path: Path | str | None,
) -> _Tiering | None:
    """The tiers that the arguments of `accelerate` ask for; None if all rows are resident.

    Raises:
        Exception: as for `accelerate`.
    """
    has_budget = budget is not None or plan is not None
    if has_budget and not specs:
        raise ValueError(NEEDS_OPTIMIZER)
    if has_budget and len(specs) > 1:
        raise ValueError(
            f"budget: tables that share it must have one optimizer, got {len(specs)}; give only "
            "one of them, which leaves the other tables alone, or leave out budget="
        )
    updated = [
        table for table in tables if any(id(table.weight) in spec.param_groups for spec in specs)
    ]
    names = {table.weight: table.name for table in reversed(updated)}
    planned = plan_of_model(tables, specs[0], budget, plan, profile) if has_budget else None
    device = _device_of(updated) if has_budget else None
    files = open_cold_files(
        cold_tier,
        cold_path,
        {name: (weight.shape, weight.dtype) for weight, name in names.items()},
        has_budget=has_budget,
    )
    if device is None:
        return None
    if planned is not None:
        return _Tiering(*planned, names, files, device)
    assert budget is not None
    return _Tiering(parse_bytes(budget, "budget"), None, names, files, device)


def _device_of(tables: Sequence[NamedTable]) -> torch.device:
    """The device of all tables.

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


def _describe(
    found: Mapping[nn.Module, list[str]], counterparts: Mapping[nn.Module, nn.Module]
) -> tuple[Replacement, ...]:
    replacements = []
    for module, names in found.items():
        sizes = [len(table.weight) for table in tables_of(module, names[0])]
        new = counterparts[module]
        note = _SCALED_BY_FREQUENCY if _scales_unlike_torch(new) else ""
        kind = type(new).__name__
        replacements.append(Replacement(tuple(names), kind, len(sizes), sum(sizes), note))
    return tuple(replacements)


_SCALED_BY_FREQUENCY = (
    "scale_grad_by_freq divides a row's gradient by how often the mini-batch has that row, as "
    "torch documents; torch's CPU kernel may divide by another row's count (pytorch#190063), so "
    "gradients differ from it where rows occur unequally often"
)


def _scales_unlike_torch(module: nn.Module) -> bool:
    """Whether a module scales gradients correctly where torch's module does not."""
    return (
        isinstance(module, HotColdEmbeddingBag)
        and module.row_updater is not None
        and module.scale_grad_by_freq
        and all(group.device.type == "cpu" for group in module._table_groups())
    )
