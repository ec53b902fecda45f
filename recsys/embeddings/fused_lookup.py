"""The lookup as autograd sees it: pooled vectors out, gradients to the ledger or to the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from recsys.embeddings.kernels.ledger import LedgerEntry
from recsys.embeddings.kernels.pooled_lookup import Bags, Lookups, pooled_lookup, row_gradient_dots
from recsys.embeddings.memory import empty_rows
from recsys.embeddings.row_space import compute_dtype
from recsys.embeddings.table_group import TableGroup, sparse_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.embeddings.row_updater import RowUpdater

__all__ = ["Part", "fused_lookup"]


_MAX_KEPT_BYTES = 32 * 2**20


class Part(NamedTuple):
    """What one kernel call looks up."""

    group: TableGroup
    lookups: Lookups
    bags: Bags


def fused_lookup(
    parts: Sequence[Part],
    bag_weights: Tensor | None,
    *,
    ids: Sequence[Tensor],
    updater: RowUpdater | None,
    explain: Callable[[int], Exception],
) -> Tensor:
    """Look up and pool every part, side by side.

    `torch.compile` cannot look into it: callers are disabled for it as a whole, once.

    Args:
        parts: All of one batch size and width of output.
        bag_weights: What the parts' bags have as weights; it gets a gradient if it asks for one.
        ids: What the parts' bags are views of; backward reads it again.
        updater: Keeps the gradients; None where they go to the tables as sparse gradients.
        explain: From the position of a value that is no row to the error that says so.

    Shape:
        bag_weights (N,); result (B, W), both in the dtype that rows are computed in.

    Raises:
        RuntimeError: the tables' gradients would have to be shared between processes; in backward,
            what it reads again was changed in place meanwhile.
    """
    asking: Sequence[Lookups] = ()
    if updater is None:
        tables: Sequence[Tensor] = [weight for part in parts for weight in part.group.weights()]
    elif torch.is_grad_enabled():
        asking = [part.group.asking(part.lookups) for part in parts]
        asks = any(lookups.distinct_tables for lookups in asking)
        tables = [updater.asks_gradient] if asks else []
        if asks and DistributedDataParallel._get_active_ddp_module() is not None:  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "DistributedDataParallel: rows that an optimizer of recsys moves are not shared "
                "between processes; build the tables without optimizer= (their sparse gradients "
                "are shared), or train in one process"
            )
    else:
        tables = []
    joined = None if updater is None else updater.join_pass()
    call = _Call(parts, asking, ids, updater, explain, joined)
    return cast("Tensor", _FusedLookup.apply(call, bag_weights, *tables))  # type: ignore[no-untyped-call]


class _Call(NamedTuple):
    parts: Sequence[Part]
    asking: Sequence[Lookups]  # by part; with an updater and gradients alone
    ids: Sequence[Tensor]
    updater: RowUpdater | None
    explain: Callable[[int], Exception]
    joined: int | None


class _FusedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, bag_weights: Tensor | None, *tables: Tensor) -> Tensor:
        group, lookups, bags = call.parts[0]
        dtype = compute_dtype(group.weights_of(lookups)[0].dtype)
        shape = bags.batch_size, lookups.width
        # glibc asks the system for anything larger anew each time, and small pages of it are
        # handed out one by one: at 100 MiB that took longer than looking up.
        is_large = shape[0] * shape[1] * dtype.itemsize > _MAX_KEPT_BYTES
        result = (empty_rows if is_large else torch.empty)(*shape, dtype=dtype)
        for part in call.parts:
            bad = pooled_lookup(part.group.space(part.lookups), part.lookups, part.bags, result)
            if bad >= 0:
                raise call.explain(bad)
        ctx.call = call
        ctx.save_for_backward(*call.ids, *(() if bag_weights is None else (bag_weights,)))
        ctx.versions = _versions(call) if ctx.needs_input_grad[1] else None
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        ctx.saved_tensors  # noqa: B018  # raises where one was changed, or backward runs twice
        gradient = _with_dense_rows(gradient.detach())  # with create_graph it is part of a graph
        of_weights = None
        if ctx.needs_input_grad[1]:
            if ctx.versions != _versions(call):
                raise RuntimeError(
                    "rows were moved between a lookup and its backward, whose gradient of the "
                    "weights is that of the rows as they were; call backward before rows move"
                )
            of_weights = gradient.new_zeros(len(call.parts[0].bags.values))
            for group, lookups, bags in call.parts:
                row_gradient_dots(
                    group.space(lookups), lookups, bags, gradient.contiguous(), of_weights
                )
        if call.updater is None:
            tables: list[Tensor | None] = []
            for group, lookups, bags in call.parts:
                weights = group.weights()
                is_asked = ctx.needs_input_grad[2 + len(tables) :][: len(weights)]
                found = sparse_gradients(weights, [LedgerEntry(lookups, bags, gradient)], is_asked)
                tables += [
                    gradient if is_sparse or gradient is None else gradient.to_dense()
                    for gradient, is_sparse in zip(found, group.are_sparse(), strict=True)
                ]
            return None, of_weights, *tables
        if any(ctx.needs_input_grad[2:]) and call.updater.is_asked():
            read_later = call.ids if gradient._is_view() else (*call.ids, gradient)
            ids = [(tensor, tensor._version) for tensor in read_later]
            entries = [
                (part.group, LedgerEntry(still_asking, _kept(part.bags), gradient, ids))
                for part, asking in zip(call.parts, call.asking, strict=True)
                # A table that was frozen meanwhile gets no gradient, as in torch.
                if (still_asking := part.group.asking(asking)).distinct_tables
            ]
            call.updater.keep(entries, call.joined)
        return (None, of_weights) + (None,) * (len(ctx.needs_input_grad) - 2)


def _with_dense_rows(gradient: Tensor) -> Tensor:
    """A gradient whose rows lie whole, one behind the other, with or without room between them.

    An interaction hands over a part of its own gradient like that; copying it costs a tenth of the
    update.
    """
    width = gradient.shape[1]
    is_whole = gradient.stride(1) == 1 or width == 1
    return gradient if is_whole and gradient.stride(0) >= width else gradient.contiguous()


def _versions(call: _Call) -> list[int]:
    return [weight._version for part in call.parts for weight in part.group.weights()]


def _kept(bags: Bags) -> Bags:
    """Bags whose weights stay as they are, though they may be parameters that an optimizer moves
    before ours moves the rows.
    """  # noqa: D205  # one sentence
    return bags if bags.weights is None else bags._replace(weights=bags.weights.copy())
