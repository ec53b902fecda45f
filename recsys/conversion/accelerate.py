"""`accelerate`: one line on an existing model; `restore`: the line back.

    nn.EmbeddingBag                   -> HotColdEmbeddingBag
    nn.Embedding                      -> HotColdEmbedding
    torchrec.EmbeddingBagCollection   -> HotColdEmbeddingBagCollection
    torchrec.EmbeddingCollection      -> HotColdEmbeddingCollection

Modules are exchanged inside the model, on the very Parameters that they had. Everything that may be
refused is refused before the first is.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

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
from recsys.conversion.left_alone import find_unfit, find_unmoved
from recsys.conversion.model_plan import plan_of_model, require_arguments
from recsys.embeddings.attach import Link, Mover, NamedTable, attach, choose_movers
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.optimizer import RowOptimizer
from recsys.embeddings.tiers.budget import NEEDS_OPTIMIZER
from recsys.embeddings.tiers.cold.cold_files import open_cold_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn

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
    """Exchange a model's embeddings for ours, in place.

    Every `nn.EmbeddingBag`, `nn.Embedding` and TorchRec `EmbeddingBagCollection` and
    `EmbeddingCollection` inside is exchanged, at any depth; a module used in two places once for
    both. Parameters stay the objects that they are, so optimizers and checkpoints stay right;
    hooks, `training` and `requires_grad` are kept. Where an error is raised, nothing was exchanged.

    A copy or a pickle of the whole model updates its rows by a formula as the model does, from its
    own state on. One of a part of it has plain tables, and says so at its first lookup. An
    optimizer of torch's stays here, and the copy leaves gradients at the tables, as plain PyTorch
    does.

    The tables are fixed until `restore`: a Parameter that is replaced (`load_state_dict(...,
    assign=True)`, `torch.func.functional_call`) raises at the next lookup. `load_state_dict` and
    `weight.data = ...` keep the Parameter.

    What is not as before, where rows are updated: nothing reaches rows by `backward(inputs=...)`,
    which leaves them as they are, nor by `torch.autograd.grad`. A row's gradient with nan or inf
    raises `NonFiniteGradient` in `step`: such rows are not updated, all other rows are, and what
    else the optimizer has is not. Torch's optimizers take it.
    Later hooks of the optimizer's `step` see a closure. With a budget, rows that were moved last
    are in `weight` when it is looked at, and in `optimizer.state` after `state_dict()`; and lookups
    of several threads at a time are not supported. A tensor kept from before (`weight.detach()`,
    `weight.data`, a `state_dict()`) that is written to after rows were updated raises
    `ConflictingWrite`; write through `weight` each time. A write by a kept numpy array is not seen.

    Args:
        model: Its tables on the CPU or on CUDA; not wrapped by `DistributedDataParallel`.
        optimizer: What moves the rows.
            An optimizer of torch's (SGD, Adagrad, SparseAdam, TorchRec's RowWiseAdagrad,
            RWSAdagrad of facebookresearch/dlrm; without momentum and weight decay), or several,
            where tables have one each: its `step` moves them, by its `param_groups` and with its
            state, which stays whole. Schedulers, `GradScaler`, clipping and accumulation work on.
            Gradients of rows are gone after `step`, not only after `zero_grad`. A module whose
            tables none of them has is left as it is.
            A formula (`recsys.embeddings.SGD`, ...): rows are updated at the end of each backward.
            None: gradients are left at the tables, sparse or dense as `sparse` of the bag says; or,
            where `apply_optimizer_in_backward` has marked tables, their rows are updated by that;
            recsys has its hooks and its state until `restore` gives both back.
        lazy_adam: Whether `torch.optim.Adam` and `AdamW` (without weight decay) may move rows by
            SparseAdam's rule, which differs from theirs: a row that is not looked up stays, and so
            do its moments. A warning says so.
        budget: Bytes that all rows in fast memory may take, with their state and what it takes to
            find them, as a number or like "2GiB". Rows that do not fit wait in the tables, which
            are then the cold store; what is computed is the same to the last bit. It needs
            something that moves rows. None keeps all rows in fast memory, or has that of `plan`.
            Tables on a device, and their state, are in the host's memory from then on, for good;
            rows in fast memory are on the device. `model.to(device)` moves these alone.
        plan: Which rows are never to leave fast memory, of the tables that are moved. A bag's table
            is called by the bag's name in the model ("tables.0"), a collection's by its own there;
            where two have one name, a collection's goes by its place in the model, as
            "left.embedding_bags.t_0". Without one, rows that are used often stay by being used.
        profile: Lookups of these tables, or of the features of a collection's: a plan is made of it
            for `budget`, as by `plan_hot_rows`.
        cold_tier: Where rows wait that do not fit: "host", in memory, or "file", in a folder on
            disk; then tables and state are moved there, and the memory they took is free.
        cold_path: That folder; it must not have tables yet.

    Returns:
        What was exchanged, what was not and why, and what speed to expect; print it.

    Raises:
        TypeError: `optimizer`, `plan` or `profile` is something else.
        BudgetTooSmall: there is no room for what it takes to find rows.
        ProfileError: `plan` or `profile` is of other tables.
        ColdTierError: the folder cannot be used, or has tables.
        ValueError: there is nothing to exchange, or something that cannot be.
    """
    optimizers = _as_tuple(optimizer)
    require_arguments(budget, plan, profile)
    found = find_replaceable(model)
    tables = tables_in(found)
    given = optimizers if isinstance(optimizers, tuple) else ()
    left = find_unfit(model, found, tables, given, lazy_adam=lazy_adam)
    found, tables = _without(left, found, tables)
    movers = choose_movers(tables, optimizers, lazy_adam=lazy_adam)
    rules = tuple(dict.fromkeys(each.rule for each in movers if each.rule))
    for message in [*rules, *(f"{x.names[0]} is left as it is: {x.reason}" for x in left.values())]:
        warnings.warn(message, stacklevel=2)  # before anything is exchanged: it may be an error
    if given:
        left |= find_unmoved(found, movers)
        found, tables = _without(left, found, tables)
    tiering = _choose_tiering(tables, movers, budget, plan, profile, cold_tier, cold_path)
    counterparts = {module: counterpart(module) for module in found}
    links: list[Link] = []
    link_of: dict[nn.Module, Link] = {}
    try:
        for mover in movers:
            link, modules = attach(mover, list(counterparts.values()))
            links.append(link)
            link_of |= dict.fromkeys(modules, link)
        for old, new in counterparts.items():
            new.__dict__[KEPT] = _Kept(old, link_of.get(new))
        exchange(model, counterparts)
        if tiering is not None:
            tiering.begin(links[0])
    except BaseException:
        _take_back(model, counterparts, links)
        raise
    return Accelerated(
        _describe(found, counterparts),
        tuple(left.values()),
        tuple(each.words for each in movers) or (_LEFT_TO_CALLER,),
        rules,
        None if len(links) != 1 else links[0].row_optimizer,
        *describe_outlook([link.updater for link in links]),
    )


def restore(model: nn.Module) -> Accelerated:
    """Put the modules back that `accelerate` has exchanged, the same objects.

    Rows and optimizer state are as trained; gradients that no step has used yet are each table's
    `grad`.

    Returns:
        What was exchanged.

    Raises:
        RuntimeError: ids, or a gradient, were overwritten before their rows were moved.
        ValueError: nothing is to be put back, `model` is only a part of what was accelerated, or a
            gradient is of rows that its table has no more.
    """
    names = names_of(model, lambda module: KEPT in module.__dict__)
    if not names:
        raise ValueError("the model has no module that recsys.accelerate has put there")
    kept: dict[AbstractTables, _Kept] = {
        cast("AbstractTables", module): module.__dict__[KEPT] for module in names
    }
    links = dict.fromkeys(each.link for each in kept.values() if each.link is not None)
    for link in links:
        found = sum(each.link is link for each in kept.values())
        if found != link.num_modules:
            raise ValueError(
                f"the model has {found} of the {link.num_modules} modules that recsys.accelerate "
                "has exchanged together, and the rows of all are moved together; call "
                "recsys.restore on the whole model"
            )
    for link in links:  # before one is cut: this may be refused
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
class _Kept:
    """The module that one of ours has taken the place of; in here it is no submodule."""

    module: nn.Module
    link: Link | None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles."""
        goes_along = self.link is not None and self.link.updater.goes_along
        return {"module": self.module, "link": self.link if goes_along else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Count the modules that were copied along; of a part, nobody asks for the rest."""
        self.__dict__.update(state)
        if self.link is not None:
            self.link.num_modules += 1


def _holders(module: nn.Module) -> list[nn.Module]:
    """The modules whose `weight`s are the tables of one of torch's or TorchRec's."""
    for name in ("embedding_bags", "embeddings"):
        if hasattr(module, name):
            return list(getattr(module, name).values())
    return [module]


def _as_tuple(optimizer: Any) -> tuple[torch.optim.Optimizer, ...] | RowOptimizer | None:
    """Optimizers of torch's as several.

    Raises:
        TypeError: it is something else.
    """
    if optimizer is None or isinstance(optimizer, RowOptimizer):
        return optimizer
    several = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if not several:
        raise TypeError("optimizer must be at least one, got an empty list; leave it out for none")
    for each in several:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer, several of these, a formula of "
                f"recsys.embeddings (SGD, Adagrad, ...) or None, got {type(each).__name__}"
            )
    return several


_LEFT_TO_CALLER = "gradients are left to the caller's optimizer"


def _without(
    left: Mapping[nn.Module, LeftAlone],
    found: Mapping[nn.Module, list[str]],
    tables: Sequence[NamedTable],
) -> tuple[dict[nn.Module, list[str]], list[NamedTable]]:
    """Modules and tables without those that are left as they are."""
    rest = {module: names for module, names in found.items() if module not in left}
    keys = {table.key for module, names in rest.items() for table in tables_of(module, names[0])}
    return rest, [table for table in tables if table.key in keys]


def _take_back(
    model: nn.Module, counterparts: Mapping[nn.Module, AbstractTables], links: Sequence[Link]
) -> None:
    """After an error: everything as it was."""
    for link in links:
        link.cut()
    for new in counterparts.values():
        new.detach()
    exchange(model, {new: old for old, new in counterparts.items()})


@dataclass(frozen=True)
class _Tiering:
    """A budget, checked; nothing of the model has been changed yet."""

    budget_bytes: int
    pinned: dict[nn.Parameter, Any] | None
    names: dict[nn.Parameter, str]
    files: ColdFiles | None
    device: torch.device

    def begin(self, link: Link) -> None:
        """Keep rows in slots from now on; where an error is raised, tables are as before."""
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
    movers: Sequence[Mover],
    budget: int | str | None,
    plan: HotPlan | None,
    profile: PopularityProfile | None,
    cold_tier: str,
    cold_path: Path | str | None,
) -> _Tiering | None:
    """What the arguments of `accelerate` say of tiers; None where all rows are resident.

    Raises:
        Exception: as `accelerate` says.
    """
    has_budget = budget is not None or plan is not None
    if has_budget and not movers:
        raise ValueError(NEEDS_OPTIMIZER)
    if has_budget and len(movers) > 1:
        raise ValueError(
            f"budget: tables that share it must have one optimizer, got {len(movers)}; accelerate "
            "with one of them, which leaves the other tables as they are, or leave out budget="
        )
    moved = [table for table in tables if any(id(table.weight) in m.param_groups for m in movers)]
    names = {table.weight: table.name for table in reversed(moved)}
    planned = plan_of_model(tables, movers[0], budget, plan, profile) if has_budget else None
    device = _device_of(moved) if has_budget else None
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
    """Where all tables are.

    Raises:
        ValueError: they are in several places.
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
    """Whether a module scales gradients right where the one that it replaces does not."""
    return (
        isinstance(module, HotColdEmbeddingBag)
        and module.row_updater is not None
        and module.scale_grad_by_freq
        and all(group.device.type == "cpu" for group in module._table_groups())
    )
