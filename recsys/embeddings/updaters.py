"""Chooses which optimizer updates the rows of a model's tables, and groups the tables.

All tables of one dim, dtype, device and param group form a `TableGroup`, across modules. A group
has one ledger, and one kernel call updates it. A table that modules share is in it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from recsys.embeddings.lookup.table_group import TableGroup
from recsys.embeddings.rows.row_space import require_aligned
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.embeddings.update.in_backward import read_marks
from recsys.embeddings.update.row_updater import RowUpdater
from recsys.embeddings.update.step_hooks import add_hooks
from recsys.embeddings.update.translate import translate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.utils.hooks import RemovableHandle

    from recsys.embeddings.lookup.abstract_tables import AbstractTables
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.update.in_backward import InBackward

__all__ = [
    "Link",
    "NamedTable",
    "UpdaterSpec",
    "choose_updaters",
    "make_updater",
    "require_translatable",
    "require_updatable",
    "tables_by_kind",
]

_Kind = tuple[int, int, torch.dtype, torch.device]


@dataclass(frozen=True, eq=False)
class NamedTable:
    """A table of a model.

    Attributes:
        name: Its path in the model: that of the bag, or of the collection and the table in it.
        key: Its key in the model's `state_dict`.
        state_prefix: Prefix of its state's names, as in TorchRec.
        weight: The rows.
        collection: Name of its collection; None for a bag.
        planned_as: Its name in profiles and plans: the bag's path, or the table's name in its
            collection.
        features: Names of its features in a profile.
        is_sparse: Whether torch makes a sparse gradient for it.
    """

    name: str
    key: str
    state_prefix: str
    weight: nn.Parameter
    collection: str | None
    planned_as: str
    features: tuple[str, ...]
    is_sparse: bool


@dataclass(eq=False)
class Link:
    """The updater of several modules, with what is needed to undo that.

    Attributes:
        updater: Updates the rows.
        row_optimizer: The formula as a torch optimizer; None if the user's optimizer is used.
        marks: Optimizers of `apply_optimizer_in_backward` that it replaces, if any.
        handles: The hooks of the user's optimizer, if that is used.
        num_modules: Number of modules whose rows it updates.
    """

    updater: RowUpdater
    row_optimizer: FusedOptimizer | None = None
    marks: InBackward | None = None
    handles: Sequence[RemovableHandle] = ()
    num_modules: int = 0

    def cut(self) -> None:
        """Release the tables; their rows and gradients are torch's again."""
        self.updater.release()
        for handle in self.handles:
            handle.remove()
        if self.row_optimizer is not None:
            self.row_optimizer.keep(self.updater)


@dataclass(frozen=True, eq=False)
class UpdaterSpec:
    """An updater that is not made yet; making it changes the tables, choosing it does not.

    Attributes:
        description: A sentence that says what updates the rows.
        rule: How updates differ from those of the optimizer, and why; usually "".
        formula: The update rule by the current settings.
        param_groups: For the `id()` of each updated table, the number of its param group.
        names: For the same ids, the names of the tables.
        make: Makes the updater of the given groups.
    """

    description: str
    rule: str
    formula: RowOptimizer
    param_groups: Mapping[int, int]
    names: Mapping[int, str]
    make: Callable[[Sequence[tuple[int, TableGroup]]], Link]


def require_updatable(table: NamedTable, *, may_be_meta: bool = False) -> None:
    """Check that the kernels support a table.

    Args:
        table: The table.
        may_be_meta: Whether it may be on the "meta" device, where it has no rows to update.

    Raises:
        ValueError: they do not.
    """
    weight: Any = table.weight
    place = f"table {table.name!r}"
    if type(weight) is not nn.Parameter:
        kind, way_out = type(weight).__name__, "remove parametrizations (weight_norm, ...) first"
        if kind == "DTensor":  # of fully_shard, for example
            way_out = (
                "this one is divided among processes; train in one process, without fully_shard, "
                "or divide the tables by recsys.distributed"
            )
        raise ValueError(f"{place}: weight must be a plain Parameter, got {kind}; {way_out}")
    if weight.is_meta and not may_be_meta:
        raise ValueError(
            f"{place}: rows must have memory, and are on the meta device; first call "
            'to_empty(device="cpu") on the module, and load or reset its parameters'
        )
    if weight.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(
            f"{place}: rows must be on the CPU or on CUDA, got {weight.device}; move the module by "
            ".cpu() (other devices are not supported yet)"
        )
    dtypes = [torch.float32] if table.collection is not None else [torch.float32, torch.float64]
    if weight.dtype not in dtypes:
        raise ValueError(
            f"{place}: rows must be one of {dtypes} here, got {weight.dtype}; convert them by "
            ".float() (others are not supported yet)"
        )
    if not weight.is_contiguous():
        raise ValueError(
            f"{place}: rows must be contiguous, got strides {weight.stride()}; set weight.data to "
            "weight.data.contiguous()"
        )
    require_aligned(f"{place}: ", weight)


def require_translatable(
    table: NamedTable, optimizers: Sequence[torch.optim.Optimizer], *, lazy_adam: bool
) -> None:
    """Check that the torch optimizers that have a table can be translated.

    Args:
        table: A table of the model.
        optimizers: All optimizers that were given.
        lazy_adam: As for `accelerate`.

    Raises:
        ValueError: one cannot be translated.
    """
    for optimizer in optimizers:
        number = _number_of_group(table, optimizer)
        if number is None:
            continue
        translation = translate(optimizer, [(table.name, number)], lazy_adam=lazy_adam)
        if translation.is_for_sparse and not table.is_sparse:
            kind = type(optimizer).__name__
            raise ValueError(
                f"table {table.name!r}: sparse must be True with {kind}, which updates elements, "
                "not rows, of a table with a dense gradient; build it with sparse=True"
            )


def _number_of_group(table: NamedTable, optimizer: torch.optim.Optimizer) -> int | None:
    for number, group in enumerate(optimizer.param_groups):
        if any(each is table.weight for each in group["params"]):
            return number
    return None


def choose_updaters(
    tables: Sequence[NamedTable],
    optimizer: Sequence[torch.optim.Optimizer] | RowOptimizer | None,
    *,
    lazy_adam: bool,
) -> list[UpdaterSpec]:
    """Choose which optimizer updates which tables; an empty list leaves gradients to torch.

    Args:
        tables: Tables of every module; a shared table is listed several times.
        optimizer: As for `accelerate`; torch optimizers as a sequence.
        lazy_adam: As for `accelerate`.

    Raises:
        ValueError: an optimizer cannot update the rows, or a table has no optimizer or several.
    """
    in_modules, tables = tables, _once(tables)
    marked = [table for table in tables if hasattr(table.weight, "_optimizer_classes")]
    if optimizer is None and not marked:
        return []
    given = optimizer[0] if isinstance(optimizer, Sequence) else optimizer
    marks = None
    if marked:  # raises if an optimizer is given, too
        marks = read_marks([(table.name, table.weight) for table in marked], given)
    if isinstance(optimizer, Sequence):
        return _specs_by_torch(in_modules, optimizer, lazy_adam=lazy_adam)
    formula = optimizer if marks is None else marks.formula
    assert formula is not None
    updated = tables if marks is None else marked
    _require_whole_collections(
        in_modules, {id(table.weight) for table in updated}, "marked by apply_optimizer_in_backward"
    )

    def make(groups: Sequence[tuple[int, TableGroup]]) -> Link:
        row_optimizer, updater = FusedOptimizer.with_updater(
            {table.key: (table.weight, table.state_prefix) for table in updated},
            [group for _, group in groups],
            formula,
            auto_apply=True,
        )
        if marks is not None:
            marks.give_state(row_optimizer)
        return Link(updater, row_optimizer, marks)

    description = f"rows are updated at the end of each backward, by {formula}"
    numbers = {id(table.weight): 0 for table in updated}
    return [UpdaterSpec(description, "", formula, numbers, _names_of(updated), make)]


def make_updater(
    spec: UpdaterSpec, modules: Sequence[AbstractTables]
) -> tuple[Link, list[AbstractTables]]:
    """Make an updater and attach it to recsys modules.

    Returns:
        The updater's link, and the modules that have tables of it.
    """
    holders = [holder for module in modules for holder in module.holders()]
    members = tables_by_kind(
        spec.param_groups, [cast("nn.Parameter", each.weight) for each in holders]
    )
    sparse: dict[int, bool] = {}  # the sum of a sparse and a dense gradient is dense
    for holder in holders:
        sparse[id(holder.weight)] = sparse.get(id(holder.weight), True) and bool(holder.sparse)
    places = {
        id(table): (kind, number)
        for kind, tables in members.items()
        for number, table in enumerate(tables)
    }
    groups = {
        kind: TableGroup(
            tables,
            [sparse[id(table)] for table in tables],
            [spec.names[id(table)] for table in tables],
        )
        for kind, tables in members.items()
    }
    link = spec.make([(kind[0], group) for kind, group in groups.items()])
    attached = []
    for module in modules:
        found_places = [places.get(id(holder.weight)) for holder in module.holders()]
        found = [(groups[place[0]], place[1]) for place in found_places if place is not None]
        if not found:
            continue
        module.attach(link.updater, found)
        attached.append(module)
    link.num_modules = len(attached)
    return link, attached


def tables_by_kind(
    param_groups: Mapping[int, int], weights: Sequence[nn.Parameter]
) -> dict[tuple[int, int, torch.dtype, torch.device], list[nn.Parameter]]:
    """The tables of each group that an updater will have, each once.

    Args:
        param_groups: For the `id()` of each updated table, the number of its param group.
        weights: Tables of all modules; those that are not updated are left out.

    Returns:
        The tables by param group, dim, dtype and device.
    """
    found: dict[_Kind, list[nn.Parameter]] = {}
    for weight in dict.fromkeys(weights):
        number = param_groups.get(id(weight))
        if number is not None:
            kind = (number, weight.shape[1], weight.dtype, weight.device)
            found.setdefault(kind, []).append(weight)
    return found


def _once(tables: Sequence[NamedTable]) -> list[NamedTable]:
    """Every table once, under the first of its names."""
    found: dict[int, NamedTable] = {}
    for table in tables:
        found.setdefault(id(table.weight), table)
    return list(found.values())


def _specs_by_torch(
    in_modules: Sequence[NamedTable],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    lazy_adam: bool,
) -> list[UpdaterSpec]:
    found = [_spec_by_torch(in_modules, each, lazy_adam=lazy_adam) for each in optimizers]
    specs = [spec for spec in found if spec is not None]
    for table in _once(in_modules):
        owners = [spec for spec in specs if id(table.weight) in spec.param_groups]
        if len(owners) > 1:
            raise ValueError(
                f"table {table.name!r}: one optimizer must have it in a param group, and "
                f"{len(owners)} of the given ones do; remove it from the others"
            )
        if not specs and table.weight.requires_grad:  # frozen tables need no optimizer
            kinds = " and ".join(type(each).__name__ for each in optimizers)
            raise ValueError(
                f"table {table.name!r}: an optimizer must have it in a param group, and {kinds} "
                "has none of the model's tables; give the one that has them"
            )
    return specs


def _spec_by_torch(
    in_modules: Sequence[NamedTable], optimizer: torch.optim.Optimizer, *, lazy_adam: bool
) -> UpdaterSpec | None:
    numbers = {
        id(weight): number
        for number, group in enumerate(optimizer.param_groups)
        for weight in group["params"]
    }
    updated = [table for table in _once(in_modules) if id(table.weight) in numbers]
    if not updated:
        return None
    _require_whole_collections(
        in_modules, {id(table.weight) for table in updated}, "in the optimizer's param groups"
    )
    translation = translate(
        optimizer,
        [(table.name, numbers[id(table.weight)]) for table in updated],
        lazy_adam=lazy_adam,
    )

    def make(groups: Sequence[tuple[int, TableGroup]]) -> Link:
        updater = RowUpdater(groups, optimizer, translation, auto_apply=False)
        return Link(updater, handles=add_hooks(updater, optimizer))

    description = f"rows are updated in the step of {type(optimizer).__name__}"
    found = {id(table.weight): numbers[id(table.weight)] for table in updated}
    formula = translation.formula(optimizer.param_groups[next(iter(found.values()))])
    return UpdaterSpec(description, translation.rule, formula, found, _names_of(updated), make)


def _require_whole_collections(tables: Sequence[NamedTable], updated: set[int], rule: str) -> None:
    """Check that an optimizer has all tables of a collection or none: one call looks them up."""
    for table in tables:
        others = [
            other.name
            for other in tables
            if other.collection == table.collection and id(other.weight) in updated
        ]
        if table.collection is not None and id(table.weight) not in updated and others:
            raise ValueError(
                f"table {table.name!r}: all tables of a collection must be {rule} or none; "
                f"{others[0]!r} is and this one is not; add this one, too, and if its rows are to "
                "stay, set its requires_grad to False"
            )


def _names_of(tables: Sequence[NamedTable]) -> dict[int, str]:
    return {id(table.weight): table.name for table in tables}
