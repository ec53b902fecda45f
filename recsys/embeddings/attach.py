"""Which optimizer updates the rows of a model's tables, and in which groups.

All tables of one dim, dtype, device and param group are a `TableGroup`, in whatever modules they
are: one ledger, one kernel call per update. A table that several modules share is in it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from recsys.embeddings.lookup.table_group import TableGroup
from recsys.embeddings.rows.row_space import require_aligned
from recsys.embeddings.update.fused_optimizer import FusedOptimizer
from recsys.embeddings.update.in_backward import InBackward, read_marks
from recsys.embeddings.update.row_updater import RowUpdater
from recsys.embeddings.update.translate import translate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.utils.hooks import RemovableHandle

    from recsys.embeddings.lookup.device_tables import AbstractTables
    from recsys.embeddings.optimizer import RowOptimizer

__all__ = [
    "Link",
    "Mover",
    "NamedTable",
    "attach",
    "choose_movers",
    "require_translatable",
    "require_updatable",
]

_Kind = tuple[int, int, torch.dtype, torch.device]


@dataclass(frozen=True, eq=False)
class NamedTable:
    """A table of a model.

    Attributes:
        name: Of the bag, or of the collection followed by the table's.
        key: In the model's `state_dict`.
        state_prefix: What its state's names begin with, as TorchRec's.
        weight: The rows.
        collection: Name of the collection that looks it up together with others; None of a bag.
        planned_as: What a profile or a plan calls it: a bag's name, or the table's in its
            collection.
        features: That look it up, by the names that a profile knows.
        is_sparse: Whether torch leaves a sparse gradient at it.
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
    """What updates rows; kept by every module whose rows it updates.

    Attributes:
        updater: Has the groups.
        row_optimizer: A formula as an optimizer of torch's; None where the user's optimizer updates
            the rows.
        marks: What the formula was read from, if from marks; copies of parameters have none.
        num_modules: How many modules it updates the rows of.
    """

    updater: RowUpdater
    row_optimizer: FusedOptimizer | None = None
    marks: InBackward | None = None
    num_modules: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles."""
        return self.__dict__ | {"marks": None, "num_modules": 0}

    def cut(self) -> None:
        """Leave tables, state and collected gradients to torch again."""
        self.updater.release()
        for handle in _HANDLES.pop(self.updater, ()):
            handle.remove()
        if self.marks is not None and self.row_optimizer is not None:
            self.marks.hand_back(self.row_optimizer)


@dataclass(frozen=True, eq=False)
class Mover:
    """What will update rows; nothing of the model has been changed yet.

    Attributes:
        words: What updates the rows, in words.
        rule: What it does differently from the optimizer, and why; mostly "".
        formula: How they are updated, as the settings are now.
        param_groups: By the id of each table that is updated: the number of its param group.
        names: Of these tables, by the same id.
        make: From the groups to what updates them.
    """

    words: str
    rule: str
    formula: RowOptimizer
    param_groups: Mapping[int, int]
    names: Mapping[int, str]
    make: Callable[[Sequence[tuple[int, TableGroup]]], Link]


def require_updatable(table: NamedTable) -> None:
    """Check that the kernels can work on a table.

    Raises:
        ValueError: they cannot.
    """
    weight: Any = table.weight
    place = f"table {table.name!r}"
    if type(weight) is not nn.Parameter:
        raise ValueError(
            f"{place}: weight must be a plain Parameter, got {type(weight).__name__}; remove "
            "parametrizations (weight_norm, ...) first"
        )
    if weight.device.type not in ("cpu", "cuda"):
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
    """Check that optimizers of torch's which have a table can be read as formulas.

    Args:
        table: Of a model.
        optimizers: Those given.
        lazy_adam: As for `accelerate`.

    Raises:
        ValueError: one cannot.
    """
    for optimizer in optimizers:
        number = _number_of_group(table, optimizer)
        if number is None:
            continue
        translation = translate(optimizer, [(table.name, number)], lazy_adam=lazy_adam)
        if translation.is_for_sparse and not table.is_sparse:
            kind = type(optimizer).__name__
            raise ValueError(
                f"table {table.name!r}: sparse must be True with {kind}, which updates a table of "
                "dense gradients number by number, not row by row; build the table with sparse=True"
            )


def _number_of_group(table: NamedTable, optimizer: torch.optim.Optimizer) -> int | None:
    for number, group in enumerate(optimizer.param_groups):
        if any(each is table.weight for each in group["params"]):
            return number
    return None


def choose_movers(
    tables: Sequence[NamedTable],
    optimizer: Sequence[torch.optim.Optimizer] | RowOptimizer | None,
    *,
    lazy_adam: bool,
) -> list[Mover]:
    """Find what is to update which rows by which formula; nothing where gradients go to torch.

    Args:
        tables: Of every module; one that modules share comes several times.
        optimizer: As for `accelerate`; those of torch's as a sequence.
        lazy_adam: As there.

    Raises:
        ValueError: an optimizer cannot update the rows, none has them, or there is one too many.
    """
    in_modules, tables = tables, _once(tables)
    marked = [table for table in tables if hasattr(table.weight, "_optimizer_classes")]
    if optimizer is None and not marked:
        return []
    given = optimizer[0] if isinstance(optimizer, Sequence) else optimizer  # one too many: an error
    marks = read_marks(_named(marked), given) if marked else None
    if isinstance(optimizer, Sequence):
        return _movers_by_torch(in_modules, optimizer, lazy_adam=lazy_adam)
    formula = optimizer if marks is None else marks.formula
    assert formula is not None
    updated = tables if marks is None else marked
    _require_whole_collections(
        in_modules, {id(table.weight) for table in updated}, "marked by apply_optimizer_in_backward"
    )

    def make(groups: Sequence[tuple[int, TableGroup]]) -> Link:
        row_optimizer = FusedOptimizer(
            {table.key: (table.weight, table.state_prefix) for table in updated},
            [group for _, group in groups],
            formula,
            auto_apply=True,
        )
        if marks is not None:
            marks.hand_over(row_optimizer)
        return Link(row_optimizer.updater, row_optimizer, marks)

    words = f"rows are updated at the end of each backward, by {formula}"
    numbers = {id(table.weight): 0 for table in updated}
    return [Mover(words, "", formula, numbers, _names_of(updated), make)]


def attach(mover: Mover, modules: Sequence[AbstractTables]) -> tuple[Link, list[AbstractTables]]:
    """Let a mover update the rows of modules of recsys.

    Returns:
        What updates them, and those of the modules that have some.
    """
    members: dict[_Kind, list[nn.Parameter]] = {}
    sparse: dict[int, bool] = {}  # of a gradient that is sparse and dense, the sum is dense
    places: dict[int, tuple[_Kind, int]] = {}
    for module in modules:
        for holder in module.holders():
            weight = cast("nn.Parameter", holder.weight)
            if id(weight) not in mover.param_groups:
                continue
            sparse[id(weight)] = sparse.get(id(weight), True) and bool(holder.sparse)
            if id(weight) not in places:
                number = mover.param_groups[id(weight)]
                kind = (number, weight.shape[1], weight.dtype, weight.device)
                others = members.setdefault(kind, [])
                places[id(weight)] = kind, len(others)
                others.append(weight)
    groups = {
        kind: TableGroup(
            tables,
            [sparse[id(table)] for table in tables],
            [mover.names[id(table)] for table in tables],
        )
        for kind, tables in members.items()
    }
    link = mover.make([(kind[0], group) for kind, group in groups.items()])
    attached = []
    for module in modules:
        its_places = [places.get(id(holder.weight)) for holder in module.holders()]
        found = [(groups[place[0]], place[1]) for place in its_places if place is not None]
        if not found:
            continue
        module.attach(link.updater, found)
        attached.append(module)
    link.num_modules = len(attached)
    return link, attached


def _once(tables: Sequence[NamedTable]) -> list[NamedTable]:
    """Every table by the first of its names."""
    found: dict[int, NamedTable] = {}
    for table in tables:
        found.setdefault(id(table.weight), table)
    return list(found.values())


def _movers_by_torch(
    in_modules: Sequence[NamedTable],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    lazy_adam: bool,
) -> list[Mover]:
    found = [_mover_by_torch(in_modules, each, lazy_adam=lazy_adam) for each in optimizers]
    movers = [mover for mover in found if mover is not None]
    for table in _once(in_modules):
        having = [mover for mover in movers if id(table.weight) in mover.param_groups]
        if len(having) > 1:
            raise ValueError(
                f"table {table.name!r}: one optimizer must have it, and {len(having)} of those "
                "given have; leave it to one of them"
            )
        if not movers and table.weight.requires_grad:  # of frozen ones there need be none
            kinds = " and ".join(type(each).__name__ for each in optimizers)
            raise ValueError(
                f"table {table.name!r}: an optimizer must have it in a param group, and {kinds} "
                "has none of the model's tables; give the one that has them"
            )
    return movers


def _mover_by_torch(
    in_modules: Sequence[NamedTable], optimizer: torch.optim.Optimizer, *, lazy_adam: bool
) -> Mover | None:
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
        updater = RowUpdater(groups, optimizer, translation, auto_apply=False, goes_along=False)
        _HANDLES[updater] = (
            optimizer.register_step_pre_hook(_BeforeStep(updater)),
            # Of rows in slots, the optimizer has an older state until it is asked.
            optimizer.register_state_dict_pre_hook(lambda *_: updater.flush()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: updater.flush()),
            optimizer.register_load_state_dict_post_hook(lambda *_: updater.follow_state()),
        )
        return Link(updater)

    words = f"rows are updated in the step of {type(optimizer).__name__}"
    found = {id(table.weight): numbers[id(table.weight)] for table in updated}
    formula = translation.formula(optimizer.param_groups[next(iter(found.values()))])
    return Mover(words, translation.rule, formula, found, _names_of(updated), make)


def _require_whole_collections(tables: Sequence[NamedTable], updated: set[int], rule: str) -> None:
    """A collection is looked up in one call, so one optimizer has all of its tables or none."""
    for table in tables:
        others = [
            other.name
            for other in tables
            if other.collection == table.collection and id(other.weight) in updated
        ]
        if table.collection is not None and id(table.weight) not in updated and others:
            raise ValueError(
                f"table {table.name!r}: all tables of a collection must be {rule} or none; "
                f"{others[0]!r} is and this one is not"
            )


def _names_of(tables: Sequence[NamedTable]) -> dict[int, str]:
    return {id(table.weight): table.name for table in tables}


def _named(tables: Sequence[NamedTable]) -> list[tuple[str, nn.Parameter]]:
    return [(table.name, table.weight) for table in tables]


class _BeforeStep:
    """Updates rows when their optimizer steps, before it updates its other parameters.

    By its closure, which torch's optimizers call first of all: hooks that were registered later
    than this one have changed gradients or settings by then.
    """

    def __init__(self, updater: RowUpdater) -> None:
        self._updater = updater

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

        def compute_and_update_rows() -> Any:
            loss = None if closure is None else closure()
            self._update_rows(optimizer)
            return loss

        return args[:1], kwargs | {"closure": compute_and_update_rows}

    def _update_rows(self, optimizer: torch.optim.Optimizer) -> None:
        # Of an optimizer that is "fused", GradScaler leaves these to the step.
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "GradScaler leaves the scale to an optimizer with fused=True, and rows are "
                "updated outside of it; call scaler.unscale_(optimizer) before "
                "scaler.step(optimizer)"
            )
        self._updater.require_param_groups()
        if bool(getattr(optimizer, "found_inf", False)):
            self._updater.forget()
        else:
            self._updater.update_rows()


# By updater: its hooks in the optimizer. No attribute: copies have none and need none, for then the
# optimizer's own step finds the ledger as the tables' `grad`.
_HANDLES: WeakKeyDictionary[RowUpdater, Sequence[RemovableHandle]] = WeakKeyDictionary()
