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
from itertools import pairwise
from operator import mul
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from recsys._support.memory import lasting_tensors
from recsys._support.sizes import counted, format_bytes
from recsys._support.torch_compat import DisableTorchFunctionSubclass
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
from recsys.embeddings.attach import Attachment
from recsys.embeddings.tables_module import TableSettings
from recsys.embeddings.tiers.budget import give_slots
from recsys.embeddings.tiers.file_store import ColdFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from recsys.conversion.choice import ChosenTables
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.counts import PopularityProfile
    from recsys.embeddings.popularity.plan import HotPlan
    from recsys.embeddings.tables_module import TableModule
    from recsys.embeddings.update.fused_optimizer import FusedOptimizer

__all__ = ["Accelerated", "LeftAlone", "Replacement", "accelerate", "restore"]

_NAMED = 3  # modules named in a list before it is shortened


@dataclass(frozen=True)
class Replacement:
    """A module that was replaced.

    Attributes:
        names: Its names in the model; several if the model uses it in several places.
        kind: The class that replaces it.
        num_tables: Number of its tables; 1 unless it is a collection.
        num_rows: Rows of all its tables.
    """

    names: tuple[str, ...]
    kind: str
    num_tables: int
    num_rows: int


@dataclass(frozen=True)
class LeftAlone:
    """A module with a table that was not replaced.

    Attributes:
        names: Its names in the model.
        kind: Its class.
        reason: Why it was not replaced.
    """

    names: tuple[str, ...]
    kind: str
    reason: str


@dataclass(frozen=True, repr=False)
class Accelerated:
    """What `accelerate` or `restore` did; prints as a few lines.

    Attributes:
        replacements: The replaced modules, in the order of the model.
        left_alone: The modules that were left to PyTorch, and why.
        updated_by: A sentence per optimizer that says what updates the rows now.
        notes: How these updates differ from those before, and why; usually empty.
        row_optimizer: The `torch.optim.Optimizer` of the rows, with their `param_groups` and state;
            None if an optimizer of the user's updates the rows.
        tiers: A sentence that says where the rows are.
        expected: A sentence that says what speed to expect.
    """

    replacements: tuple[Replacement, ...]
    left_alone: tuple[LeftAlone, ...]
    updated_by: tuple[str, ...]
    notes: tuple[str, ...]
    row_optimizer: FusedOptimizer | None = None
    tiers: str = ""
    expected: str = ""

    def __repr__(self) -> str:
        lines = []
        for kind in dict.fromkeys(each.kind for each in self.replacements):
            of_kind = [each for each in self.replacements if each.kind == kind]
            num_tables = sum(each.num_tables for each in of_kind)
            num_rows = sum(each.num_rows for each in of_kind)
            tables = counted(num_tables, "table")
            places = _some([", ".join(each.names) for each in of_kind])
            lines.append(f"{kind}: {tables} of {num_rows:,} rows at {places}")
        for reason in dict.fromkeys(each.reason for each in self.left_alone):
            places = _some([each.names[0] for each in self.left_alone if each.reason == reason])
            lines.append(f"left to PyTorch: {places}, because {reason}")
        outlook = [each for each in (self.tiers, self.expected) if each]
        return "\n".join([*lines, *self.updated_by, *self.notes, *outlook])


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
            not fit stay in the tables, the cold store. Results are the same to the last bit. A
            budget needs an optimizer. None takes the budget of `plan`, or keeps all rows in fast
            memory. Tables on a device, and their state, move to the host's memory permanently, and
            rows in fast memory are on the device; `model.to(device)` moves neither. Arrays on the
            tables' former memory see the former rows.
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
        ConfigError: the arguments of tiers contradict each other, or `cold_tier` is "file" and the
            model is on CUDA.
        ProfileError: `plan` or `profile` is for other tables.
        ColdTierError: the folder cannot be used, or the disk has no room.
        ValueError: the model has nothing to replace, or something that cannot be replaced.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    require_arguments(budget, plan, profile)
    always = always or budget is not None or plan is not None
    chosen = choose_tables(model, optimizer, lazy_adam=lazy_adam, always=always)
    updaters, left = chosen.updaters, chosen.left
    notes = tuple(dict.fromkeys(updater.rule for updater in updaters if updater.rule))
    refused = [f"{left[module][0]} is not replaced: {why}" for module, why in chosen.unfit.items()]
    for message in (*notes, *refused):
        warnings.warn(message, stacklevel=2)  # before any replacement, because a warning may raise
    with lasting_tensors():  # which training changes, also if this is called in inference mode
        begin_tiers = _choose_tiers(model, chosen, budget, plan, profile, cold_tier, cold_path)
        counterparts = {module: counterpart(module) for module in chosen.found}
        made: list[Attachment] = []
        try:
            tables = list(counterparts.values())
            for updater in updaters:
                of_rows = updater.optimizer or updater.formula
                made.append(Attachment(tables, updater.tables, of_rows, updater.translation))
                if updater.marks is not None and made[-1].row_optimizer is not None:
                    updater.marks.give_state(made[-1].row_optimizer)
            for old, new in counterparts.items():
                new.__dict__[KEPT] = _Original(old)
            exchange(model, counterparts)
            if begin_tiers is not None:
                begin_tiers(made[0])
        except BaseException:
            for attachment in made:
                attachment.release()
            exchange(model, {new: old for old, new in counterparts.items()})
            raise
    for updater in updaters:
        if updater.marks is not None:
            updater.marks.remove_hooks()
    return Accelerated(
        _describe(chosen.found, counterparts),
        tuple(
            LeftAlone(tuple(left[module]), type(module).__name__, why)
            for module, why in (chosen.unfit | chosen.not_updated).items()
        ),
        _describe_updates(
            chosen, {old for old, new in counterparts.items() if new.attachment is not None}
        ),
        notes,
        None if len(made) != 1 else made[0].row_optimizer,
        *_describe_outlook(made),
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
        return Accelerated((), (), (_LEFT_TO_CALLER,), ())
    kept = {cast("TableModule", module): module.__dict__[KEPT].module for module in names}
    made = dict.fromkeys(each.attachment for each in kept if each.attachment is not None)
    for attachment in made:
        found = sum(each.attachment is attachment for each in kept)
        if found != attachment.num_modules:
            raise ValueError(
                f"the model has {found} of the {attachment.num_modules} modules that "
                "recsys.accelerate replaced together, and one optimizer updates the rows of all; "
                "call recsys.restore on the whole model, and before one of these modules is "
                "replaced"
            )
    for attachment in made:  # may raise, so before the first release
        attachment.require_releasable()
    for attachment in made:
        attachment.release()
    originals: dict[nn.Module, nn.Module] = {}
    for module, original in kept.items():
        module.detach()
        originals[module] = original
        give_back(module, original)
        del module.__dict__[KEPT]
    exchange(model, originals)
    return Accelerated(_describe(names, originals), (), (_LEFT_TO_CALLER,), ())


@dataclass(frozen=True, eq=False)
class _Original:
    """The module that a recsys module replaced; wrapped, so that it is not a submodule."""

    module: nn.Module


_LEFT_TO_CALLER = "gradients are left to the caller's optimizer"


def _describe_updates(chosen: ChosenTables, updated: set[nn.Module]) -> tuple[str, ...]:
    """Say what updates the rows, and which replaced modules that leaves to the caller."""
    if not chosen.updaters:
        return (_LEFT_TO_CALLER,)
    left = [
        names[0]
        for module, names in chosen.found.items()
        if module not in updated and any(each.requires_grad for each in module.parameters())
    ]
    of_rest = [f"of {', '.join(left)}, {_LEFT_TO_CALLER}"] if left else []
    return (*(updater.description for updater in chosen.updaters), *of_rest)


def _choose_tiers(
    model: nn.Module,
    chosen: ChosenTables,
    budget: int | str | None,
    plan: HotPlan | None,
    profile: PopularityProfile | None,
    cold_tier: str,
    cold_path: Path | str | None,
) -> Callable[[Attachment], None] | None:
    """Check the arguments of tiers, and open their files.

    Returns:
        What gives the tables tiers; None if all rows are resident.

    Raises:
        Exception: as for `accelerate`.
    """
    updated = chosen.updated
    formulas = [updater.formula for updater in chosen.updaters]
    budgeted = plan_of_model(updated, formulas, budget, plan, profile)
    if budgeted is not None:
        _require_own_memory(model, {table.weight: table.name for table in updated})
    formula = None if budgeted is None else formulas[0]
    settings = TableSettings(
        formula,
        budget=None if budgeted is None else budgeted[0],
        cold_tier=cold_tier,
        cold_path=cold_path,
    )
    settings.require()
    if budgeted is None or formula is None:
        return None
    budget_bytes, pinned = budgeted
    names = {table.weight: table.name for table in reversed(updated)}

    def begin(attachment: Attachment) -> None:
        """Give the tables tiers; after an error, the tables are as before."""
        before = {weight: weight.data for weight in names}
        try:
            settings.require(attachment.groups[0].device)
            if cold_path is not None:
                files = ColdFiles(cold_path)
                for weight, name in names.items():
                    weight.data = files.keep(name, weight.detach())
                for group in attachment.groups:
                    group.files = files
                    group.lay_out()
            give_slots(
                attachment.groups,
                formula,
                budget_bytes,
                {names[weight]: rows for weight, rows in pinned.items()},
            )
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
    ordered = sorted((table.data_ptr(), name, table.nbytes) for table, name in tables.items())
    for (begin, first, num_bytes), (then, second, _) in pairwise(ordered):
        if begin + num_bytes > then:
            raise ValueError(
                f"tables {first!r} and {second!r}: with a budget a table must have its own memory, "
                "and these are two Parameters on one; use one Parameter in both modules, or a clone"
            )
    names = {_memory(weight): name for weight, name in tables.items()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        memory = _memory(tensor)
        if memory is not None and tensor not in tables and memory in names:
            raise ValueError(
                f"table {names[memory]!r}: with a budget a table must have its own memory, and "
                f"{name!r} is another Parameter or buffer of the model on it, which would miss "
                "newer rows; use the table's own Parameter there, or a clone"
            )


def _memory(tensor: Tensor) -> int | None:
    """The address of a tensor's storage; None if it has none, as a sparse or a lazy tensor."""
    try:
        with DisableTorchFunctionSubclass():  # reading a table would write back all its rows
            return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, ValueError):
        return None


def _describe(
    found: Mapping[nn.Module, list[str]], counterparts: Mapping[nn.Module, nn.Module]
) -> tuple[Replacement, ...]:
    replacements = []
    for module, names in found.items():
        sizes = [len(table.weight) for table in tables_of(module, names[0])]
        kind = type(counterparts[module]).__name__
        replacements.append(Replacement(tuple(names), kind, len(sizes), sum(sizes)))
    return tuple(replacements)


def _describe_outlook(made: Sequence[Attachment]) -> tuple[str, str]:
    """Say where the rows are, and what speed to expect.

    Args:
        made: Everything in recsys that updates rows; empty if only torch does.
    """
    if not made:
        return "", "expect the same speed as before: recsys updates no rows here"
    groups = [group for attachment in made for group in attachment.groups]
    updates = [update for attachment in made for update in attachment.updates]
    sizes = [sum(update.formula().state_sizes(update.group.dim).values()) for update in updates]
    of_row = [
        group.dim * group.dtype.itemsize + size * group.compute_dtype.itemsize
        for group, size in zip(groups, sizes, strict=True)
    ]
    rows = [int(group.first_rows[-1]) for group in groups]
    total = f"{format_bytes(sum(map(mul, rows, of_row)))} of rows and state"
    speed = "expect shorter steps"
    is_tiered = any(group.fetcher is not None for group in groups)
    if is_tiered:
        speed = (
            "expect longer steps: a budget saves fast memory, and rows that are not in it must be "
            "fetched; recsys.pipeline.TrainPipeline fetches them before their step"
        )
    elif not any(sizes):
        speed += (
            "; steps of fewer than 500 samples may take longer than before, because the optimizer "
            "has no state"
        )
    if not is_tiered:
        return f"all {total} are in fast memory", speed
    hot = sum(map(mul, [group.num_slots for group in groups], of_row))
    place = "in memory" if groups[0].files is None else "in files"
    return f"{format_bytes(hot)} of fast memory for {total}; the other rows are {place}", speed


def _some(places: Sequence[str]) -> str:
    if len(places) <= 2 * _NAMED:
        return ", ".join(places)
    return f"{', '.join(places[:_NAMED])}, ... {places[-1]}"
