"""Tables as their users see them: `Parameter`s that show what recsys keeps elsewhere.

Their `grad` is what the ledger holds. Their rows are those in the slots, where there are slots. It
costs nothing until a caller reads one of them.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from recsys._support.torch_compat import (
    DisableTorchFunctionSubclass,
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
    "require_no_updater",
    "unbind_table",
]


class LedgerParameter(nn.Parameter):
    """A table whose `grad` is what the ledger of its group holds.

    A `Parameter` becomes one by a change of class, so it stays the same object. Pickles and state
    dicts have plain ones.
    """

    @property
    def grad(self) -> Tensor | None:
        """The gradient, (E, D), sparse or dense as in torch; None where nothing was collected."""
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
    def data(self) -> Tensor:
        """The rows, (E, D), as autograd does not see them."""
        rows: Tensor = plain_data(self)
        return rows

    @data.setter
    def data(self, rows: Tensor) -> None:
        set_plain_data(self, rows)
        _forget_space_of(self)

    def set_(self, *source: Any) -> Any:
        """As `torch.Tensor.set_`."""
        super().set_(*source)
        _forget_space_of(self)
        return self

    def resize_(self, *size: Any, **more: Any) -> Any:
        """As `torch.Tensor.resize_`."""
        super().resize_(*size, **more)
        _forget_space_of(self)
        return self


class TieredParameter(LedgerParameter):
    """A table whose newest rows may be in slots.

    Any use by torch finds them written back. Unless the result is a copy, it may be written to
    without a trace (through numpy, say), so the next lookup takes all rows anew.
    """

    @property
    def data(self) -> Tensor:
        """The rows, (E, D), as autograd does not see them; writes to them are seen."""
        rows: Tensor = plain_data(self)
        place = _place_of(self)
        return rows if place is None else place.tiers.data_of(rows, place.table)

    @data.setter
    def data(self, rows: Tensor) -> None:
        set_plain_data(self, rows)
        _forget_space_of(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Any use by torch, any method, any attribute."""
        with DisableTorchFunctionSubclass():
            if func in _BLIND:
                return func(*args, **kwargs or {})
            tables = list(_tables_among((args, kwargs)))
            places = [place for table in tables if (place := _place_of(table)) is not None]
            exposed = [place.tiers for place in places if not place.tiers.is_exposed]
            for place in places:
                is_whole = func is torch.Tensor.copy_ and _is_overwritten(tables[0], args)
                place.tiers.expose(place.table if is_whole else None)
            result = func(*args, **kwargs or {})
            if _is_copy(result, tables):
                for tiers in exposed:
                    tiers.is_exposed = False
            return result


class _Place(NamedTuple):
    """Where the rows of a table are, and its number there."""

    tiers: Tiers
    table: int


def _place_of(table: Tensor) -> _Place | None:
    """None of a table whose rows are in no slots."""
    group = _group_of(table)
    if group is None or group.tiers is None:
        return None
    return _Place(group.tiers, group.number_of(table))


def _is_overwritten(table: TieredParameter, args: Sequence[Any]) -> bool:
    """Whether `table.copy_(source)` writes every number of the table."""
    source = args[1] if len(args) > 1 else None
    return args[0] is table and type(source) is Tensor and source.shape == table.shape


def _is_copy(result: Any, tables: Sequence[Tensor]) -> bool:
    """Whether a result shares no memory with any of the tables."""
    if isinstance(result, tuple | list):
        return all(_is_copy(each, tables) for each in result)
    if type(result) in (bool, float):  # an int may be an address
        return True
    if not isinstance(result, Tensor) or result.layout is not torch.strided:
        return False
    memory = result.untyped_storage().data_ptr()
    return all(table.untyped_storage().data_ptr() != memory for table in tables)


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
# What tells nothing of a table's values.
_BLIND = (
    {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()}
    | {getattr(torch.Tensor, name) for name in _METHODS.split()}
    | {getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")}
)

# Keyed by the table's identity: torch.save would pickle the group if it were an attribute. Groups
# are in a plain dictionary because optimizers read every `grad` twice a step.
_GROUPS: dict[int, tuple[ref[nn.Parameter], ref[TableGroup]]] = {}


def require_no_updater(name: str, table: nn.Parameter, but_by: TableGroup | None = None) -> None:
    """Refuse a table that a recsys optimizer updates: a second one would update its rows twice.

    A table whose optimizer has been deleted becomes a plain Parameter again.

    Args:
        name: Of the table, for the error.
        table: The Parameter.
        but_by: The group that may have it.

    Raises:
        ValueError: another group has it.
    """
    if _group_of(table) not in (None, but_by):
        gc.collect()  # modules and their optimizers refer to each other
    if _group_of(table) not in (None, but_by):
        raise ValueError(
            f"table {name!r} is already updated by another recsys optimizer; accelerate all of its "
            "modules in one call, or call recsys.restore on the other model (or delete it) first"
        )
    make_plain(table)


def bind_table(table: nn.Parameter, group: TableGroup, *, is_tiered: bool) -> None:
    """Let a table show what its group has of it."""
    number = id(table)
    _GROUPS[number] = ref(table, lambda _: _GROUPS.pop(number, None)), ref(group)
    _set_class(table, TieredParameter if is_tiered else LedgerParameter)


def unbind_table(table: nn.Parameter, group: TableGroup | None) -> None:
    """Make a table of this group, or of none, a plain Parameter."""
    if isinstance(table, LedgerParameter) and _group_of(table) in (None, group):
        _GROUPS.pop(id(table), None)
        _set_class(table, nn.Parameter)


def make_plain(table: nn.Parameter) -> None:
    """Make a table that no group has a plain Parameter."""
    unbind_table(table, None)


def move_table(weight: nn.Parameter, device: torch.device) -> None:
    """Move a table and its gradient to another device; it stays the object that it is."""
    if weight.device != device:
        gradient = plain_grad(weight)
        set_plain_grad(weight, None)
        weight.data = weight.data.to(device)
        set_plain_grad(weight, None if gradient is None else gradient.to(device))


def _group_of(weight: Tensor) -> TableGroup | None:
    found = _GROUPS.get(id(weight))
    return None if found is None else found[1]()


def _set_class(weight: nn.Parameter, kind: type[nn.Parameter]) -> None:
    weight.__class__ = kind


def _open_ledger_of(weight: LedgerParameter) -> None:
    group = _group_of(weight)
    if group is not None and group.ledger:
        with DisableTorchFunctionSubclass():  # a gradient tells nothing of the rows
            group.ledger_to_grads()


def _forget_space_of(weight: LedgerParameter) -> None:
    group = _group_of(weight)
    if group is not None:
        group.forget_space()
