"""Pooled lookup with torch operations, of rows some of which are copies of rows in files.

`segment_reduce` adds a bag's rows in lookup order, so results are bitwise reproducible.

Letters: B samples, F features, L lookups, N values, D dim, W columns of the output, R rows of all
tables, S slots, M rows without a slot, U requested rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from recsys.embeddings.kernels.cpu.slot_arrays import NOWHERE
from recsys.embeddings.kernels.torch.bags import (
    layers_of,
    lengths_of,
    locate_one_hot,
    rows_of,
)
from recsys.embeddings.kernels.torch.errors import BAD_BOUND, BAD_WEIGHT, NO_ROW
from recsys.embeddings.kernels.torch.row_space import RowNumbers
from recsys.embeddings.kernels.torch.slots import slots_of

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.embeddings.kernels.torch.bags import Layer, TorchBags
    from recsys.embeddings.kernels.torch.slots import TorchSlots
    from recsys.embeddings.rows.lookups import Lookups

__all__ = ["TieredRows", "pooled_lookup"]


class TieredRows(RowNumbers):
    """Rows of all tables, read from slots or, if they have none, from copies.

    Args:
        numbers: Numbers of the rows of all tables.
        slots: Which row each slot holds.
        slot_rows: The rows in the slots, (S, D).
        others: Rows without a slot, in ascending order, (M,) int64.
        other_rows: Copies of these rows, (M, D).
    """

    def __init__(
        self,
        numbers: RowNumbers,
        slots: TorchSlots,
        slot_rows: Tensor,
        others: Tensor,
        other_rows: Tensor,
    ) -> None:
        super().__init__(
            numbers.first_rows,
            numbers.sizes,
            numbers.num_rows,
            numbers.dim,
            slot_rows.dtype,
            slot_rows.device,
        )
        self.layers = numbers.layers  # the same layers; making them would copy to the device
        self._slots, self._slot_rows = slots, slot_rows
        self._others, self._other_rows = others, other_rows

    def read(self, rows: Tensor) -> Tensor:
        """Read rows in the compute dtype; see `TorchRows`."""
        slots_U = slots_of(self._slots, rows.clamp(max=self.num_rows))
        found = self._slot_rows.index_select(0, slots_U.clamp(min=0))
        if len(self._others):
            places_U = torch.searchsorted(self._others, rows).clamp(max=len(self._others) - 1)
            copies = self._other_rows.index_select(0, places_U)
            found = torch.where((slots_U == NOWHERE).unsqueeze(1), copies, found)
        return found.to(self.compute_dtype)


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
        samples = torch.arange(bags.batch_size, device=rows_LB.device)
        places_LB = whole.positions.unsqueeze(1) * bags.batch_size + samples
        space.errors.note(NO_ROW, rows_LB == space.num_rows, places_LB)
        rows_N = rows_LB.t().reshape(-1)
        _write(whole, _zeros_for_no_row(space, rows_N, space.read(rows_N)), result)
        return -1
    if bags.offsets is not None:
        space.errors.note(BAD_BOUND, bags.bounds() != bags.offsets)
    if bags.weights is not None:
        space.errors.note(BAD_WEIGHT, bags.weights.isnan())
    for layer in layers:
        rows_N, is_bad_N = rows_of(space, layer, bags)
        space.errors.note(NO_ROW, is_bad_N)
        _write(layer, _pool(space, layer, bags, rows_N), result)
    return -1


def _pool(space: TieredRows, layer: Layer, bags: TorchBags, rows_N: Tensor) -> Tensor:
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
