"""Pools the rows that a rank receives for its own samples, in lookup order.

    received rows, (U, D)          -> lookup and pooling -> vectors, (B, sum of dims)
    gradient of each row, summed   <- backward           <- gradient of the vectors

The lookup is that of tables in one process. So the vectors are equal to the last bit to those of
one process that has the whole tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from recsys.embeddings.lookup.abstract import pooling_of
from recsys.embeddings.lookup.inputs import read_bags
from recsys.embeddings.lookup.leave_to_torch import look_up_for_torch
from recsys.embeddings.rows.bags import Lookups
from recsys.embeddings.rows.tables import TableGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torchrec.distributed.embedding_types import ShardedEmbeddingTable


__all__ = ["ReceivedRowsPooling"]


class ReceivedRowsPooling:
    """Pools the features of row-wise tables.

    Args:
        tables: The row-wise tables, in TorchRec's order. Their features are in this order, too.
    """

    def __init__(self, tables: Sequence[ShardedEmbeddingTable]) -> None:
        self._dims_of_tables = [int(table.embedding_dim) for table in tables]
        kinds, dims = [], []
        for table in tables:
            for _ in table.embedding_names:
                dims.append(int(table.embedding_dim))
                kinds.append((dims[-1], pooling_of(table) == "mean"))
        columns = np.cumsum([0, *dims])
        self._dims = sorted(set(dims))
        # For each dim and pooling: one kernel call.
        self._lookups: dict[tuple[int, bool], Lookups] = {}
        for kind in dict.fromkeys(kinds):
            features = [number for number, of_feature in enumerate(kinds) if of_feature == kind]
            self._lookups[kind] = Lookups(
                [(0, feature, int(columns[feature])) for feature in features], is_mean=kind[1]
            )
        self._width, self._num_features = int(columns[-1]), len(kinds)

    def __call__(self, received: Tensor, context: Any) -> Tensor:
        """Pool.

        Args:
            received: The rows, rank by rank, and of each rank table by table.
            context: The exchange of the mini-batch, a `DistinctRowsContext`.

        Shape:
            received (sum of dims of U rows, 1); result (B, sum of dims of the features).
        """
        received, positions = received.reshape(-1), context.places
        if len(self._dims) == 1:
            [dim] = self._dims
            rows = {dim: received.view(-1, dim)}
        else:
            rows, positions = self._by_dim(received, context.num_received, positions)
        groups = {
            dim: TableGroup(["received rows"], [cast("nn.Parameter", of_dim)])
            for dim, of_dim in rows.items()
        }
        num_bags = self._num_features * context.batch_size
        bags = read_bags(
            positions,
            context.offsets,
            context.weights,
            context.batch_size,
            num_bags,
            received.dtype,
        )
        parts = [(groups[dim], lookups) for (dim, _), lookups in self._lookups.items()]
        return look_up_for_torch(parts, bags, self._width, [[False]] * len(parts))

    def _by_dim(
        self, received: Tensor, num_received: Tensor, positions: Tensor
    ) -> tuple[dict[int, Tensor], Tensor]:
        """The rows of each dim, and positions that count the rows of one dim only."""
        dims = self._dims_of_tables * len(num_received)  # of every piece
        counts = num_received.flatten()
        sizes = [count * dim for count, dim in zip(counts.tolist(), dims, strict=True)]
        pieces = list(zip(dims, torch.split(received, sizes), strict=True))
        dim_of_row = torch.tensor(dims, device=counts.device).repeat_interleave(counts)
        place_in_dim = torch.empty_like(dim_of_row)
        rows = {}
        for dim in self._dims:
            of_dim = (dim_of_row == dim).nonzero().flatten()
            place_in_dim[of_dim] = torch.arange(len(of_dim), device=counts.device)
            rows[dim] = torch.cat([piece for of_piece, piece in pieces if of_piece == dim])
            rows[dim] = rows[dim].view(-1, dim)
        return rows, place_in_dim[positions]
