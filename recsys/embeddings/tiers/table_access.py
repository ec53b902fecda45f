"""`TieredParameter`: a table whose newest rows may be in slots, for callers who read or write it.

Every torch operation on the table first writes these rows back. Then, unless the result is surely a
copy, rows leave their slots: the caller may write to the table, through numpy, too. A write by a
tensor kept from before is noticed by its version when the next rows are claimed. If slots had newer
rows then, one of the two would be lost, and `ConflictingWrite` says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recsys._support.torch_compat import (
    DisableTorchFunctionSubclass,
    outside_graphs,
    set_plain_data,
)
from recsys.embeddings.rows.grads import LedgerParameter, group_of
from recsys.embeddings.tiers.write_back import write_back

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["TieredParameter"]


class TieredParameter(LedgerParameter):
    """A table with slots; an existing Parameter becomes one by assignment to its `__class__`."""

    @property
    @outside_graphs
    def data(self) -> Tensor:
        """The rows, (E, D), detached from autograd; writes to them are noticed."""
        group, rows = group_of(self), super().data
        if group is None:
            return rows
        group.fetcher.empty_slots(is_written_back=True)
        return group.fetcher.watch(rows)  # type: ignore[no-any-return]

    @data.setter
    @outside_graphs
    def data(self, rows: Tensor) -> None:
        group, own = group_of(self), super().data
        is_same = (rows.data_ptr(), rows.shape, rows.dtype) == (
            own.data_ptr(),
            own.shape,
            own.dtype,
        )
        if group is not None and not is_same:
            raise ValueError(
                f"a table of {group.names}: its memory is fixed while it has a budget; copy values "
                "into it (weight.copy_, load_state_dict), or call recsys.restore first"
            )
        set_plain_data(self, rows)

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
            groups = [group for table in tables if (group := group_of(table)) is not None]
            for group in groups:
                # A conflict ends with `load_state_dict`, which copies to the table.
                is_target = func is torch.Tensor.copy_ and group_of(args[0]) is group
                write_back(group, is_checked=not is_target)
            result = func(*args, **kwargs or {})
            is_copy = _is_copy(result, tables)
            for group in groups:
                if not is_copy or group.fetcher.is_written():
                    group.find_tables()  # `share_memory_` moves them
                    group.fetcher.empty_slots(is_written_back=False)
            return result


def _tables_among(value: Any) -> Iterator[TieredParameter]:
    if isinstance(value, TieredParameter):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tables_among(item)
    elif isinstance(value, dict):
        yield from _tables_among(list(value.values()))


def _is_copy(result: Any, tables: Sequence[Tensor]) -> bool:
    """Whether a result certainly shares no memory with the tables."""
    if isinstance(result, tuple | list):
        return all(_is_copy(item, tables) for item in result)
    if type(result) in (bool, float):  # an int may be an address
        return True
    if not isinstance(result, Tensor) or result.layout is not torch.strided:
        return False
    try:
        memory = result.untyped_storage().data_ptr()
    except RuntimeError:  # of a tensor of torch.func's transforms
        return False
    return all(table.untyped_storage().data_ptr() != memory for table in tables)


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
