"""What ranks must send each other in a step: a model, computed from the ids of a mini-batch.

A mini-batch of B samples is divided among W ranks: rank `i` has `B / W` samples. Rank `j` has rows.
For each design, two tables of bytes describe a step:

    ids[i, j]        rank i tells rank j which rows it needs
    vectors[i, j]    rank j sends rank i vectors; in backward, rank i sends rank j as many gradients

    design              ids[i, j]                            vectors[i, j]
    table_wise_pooled   an id and a length for each lookup   a vector for each lookup in j's tables
    row_wise_pooled     ids of j's rows; every length        a part of every vector
    row_wise_rows       distinct ids of j's rows; a number   a row for each distinct id
                        for each table

An id and a length take 8 bytes. With distinct rows, an id and a number take 4 bytes. A column of a
vector or row takes 4 bytes. What a rank keeps for itself is left out, and so are headers and the
sizes that ranks announce (below 10 kB). Table-wise, rank `n` has tables `n`, `n + W`, ...;
row-wise, every rank has `ceil(E / W)` rows of each table, in order.

The time on a link is `bytes / speed` for the rank with most to send or to receive, first for ids,
then for vectors, then for gradients. A link sends and receives at once. Latency, computation and
whatever overlaps with the exchange are left out, so this is a lower bound for an exchange alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["LINKS", "Traffic", "traffic_of"]

# Bits per second.
LINKS = {"25GbE": 25e9, "100GbE": 100e9, "200Gb-InfiniBand": 200e9}
_ID_BYTES, _LENGTH_BYTES, _FLOAT_BYTES = 8, 8, 4
_DISTINCT_ID_BYTES, _NUMBER_BYTES = 4, 4


class Traffic(NamedTuple):
    """Bytes between ranks in one step.

    Shape:
        ids (W, W) and vectors (W, W), as above; the diagonal is what ranks keep for themselves.
    """

    ids: NDArray[np.int64]
    vectors: NDArray[np.int64]

    @property
    def bytes_sent(self) -> float:
        """Bytes that a rank sends to others in a step; the mean over ranks."""
        ids, vectors = _without_own(self.ids), _without_own(self.vectors)
        return float(ids.sum() + 2 * vectors.sum()) / len(ids)

    def seconds(self, bits_per_second: float) -> float:
        """Seconds that a step's exchanges take at least on such links."""
        busiest = _busiest(self.ids) + 2 * _busiest(self.vectors)
        return 8 * busiest / bits_per_second


def traffic_of(
    ids_FB: NDArray[np.int64],
    table_sizes: Sequence[int],
    world_size: int,
    dim: int,
) -> dict[str, Traffic]:
    """What each design sends for one mini-batch.

    Args:
        ids_FB: One id for each feature and sample; feature `n` is looked up in table `n`.
        table_sizes: Rows per table.
        world_size: W.
        dim: D.
    """
    num_tables, batch_size = ids_FB.shape
    bounds = np.arange(world_size + 1) * batch_size // world_size
    shares = np.diff(bounds)[:, np.newaxis]
    tables = np.bincount(np.arange(num_tables) % world_size, minlength=world_size)
    lookups, distinct = np.zeros((2, world_size, world_size), np.int64)
    for ids_B, size in zip(ids_FB, table_sizes, strict=True):
        block = -(-size // world_size)
        for rank in range(world_size):
            of_rank = ids_B[bounds[rank] : bounds[rank + 1]]
            lookups[rank] += np.bincount(of_rank // block, minlength=world_size)
            distinct[rank] += np.bincount(np.unique(of_rank) // block, minlength=world_size)
    row = _FLOAT_BYTES * dim
    everything = np.broadcast_to(shares * num_tables, (world_size, world_size))
    return {
        "table_wise_pooled": Traffic(
            shares * tables * (_ID_BYTES + _LENGTH_BYTES), shares * tables * row
        ),
        "row_wise_pooled": Traffic(
            lookups * _ID_BYTES + everything * _LENGTH_BYTES, everything * row
        ),
        "row_wise_rows": Traffic(
            distinct * _DISTINCT_ID_BYTES + num_tables * _NUMBER_BYTES, distinct * row
        ),
    }


def _without_own(between: NDArray[np.int64]) -> NDArray[np.int64]:
    return between - np.diag(np.diag(between))


def _busiest(between: NDArray[np.int64]) -> int:
    others = _without_own(between)
    return int(max(others.sum(axis=0).max(), others.sum(axis=1).max()))
