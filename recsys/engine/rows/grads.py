"""`weight.grad` of tables whose gradients are in a ledger.

It is made when a caller reads it, of the form that torch would have, and kept. Clipping and
`GradScaler` write to it in place; then the update uses it in place of the ledger's entries that it
was made of. A caller that only reads it changes nothing.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from recsys._support.torch_compat import plain_grad, set_plain_grad, version_of
from recsys.engine.rows.bags import Lookups
from recsys.engine.rows.ledger import Call, Entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.engine.rows.tables import TableGroup

__all__ = ["LedgerParameter", "bind_table", "gradient_of", "group_of", "use_written_grads"]


class MadeGrad(NamedTuple):
    """A `grad` that a caller has.

    Attributes:
        gradient: (E, D), sparse or dense.
        version: Of the gradient, when it was made.
        last: The serial number of the last entry that it was made of.
    """

    gradient: Tensor
    version: int
    last: int


class LedgerParameter(nn.Parameter):
    """A table whose `grad` returns the gradients in its group's ledger.

    An existing Parameter becomes one by assignment to its `__class__`, so it stays the same object.
    A copy has no group, and is a plain table.
    """

    @property
    def grad(self) -> Tensor | None:
        """The gradient, (E, D), sparse or dense as in torch; None if there is none.

        It may be written to in place, as clipping does.
        """
        bound, group = _BOUND.get(id(self)), group_of(self)
        if bound is None or group is None:
            return plain_grad(self)
        return _read(group, bound.number, is_sparse=bound.is_sparse)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        bound, group = _BOUND.get(id(self)), group_of(self)
        if bound is None or group is None:
            set_plain_grad(self, gradient)
        elif gradient is None:
            _drop(group, bound.number, group.ledger.last)
        else:
            raise ValueError(
                f"table {group.names[bound.number]!r}: its grad can be set to None, or written to "
                "in place (grad.mul_, clip_grad_norm_, GradScaler); a new one cannot take its "
                "place, because rows are updated from the gradients of lookups"
            )

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain table with the same rows."""
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickles: a plain table with the same rows."""
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _plain(table: LedgerParameter) -> nn.Parameter:
    return nn.Parameter(table.data, table.requires_grad)


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


def group_of(table: Tensor) -> TableGroup | None:
    """The group that a table is bound to; None if there is none any more."""
    bound = _BOUND.get(id(table))
    return None if bound is None else bound.group()


def use_written_grads(group: TableGroup) -> None:
    """Put gradients that callers have written to in place of the entries that they were made of."""
    for number, (gradient, version, last) in list(group.ledger.grads.items()):
        if version_of(gradient) == version:
            continue
        if gradient.is_sparse:
            rows, values = gradient._indices()[0], gradient._values()
        else:
            made_of = [entry for entry in group.ledger.entries if entry.serial <= last]
            looked_up = [rows for rows, _ in _by_id(group, made_of, number)]
            rows = torch.cat(looked_up).long().unique()  # type: ignore[no-untyped-call]
            values = gradient.detach()[rows]
        _drop(group, number, last)
        if len(rows):
            lookups = Lookups([(number, 0, 0)], is_mean=False)
            kept = torch.cat([rows.to(torch.int32), torch.zeros(1, dtype=torch.int32)])
            call = Call(0, lookups, kept, len(rows), len(rows), 0, None, 0)
            values = values.to(group.compute_dtype).contiguous()
            group.ledger.entries.insert(0, Entry(call, values, version_of(values), last))


def _read(group: TableGroup, number: int, *, is_sparse: bool) -> Tensor | None:
    ledger = group.ledger
    known = ledger.grads.get(number)
    if known is not None and known.last == ledger.last:
        gradient: Tensor = known.gradient
        return gradient
    use_written_grads(group)
    made = gradient_of(group, ledger.entries, number, is_sparse=is_sparse)
    if made is not None:
        ledger.grads[number] = MadeGrad(made, version_of(made), ledger.last)
    return made


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
    rows = torch.cat([rows for rows, _ in found]).long()
    values = torch.cat([values for _, values in found])
    if is_sparse:
        return torch.sparse_coo_tensor(
            rows.unsqueeze(0), values.to(table.dtype), table.shape, check_invariants=False
        )
    return values.new_zeros(table.shape).index_add_(0, rows, values).to(table.dtype)


def _by_id(group: TableGroup, entries: Sequence[Entry], number: int) -> list[tuple[Tensor, Tensor]]:
    """For each lookup in a table: the ids, and the gradient of each."""
    found = []
    for call, whole, *_ in entries:
        for table, position, column in call.lookups.locations:
            if table != number:
                continue
            first, end = position * call.num_samples, (position + 1) * call.num_samples
            part = whole.detach()[:, column : column + group.dim]
            if not call.num_bounds:
                found.append((call.kept[first:end], part))
                continue
            bounds = call.kept[call.num_ids + first : call.num_ids + end + 1].long()
            lengths, of_ids = bounds.diff(), slice(int(bounds[0]), int(bounds[-1]))
            scales = part.new_ones(int(lengths.sum()))
            if call.weights is not None:
                scales = call.weights[of_ids]
            if call.lookups.is_mean:
                scales = scales / lengths.repeat_interleave(lengths).to(scales.dtype)
            by_id = scales.unsqueeze(1) * part.repeat_interleave(lengths, dim=0)
            found.append((call.kept[of_ids], by_id))
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
