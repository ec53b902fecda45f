"""`weight.grad` of tables whose gradients are in a ledger.

It is made when a caller reads it, of the form that torch would have, and kept. Clipping and
`GradScaler` write to it in place; then the update uses it in place of the ledger's entries that it
was made of. A caller that only reads it changes nothing.

A gradient that did not come from lookups, such as that of an L2 penalty or one that a caller has
set, is where torch keeps it. It becomes an entry of the ledger when rows are updated.
"""

from __future__ import annotations

import copy
import gc
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from recsys._support.torch_compat import (
    DisableTorchFunctionSubclass,
    outside_graphs,
    plain_data,
    plain_grad,
    set_plain_data,
    set_plain_grad,
    version_of,
)
from recsys.embeddings.rows.bags import Lookups
from recsys.embeddings.rows.ledger import Call, Entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.rows.tables import TableGroup

__all__ = [
    "LedgerParameter",
    "bind_table",
    "drop_grads",
    "gradient_of",
    "group_of",
    "leave_to_released",
    "require_no_optimizer",
    "take_grads",
    "unbind_table",
    "with_dense_grads",
]


class MadeGrad(NamedTuple):
    """A `grad` that a caller has.

    Attributes:
        gradient: (E, D), sparse or dense.
        values: A copy of its values. GradScaler writes to them without a new version.
        last: The serial number of the last entry that it was made of.
    """

    gradient: Tensor
    values: Tensor
    last: int


class LedgerParameter(nn.Parameter):
    """A table whose `grad` returns the gradients in its group's ledger.

    An existing Parameter becomes one by assignment to its `__class__`, so it stays the same object.
    A copy has no group, and is a plain table.
    """

    @property
    @outside_graphs
    def data(self) -> Tensor:
        """The rows, (E, D), detached from autograd. A read counts as a write to them."""
        bound, group = _BOUND.get(id(self)), group_of(self)
        if bound is not None and group is not None:
            group.data_reads[bound.number] += 1
        return plain_data(self)

    @data.setter
    @outside_graphs
    def data(self, rows: Tensor) -> None:
        set_plain_data(self, rows)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, (E, D), sparse or dense as in torch; None if there is none.

        It may be written to in place, as clipping does.
        """
        bound = _BOUND.get(id(self))
        group = None if bound is None else bound.group()
        if bound is None or group is None or not (group.ledger.entries or group.ledger.grads):
            return plain_grad(self)  # quickly: torch reads all of them in each step
        return _read(group, bound.number, is_sparse=bound.is_sparse)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        bound, group = _BOUND.get(id(self)), group_of(self)
        if bound is not None and group is not None:
            had_entries = bool(group.ledger.entries)
            _drop(group, bound.number, group.ledger.last)
            if (
                gradient is None  # else the update ends the generation
                and had_entries
                and not group.ledger.entries
                and group.fetcher is not None
            ):
                group.fetcher.end_generation()
        set_plain_grad(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def register_hook(self, hook: Any) -> Any:
        """Like torch's; refused while lookups leave their gradients to recsys.

        Raises:
            ValueError: a recsys optimizer updates the table.
        """
        _require_unbound(self)
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """As `register_hook`.

        Raises:
            ValueError: a recsys optimizer updates the table.
        """
        _require_unbound(self)
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain table with the same rows."""
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickles: a plain table with the same rows."""
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _require_unbound(table: LedgerParameter) -> None:
    bound, group = _BOUND.get(id(table)), group_of(table)
    if bound is not None and group is not None:
        raise ValueError(
            f"table {group.names[bound.number]!r}: a hook for its gradient would not be called, "
            "because recsys updates rows without it; change weight.grad between backward and step"
        )


def _plain(table: LedgerParameter) -> nn.Parameter:
    group = group_of(table)
    # A read of `data` counts as a write of the caller's.
    is_tiered = group is not None and group.fetcher is not None
    return nn.Parameter(table.data if is_tiered else plain_data(table), table.requires_grad)


class _Bound(NamedTuple):
    table: ref[nn.Parameter]
    group: ref[TableGroup]
    number: int
    is_sparse: bool


# By the table's id: torch.save would pickle the group if it were an attribute.
_BOUND: dict[int, _Bound] = {}


def bind_table(group: TableGroup, number: int, *, is_sparse: bool) -> None:
    """Let a table's `grad` be that of its group's ledger.

    Args:
        group: Its group.
        number: Its number there.
        is_sparse: Whether torch would make a sparse gradient.
    """
    table, key = group.tables[number], id(group.tables[number])
    weak_table = ref(table, lambda _: _BOUND.pop(key, None))
    _BOUND[key] = _Bound(weak_table, ref(group), number, is_sparse)
    table.__class__ = LedgerParameter


def unbind_table(group: TableGroup, number: int) -> None:
    """Make a table a plain Parameter; its gradients become its `grad`.

    Args:
        group: Its group, without rows in slots that are newer.
        number: Its number there.
    """
    table = group.tables[number]
    gradient = table.grad
    _drop(group, number, group.ledger.last)
    group.released[number] = _BOUND.pop(id(table)).is_sparse
    table.__class__ = nn.Parameter
    table.grad = gradient


def require_no_optimizer(name: str, table: Tensor) -> None:
    """Refuse a table that a recsys optimizer updates: a second one would update its rows twice.

    A table whose optimizer has been deleted becomes a plain Parameter again.

    Raises:
        ValueError: a recsys optimizer updates the table.
    """
    if group_of(table) is not None:
        gc.collect()  # a deleted module may be in a circle of references
    if group_of(table) is not None:
        raise ValueError(
            f"table {name!r} is already updated by another recsys optimizer; accelerate all of its "
            "modules in one call, or call recsys.restore on the other model (or delete it) first"
        )
    if isinstance(table, LedgerParameter):
        _BOUND.pop(id(table), None)
        table.__class__ = nn.Parameter  # type: ignore[assignment]


def with_dense_grads(group: TableGroup) -> list[int]:
    """The tables with a dense gradient that did not come from lookups."""
    return [
        number
        for number, grad in _plain_grads(group)
        if not grad.is_sparse and number not in group.released
    ]


def group_of(table: Tensor) -> TableGroup | None:
    """The group that a table is bound to; None if there is none any more."""
    bound = _BOUND.get(id(table))
    return None if bound is None else bound.group()


def leave_to_released(group: TableGroup, call: Call, gradient: Tensor) -> Lookups:
    """Leave the gradient of a lookup to tables that were given back to torch since.

    Returns:
        The lookups in other tables.
    """
    for number in call.lookups.tables:
        if number in group.released:
            table, is_sparse = group.tables[number], group.released[number]
            entries = [Entry(call, gradient, 0, 0)]
            table.grad = _sum(table.grad, gradient_of(group, entries, number, is_sparse=is_sparse))
    return call.lookups.in_tables(
        [number for number in call.lookups.tables if number not in group.released]
    )


def drop_grads(group: TableGroup) -> None:
    """Drop all gradients."""
    group.drop_ledger()
    with DisableTorchFunctionSubclass():
        for number, _ in _plain_grads(group):
            set_plain_grad(group.tables[number], None)


def _plain_grads(group: TableGroup) -> list[tuple[int, Tensor]]:
    """The gradients that are where torch keeps them, by table."""
    grads = [*map(plain_grad, group.tables)]
    if grads.count(None) == len(grads):  # almost always; twice as fast as a loop
        return []
    return [(number, grad) for number, grad in enumerate(grads) if grad is not None]


def take_grads(group: TableGroup) -> list[int]:
    """Put gradients that callers have written to, or that no lookup has left, into the ledger.

    Returns:
        The tables with a dense gradient that no lookup has left.

    Raises:
        ValueError: a sparse one has an index that is not in its table.
    """
    if group.ledger.grads:
        _take_written(group)
    dense = []
    for number, grad in _plain_grads(group):
        if number not in group.released:
            if not grad.is_sparse:
                dense.append(number)
            _add(group, number, grad, group.ledger.last)
            set_plain_grad(group.tables[number], None)
    return dense


def _take_written(group: TableGroup) -> None:
    """Put gradients that callers have written to in place of the entries that they were made of."""
    for number, (gradient, values, last) in list(group.ledger.grads.items()):
        if not torch.equal(_values_of(gradient), values):
            _drop(group, number, last)
            _add(group, number, gradient, last)


def _values_of(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


@lru_cache(maxsize=1024)
def _whole(number: int) -> Lookups:
    """The lookups of one table; the same object in each call, by which arrays are kept."""
    return Lookups([(number, 0, 0)], is_mean=False)


def _add(group: TableGroup, number: int, gradient: Tensor, last: int) -> None:
    """Put a gradient into the ledger, as an entry before all others."""
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        rows, values = gradient._indices()[0], gradient._values()
    else:
        dense = gradient.detach().to_dense()
        rows = (dense != 0).any(1).nonzero().view(-1)
        values = dense[rows]
    if not len(rows) and not gradient.is_sparse:
        return  # but lookups without ids are a step of their table
    size = int(group.sizes[number])
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= size):
        raise ValueError(
            f"table {group.names[number]!r}: its grad is sparse and has an index that is not in "
            f"[0, {size}); correct what made it"
        )
    kept = torch.cat([rows, rows.new_zeros(1)]).to(group.device, torch.int32)
    call = Call(0, _whole(number), kept, len(rows), len(rows), 0, None, -1)
    values = values.detach().to(group.device, group.compute_dtype).contiguous()
    group.ledger.entries.insert(0, Entry(call, values, version_of(values), last))


def _read(group: TableGroup, number: int, *, is_sparse: bool) -> Tensor | None:
    ledger, table = group.ledger, group.tables[number]
    plain, known = plain_grad(table), ledger.grads.get(number)
    if plain is None and known is not None and known.last == ledger.last:
        gradient: Tensor = known.gradient
        return gradient
    _take_written(group)
    made = gradient_of(group, ledger.entries, number, is_sparse=is_sparse)
    if made is None:
        return plain
    if plain is None:
        ledger.grads[number] = MadeGrad(made, _values_of(made).clone(), ledger.last)
        return made
    _drop(group, number, ledger.last)
    set_plain_grad(table, _sum(plain, made))
    return plain_grad(table)


def _sum(known: Tensor | None, made: Tensor | None) -> Tensor | None:
    """The sum of two gradients; torch adds a sparse one to a dense one, not the other way round."""
    if known is None or made is None:
        return made if known is None else known
    if known.is_sparse and known.sparse_dim() > 1:
        known = known.to_dense().to_sparse(1)
    return made + known if known.is_sparse else known + made


def gradient_of(
    group: TableGroup, entries: Sequence[Entry], number: int, *, is_sparse: bool
) -> Tensor | None:
    """The gradient of a table, (E, D); None if no entry has one.

    Args:
        group: Its group.
        entries: Lookups and their gradients.
        number: Its number in the group.
        is_sparse: Whether it is sparse, with one row for each id that was looked up.
    """
    table = group.tables[number]
    found = _by_id(group, entries, number)
    if not found:
        return None
    rows = torch.cat([rows for rows, _ in found]).to(table.device, torch.int64)
    values = torch.cat([values for _, values in found]).to(table.device)
    if is_sparse:
        return torch.sparse_coo_tensor(
            rows.unsqueeze(0), values.to(table.dtype), table.shape, check_invariants=False
        )
    return values.new_zeros(table.shape).index_add_(0, rows, values).to(table.dtype)


def _by_id(group: TableGroup, entries: Sequence[Entry], number: int) -> list[tuple[Tensor, Tensor]]:
    """For each lookup in a table: the ids, and the gradient of each."""
    found, on_device = [], group.is_on_device
    for call, whole, *_ in entries:
        for table, position, column in call.lookups.locations:
            if table != number:
                continue
            first, end = position * call.num_samples, (position + 1) * call.num_samples
            part = whole.detach()[:, column : column + group.dim]
            rows, by_id = call.kept[first:end], part
            if call.num_bounds:
                begins = call.num_ids + first
                bounds = call.kept[begins : call.num_ids + end + 1].long()
                lengths, of_ids = bounds.diff(), slice(int(bounds[0]), int(bounds[-1]))
                scales = (
                    part.new_ones(int(lengths.sum()))
                    if call.weights is None
                    else call.weights[of_ids]
                )
                if call.lookups.is_mean:
                    counts = (
                        call.kept[begins + call.num_bounds + 1 :][: len(lengths)]
                        if on_device
                        else lengths
                    )
                    scales = scales / counts.repeat_interleave(lengths).to(scales.dtype)
                by_id = scales.unsqueeze(1) * part.repeat_interleave(lengths, dim=0)
                rows = call.kept[of_ids]
            if on_device:  # where some ids may be left out, or be no rows
                is_row = (rows >= 0) & (rows < int(group.sizes[number]))
                rows, by_id = rows[is_row], by_id[is_row]
            found.append((rows, by_id))
    return found


def _drop(group: TableGroup, number: int, last: int) -> None:
    """Take a table out of the entries of a ledger up to a serial number."""
    group.ledger.grads.pop(number, None)
    kept = []
    for entry in group.ledger.entries:
        lookups = entry.call.lookups
        if entry.serial <= last:
            lookups = lookups.in_tables([table for table in lookups.tables if table != number])
        if lookups.tables:
            kept.append(entry._replace(call=entry.call._replace(lookups=lookups)))
    group.ledger.entries = kept
