"""Turns a ledger into the gradients of plain PyTorch: a `grad` per table, sparse or dense.

A dense `grad` notes which rows were looked up. An update changes these rows, and other rows that
are not zero in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from recsys._support.memory import empty_rows
from recsys._support.torch_compat import plain_grad, set_plain_grad, version_of
from recsys.embeddings.kernels.torch.bags import TorchBags, by_value
from recsys.embeddings.rows.row_space import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from recsys.embeddings.rows.ledger import LedgerEntry
    from recsys.embeddings.rows.lookups import Bags

__all__ = ["leave_grads", "of_tables", "require_grad_of", "rows_and_values", "sparse_gradients"]

_ROWS = "_rows_looked_up"  # an attribute of dense gradients


def sparse_gradients(
    weights: Sequence[Tensor], ledger: Sequence[LedgerEntry], needs_grad: Sequence[bool]
) -> list[Tensor | None]:
    """For each table: the rows in lookup order and their gradients; None without a lookup.

    Shape:
        weights (E, D) each; results sparse (E, D), not coalesced, each of its weight's dtype.
    """
    found: list[Tensor | None] = []
    for number, weight in enumerate(weights):
        rows, gradients = [], []
        for entry in ledger if needs_grad[number] else ():
            for lookup in np.flatnonzero(entry.lookups.tables == number):
                first = int(entry.lookups.positions[lookup]) * entry.bags.batch_size
                column = int(entry.lookups.columns[lookup])
                of_bags = entry.gradient.flatten(1)[:, column : column + weight.shape[1]]
                bags: Any = entry.rows or entry.bags
                if isinstance(bags, TorchBags):
                    rows_n, gradients_nD = by_value(bags, first, of_bags, len(weight))
                else:
                    rows_n, gradients_nD = _by_value(bags, first, of_bags)
                rows.append(rows_n)
                gradients.append(gradients_nD)
        found.append(
            torch.sparse_coo_tensor(
                torch.cat(rows).unsqueeze(0).to(weight.device),
                torch.cat(gradients).to(weight.device, weight.dtype),
                weight.shape,
                check_invariants=False,
            )
            if rows
            else None
        )
    return found


def leave_grads(
    ledger: Sequence[LedgerEntry], tables: Sequence[Tensor], are_sparse: Sequence[bool]
) -> None:
    """Turn a ledger into the `grad` of each table, added to an existing one.

    Args:
        ledger: Gradients of lookups in the tables.
        tables: All tables of the group.
        are_sparse: For each table, whether its gradient is sparse.

    Raises:
        ValueError: a table has lost rows that were looked up, or its `grad` has another shape or
            an index outside of the table. No `grad` was changed.
    """
    for entry in ledger:
        entry.require_rows_in(tables)
        for number in entry.lookups.distinct_tables:
            require_grad_of(tables[number])
    found = sparse_gradients(tables, ledger, [True] * len(tables))
    for table, gradient, is_sparse in zip(tables, found, are_sparse, strict=True):
        if gradient is not None:
            set_plain_grad(table, _added(plain_grad(table), gradient, is_sparse=is_sparse))


def require_grad_of(table: Tensor) -> None:
    """Check that a `grad` has its table's shape, and a sparse one only indices in it.

    torch makes sparse tensors without a check of their indices. Without this a kernel could write
    out of bounds.

    Raises:
        ValueError: the shape differs, because the table got other rows after backward; or an index
            is not in the table.
    """
    gradient = plain_grad(table)
    if gradient is not None and gradient.shape != table.shape:
        raise ValueError(
            f"the grad of a table of shape {tuple(table.shape)} has shape {tuple(gradient.shape)}: "
            "the table got other rows after backward; set its grad to None"
        )
    if gradient is None or not gradient.is_sparse or not gradient._nnz():
        return
    for size, indices in zip(gradient.shape, gradient._indices(), strict=False):
        first, last = map(int, indices.aminmax())
        if first < 0 or last >= size:
            raise ValueError(
                f"the grad of a table of shape {tuple(table.shape)} is sparse and has an index "
                f"{first if first < 0 else last}, which must be in [0, {size}); set its grad to "
                "one with indices of this table, or to None"
            )


def of_tables(ledger: Sequence[LedgerEntry], tables: Container[int]) -> list[LedgerEntry]:
    """The part of a ledger that is for some of the tables."""
    found = [each._replace(lookups=each.lookups.of_tables(tables)) for each in ledger]
    return [each for each in found if each.lookups.distinct_tables]


def rows_and_values(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that a `grad` updates, and their gradients.

    In a dense `grad`, these are the rows looked up, and other rows that are not zero.

    Shape:
        gradient (E, D); results (R,) int64, (R, D).
    """
    found = gradient.detach()
    if found.is_sparse:
        found = _of_whole_rows(found)
        return found._indices()[0], found._values()
    rows = _rows_in(gradient)
    return rows, found[rows]


def _rows_in(gradient: Tensor) -> Tensor:
    looked_up: Tensor | None
    looked_up, version = getattr(gradient, _ROWS, (None, 0))
    if looked_up is not None:
        looked_up = looked_up.unique()
        # Counting all numbers takes half as long as checking every row.
        num_numbers = int(gradient.count_nonzero())
        if num_numbers == int(gradient[looked_up].count_nonzero()):
            is_forgotten = not num_numbers and version_of(gradient) != version  # by zero_()
            return looked_up[:0] if is_forgotten else looked_up
    is_meant = gradient.any(1)
    if looked_up is not None:
        is_meant[looked_up] = True
    return is_meant.nonzero().flatten()


def _of_whole_rows(gradient: Tensor) -> Tensor:
    """A sparse gradient with one index for each row; `to_sparse()` makes two for each number."""
    if gradient.sparse_dim() == 1:
        return gradient
    row_of, column_of = gradient._indices()
    rows, places = row_of.unique(return_inverse=True)
    numbers = gradient._values().to(compute_dtype(gradient.dtype))
    values = numbers.new_zeros(len(rows), gradient.shape[1])
    values.index_put_((places, column_of), numbers, accumulate=True)
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values.to(gradient.dtype), gradient.shape, check_invariants=False
    )


def _added(known: Tensor | None, more: Tensor, *, is_sparse: bool) -> Tensor:
    """The sum of a `grad` and a sparse gradient; dense unless both are sparse."""
    dtype = compute_dtype(more.dtype)
    if is_sparse and (known is None or known.is_sparse):
        if known is None:
            return more
        return (_of_whole_rows(known).to(dtype) + more.to(dtype)).to(more.dtype)
    found = empty_rows(*more.shape, dtype=dtype, device=more.device).zero_()
    found.index_add_(0, more._indices()[0], more._values().to(dtype))
    if known is not None:
        found += known.to_dense() if known.is_sparse else known
    found = found.to(more.dtype)
    rows = [more._indices()[0]]
    if known is not None:
        rows.append(known._indices()[0] if known.is_sparse else _rows_in(known))
    setattr(found, _ROWS, (torch.cat(rows), version_of(found)))
    return found


def _by_value(bags: Bags, first_bag: int, of_bags: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of one feature's bags and the gradient of each."""
    end = first_bag + bags.batch_size
    if bags.offsets is None:
        rows, gradients = torch.from_numpy(bags.values[first_bag:end]), of_bags
        values = slice(first_bag, end)
    else:
        bounds = torch.from_numpy(bags.offsets[first_bag : end + 1])
        values = slice(int(bounds[0]), int(bounds[-1]))
        rows = torch.from_numpy(bags.values[values])
        lengths = bounds.diff()
        of_bags = of_bags / lengths.clamp(min=1).unsqueeze(1) if bags.is_mean else of_bags
        gradients = of_bags.repeat_interleave(lengths, dim=0)
    if bags.weights is not None:
        gradients = gradients * torch.from_numpy(bags.weights[values]).unsqueeze(1)
    return rows.long(), gradients
