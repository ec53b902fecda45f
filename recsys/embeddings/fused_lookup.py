"""The lookup as autograd sees it: pooled vectors out, gradients to the ledger or to the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, is_grad_enabled, nn
from torch._C import DisableTorchFunctionSubclass, _are_functorch_transforms_active
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from recsys.embeddings.ahead import Prefetched
from recsys.embeddings.kernels.ledger import LedgerEntry
from recsys.embeddings.kernels.pooled_lookup import Bags, Lookups
from recsys.embeddings.kernels.slots import NoSuchRow
from recsys.embeddings.memory import empty_rows
from recsys.embeddings.residency import NotEnoughSlots
from recsys.embeddings.row_space import compute_dtype
from recsys.embeddings.sparse_gradients import sparse_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.embeddings.found import Found
    from recsys.embeddings.residency import Ticket
    from recsys.embeddings.row_updater import RowUpdater
    from recsys.embeddings.table_group import TableGroup

__all__ = [
    "MAX_KEPT_BYTES",
    "Part",
    "empty_result",
    "fused_lookup",
    "prefetch_parts",
    "with_dense_rows",
]


MAX_KEPT_BYTES = 32 * 2**20


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
    num_stacked: int = 0,
) -> Tensor:
    """Look up and pool every part, side by side.

    `torch.compile` cannot look into it: callers are disabled for it as a whole, once.

    Args:
        parts: All of one batch size and width of output.
        bag_weights: What the parts' bags have as weights; it gets a gradient if it asks for one.
        ids: What the parts' bags are views of; backward reads it again.
        updater: Keeps the gradients; None where they go to the tables.
        explain: From the position of a value that is no row to the error that says so.
        num_stacked: F, if pooled vectors, of one dim, are to come each by itself; else 0.

    Shape:
        bag_weights (N,); result (B, W) or (B, F, W / F); both in the dtype that rows are computed
        in.

    Raises:
        BudgetTooSmall: the budget has no room for the rows.
        RuntimeError: the tables' gradients would have to be shared between processes; in backward,
            what it reads again was changed in place meanwhile.
    """
    with DisableTorchFunctionSubclass():  # it is us who read the tables
        may_move = updater is not None and is_grad_enabled()
        weights_of: list[Sequence[nn.Parameter]] = []
        asking: list[Lookups] = []
        asks_tables = False
        for group, lookups, _ in parts:
            weights_of.append(group.follow(lookups))
            asking.append(group.asking(lookups, weights_of[-1]) if may_move else _NOTHING)
            asks_tables = asks_tables or bool(asking[-1].distinct_tables)
        if not asks_tables and updater is not None and parts[0].group.tiers is not None:
            asks_weights = may_move and bag_weights is not None and bag_weights.requires_grad
            if not asks_weights:
                return _look_up_where_rows_are(parts, explain, num_stacked)
        calls = None
        while calls is None:
            try:
                calls = _calls_of(parts, weights_of, asking)
            except NoSuchRow as error:
                raise explain(error.position) from None
            except NotEnoughSlots as error:
                # Behind this block: until its end the error keeps what has been claimed.
                short, num_needed = error.residency, error.num_needed
            if calls is None:
                assert updater is not None
                updater.make_room(short, num_needed, _count_distinct(parts))
        tables: Sequence[Tensor] = ()
        if updater is None:
            tables = [weight for part in parts for weight in part.group.weights()]
        elif asks_tables:
            tables = (updater.asks_gradient,)
            if DistributedDataParallel._active_ddp_module is not None:
                raise RuntimeError(
                    "DistributedDataParallel: rows that an optimizer of recsys moves are not "
                    "shared between processes; build the tables without optimizer= (their sparse "
                    "gradients are shared), or train in one process"
                )
        joined = None if updater is None else updater.join_pass()
        work = _Work(calls, ids, updater, explain, joined, num_stacked)
        # torch's own first looks, in Python, for tensors that a transform of functorch's has left
        # among the arguments; where they are all of our making, there are none.
        is_ours = updater is not None and bag_weights is None
        is_plain = is_ours and not _are_functorch_transforms_active()
        apply = _apply_plainly if is_plain else _FusedLookup.apply
        pooled: Tensor = apply(work, bag_weights, *tables)
        return pooled


def prefetch_parts(parts: Sequence[Part], explain: Callable[[int], Exception]) -> Prefetched:
    """Have the rows fetched that `fused_lookup` of the same parts will need.

    Args:
        parts: As there.
        explain: As there.

    Returns:
        What was claimed: all of it, or nothing where there are too few slots; nothing, either,
        where no table asks for a gradient, since rows are then read where they are.
    """
    tickets: list[Ticket] = []
    with DisableTorchFunctionSubclass():  # it is us who read the tables
        if not any(part.group.asking(part.lookups).distinct_tables for part in parts):
            return Prefetched(())
        try:
            for group, lookups, bags in parts:
                assert group.tiers is not None
                tickets += group.tiers.claim_ahead(group.space(), lookups, bags)
        except BaseException as error:
            for ticket in tickets:
                ticket.release()
            if isinstance(error, NoSuchRow):
                raise explain(error.position) from None
            if not isinstance(error, NotEnoughSlots):
                raise
            return Prefetched((), has_room=False)
    return Prefetched(tickets)


_NOTHING = Lookups.nothing()


def _count_distinct(parts: Sequence[Part]) -> dict[TableGroup, int]:
    """By group: how many different rows are looked up."""
    found: dict[TableGroup, int] = {}
    for table_group, lookups, bags in parts:
        for table in lookups.distinct_tables:
            of_table = lookups.of_tables({table}).positions.tolist()
            runs = [bags.values_of(position) for position in of_table]
            count = len(np.unique(np.concatenate(runs)))
            found[table_group] = found.get(table_group, 0) + count
    return found


def _calls_of(
    parts: Sequence[Part],
    weights_of: Sequence[Sequence[nn.Parameter]],
    asking: Sequence[Lookups],
) -> list[tuple[Found, Lookups]]:
    """The kernel calls of all parts, and which lookups of each ask for a gradient.

    Args:
        parts: What is looked up.
        weights_of: Each one's tables.
        asking: Of the lookups of each.
    """
    calls = []
    for (group, lookups, bags), weights, its_asking in zip(parts, weights_of, asking, strict=True):
        for found in group.find(lookups, bags, weights):
            is_whole = found.lookups is lookups
            calls.append((found, its_asking if is_whole else group.asking(found.lookups)))
    return calls


def _look_up_where_rows_are(
    parts: Sequence[Part], explain: Callable[[int], Exception], num_stacked: int
) -> Tensor:
    """Of tiered rows, for nobody who would come back to them: no slots, no graph."""
    errors = parts[0].group.kernels.errors
    if errors is not None:
        errors.poll()
    dtype, device = parts[0].group.weights()[0].dtype, parts[0].group.device
    result = empty_result(dtype, device, parts[0].bags, parts[0].lookups, num_stacked)
    for group, lookups, bags in parts:
        assert group.tiers is not None
        bad = group.tiers.look_up(group.space(), lookups, bags, result.flatten(1))
        if bad >= 0:
            raise explain(bad)
    if errors is not None:
        errors.report(explain)
    return result


def empty_result(
    dtype: torch.dtype, device: torch.device, bags: Bags, lookups: Lookups, num_stacked: int = 0
) -> Tensor:
    """Memory for the pooled rows of tables of a dtype, (B, W) or (B, F, W / F)."""
    computed, batch_size, width = compute_dtype(dtype), bags.batch_size, lookups.width
    shape = (batch_size, num_stacked, width // num_stacked) if num_stacked else (batch_size, width)
    # glibc asks the system for anything larger anew each time, and small pages of it are handed
    # out one by one: at 100 MiB that took longer than looking up.
    is_large = batch_size * width * computed.itemsize > MAX_KEPT_BYTES
    return (empty_rows if is_large else torch.empty)(*shape, dtype=computed, device=device)


class _Work(NamedTuple):
    calls: Sequence[tuple[Found, Lookups]]
    ids: Sequence[Tensor]
    updater: RowUpdater | None
    explain: Callable[[int], Exception]
    joined: int | None
    num_stacked: int


class _FusedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, bag_weights: Tensor | None, *tables: Tensor) -> Tensor:
        found, _ = work.calls[0]
        kernels = found.kernels
        if kernels.errors is not None:
            kernels.errors.poll()
        table = found.space.tables[0]
        result = empty_result(
            table.dtype, table.device, found.bags, found.lookups, work.num_stacked
        )
        for found, _ in work.calls:
            bad = found.kernels.pooled_lookup(found.space, found.lookups, found.bags, result)
            if bad >= 0:
                raise work.explain(bad)
        if kernels.errors is not None:
            kernels.errors.report(work.explain)
        ctx.work = work
        ctx.save_for_backward(*work.ids, *(() if bag_weights is None else (bag_weights,)))
        ctx.versions = _versions(work) if ctx.needs_input_grad[1] else None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if is_grad_enabled():  # a graph of gradients is made, which ends here
            return _FusedLookup._backward_once(ctx, gradient)
        return _FusedLookup._backward(ctx, gradient)

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        work: _Work = ctx.work
        ctx.saved_tensors  # noqa: B018  # raises where one was changed, or backward runs twice
        if not _get_current_graph_task_keep_graph():
            ctx.work = None  # its slots are the ledger's now, and then whose they may be
        if gradient.requires_grad:  # with create_graph it is part of a graph
            gradient = gradient.detach()
        gradient = with_dense_rows(gradient)
        of_weights = None
        if ctx.needs_input_grad[1]:
            if ctx.versions != _versions(work):
                raise RuntimeError(
                    "rows were moved between a lookup and its backward, whose gradient of the "
                    "weights is that of the rows as they were; call backward before rows move"
                )
            of_weights = gradient.new_zeros(len(work.calls[0][0].bags.values))
            whole = gradient.flatten(1).contiguous()
            for found, _ in work.calls:
                found.kernels.row_gradient_dots(
                    found.space, found.lookups, found.bags, whole, of_weights
                )
        with DisableTorchFunctionSubclass():
            if work.updater is None:
                return None, of_weights, *_gradients_of_tables(ctx, work, gradient)
            if any(ctx.needs_input_grad[2:]) and work.updater.is_asked():
                work.updater.keep(_entries(work, work.updater, gradient), work.joined)
        return (None, of_weights) + (None,) * (len(ctx.needs_input_grad) - 2)

    _backward_once = staticmethod(once_differentiable(_backward))


# What `torch.autograd.Function.apply` calls when it has looked.
_apply_plainly: Callable[..., Any] = super(torch.autograd.Function, _FusedLookup).apply


def _gradients_of_tables(ctx: Any, work: _Work, gradient: Tensor) -> list[Tensor | None]:
    tables: list[Tensor | None] = []
    for call, _ in work.calls:
        is_asked = ctx.needs_input_grad[2 + len(tables) :][: len(call.tables)]
        # Of the tables as they were: what has come in the place of one may have fewer rows.
        ledger = [LedgerEntry(call.lookups, call.bags, gradient)]
        found = sparse_gradients(call.tables, ledger, is_asked)
        tables += [
            gradient if is_sparse or gradient is None else gradient.to_dense()
            for gradient, is_sparse in zip(found, call.group.are_sparse(), strict=True)
        ]
    return tables


def _entries(work: _Work, updater: RowUpdater, gradient: Tensor) -> list[tuple[Found, LedgerEntry]]:
    entries = []
    for found, asking in work.calls:
        still_asking = found.group.still_asking(asking, found.parameters)
        if not still_asking.distinct_tables:
            continue
        bags, rows = found.bags, None if found.ticket is None else found.rows
        if updater.auto_apply:  # in this same pass
            bags = bags.with_own_weights()
        else:  # the caller may refill its memory before the step
            bags, rows = bags.copied(), None if rows is None else rows.copied()
        entry = LedgerEntry(
            still_asking,
            bags,
            gradient,
            gradient._version,
            found.tables,
            rows,
            found.ticket,
            found.lookups,
        )
        entries.append((found, entry))
    return entries


def with_dense_rows(gradient: Tensor) -> Tensor:
    """A gradient whose rows lie whole, one behind the other, with or without room between them.

    An interaction hands over a part of its own gradient like that; copying it costs a tenth of the
    update.

    Shape:
        gradient (B, W) or (B, F, W / F), and so is the result.
    """
    width, stride = 1, gradient.stride()
    for axis in range(gradient.dim() - 1, 0, -1):
        size = gradient.shape[axis]
        if stride[axis] != width and size != 1:
            return gradient.contiguous()
        width *= size
    return gradient if stride[0] >= width else gradient.contiguous()


def _versions(work: _Work) -> list[int]:
    return [weight._version for found, _ in work.calls for weight in found.group.weights()]
