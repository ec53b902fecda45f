"""The autograd function of lookups: pooled vectors out, gradients to the ledger or the tables."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.function import once_differentiable

from recsys._support.torch_compat import (
    NO_PASS,
    DisableTorchFunctionSubclass,
    active_ddp_module,
    current_pass,
    is_graph_kept,
    outside_graphs,
    plain_apply,
    version_of,
)
from recsys.embeddings.kernels.cpu.pooled_lookup import row_gradients
from recsys.embeddings.kernels.cpu.slots import NoSuchRow
from recsys.embeddings.lookup.result_memory import empty_result
from recsys.embeddings.lookup.sparse_gradients import sparse_gradients
from recsys.embeddings.rows.ledger import LedgerEntry, next_lookup
from recsys.embeddings.rows.lookups import (
    Bags,
    Lookups,
    num_distinct_rows,
    require_no_transform,
)
from recsys.embeddings.rows.row_space import compute_dtype
from recsys.embeddings.tiers.ahead import Prefetched
from recsys.embeddings.tiers.ticket import NotEnoughSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.embeddings.lookup.table_group import ResolvedLookup, TableGroup
    from recsys.embeddings.tiers.ticket import Ticket
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = [
    "Part",
    "count_distinct",
    "fused_lookup",
    "keep_gradient",
    "own_if_one_sample",
    "prefetch_parts",
    "require_grad",
    "with_dense_rows",
]


class Part(NamedTuple):
    """The lookups of one kernel call."""

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
    padding_idx: int | None = None,
    num_samples: int | None = None,
) -> Tensor:
    """Look up and pool all parts; each writes its own columns of the result.

    `torch.compile` cannot trace it, so callers disable the compiler.

    Args:
        parts: Parts with the same batch size and output width.
        bag_weights: The weights in the parts' bags; they get a gradient if they require one.
        ids: The tensors that the parts' bags are views of; backward reads them again.
        updater: Collects the gradients; None if they go to the tables.
        explain: Maps the position of an invalid id to the error to raise.
        num_stacked: F, to return the F pooled vectors of a sample as (F, W / F); else 0.
        padding_idx: For bags of one id: a row that is looked up but gets no gradient.
        num_samples: Number of samples that have the B bags; None for B.

    Shape:
        bag_weights (N,); result (B, W) or (B, F, W / F); both in the compute dtype of the rows.

    Raises:
        BudgetTooSmall: the budget has no room for the rows.
        RuntimeError: the model is in `DistributedDataParallel`, or in a transform of `torch.func`,
            such as vmap, or in `torch.jit.trace`; in backward, `ids` or a table was changed in
            place after the lookup.
    """
    require_no_transform()
    with DisableTorchFunctionSubclass():  # internal reads of tables
        if updater is not None and not updater.is_sharded:
            wrapper = active_ddp_module()
            if wrapper is not None and (is_grad_enabled() or wrapper.training):
                _refuse_ddp(parts)
        may_update = updater is not None and is_grad_enabled()
        requiring: list[Lookups] = []
        is_updated = False
        for group, lookups, _ in parts:
            requiring.append(group.lookups_requiring_grad(lookups) if may_update else _NOTHING)
            is_updated = is_updated or bool(requiring[-1].distinct_tables)
        if not is_updated and updater is not None and parts[0].group.tiers is not None:
            has_gradient = may_update and bag_weights is not None and bag_weights.requires_grad
            if not has_gradient:
                return _look_up_where_rows_are(parts, explain, num_stacked)
        calls = _resolve(parts, requiring, updater, explain)
        tables: Sequence[Tensor] = ()
        if updater is None:
            tables = [table for part in parts for table in part.group.tables]
        elif is_updated:
            tables = (updater.grad_anchor,)
        is_recomputed = updater is not None and current_pass() != NO_PASS
        joined = updater.join_pass() if updater is not None and is_recomputed else None
        is_one_sample = 1 in (num_samples, parts[0].bags.batch_size)
        more = next_lookup(), padding_idx, is_one_sample
        work = _Work(calls, ids, updater, explain, joined, num_stacked, *more)
        # torch's own `apply` first checks all arguments, in Python, for tensors of functorch
        # transforms. If recsys made all of the tensors, there are none.
        has_own_tensors = updater is not None and bag_weights is None
        apply = _apply_plainly if has_own_tensors else _FusedLookup.apply
        pooled: Tensor = apply(work, bag_weights, *tables)
        return pooled


def _refuse_ddp(parts: Sequence[Part]) -> None:
    """Check that `DistributedDataParallel`, whose forward this is, does not train these tables.

    A reentrant checkpoint looks up without gradients in this forward, and again in backward, where
    the wrapper cannot be seen. So a lookup without gradients is checked, too, unless in `eval()`.

    Raises:
        RuntimeError: it does.
    """
    if require_grad(parts):
        raise RuntimeError(
            "DistributedDataParallel: a recsys optimizer does not share its row updates between "
            "processes; build the tables without optimizer=, or call recsys.accelerate without "
            "it, so that their gradients are shared; or train in one process"
        )


def prefetch_parts(parts: Sequence[Part], explain: Callable[[int], Exception]) -> Prefetched:
    """Start to fetch the rows for `fused_lookup` of the same parts.

    Args:
        parts: As for `fused_lookup`.
        explain: As for `fused_lookup`.

    Returns:
        The claim of all rows; an empty one if there are too few slots, or if no table requires a
        gradient, because rows are then read in place.
    """
    tickets: list[Ticket] = []
    with DisableTorchFunctionSubclass():  # internal reads of tables
        if not require_grad(parts):
            return Prefetched(())
        try:
            for group, lookups, bags in parts:
                assert group.tiers is not None
                space = group.space(lookups.distinct_tables)
                tickets += group.tiers.claim_ahead(space, [(lookups, bags)])
        except BaseException as error:
            for ticket in tickets:
                ticket.release()
            if isinstance(error, NotEnoughSlots):
                return Prefetched((), has_room=False)
            if not isinstance(error, NoSuchRow):
                raise
            bad = error.position  # explained below, as in `fused_lookup`
        else:
            return Prefetched(tickets, needs_slots=partial(require_grad, parts))
    raise explain(bad)


def require_grad(parts: Sequence[Part]) -> bool:
    """Whether a table of the parts requires a gradient now; else rows are read in place."""
    return any(part.group.lookups_requiring_grad(part.lookups).distinct_tables for part in parts)


_NOTHING = Lookups.nothing()


def count_distinct(parts: Sequence[Part]) -> dict[TableGroup, int]:
    """For each group: the number of distinct rows looked up.

    Args:
        parts: Parts with any batch sizes.
    """
    of_groups: dict[TableGroup, list[tuple[Lookups, Bags]]] = {}
    for group, lookups, bags in parts:
        of_groups.setdefault(group, []).append((lookups, bags))
    return {group: num_distinct_rows(looked_up) for group, looked_up in of_groups.items()}


def _resolve(
    parts: Sequence[Part],
    requiring: Sequence[Lookups],
    updater: RowUpdater | None,
    explain: Callable[[int], Exception],
) -> list[tuple[ResolvedLookup, Lookups]]:
    """The kernel calls of all parts, each with its lookups that require a gradient.

    If slots are too few, the updater makes room, and all parts are resolved again.

    Args:
        parts: What is looked up.
        requiring: For each part, the lookups in tables that require a gradient.
        updater: As for `fused_lookup`.
        explain: As for `fused_lookup`.
    """
    calls: list[tuple[ResolvedLookup, Lookups]] = []
    found: ResolvedLookup | None = None
    while True:
        bad = -1
        try:
            for (group, lookups, bags), required in zip(parts, requiring, strict=True):
                for found in group.resolve(lookups, bags):
                    is_whole = found.lookups is lookups
                    own = required if is_whole else group.lookups_requiring_grad(found.lookups)
                    calls.append((found, own))
        except NoSuchRow as error:
            bad = error.position
        except NotEnoughSlots as error:
            short, num_needed = error.residency, error.num_needed
        else:
            return calls
        # The error, deleted by now, and the calls so far would keep claimed slots alive.
        calls.clear()
        found = None
        if bad >= 0:
            raise explain(bad)
        assert updater is not None
        updater.make_room(short, num_needed, count_distinct(parts))


def _look_up_where_rows_are(
    parts: Sequence[Part], explain: Callable[[int], Exception], num_stacked: int
) -> Tensor:
    """Look up tiered rows without backward: read them in place, claim no slots, make no graph."""
    errors = parts[0].group.kernels.errors
    if errors is not None:
        errors.report_expected()
        errors.poll()
    group, lookups, bags = parts[0]
    dtype = compute_dtype(group.tables[0].dtype)
    result = empty_result(dtype, group.device, bags, lookups, num_stacked)
    for group, lookups, bags in parts:
        assert group.tiers is not None
        space = group.space(lookups.distinct_tables)
        bad = group.tiers.look_up(space, lookups, bags, result.flatten(1))
        if bad >= 0:
            raise explain(bad)
    if errors is not None:
        errors.report(explain)
    return result


class _Work(NamedTuple):
    """What the autograd node keeps of a lookup; other fields as for `fused_lookup`."""

    calls: Sequence[tuple[ResolvedLookup, Lookups]]  # as of `_resolve`
    ids: Sequence[Tensor]
    updater: RowUpdater | None
    explain: Callable[[int], Exception]
    joined: int | None  # the backward pass that recomputes the lookup; see `RowUpdater.join_pass`
    num_stacked: int
    number: int  # by `next_lookup`
    padding_idx: int | None
    is_one_sample: bool  # see `own_if_one_sample`


class _FusedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, bag_weights: Tensor | None, *tables: Tensor) -> Tensor:
        found, _ = work.calls[0]
        errors, space = found.kernels.errors, found.space
        if errors is not None:
            errors.report_expected()
            errors.poll()
        device = space.tables[0].device
        result = empty_result(
            space.compute_dtype, device, found.bags, found.lookups, work.num_stacked
        )
        for found, _ in work.calls:
            bad = found.kernels.pooled_lookup(found.space, found.lookups, found.bags, result)
            if bad >= 0:
                raise work.explain(bad)
        if errors is not None:
            errors.report(work.explain)
        ctx.work = work
        ctx.save_for_backward(*work.ids, *(() if bag_weights is None else (bag_weights,)))
        ctx.versions = _versions(work) if ctx.needs_input_grad[1] else None
        return result

    @staticmethod
    @outside_graphs
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if is_grad_enabled():  # with create_graph=True; not differentiable a second time
            return _backward_once(ctx, gradient)
        work: _Work = ctx.work
        ctx.saved_tensors  # noqa: B018  # raises if one was changed, or backward runs twice
        if not is_graph_kept():
            ctx.work = None  # the ledger keeps the slots until the update releases them
        if gradient.requires_grad:  # with create_graph=True
            gradient = gradient.detach()
        if not gradient.is_contiguous():
            gradient = with_dense_rows(gradient)
        of_weights = None
        if ctx.needs_input_grad[1]:
            if ctx.versions != _versions(work):
                raise RuntimeError(
                    "rows were updated between a lookup and its backward, and the gradient of "
                    "per_sample_weights needs the rows as they were; call backward before rows "
                    "are updated"
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
            if any(ctx.needs_input_grad[2:]) and work.updater.is_in_pass():
                _keep(work, work.updater, gradient)
        return (None, of_weights) + (None,) * (len(ctx.needs_input_grad) - 2)


_NODE: Any = _FusedLookup._backward_cls  # the type of its contexts
_backward_once: Callable[..., tuple[Tensor | None, ...]] = once_differentiable(
    _FusedLookup.backward
)
# `torch.autograd.Function.apply` without its check for functorch transforms.
_apply_plainly: Callable[..., Any] = plain_apply(_FusedLookup)


def keep_gradient(pooled: Tensor, gradient: Tensor) -> bool:
    """In place of `pooled.backward(gradient)`, if all that it does is to fill ledgers.

    Autograd takes several times as long.

    Args:
        pooled: A result of `fused_lookup`; no hook may see its gradient, and nothing else may need
            its graph.
        gradient: Its gradient.

    Shape:
        pooled and gradient, of one shape.

    Returns:
        Whether ledgers have the gradient.

    Raises:
        RuntimeError: ids were changed in place after the lookup.
    """
    ctx: Any = pooled.grad_fn
    if type(ctx) is not _NODE:
        return False
    work: _Work = ctx.work
    updater, (_, of_weights, *of_tables) = work.updater, ctx.needs_input_grad
    if updater is None or updater.auto_apply or of_weights or not any(of_tables):
        return False  # only a pass of autograd can end with an update
    ctx.saved_tensors  # noqa: B018  # raises if one was changed
    ctx.work = None
    with DisableTorchFunctionSubclass():
        _keep(work, updater, with_dense_rows(gradient))
    return True


def _gradients_of_tables(ctx: Any, work: _Work, gradient: Tensor) -> list[Tensor | None]:
    tables: list[Tensor | None] = []
    for call, _ in work.calls:
        needs_grad = ctx.needs_input_grad[2 + len(tables) :][: len(call.tables)]
        is_dense = not any(call.group.are_sparse) and isinstance(call.bags, Bags)
        if is_dense and all(table.dtype == gradient.dtype for table in call.tables):
            tables += _dense_gradients(call, gradient.flatten(1).contiguous(), needs_grad)
            continue
        # Use the tables as they were at the lookup; now they may have fewer rows.
        ledger = [LedgerEntry(call.lookups, call.bags, gradient)]
        found = sparse_gradients(call.tables, ledger, needs_grad)
        tables += [
            gradient if is_sparse or gradient is None else gradient.to_dense()
            for gradient, is_sparse in zip(found, call.group.are_sparse, strict=True)
        ]
    return tables


def _dense_gradients(
    call: ResolvedLookup, gradient: Tensor, needs_grad: Sequence[bool]
) -> list[Tensor | None]:
    """The gradient of each table that was looked up; of tables as they were at the lookup."""
    looked_up = call.lookups.distinct_tables
    return [
        row_gradients(call.lookups, call.bags, gradient, number, table.shape)
        if needs_grad[number] and number in looked_up
        else None
        for number, table in enumerate(call.tables)
    ]


def _keep(work: _Work, updater: RowUpdater, gradient: Tensor) -> None:
    """Add the gradient to the ledgers of tables that still require one; copy the ids."""
    if updater.auto_apply:
        updater.begin_pass(work.joined)
    gradient = own_if_one_sample(gradient, is_one_sample=work.is_one_sample)
    for found, requiring in work.calls:
        group, ticket, row = found.group, found.ticket, work.padding_idx
        requiring = group.lookups_requiring_grad(requiring)  # noqa: PLW2901  # without tables frozen since
        if requiring.distinct_tables:
            rows = found.rows.copied()
            # The caller cannot write to slot numbers, so they need no copy.
            bags = rows if ticket is None else rows.at_slots(ticket.slot_of_value)
            if row is not None:
                slots = None if ticket is None else ticket.slot_of_value
                bags, rows = rows.without_row(row, slots), rows.without_row(row)
            version = version_of(gradient)
            group.keep(
                LedgerEntry(
                    requiring,
                    bags,
                    gradient,
                    version,
                    found.tables,
                    None if ticket is None else rows,
                    ticket,
                    found.lookups,
                    is_cut=row is not None and ticket is not None,
                    number=work.number,
                )
            )


def with_dense_rows(gradient: Tensor) -> Tensor:
    """A gradient with contiguous rows; there may be gaps between rows, but no overlap.

    An interaction passes such a part of its own gradient. Copying it would cost a tenth of the
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


def own_if_one_sample(gradient: Tensor, *, is_one_sample: bool) -> Tensor:
    """A clone of the gradient of a mini-batch of one sample; others as given.

    There, autograd can make the `grad` of another parameter on the same memory, such as that of
    positions in `embedding(ids) + positions.unsqueeze(0)`: it has nothing to add up over samples.
    What is written to that `grad` must not change the gradient in the ledger.
    """
    return gradient.clone() if is_one_sample else gradient


def _versions(work: _Work) -> list[int]:
    """The versions of the tables that are looked up; others may be written to until backward."""
    return [
        version_of(found.group.tables[number])
        for found, _ in work.calls
        for number in found.lookups.distinct_tables
    ]
