"""Lookups whose gradients are left to torch: each table gets a `grad`, sparse or dense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.function import once_differentiable

from recsys.embeddings.lookup.lookup import (
    new_kept,
    pool_part,
    require_one_dtype,
    weight_gradient,
    with_dense_rows,
)
from recsys.embeddings.rows.grads import gradient_of
from recsys.embeddings.rows.ledger import Call, Entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.lookup.lookup import Part
    from recsys.embeddings.rows.bags import Bags

__all__ = ["look_up_for_torch"]


def look_up_for_torch(
    parts: Sequence[Part], bags: Bags, width: int, is_sparse: Sequence[Sequence[bool]]
) -> Tensor:
    """Look up and pool.

    Args:
        parts: What is looked up in which group.
        bags: The input.
        width: W.
        is_sparse: For each part and each table of its group, whether its gradient is sparse.

    Returns:
        The pooled rows, (B, W).

    Raises:
        IdOutOfRange, MalformedBags, ValueError: as for `lookup.look_up`.
    """
    if not is_grad_enabled():
        return _pool(parts, bags, width)[0]
    tables = [group.tables[table] for group, lookups in parts for table in lookups.tables]
    result: Tensor = _Lookup.apply(parts, bags, width, is_sparse, bags.weights, *tables)  # type: ignore[no-untyped-call]
    return result


def _pool(parts: Sequence[Part], bags: Bags, width: int) -> tuple[Tensor, Tensor, list[int]]:
    """The pooled rows, what was kept, and `num_bounds` of each part's `Call`."""
    kept = new_kept(parts[0][0], bags.ids.numel(), bags.num_bags)
    for group, _ in parts[1:]:  # a part whose tables moved changes where others of a group are
        group.notice_moved_tables()
    located = [group.locate(lookups) for group, lookups in parts]
    dtype, device = require_one_dtype(parts, bags.weights), parts[0][0].device
    result = torch.empty(bags.num_samples, width, dtype=dtype, device=device)
    num_bounds = [
        pool_part(group, lookups, one.lookups_5L, bags, kept, result) if bags.num_samples else 0
        for (group, lookups), one in zip(parts, located, strict=True)
    ]
    return result, kept, num_bounds


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        parts: Sequence[Part],
        bags: Bags,
        width: int,
        is_sparse: Sequence[Sequence[bool]],
        weights: Tensor | None,
        *tables: Tensor,
    ) -> Tensor:
        result, kept, num_bounds = _pool(parts, bags, width)
        of_input = kept, bags.ids.numel(), bags.num_samples
        copied = None if weights is None else weights.detach().clone()
        ctx.calls = [
            (group, Call(0, lookups, *of_input, num, copied, 0))
            for (group, lookups), num in zip(parts, num_bounds, strict=True)
        ]
        ctx.is_sparse = is_sparse
        if ctx.needs_input_grad[4]:
            ctx.save_for_backward(*tables)  # torch notices writes to them
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        gradient = with_dense_rows(gradient)
        of_weights = None
        if ctx.needs_input_grad[4]:
            _ = ctx.saved_tensors
            of_weights = weight_gradient(ctx.calls, gradient)
        of_tables: list[Tensor | None] = []
        for (group, call), is_sparse in zip(ctx.calls, ctx.is_sparse, strict=True):
            entry = Entry(call, gradient, 0, 0)
            for table in call.lookups.tables:
                is_needed = ctx.needs_input_grad[5 + len(of_tables)]
                of_tables.append(
                    gradient_of(group, [entry], table, is_sparse=is_sparse[table])
                    if is_needed
                    else None
                )
        return None, None, None, None, of_weights, *of_tables
