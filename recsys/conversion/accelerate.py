"""`accelerate` replaces the embeddings of an existing model; `restore` puts them back.

    nn.EmbeddingBag                   -> HotColdEmbeddingBag
    nn.Embedding                      -> HotColdEmbedding
    torchrec.EmbeddingBagCollection   -> HotColdEmbeddingBagCollection
    torchrec.EmbeddingCollection      -> HotColdEmbeddingCollection

Modules are replaced inside the model; the Parameters stay the same objects. All checks come before
the first replacement.
"""

from __future__ import annotations

import textwrap
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from recsys._support.memory import lasting_tensors
from recsys._support.sizes import format_bytes
from recsys._support.torch_compat import MODULE_HOOKS, DisableTorchFunctionSubclass
from recsys.conversion.choice import (
    KEPT,
    choose_tables,
    find_replaceable,
    names_of,
    plan_of_model,
    require_module,
    tables_of,
)
from recsys.embeddings.attach import Attachment
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection, HotColdEmbeddingCollection
from recsys.embeddings.embedding import HotColdEmbedding
from recsys.embeddings.popularity.plan import require_plan
from recsys.embeddings.tables_module import TableSettings
from recsys.embeddings.tiers.budget import SpaceSize, give_slots
from recsys.embeddings.tiers.file_store import ColdFiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.tables_module import TableModule
    from recsys.embeddings.update.fused_optimizer import FusedOptimizer

__all__ = ["Accelerated", "accelerate", "restore"]

_COUNTERPARTS = {
    "EmbeddingBag": HotColdEmbeddingBag,
    "Embedding": HotColdEmbedding,
    "EmbeddingBagCollection": HotColdEmbeddingBagCollection,
    "EmbeddingCollection": HotColdEmbeddingCollection,
}


@dataclass(frozen=True, repr=False)
class Accelerated:
    """What `accelerate` or `restore` did; prints as a few lines.

    Attributes:
        replacements: By the names of replaced modules in the model: the class that is there now.
        left_alone: By the names of modules that were left to PyTorch: why.
        updated_by: A sentence per optimizer that says what updates the rows now.
        notes: How these updates differ from those before, and why; usually empty.
        row_optimizer: The `torch.optim.Optimizer` of the rows, with their `param_groups` and state;
            None if an optimizer of the user's updates the rows.
        expected: A sentence that says where the rows are, and what speed to expect.
    """

    replacements: dict[str, str]
    left_alone: dict[str, str]
    updated_by: tuple[str, ...]
    notes: tuple[str, ...]
    row_optimizer: FusedOptimizer | None = None
    expected: str = ""

    def __repr__(self) -> str:
        lines = [f"{kind}: {names}" for kind, names in _by_value(self.replacements)]
        for reason, names in _by_value(self.left_alone):
            lines.append(f"left to PyTorch: {names}, because {reason}")
        return "\n".join([*lines, *self.updated_by, *self.notes, *filter(None, [self.expected])])


def _by_value(by_name: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each value, with the names that have it in words."""
    for value in dict.fromkeys(by_name.values()):
        names = ", ".join(name for name, found in by_name.items() if found == value)
        yield value, textwrap.shorten(names, 80, placeholder=" ...")


def accelerate(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | RowOptimizer | None = None,
    lazy_adam: bool = False,
    budget: int | str | None = None,
    plan: HotPlan | None = None,
    cold_tier: str = "host",
    cold_path: Path | str | None = None,
    always: bool = False,
) -> Accelerated:
    """Replace a model's embeddings by those of recsys, in place.

    This replaces every `nn.EmbeddingBag`, `nn.Embedding` and TorchRec `EmbeddingBagCollection` and
    `EmbeddingCollection` inside the model, at any depth. Parameters stay the same objects, so
    optimizers and checkpoints stay valid. Hooks, `training` and `requires_grad` are kept. After an
    error nothing has been replaced. A module with `mode="max"`, `max_norm`, `scale_grad_by_freq` or
    rows of 16 bits is left to torch, and the result says so.

    A copy or a pickle of the model has plain tables with all rows, and leaves gradients at them.
    Call `restore` and `accelerate` for the copy to continue as here. Without that, a copied Adam
    updates every row in each step, also with `lazy_adam`; a warning says so.

    The tables are fixed until `restore`: if a Parameter is replaced (`load_state_dict(...,
    assign=True)`, `torch.func.functional_call`), the next lookup raises. `load_state_dict` and
    `weight.data = ...` keep the Parameter. With a budget, `weight.data = ...` raises: call
    `weight.data.copy_(...)`.

    Differences from plain PyTorch, for updated rows:

    - `backward(inputs=...)` and `torch.autograd.grad` compute no gradients of rows.
    - If a row's gradient contains nan or inf, `step` raises `NonFiniteGradient`. Such rows are not
      updated, all other rows are, and the optimizer's other parameters are not.
    - A step without lookups in a table is no step of that table. In plain PyTorch it is one after
      `zero_grad(set_to_none=False)`, which SparseAdam and `lr_decay` of Adagrad count.
    - `nn.Parameter(weight)` and `from_pretrained(weight)` need `weight.detach()`.
    - The modules keep the gradients of rows. If all of them are deleted before `step`, it does not
      update their rows.
    - A hook for the gradient of a table is refused. Step hooks that are registered later see a
      closure.
    - With a budget, `weight` is written back when it is read, and `optimizer.state` by
      `state_dict()`. A tensor kept from before (`weight.detach()`, `weight.data`, a `state_dict()`)
      misses updates since then, of some rows or of all: copy it to keep the rows of that time, or
      ask for it again. One thread trains; others may evaluate meanwhile. A write through such a
      tensor raises `ConflictingWrite` if rows were updated since; write through `weight`. A write
      through a kept numpy array is not seen. What a forked process trains in tables that are shared
      is lost; with rows in files it may only evaluate, and sees what this process writes meanwhile.
    - With a budget, give `weight.detach()` to what takes a tensor without PyTorch's protocol for
      classes of tensors, or it misses newer rows, too: `torch.tensor`, `torch.asarray`,
      `new_tensor`, `as_subclass`, values of a sparse tensor, `other.data = weight`, functions of
      TorchScript, and transforms such as `torch.vmap(f)(weight)` and `torch.func.grad(f)(weight)`.

    Args:
        model: Has its tables on the CPU or on CUDA; not inside `DistributedDataParallel`.
        optimizer: Updates the rows.
            A torch optimizer (SGD, Adagrad, SparseAdam, TorchRec's RowWiseAdagrad, RWSAdagrad of
            facebookresearch/dlrm; without momentum and weight decay), or several for different
            tables: its `step` updates the rows, with its `param_groups` and its state. Schedulers,
            `GradScaler`, clipping and accumulation continue to work. `step` clears gradients of
            rows, as `zero_grad` does, so what looks for them later, such as the averagers of
            `torch.distributed.algorithms.model_averaging`, leaves tables out. A module
            with tables of none of them is not replaced. An optimizer that is made later gets
            gradients of whole tables, and is no faster than before: call `restore`, and
            `accelerate` with it.
            A formula (`recsys.embeddings.SGD`, ...): rows are updated at the end of each backward,
            so accumulation, clipping and `GradScaler` do not reach them.
            None: gradients are left at the tables, sparse or dense as `sparse` of the bag says. If
            `apply_optimizer_in_backward` gave tables an optimizer, recsys reads its settings and
            state once, and updates the rows by its formula. From then on the rows have the
            returned `row_optimizer`, for schedulers and `load_state_dict`; after `restore` they
            have none.
        lazy_adam: Whether `torch.optim.Adam` and `AdamW` (without weight decay) may update rows by
            the rule of SparseAdam, which keeps a row and its moments if it is not looked up. A
            warning describes the difference.
        budget: Fast memory in bytes or as "2GiB", for rows, their state and row maps. Rows that do
            not fit stay in the tables, the cold tier. Results are the same to the last bit. A
            budget needs an optimizer. None takes the budget of `plan`, or keeps all rows in fast
            memory. Tables on a device, and their state, move to the host's memory permanently, and
            rows in fast memory are on the device; `model.to(device)` moves neither. Arrays on the
            tables' former memory see the former rows.
        plan: Rows that never leave fast memory, as a plan of the updated tables by
            `plan_hot_rows`. A bag's table has the bag's name in the model ("tables.0"), a
            collection's table its name there. If two tables have the same name, the collection's
            has its path in the model, such as "left.embedding_bags.t_0". Without a plan, rows in
            frequent use stay in fast memory.
        cold_tier: Cold store: "host" in memory, or "file" in a folder on disk. "file" moves tables
            and state to files there and frees their memory.
        cold_path: Folder of the cold tier "file", as for `HotColdEmbeddingBag`.
        always: Whether modules are replaced that PyTorch trains faster. Without a budget and a
            plan, these are left to it and to their torch optimizer. With SGD they are fewer than 24
            tables with sparse gradients, and less than 2^19 numbers in tables with dense ones. With
            an optimizer that has state, they are one table, and less than 2^16 numbers. On CUDA
            they are separate modules, too. A formula and `lazy_adam` take all modules. The report
            names what is left.

    Returns:
        What was replaced, what was not and why, and what speed to expect; print it.

    Raises:
        TypeError: `model`, `optimizer` or `plan` has another type.
        BudgetTooSmall: the budget is smaller than the row maps.
        ConfigError: the arguments of tiers contradict each other, or `cold_tier` is "file" and the
            model is on CUDA.
        ProfileError: `plan` is for other tables.
        ColdTierError: the folder cannot be used, or the disk has no room.
        ValueError: the model has nothing to replace, or something that cannot be replaced.
    """
    require_module(model)
    require_plan(plan)
    always = always or budget is not None or plan is not None
    chosen = choose_tables(model, optimizer, lazy_adam=lazy_adam, always=always)
    updaters, updated = chosen.updaters, chosen.updated
    notes = tuple(dict.fromkeys(updater.rule for updater in updaters if updater.rule))
    for message in notes:
        warnings.warn(message, stacklevel=2)  # before any replacement, because a warning may raise
    formulas = [updater.formula for updater in updaters]
    budgeted = plan_of_model(updated, formulas, budget, plan)
    if budgeted is not None:
        _require_own_memory(model, {table.weight: table.name for table in updated})
    TableSettings(
        None if budgeted is None else formulas[0],
        budget=None if budgeted is None else budgeted[0],
        cold_tier=cold_tier,
        cold_path=cold_path,
    ).require(None if budgeted is None else updated[0].weight.device)
    with lasting_tensors():  # which training changes, also if this is called in inference mode
        counterparts = {module: _counterpart(module) for module in chosen.found}
        made: list[Attachment] = []
        rows = {table.weight: table.weight.data for table in updated if budgeted is not None}
        try:
            tables = list(counterparts.values())
            for updater in updaters:
                of_rows = updater.optimizer or updater.formula
                made.append(Attachment(tables, updater.tables, of_rows, updater.translation))
                if updater.marks is not None and made[-1].row_optimizer is not None:
                    updater.marks.give_state(made[-1].row_optimizer)
            for old, new in counterparts.items():
                new.__dict__[KEPT] = old  # not as an attribute: it is no submodule
            _exchange(model, counterparts)
            if budgeted is not None:
                _begin_tiers(made[0], formulas[0], *budgeted, cold_path)
        except BaseException:
            for attachment in made:
                attachment.release()
            for weight, before in rows.items():  # a table with slots refuses other memory
                weight.data = before
            _exchange(model, {new: old for old, new in counterparts.items()})
            raise
    for updater in updaters:
        if updater.marks is not None:
            updater.marks.remove_hooks()
    return Accelerated(
        _describe(chosen.found, counterparts),
        chosen.left,
        tuple(
            f"rows are updated in the step of {type(updater.optimizer).__name__}"
            if updater.optimizer is not None
            else f"rows are updated at the end of each backward, by {updater.formula}"
            for updater in updaters
        )
        or (_LEFT_TO_CALLER,),
        notes,
        None if len(made) != 1 else made[0].row_optimizer,
        _describe_speed(made),
    )


def restore(model: nn.Module) -> Accelerated:
    """Put back the modules that `accelerate` replaced.

    Rows and optimizer state are as trained. Gradients that no step has used become each table's
    `grad`. Hooks, settings and other attributes are those that the replacements have now.

    Args:
        model: The model that was given to `accelerate`.

    Returns:
        What was replaced; nothing if `accelerate` left all modules to PyTorch.

    Raises:
        ConflictingWrite: a table was written to while fast memory had newer rows.
        RuntimeError: a gradient was overwritten before its rows were updated.
        ValueError: the model has no tables, or is only a part of what was accelerated, or a
            gradient has rows that its table no longer has.
    """
    names = names_of(model, lambda module: KEPT in module.__dict__)
    if not names:
        find_replaceable(model)  # raises if there is nothing that accelerate may have left
        return Accelerated({}, {}, (_LEFT_TO_CALLER,), ())
    kept = {cast("TableModule", module): module.__dict__[KEPT] for module in names}
    made = dict.fromkeys(module.attachment for module in kept if module.attachment is not None)
    for attachment in made:
        found = sum(module.attachment is attachment for module in kept)
        if found != len(attachment.modules):
            raise ValueError(
                f"the model has {found} of the {len(attachment.modules)} modules that "
                "recsys.accelerate replaced together, and one optimizer updates the rows of all; "
                "call recsys.restore on the whole model, and before one of these modules is "
                "replaced"
            )
    for attachment in made:  # may raise, so before the first release
        attachment.require_releasable()
    for attachment in made:
        attachment.release()
    for module, original in kept.items():
        module.detach()
        _give_back(module, original)
        del module.__dict__[KEPT]
    originals: dict[nn.Module, nn.Module] = dict(kept.items())
    _exchange(model, originals)
    return Accelerated(_describe(names, originals), {}, (_LEFT_TO_CALLER,), ())


_LEFT_TO_CALLER = "gradients are left to the caller's optimizer"


def _begin_tiers(
    attachment: Attachment,
    formula: RowOptimizer,
    budget: int,
    pinned: Mapping[nn.Parameter, tuple[NDArray[np.int64], NDArray[np.int64]]],
    cold_path: Path | str | None,
) -> None:
    names: dict[nn.Parameter, str] = {}
    for group in attachment.groups:
        names |= dict(zip(group.tables, group.names, strict=True))
    if cold_path is not None:
        files = ColdFiles(cold_path)
        for weight, name in names.items():
            weight.data = files.keep(name, weight.detach())
        for group in attachment.groups:
            group.files = files
            group.lay_out()
    by_name = {names[weight]: rows for weight, rows in pinned.items()}
    give_slots(attachment.groups, formula, budget, by_name)


def _require_own_memory(model: nn.Module, tables: Mapping[nn.Parameter, str]) -> None:
    """Refuse other Parameters and buffers on the memory of a table: they would miss newer rows.

    Args:
        model: The whole model.
        tables: The tables that share the budget, with their names.

    Raises:
        ValueError: there is one.
    """
    names: dict[int, str] = {}
    tensors = (*model.named_parameters(), *model.named_buffers())
    others = [(tensor, name) for name, tensor in tensors if tensor not in tables]
    for tensor, name in (*tables.items(), *others):
        with DisableTorchFunctionSubclass():  # reading a table would write back all its rows
            has_memory = tensor.layout is torch.strided and not tensor.is_meta
            memory = tensor.untyped_storage().data_ptr() if has_memory else 0
        if memory and memory in names:
            raise ValueError(
                f"table {names[memory]!r} and {name!r}: with a budget a table must have its own "
                "memory, and these are two tensors of the model on one, of which one would miss "
                "newer rows; use one Parameter in both places, or a clone"
            )
        if tensor in tables:
            names[memory] = name


def _describe(
    found: Mapping[nn.Module, list[str]], counterparts: Mapping[nn.Module, nn.Module]
) -> dict[str, str]:
    kinds = {module: type(counterparts[module]).__name__ for module in found}
    return {name: kinds[module] for module, names in found.items() for name in names}


def _describe_speed(made: Sequence[Attachment]) -> str:
    """Say where the rows are; `made` is everything in recsys that updates rows."""
    updates = [update for attachment in made for update in attachment.updates]
    if not updates:
        return "expect the same speed as before: recsys updates no rows here"
    sizes = [
        SpaceSize.of(update.group.tables, update.formula().state_sizes(update.group.dim))
        for update in updates
    ]
    total = f"{format_bytes(sum(size.resident_bytes for size in sizes))} of rows and state"
    if all(update.group.fetcher is None for update in updates):
        return f"all {total} are in fast memory"
    pairs = zip(updates, sizes, strict=True)
    hot = format_bytes(sum(update.group.num_slots * size.slot_bytes for update, size in pairs))
    location = "in memory" if updates[0].group.files is None else "in files"
    return (
        f"{hot} of fast memory for {total}; the other rows are {location}, so expect longer steps: "
        "recsys.pipeline.TrainPipeline fetches rows before their step"
    )


def _counterpart(module: nn.Module) -> TableModule:
    """A recsys module that computes the same on the same Parameters; it has no optimizer yet."""
    kind: Any = _COUNTERPARTS[type(module).__name__]
    ours: TableModule = kind._on(module)
    ours.training = module.training
    for new, old in _pairs(ours, module):
        new.__dict__.update({name: old.__dict__[name] for name in MODULE_HOOKS})
        for name, value in _attributes(old).items():
            if hasattr(type(old), name) or not hasattr(type(new), name):  # a name of our class
                new.__dict__.setdefault(name, value)
    return ours


def _give_back(ours: TableModule, module: nn.Module) -> None:
    """Give the module that `ours` replaced its Parameters, and what was set on `ours` meanwhile."""
    for new, old in _pairs(ours, module):
        for name, value in _attributes(new).items():
            if name != KEPT and not hasattr(type(new), name):
                old.__dict__[name] = value


def _pairs(ours: TableModule, module: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """A module with the one that it replaces, and so the modules with the tables of both."""
    holders = zip(ours.tables(), tables_of(module, ""), strict=True)
    return [(ours, module), *((new.holder, old.holder) for new, old in holders)]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a user may have set; the private attributes of a collection are its own."""
    is_table = isinstance(module, nn.EmbeddingBag | nn.Embedding)
    return {
        name: value
        for name, value in module.__dict__.items()
        if is_table or name[:1] != "_" or name in MODULE_HOOKS
    }


def _exchange(model: nn.Module, counterparts: Mapping[nn.Module, nn.Module]) -> None:
    """Replace each key by its value in the model, except inside other keys."""
    inside = {part for module in counterparts for part in module.modules()}
    for parent in set(model.modules()) - inside:
        for name, child in parent._modules.items():  # also under a second name
            if child is not None and child in counterparts:
                parent._modules[name] = counterparts[child]
