"""Pooled lookup with torch operations, of rows some of which are copies of rows in files.

`segment_reduce` adds a bag's rows in lookup order, so results are bitwise reproducible.

Letters: B samples, F features, L lookups, N values, D dim, W columns of the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from recsys.embeddings.kernels.torch.bags import (
    layers_of,
    lengths_of,
    locate_one_hot,
    note_bad_rows,
    note_errors,
    rows_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.embeddings.kernels.torch.bags import Layer, TorchBags
    from recsys.embeddings.kernels.torch.slot_rows import TieredRows
    from recsys.embeddings.rows.lookups import Lookups

__all__ = ["pooled_lookup"]


def pooled_lookup(space: TieredRows, lookups: Lookups, bags: TorchBags, result: Tensor) -> int:
    """Write the pooled rows of every lookup into its columns.

    Args:
        space: The rows of all tables.
        lookups: Which features are looked up in which tables.
        bags: The input.
        result: (B, W), or (B, F, D) if all have one dim; contiguous, in the compute dtype. Columns
            without a lookup do not change.

    Returns:
        Always -1. Errors of the input are recorded in `space.errors`. An id that is not a row adds
        zeros to its bag; bags of other invalid input are undefined.
    """
    if not bags.batch_size or not len(lookups.tables):
        return -1
    result = result.flatten(1)
    whole, layers = layers_of(space, lookups, bags.num_features)
    if bags.is_plain:
        rows_LB = locate_one_hot(space, whole, bags)
        note_bad_rows(space, whole, bags, rows_LB)
        rows_N = rows_LB.t().reshape(-1)
        _write(whole, _zeros_for_no_row(space, rows_N, space.read(rows_N)), result)
        return -1
    for layer in layers:
        note_errors(space, layer, bags)
        _write(layer, _pool(space, layer, bags), result)
    return -1


def _pool(space: TieredRows, layer: Layer, bags: TorchBags) -> Tensor:
    """The pooled rows, (B * L, D)."""
    rows_N, _ = rows_of(space, layer, bags)
    rows_ND = space.read(rows_N)
    if bags.weights is not None:
        rows_ND = rows_ND * bags.weights.to(rows_ND.dtype).unsqueeze(1)
    rows_ND = _zeros_for_no_row(space, rows_N, rows_ND)
    pooled = torch.segment_reduce(
        rows_ND, "sum", offsets=bags.bounds(), axis=0, unsafe=True, initial=0
    )
    if bags.is_mean:
        pooled = pooled / lengths_of(bags).clamp(min=1).to(pooled.dtype).unsqueeze(1)
    pooled_FBD = pooled.view(-1, bags.batch_size, space.dim)
    pooled_LBD = pooled_FBD.index_select(0, layer.positions)
    return pooled_LBD.transpose(0, 1).reshape(-1, space.dim)


def _zeros_for_no_row(space: TieredRows, rows_N: Tensor, rows_ND: Tensor) -> Tensor:
    """What was read, with zeros for no row: `read` returns any row for it, or an empty slot."""
    return torch.where((rows_N < space.num_rows).unsqueeze(1), rows_ND, 0)


def _write(layer: Layer, pooled: Tensor, result: Tensor) -> None:
    pooled = pooled.view(len(result), -1)
    if layer.columns is None:
        result.copy_(pooled)
    else:
        result.index_copy_(1, layer.columns, pooled)
