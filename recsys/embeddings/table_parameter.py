"""Tables as their users see them: `Parameter`s that show what is kept of them elsewhere.

Their `grad` is what the ledger holds; their rows are those in the slots, where there are slots. It
costs nothing as long as nobody looks. What becomes of them they tell their group, which would have
to ask each of them several times a step.
"""

from __future__ import annotations

import gc
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from recsys.embeddings.table_group import TableGroup
    from recsys.embeddings.tiers import Tiers

__all__ = [
    "LedgerParameter",
    "TieredParameter",
    "make_plain",
    "move_table",
    "plain_grad",
    "require_unmoved",
    "requires_grad",
    "set_plain_grad",
    "tell_group",
    "unwatch",
    "watch",
]


class LedgerParameter(nn.Parameter):
    """A table whose `grad` is what the ledger of its group holds.

    A `Parameter` becomes one by a change of class, so it stays the object that it was; pickles and
    state dicts have plain ones. What is set by a function of torch's, and neither by an attribute
    nor by a method (`torch.Tensor.requires_grad_(table, False)`), it is not told.
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
            group.ask_again()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def requires_grad(self) -> bool:
        """As of any tensor."""
        return requires_grad(self)

    @requires_grad.setter
    def requires_grad(self, is_asked: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # it tells nothing of the rows
            _REQUIRES_GRAD.__set__(self, is_asked)
        _listen(self)
        tell_group(self)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As `torch.Tensor.requires_grad_`."""
        self.requires_grad = requires_grad
        return self

    def detach_(self) -> Self:
        """As `torch.Tensor.detach_`."""
        super().detach_()
        tell_group(self)
        return self

    @property
    def data(self) -> Tensor:
        """The rows, (E, D), as autograd does not see them."""
        rows: Tensor = _DATA.__get__(self)
        return rows

    @data.setter
    def data(self, rows: Tensor) -> None:
        _DATA.__set__(self, rows)
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
        rows: Tensor = _DATA.__get__(self)
        place = _place_of(self)
        return rows if place is None else place.tiers.data_of(rows, place.table)

    @data.setter
    def data(self, rows: Tensor) -> None:
        _DATA.__set__(self, rows)
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
        with torch._C.DisableTorchFunctionSubclass():
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
    | {getattr(torch.Tensor, name).__set__ for name in ("grad",)}
)

# Keyed by the table's identity: torch.save would pickle the group if it were an attribute. Groups
# are in a plain dictionary because optimizers read every `grad` twice a step.
_GROUPS: dict[int, tuple[ref[nn.Parameter], ref[TableGroup]]] = {}
_HOOKS: Any = WeakIdKeyDictionary()


def require_unmoved(place: str, weight: nn.Parameter, but_by: TableGroup | None = None) -> None:
    """Refuse a table whose rows an optimizer of ours moves; two would move them twice.

    What one that is gone has left behind is a plain parameter again.

    Raises:
        ValueError: it is moved, and not by the group `but_by`.
    """
    if _group_of(weight) not in (None, but_by):
        gc.collect()  # modules and their optimizers refer to each other
    if _group_of(weight) not in (None, but_by):
        raise ValueError(
            f"{place}: an optimizer of recsys moves its rows already, and a second one would move "
            "them twice; call recsys.accelerate on a model that has all modules of the table, or "
            "let go of the module whose optimizer it is (recsys.restore, or del)"
        )
    make_plain(weight)


def watch(weight: nn.Parameter, group: TableGroup, *, is_tiered: bool) -> bool:
    """Let a table show what its group holds of it.

    Returns:
        Whether it will tell the group what becomes of it: a parameter of another class will not.
    """
    if type(weight) is nn.Parameter:
        _set_class(weight, LedgerParameter)
    if isinstance(weight, LedgerParameter):
        number = id(weight)
        _GROUPS[number] = ref(weight, lambda _: _GROUPS.pop(number, None)), ref(group)
        _listen(weight)
        if is_tiered:
            _set_class(weight, TieredParameter)
    return isinstance(weight, LedgerParameter)


def unwatch(weight: nn.Parameter, group: TableGroup | None) -> None:
    """Make a plain parameter of a table that no group has, or but this one."""
    if isinstance(weight, LedgerParameter) and _group_of(weight) in (None, group):
        _GROUPS.pop(id(weight), None)
        hook = _HOOKS.pop(weight, None)
        if hook is not None:
            hook.remove()
        _set_class(weight, nn.Parameter)


def make_plain(weight: nn.Parameter) -> None:
    """Make a plain parameter of a table that no group has (any more)."""
    unwatch(weight, None)


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
        with torch._C.DisableTorchFunctionSubclass():  # a gradient tells nothing of the rows
            group.open_ledger()


def _forget_space_of(weight: LedgerParameter) -> None:
    group = _group_of(weight)
    if group is not None:
        group.forget_space()


def tell_group(weight: Tensor) -> None:
    """Let its group look anew for the `grad` of a table, and whether it asks for one."""
    group = _group_of(weight)
    if group is not None:
        group.ask_again()


def _listen(weight: nn.Parameter) -> None:
    """Hear of a gradient that autograd leaves at a table, which asks no Python for it."""
    if weight not in _HOOKS:
        with torch._C.DisableTorchFunctionSubclass():  # it is us
            if weight.requires_grad:
                _HOOKS[weight] = weight.register_post_accumulate_grad_hook(tell_group)  # type: ignore[no-untyped-call]


_REQUIRES_GRAD: Any = inspect.getattr_static(torch.Tensor, "requires_grad")
requires_grad: Callable[[Tensor], bool] = _REQUIRES_GRAD.__get__
# What autograd and users have left at a table, the ledger aside.
_GRAD: Any = inspect.getattr_static(torch.Tensor, "grad")
_DATA: Any = inspect.getattr_static(torch.Tensor, "data")
plain_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__
set_plain_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
