"""`accelerate`: one line on an existing model; `restore`: the line back.

    nn.EmbeddingBag                   -> HotColdEmbeddingBag
    torchrec.EmbeddingBagCollection   -> HotColdEmbeddingBagCollection

Modules are exchanged inside the model, on the very Parameters that they had. Everything that may be
refused is refused before the first is.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recsys.embeddings.attach import Link, NamedTable, attach, choose_mover, require_movable
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.budget import NEEDS_OPTIMIZER
from recsys.embeddings.cold_files import open_cold_files
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.model_plan import plan_of_model, require_arguments
from recsys.embeddings.optimizer import RowOptimizer
from recsys.sizes import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from recsys.embeddings.fused_optimizer import FusedOptimizer
    from recsys.embeddings.plan import HotPlan
    from recsys.embeddings.popularity import PopularityProfile

__all__ = ["Accelerated", "Replacement", "accelerate", "restore"]

_Ours = HotColdEmbeddingBag | HotColdEmbeddingBagCollection


@dataclass(frozen=True)
class Replacement:
    """A module that was exchanged.

    Attributes:
        names: Where it is in the model; several where it is used in several places.
        kind: The class that is there now.
        num_tables: 1, or those of a collection.
        num_rows: Of all its tables.
        note: What it computes differently from the module that was there, and why; mostly "".
    """

    names: tuple[str, ...]
    kind: str
    num_tables: int
    num_rows: int
    note: str = ""


@dataclass(frozen=True, repr=False)
class Accelerated:
    """What `accelerate` or `restore` did.

    Attributes:
        replacements: In the order of the model.
        moved_by: What moves the rows now, in words.
        row_optimizer: `torch.optim`'s face of a formula of ours, for its `param_groups` and state;
            None where an optimizer of the user's moves the rows.
    """

    replacements: tuple[Replacement, ...]
    moved_by: str
    row_optimizer: FusedOptimizer | None = None

    def __repr__(self) -> str:
        lines = [
            f"{each.kind}: {each.num_tables} tables of {each.num_rows:,} rows at "
            f"{', '.join(each.names)}"
            for each in self.replacements
        ]
        return "\n".join([*lines, *self.notes, self.moved_by])

    @property
    def notes(self) -> list[str]:
        """What replaced modules compute differently, and why; each begins with its module."""
        return [f"{each.names[0]}: {each.note}" for each in self.replacements if each.note]


def accelerate(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | RowOptimizer | None = None,
    budget: int | str | None = None,
    plan: HotPlan | None = None,
    profile: PopularityProfile | None = None,
    cold_tier: str = "host",
    cold_path: Path | str | None = None,
) -> Accelerated:
    """Exchange a model's embeddings for ours, in place.

    Every `nn.EmbeddingBag` and TorchRec `EmbeddingBagCollection` inside is exchanged, at any depth;
    a module used in two places once for both. Parameters stay the objects that they are, so
    optimizers and checkpoints stay right; hooks, `training` and `requires_grad` are kept. Where an
    error is raised, nothing was exchanged.

    A copy or a pickle of the model, or of a part of it, moves its rows by a formula as the model
    does, from its own state on; an optimizer of torch's stays here, and the copy leaves gradients
    to whoever steps, as in plain PyTorch.

    What is not as before, where rows are moved: `weight.grad` is sparse, of a bag with
    `sparse=False` too, and torch's `clip_grad_norm_` refuses such gradients; scale it by hand
    (`weight.grad = factor * weight.grad`). Nothing reaches rows by `backward(inputs=...)`, which
    leaves them as they are, nor by `torch.autograd.grad`. A row's gradient with nan or inf raises
    `NonFiniteGradient` in `step`: such rows are not updated, all other rows are, and what else the
    optimizer has is not. Torch's optimizers take it.
    Later hooks of the optimizer's `step` see a closure. With a budget, rows that were moved last
    are in `weight` when it is looked at, and in `optimizer.state` after `state_dict()`; and lookups
    of several threads at a time are not supported. A tensor kept from before (`weight.detach()`,
    `weight.data`, a `state_dict()`) that is written to after rows were updated raises
    `ConflictingWrite`; write through `weight` each time. A write by a kept numpy array is not seen.

    Args:
        model: Its tables on the CPU or on CUDA; not wrapped by `DistributedDataParallel`.
        optimizer: What moves the rows.
            An optimizer of torch's (SGD, Adagrad, SparseAdam, TorchRec's RowWiseAdagrad; without
            momentum and weight decay): its `step` moves them, by its `param_groups` and with its
            state, which stays whole. Schedulers, `GradScaler`, clipping and accumulation work on.
            Gradients of rows are gone after `step`, not only after `zero_grad`.
            A formula (`recsys.embeddings.SGD`, ...): rows move at the end of each backward.
            None: gradients are left to whoever steps, sparse or dense as `sparse` of the bag says;
            or, where `apply_optimizer_in_backward` has marked tables, their rows move by that;
            its hooks are gone and its state is ours until `restore` gives both back.
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
        What was exchanged.

    Raises:
        TypeError: `optimizer`, `plan` or `profile` is something else.
        BudgetTooSmall: there is no room for what it takes to find rows.
        ProfileError: `plan` or `profile` is of other tables.
        ColdTierError: the folder cannot be used, or has tables.
        ValueError: there is nothing to exchange, or something that cannot be.
    """
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer | RowOptimizer):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer, a formula of recsys.embeddings (SGD, "
            f"Adagrad, ...) or None, got {type(optimizer).__name__}"
        )
    require_arguments(budget, plan, profile)
    found = _find(model)
    tables = _tables(found)
    mover = choose_mover(tables, optimizer)
    if mover is None and (budget is not None or plan is not None):
        raise ValueError(NEEDS_OPTIMIZER)
    budget_bytes = None if budget is None else parse_bytes(budget, "budget")
    planned = None if mover is None else plan_of_model(tables, mover, budget, plan, profile)
    budget_bytes, pinned = (budget_bytes, None) if planned is None else planned
    device = None if budget_bytes is None else _device_of(tables)
    moved = {} if mover is None else mover.param_groups
    names = {table.weight: table.name for table in reversed(tables) if id(table.weight) in moved}
    files = open_cold_files(
        cold_tier,
        cold_path,
        {name: (weight.shape, weight.dtype) for weight, name in names.items()},
        has_budget=budget_bytes is not None,
    )
    counterparts = {module: _counterpart(module) for module in found}
    link = None if mover is None else attach(mover, list(counterparts.values()))
    if link is not None:
        link.num_modules = len(counterparts)
    for old, new in counterparts.items():
        new.__dict__[_KEPT] = _Kept(old, link)
    _exchange(model, counterparts)
    if link is not None and budget_bytes is not None:
        before = {weight: weight.data for weight in names}
        try:
            if files is not None:
                for weight, name in names.items():
                    weight.data = files.begin_with(name, weight.detach())
            link.updater.tier(budget_bytes, pinned, files=files, names=names, device=device)
        except BaseException:
            for weight, rows in before.items():
                weight.data = rows
            restore(model)
            raise
    return Accelerated(
        _describe(found, counterparts),
        "gradients are left to the caller's optimizer" if mover is None else mover.words,
        None if link is None else link.row_optimizer,
    )


def restore(model: nn.Module) -> Accelerated:
    """Put the modules back that `accelerate` has exchanged, the same objects.

    Rows and optimizer state are as trained; gradients that no step has used yet are each table's
    sparse `grad`.

    Returns:
        What was exchanged.

    Raises:
        RuntimeError: ids, or a gradient, were overwritten before their rows were moved.
        ValueError: nothing is to be put back, `model` is only a part of what was accelerated, or a
            gradient is of rows that its table has no more.
    """
    names = _names(model, lambda module: _KEPT in module.__dict__)
    if not names:
        raise ValueError("the model has no module that recsys.accelerate has put there")
    kept: dict[nn.Module, _Kept] = {module: module.__dict__[_KEPT] for module in names}
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
    originals = {}
    for module, each in kept.items():
        cast("_Ours", module).detach()
        originals[module] = each.module
        each.module.training = module.training
        if isinstance(module, HotColdEmbeddingBag):
            each.module._parameters["weight"] = module._parameters["weight"]
        del module.__dict__[_KEPT]
    _exchange(model, originals)
    return Accelerated(_describe(names, originals), "gradients are left to the caller's optimizer")


_KEPT = "_accelerated_from"


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


def _find(model: nn.Module) -> dict[nn.Module, list[str]]:
    """What is to be exchanged, and where it is.

    Raises:
        ValueError: there is nothing, or the model is such as cannot be changed.
    """
    for name, module in model.named_modules():
        place = f"module {name!r}" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(  # noqa: TRY004  # a module it is, in the wrong place
                f"{place} must not be wrapped by DistributedDataParallel, which gathers gradients "
                "that rows moved by recsys do not leave; accelerate in one process"
            )
        if _KEPT in module.__dict__:
            raise ValueError(f"{place} is accelerated already; call recsys.restore(model) first")
    if _is_replaceable(model):
        raise ValueError(
            f"the model is itself an {type(model).__name__}, which cannot be exchanged in place; "
            "use recsys.embeddings.HotColdEmbeddingBag.from_torch or "
            "HotColdEmbeddingBagCollection.from_torchrec"
        )
    found = _names(model, _is_replaceable)
    others = _names(model, _is_of_another_class)
    if not found:
        reason = "".join(
            f"; {names[0]} is a {type(module).__name__}, a class of its own"
            for module, names in others.items()
        )
        raise ValueError(
            "the model must have an nn.EmbeddingBag or a torchrec.EmbeddingBagCollection inside, "
            f"and has none{reason}"
        )
    for module, names in others.items():
        warnings.warn(
            f"{names[0]} is left as it is: {type(module).__name__} is a class of its own, which "
            "may compute otherwise than nn.EmbeddingBag",
            stacklevel=3,
        )
    return found


def _is_replaceable(module: nn.Module) -> bool:
    return type(module) is nn.EmbeddingBag or _is_torchrec(module)


def _is_of_another_class(module: nn.Module) -> bool:
    is_bag = isinstance(module, nn.EmbeddingBag) and type(module) is not nn.EmbeddingBag
    return is_bag and not isinstance(module, HotColdEmbeddingBag)


def _is_torchrec(module: nn.Module) -> bool:
    # Who has one has imported it; importing it here takes seconds.
    library = sys.modules.get("torchrec.modules.embedding_modules")
    return library is not None and type(module) is library.EmbeddingBagCollection


def _names(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> dict[nn.Module, list[str]]:
    """Modules by where they are; what is inside of one, or of a module of ours, is part of it."""
    found: dict[nn.Module, list[str]] = {}

    def visit(module: nn.Module, prefix: str, path: tuple[nn.Module, ...]) -> None:
        for name, child in _children(module):
            if is_wanted(child):
                found.setdefault(child, []).append(prefix + name)
            elif not isinstance(child, _Ours) and child not in path:
                visit(child, f"{prefix}{name}.", (*path, child))

    visit(model, "", (model,))
    return found


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """By every name; `named_children` leaves out the second of a module used twice."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _tables(found: Mapping[nn.Module, list[str]]) -> list[NamedTable]:
    """Every table of every module; one that modules share comes several times."""
    tables = [table for module, names in found.items() for table in _tables_of(module, names[0])]
    for table in tables:
        require_movable(table)
    return tables


def _tables_of(module: nn.Module, name: str) -> Iterator[NamedTable]:
    if isinstance(module, nn.EmbeddingBag):
        yield NamedTable(name, f"{name}.weight", "", _weight(module), None, name, (name,))
        return
    configs = {config.name: config for config in cast("Any", module).embedding_bag_configs()}
    for table, bag in cast("nn.ModuleDict", module.embedding_bags).items():
        place = f"{name}.embedding_bags.{table}"
        features = tuple(configs[table].feature_names)
        yield NamedTable(place, f"{place}.weight", f"{table}.", _weight(bag), name, table, features)


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


def _weight(bag: nn.Module) -> nn.Parameter:
    return cast("nn.Parameter", bag.weight)


def _counterpart(module: nn.Module) -> _Ours:
    """A module of ours that does the same, on the same Parameters; nothing moves rows yet."""
    ours: _Ours
    if isinstance(module, nn.EmbeddingBag):
        ours = HotColdEmbeddingBag._on_weight_of(module)
    else:
        ours = HotColdEmbeddingBagCollection._on_bags_of(module)
    ours.training = module.training
    for name in _SHARED:
        ours.__dict__[name] = module.__dict__[name]
    return ours


# The very dictionaries: handles of hooks know them, and remove hooks from them.
_SHARED = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


def _exchange(model: nn.Module, counterparts: Mapping[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in _children(parent):
            if child in counterparts:
                parent._modules[name] = counterparts[child]


def _describe(
    found: Mapping[nn.Module, list[str]], counterparts: Mapping[nn.Module, nn.Module]
) -> tuple[Replacement, ...]:
    replacements = []
    for module, names in found.items():
        sizes = [len(table.weight) for table in _tables_of(module, names[0])]
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
