"""The `Parameter` classes of tables whose gradients or rows recsys keeps elsewhere.

Reading `grad` returns the gradients in the ledger. Reading a tiered table first writes back the
rows in slots. Neither costs anything until a caller reads it.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from recsys._support.cuda.own_pages import in_own_pages
from recsys._support.torch_compat import (
    DisableTorchFunctionSubclass,
    outside_graphs,
    plain_data,
    plain_grad,
    set_plain_data,
    set_plain_grad,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from recsys.embeddings.lookup.table_group import TableGroup
    from recsys.embeddings.tiers.table_tiers import Tiers

__all__ = [
    "LedgerParameter",
    "TieredParameter",
    "bind_table",
    "make_plain",
    "move_table",
    "move_to_own_pages",
    "require_no_updater",
    "storage_address",
    "unbind_table",
]


class LedgerParameter(nn.Parameter):
    """A table whose `grad` returns the gradients in its group's ledger.

    An existing `Parameter` becomes one by assignment to its `__class__`, so it stays the same
    object. Pickles and state dicts hold plain Parameters.
    """

    @property
    def grad(self) -> Tensor | None:
        """The gradient, (E, D), sparse or dense as in torch; None if there is none."""
        _open_ledger_of(self)
        return plain_grad(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        set_plain_grad(self, gradient)
        group = _group_of(self)
        if group is not None:
            group.forget_lookups_in(self)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    @outside_graphs
    def data(self) -> Tensor:
        """The rows, (E, D), detached from autograd."""
        _mark_changed(self)
        rows: Tensor = plain_data(self)
        return rows

    @data.setter
    @outside_graphs
    def data(self, rows: Tensor) -> None:
        set_plain_data(self, rows)
        _forget_space_of(self)

    def register_hook(self, hook: Any) -> Any:
        """Refused: rows are updated without the gradient that `torch.Tensor.register_hook` gives.

        Raises:
            ValueError: always, if a recsys optimizer updates the table.
        """
        _require_no_group(self)
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Refused, as `register_hook`.

        Raises:
            ValueError: as `register_hook`.
        """
        _require_no_group(self)
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def set_(self, *source: Any) -> Any:
        """Like `torch.Tensor.set_`."""
        plain_data(self)  # rows in slots are written back; `set_` has no `__torch_function__`
        super().set_(*source)
        _forget_space_of(self)
        return self

    def resize_(self, *size: Any, **more: Any) -> Any:
        """Like `torch.Tensor.resize_`."""
        super().resize_(*size, **more)
        _forget_space_of(self)
        return self


class TieredParameter(LedgerParameter):
    """A table whose newest rows may be in slots.

    Every torch operation on it first writes these rows back. If its result may share the table's
    memory, a caller can write to it undetected (through numpy, for example). So unless the result
    is a copy, the next lookup fetches all rows again.
    """

    @property
    @outside_graphs
    def data(self) -> Tensor:
        """The rows, (E, D), detached from autograd; writes to them are detected."""
        rows: Tensor = plain_data(self)
        place = _place_of(self)
        return rows if place is None else place.tiers.data_of(rows, place.table)

    @data.setter
    @outside_graphs
    def data(self, rows: Tensor) -> None:
        _require_own_memory(self, storage_address(rows))
        set_plain_data(self, rows)
        _forget_space_of(self)

    def set_(self, *source: Any) -> Any:
        """Like `torch.Tensor.set_`.

        Raises:
            ValueError: the memory of `source` belongs to another tiered table.
        """
        if source:
            _require_own_memory(self, storage_address(source[0]))
        return super().set_(*source)

    @classmethod
    @outside_graphs
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run any torch function, method or attribute access; writes rows back first."""
        with DisableTorchFunctionSubclass():
            if func in _VALUE_FREE:
                return func(*args, **kwargs or {})
            tables = list(_tables_among((args, kwargs)))
            places = [place for table in tables if (place := _place_of(table)) is not None]
            exposed = [place.tiers for place in places if not place.tiers.is_exposed]
            is_whole = func is torch.Tensor.copy_ and _is_overwritten(tables[0], args)
            for place in places:
                place.tiers.expose(place.table if is_whole else None)
            result = func(*args, **kwargs or {})
            if _is_copy(result, tables):
                for tiers in exposed:
                    tiers.is_exposed = False
            return result


class _Place(NamedTuple):
    """The tiers of a table, and its number there."""

    tiers: Tiers
    table: int


def _place_of(table: Tensor) -> _Place | None:
    """The tiers of a table; None if the table is resident."""
    found = _BINDINGS.get(id(table))
    return None if found is None else found.place


def _is_overwritten(table: TieredParameter, args: Sequence[Any]) -> bool:
    """Whether `table.copy_(source)` writes every number of the table."""
    source = args[1] if len(args) > 1 else None
    return args[0] is table and type(source) is Tensor and source.shape == table.shape


def _is_copy(result: Any, tables: Sequence[Tensor]) -> bool:
    """Whether a result certainly shares no memory with the tables."""
    if isinstance(result, tuple | list):
        return all(_is_copy(each, tables) for each in result)
    if type(result) in (bool, float):  # an int may be an address
        return True
    if not isinstance(result, Tensor) or result.layout is not torch.strided:
        return False
    memory = storage_address(result)
    return memory is not None and all(storage_address(table) != memory for table in tables)


def _tables_among(value: Any) -> Iterator[TieredParameter]:
    if isinstance(value, TieredParameter):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tables_among(each)
    elif isinstance(value, dict):
        yield from _tables_among(list(value.values()))


_ATTRIBUTES = (
    "shape dtype device layout requires_grad is_leaf grad_fn ndim is_sparse is_meta is_cpu is_cuda "
    "is_nested nbytes itemsize _version grad retains_grad _backward_hooks"
)
_METHODS = (
    "dim size numel stride is_contiguous is_floating_point is_complex element_size __len__ "
    "requires_grad_ register_hook nelement get_device storage_offset"
)
# Functions that neither read nor write a table's values, so rows need not be written back.
_VALUE_FREE = (
    {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()}
    | {getattr(torch.Tensor, name) for name in _METHODS.split()}
    | {getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")}
)


class _Binding(NamedTuple):
    """What a table is bound to.

    Its group may be deleted earlier than the table. Its tiers may not, because slots may have the
    newest rows.
    """

    table: ref[nn.Parameter]
    group: ref[TableGroup]
    place: _Place | None


# Keyed by the table's id: torch.save would pickle the group if it were an attribute. A plain
# dictionary, because it is fast and optimizers read every `grad` twice a step.
_BINDINGS: dict[int, _Binding] = {}


def require_no_updater(name: str, table: nn.Parameter, but_by: TableGroup | None = None) -> None:
    """Refuse a table that a recsys optimizer updates: a second one would update its rows twice.

    A table whose optimizer has been deleted becomes a plain Parameter again.

    Args:
        name: Name of the table, for the error.
        table: The Parameter.
        but_by: A group that may update the table.

    Raises:
        ValueError: another group updates the table.
    """
    if _group_of(table) not in (None, but_by):
        gc.collect()  # a deleted module may be in a circle of references
    if _group_of(table) not in (None, but_by):
        raise ValueError(
            f"table {name!r} is already updated by another recsys optimizer; accelerate all of its "
            "modules in one call, or call recsys.restore on the other model (or delete it) first"
        )
    make_plain(table)


def bind_table(table: nn.Parameter, group: TableGroup, number: int, tiers: Tiers | None) -> None:
    """Connect a table to the group that holds its gradients and, if tiered, its newest rows.

    Args:
        table: The Parameter.
        group: Its group.
        number: Its number in the group.
        tiers: The tiers of the group.
    """
    key = id(table)
    place = None if tiers is None else _Place(tiers, number)
    weak_table = ref(table, lambda _: _BINDINGS.pop(key, None))
    _BINDINGS[key] = _Binding(weak_table, ref(group), place)
    _set_class(table, LedgerParameter if tiers is None else TieredParameter)


def unbind_table(table: nn.Parameter, group: TableGroup | None) -> None:
    """Make a table a plain Parameter, unless it belongs to another group.

    Raises:
        ConflictingWrite: its group was deleted, and it was written to while slots had newer rows.
        TiersFailed: its group was deleted after a transfer had failed.
    """
    if isinstance(table, LedgerParameter) and _group_of(table) in (None, group):
        place = _place_of(table)
        if place is not None:
            place.tiers.flush()
            # A device may be yet to read the table, for lookups that it has queued.
            place.tiers.settle()
        _BINDINGS.pop(id(table), None)
        _set_class(table, nn.Parameter)


def make_plain(table: nn.Parameter) -> None:
    """Make a table a plain Parameter, unless it belongs to a group."""
    unbind_table(table, None)


def storage_address(tensor: Any) -> int | None:
    """The address of a tensor's storage, or of a storage; None if it has none, as a sparse tensor.

    The tensors of torch.vmap, torch.func.jacrev, ... and lazy Parameters have none, either.
    """
    try:
        with DisableTorchFunctionSubclass():  # else the rows of a tiered table count as handed out
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor
            return storage.data_ptr() or None
    except (RuntimeError, ValueError):
        return None


def move_table(weight: nn.Parameter, device: torch.device) -> None:
    """Move a table and its gradient to another device; it stays the same object."""
    if weight.device != device:
        gradient = plain_grad(weight)
        set_plain_grad(weight, None)
        weight.data = weight.data.to(device)
        set_plain_grad(weight, None if gradient is None else gradient.to(device))


def move_to_own_pages(weight: nn.Parameter) -> None:
    """Move a table in host memory to pages of its own; it stays the same object."""
    rows = plain_data(weight)
    moved = in_own_pages(rows)
    if moved is not rows:
        set_plain_data(weight, moved)


def _group_of(weight: Tensor) -> TableGroup | None:
    found = _BINDINGS.get(id(weight))
    return None if found is None else found.group()


def _require_no_group(table: LedgerParameter) -> None:
    """Refuse a hook for the gradient of a table that is updated.

    Raises:
        ValueError: a recsys optimizer updates the table.
    """
    group = _group_of(table)
    if group is not None:
        raise ValueError(
            f"table {group.names[group.number_of(table)]!r}: a hook for its gradient would not be "
            "called, because recsys updates its rows; with a torch optimizer change weight.grad "
            "between backward and step instead, or leave optimizer= out"
        )


def _require_own_memory(table: TieredParameter, memory: int | None) -> None:
    """Refuse to move a tiered table to the memory of another: a row there would have two slots.

    Raises:
        ValueError: the rows of another tiered table are at this address.
    """
    for found in _BINDINGS.values() if memory is not None else ():
        other = found.table()
        if found.place is None or other is None or other is table:
            continue
        if storage_address(other) == memory:
            raise ValueError(
                f"table {found.place.tiers.names[found.place.table]!r}: another table in two tiers "
                "cannot take its memory, because each row would then have two slots; give that "
                "table a clone (weight.data = other.weight.data.clone()), or give both modules one "
                "Parameter before recsys.accelerate"
            )


def _set_class(weight: nn.Parameter, kind: type[nn.Parameter]) -> None:
    weight.__class__ = kind


def _open_ledger_of(weight: LedgerParameter) -> None:
    group = _group_of(weight)
    if group is not None and group.ledger:
        with DisableTorchFunctionSubclass():  # gradients do not depend on rows in slots
            group.ledger_to_grads()


def _forget_space_of(weight: LedgerParameter) -> None:
    group = _group_of(weight)
    if group is not None:
        group.forget_space()
        _mark_changed(weight)


def _mark_changed(weight: LedgerParameter) -> None:
    """Mark every row as changed, if changes are recorded."""
    group = _group_of(weight)
    if group is not None and group.changed_rows is not None:
        group.changed_rows.mark_table(group.number_of(weight))
