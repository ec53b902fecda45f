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

from recsys._support.memory import lasting_tensors
from recsys.conversion.accelerated import (
    Accelerated,
    LeftAlone,
    Replacement,
    describe_outlook,
)
from recsys.conversion.choice import choose_tables
from recsys.conversion.exchange import (
    KEPT,
    counterpart,
    exchange,
    find_replaceable,
    give_back,
    names_of,
    tables_of,
)
from recsys.conversion.model_plan import plan_of_model, require_arguments
from recsys.embeddings.rows.table_parameter import storage_address
from recsys.embeddings.tiers.cold.cold_tier import open_cold_files
from recsys.embeddings.update.tiering import require_own_memory
from recsys.embeddings.updaters import make_updater

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from recsys.conversion.choice import ChosenTables
    from recsys.embeddings.lookup.abstract_tables import AbstractTables
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.counts import PopularityProfile
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.updaters import Link

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
    `weight.data = ...` keep the Parameter. With rows in files, `weight.data = ...` takes the rows
    out of their file, and the next use raises: call `weight.data.copy_(...)`.

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
      ask for it again. Lookups by several threads at once are not supported. A write through such
      a tensor raises `ConflictingWrite` if rows were updated since; write through `weight`. A write
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
            not fit stay in the tables, the cold store. Results are the same to the last bit. A
            budget needs an optimizer. None takes the budget of `plan`, or keeps all rows in fast
            memory. Tables on a device, and their state, move to the host's memory permanently, and
            rows in fast memory are on the device; `model.to(device)` moves only these. With these
            on CUDA, tables are copied once into memory that the GPU reaches, and arrays on their
            former memory see the former rows.
        plan: Rows that never leave fast memory, as a plan of the updated tables. A bag's table has
            the bag's name in the model ("tables.0"), a collection's table its name there. If two
            tables have the same name, the collection's has its path in the model, such as
            "left.embedding_bags.t_0". Without a plan, rows in frequent use stay in fast memory.
        profile: Lookups of these tables, or of the features of a collection's tables. Makes a plan
            for `budget`, as `plan_hot_rows` does.
        cold_tier: Cold store: "host" in memory, or "file" in a folder on disk. "file" moves tables
            and state to files there and frees their memory.
        cold_path: Folder of the cold tier "file", as for `HotColdEmbeddingBag`.
        always: Whether modules are replaced that PyTorch trains faster. Without a budget, these are
            left to it and to their torch optimizer: few tables, small tables with dense gradients,
            and separate modules on CUDA. The report names them and the limits.

    Returns:
        What was replaced, what was not and why, and what speed to expect; print it.

    Raises:
        TypeError: `model`, `optimizer`, `plan` or `profile` has another type.
        BudgetTooSmall: the budget is smaller than the row maps.
        ProfileError: `plan` or `profile` is for other tables.
        ColdTierError: the folder cannot be used, or the disk has no room.
        ValueError: the model has nothing to replace, or something that cannot be replaced.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    require_arguments(budget, plan, profile)
    always = always or budget is not None or plan is not None
    chosen = choose_tables(model, optimizer, lazy_adam=lazy_adam, always=always)
    specs, left = chosen.specs, chosen.left
    notes = tuple(dict.fromkeys(each.rule for each in specs if each.rule))
    refused = [f"{left[each][0]} is not replaced: {why}" for each, why in chosen.unfit.items()]
    for message in (*notes, *refused):
        warnings.warn(message, stacklevel=2)  # before any replacement, because a warning may raise
    with lasting_tensors():  # which training changes, also if this is called in inference mode
        begin_tiers = _choose_tiers(model, chosen, budget, plan, profile, cold_tier, cold_path)
        counterparts = {module: counterpart(module) for module in chosen.found}
        links: list[Link] = []
        link_of: dict[nn.Module, Link] = {}
        try:
            for spec in specs:
                link, modules = make_updater(spec, list(counterparts.values()))
                links.append(link)
                link_of |= dict.fromkeys(modules, link)
            for old, new in counterparts.items():
                new.__dict__[KEPT] = _Original(old, link_of.get(new))
            exchange(model, counterparts)
            if begin_tiers is not None:
                begin_tiers(links[0])
        except BaseException:
            for link in links:
                link.cut()
            for new in counterparts.values():
                new.detach()
            exchange(model, {new: old for old, new in counterparts.items()})
            raise
    for link in links:
        if link.marks is not None:
            link.marks.remove_hooks()
    return Accelerated(
        _describe(chosen.found, counterparts),
        tuple(
            LeftAlone(tuple(left[each]), type(each).__name__, why)
            for each, why in (chosen.unfit | chosen.not_updated).items()
        ),
        _describe_updates(chosen, {old for old, new in counterparts.items() if new in link_of}),
        notes,
        None if len(links) != 1 else links[0].row_optimizer,
        *describe_outlook([link.updater for link in links], len(counterparts)),
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
        RuntimeError: a gradient was overwritten before its rows were updated.
        ValueError: the model has no tables, or is only a part of what was accelerated, or a
            gradient has rows that its table no longer has.
    """
    names = names_of(model, lambda module: KEPT in module.__dict__)
    if not names:
        find_replaceable(model)  # raises if there is nothing that accelerate may have left
        return Accelerated((), (), (_LEFT_TO_CALLER,), ())
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
                "on the whole model, and before one of these modules is replaced"
            )
    for link in links:  # may raise, so before the first cut
        link.updater.prepare_release()
    for link in links:
        link.cut()
    originals: dict[nn.Module, nn.Module] = {}
    for module, each in kept.items():
        module.detach()
        originals[module] = each.module
        give_back(module, each.module)
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
        return {"module": self.module, "link": None}


_LEFT_TO_CALLER = "gradients are left to the caller's optimizer"


def _describe_updates(chosen: ChosenTables, updated: set[nn.Module]) -> tuple[str, ...]:
    """Say what updates the rows, and which replaced modules that leaves to the caller."""
    if not chosen.specs:
        return (_LEFT_TO_CALLER,)
    left = [
        names[0]
        for module, names in chosen.found.items()
        if module not in updated and any(each.requires_grad for each in module.parameters())
    ]
    of_rest = [f"of {', '.join(left)}, {_LEFT_TO_CALLER}"] if left else []
    return (*(each.description for each in chosen.specs), *of_rest)


def _choose_tiers(
    model: nn.Module,
    chosen: ChosenTables,
    budget: int | str | None,
    plan: HotPlan | None,
    profile: PopularityProfile | None,
    cold_tier: str,
    cold_path: Path | str | None,
) -> Callable[[Link], None] | None:
    """Check the arguments of tiers, and open their files.

    Returns:
        What gives the tables tiers; None if all rows are resident.

    Raises:
        Exception: as for `accelerate`.
    """
    updated = chosen.updated
    formulas = [spec.formula for spec in chosen.specs]
    budgeted = plan_of_model(updated, formulas, budget, plan, profile)
    if budgeted is not None:
        _require_own_memory(model, {table.weight: table.name for table in updated})
    names = {table.weight: table.name for table in reversed(updated)}
    if cold_tier == "file":  # before each table gets a file of its own
        own = [(name, weight) for weight, name in names.items() if weight.is_cpu]
        require_own_memory(reversed(own))
    files = open_cold_files(
        cold_tier,
        cold_path,
        {name: (weight.shape, weight.dtype) for weight, name in names.items()},
        has_budget=budgeted is not None,
        formula=None if budgeted is None else formulas[0],
        frozen={name for weight, name in names.items() if not weight.requires_grad},
    )
    if budgeted is None:
        return None
    budget_bytes, pinned = budgeted
    device = updated[0].weight.device

    def begin(link: Link) -> None:
        """Give the tables tiers; after an error, the tables are as before."""
        before = {weight: weight.data for weight in names}
        try:
            if files is not None:
                for weight, name in names.items():
                    weight.data = files.begin_with(name, weight.detach())
            link.updater.tier(budget_bytes, pinned, files=files, names=names, device=device)
        except BaseException:
            for weight, rows in before.items():
                weight.data = rows
            raise

    return begin


def _require_own_memory(model: nn.Module, tables: Mapping[nn.Parameter, str]) -> None:
    """Refuse other Parameters and buffers on the memory of a table: they would miss newer rows.

    Args:
        model: The whole model.
        tables: The tables that share the budget, with their names.

    Raises:
        ValueError: there is one.
    """
    names = {storage_address(weight): name for weight, name in tables.items()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        memory = storage_address(tensor)
        if memory is not None and tensor not in tables and memory in names:
            raise ValueError(
                f"table {names[memory]!r}: with a budget a table must have its own memory, and "
                f"{name!r} is another Parameter or buffer of the model on it, which would miss "
                "newer rows; use the table's own Parameter there, or a clone"
            )


def _describe(
    found: Mapping[nn.Module, list[str]], counterparts: Mapping[nn.Module, nn.Module]
) -> tuple[Replacement, ...]:
    replacements = []
    for module, names in found.items():
        sizes = [len(table.weight) for table in tables_of(module, names[0])]
        kind = type(counterparts[module]).__name__
        replacements.append(Replacement(tuple(names), kind, len(sizes), sum(sizes)))
    return tuple(replacements)
