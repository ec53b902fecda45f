"""Max pooling: of each bag the greatest number in every column, for all tables of one dim at once.

Which value of a bag won is told for each column, because its row alone gets the column's gradient.
As in PyTorch, the first of equal numbers wins; a NaN wins if it comes first, for nothing is greater
than it, and at no other place, for it is greater than nothing.

Letters: B samples, L lookups (a feature in a table), N rows looked up, D dim, W columns of the
output, n rows of one lookup.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import prange
from torch.nn import functional

from recsys.embeddings.kernels.pooled_lookup import (
    AHEAD,
    bounds_of,
    compiled_for,
    first_bad,
    offsets_of,
    samples_of,
)
from recsys.embeddings.kernels.prefetch import prefetch
from recsys.jit import num_parts, parallel_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.pooled_lookup import Bags, Lookups
    from recsys.embeddings.row_space import RowSpace

__all__ = ["max_gradients", "pooled_max", "pooled_max_reference"]

_ONE = np.uint64(1)


def pooled_max_reference(
    weights: Sequence[Tensor],
    lookups: Lookups,
    values: Tensor,
    offsets: Tensor,
    batch_size: int,
) -> Tensor:
    """Every lookup by `torch.nn.functional.embedding_bag`, side by side; see `pooled_max`."""
    pooled = []
    for table, position in zip(lookups.tables, lookups.positions, strict=True):
        first = int(position) * batch_size
        bounds = offsets[first : first + batch_size + 1]
        pooled.append(
            functional.embedding_bag(
                values[int(bounds[0]) : int(bounds[-1])],
                weights[int(table)],
                bounds - bounds[0],
                mode="max",
                include_last_offset=True,
            )
        )
    return torch.cat(pooled, dim=1)


def pooled_max(
    space: RowSpace, lookups: Lookups, bags: Bags, result: Tensor, winners: Tensor
) -> int:
    """Write the greatest numbers of every lookup's bags into its columns, and where they stood.

    Args:
        space: The tables.
        lookups: What is looked up where.
        bags: The input, without weights.
        result: (B, W), contiguous, in the rows' dtype; other columns are left alone. An empty bag
            is zeros.
        winners: (B, W) int64, contiguous: the value, by its place among all N, whose row has the
            number; -1 of an empty bag. Other columns are left alone.

    Returns:
        The first value that is no row of its table, by position; -1 where there is none. The
        columns of `result` and `winners` are undefined where there is one.

    Raises:
        ValueError: the bags have weights.
    """
    if bags.weights is not None:
        raise ValueError(
            "max pooling takes no weights: which number is the greatest is all it asks"
        )
    return _max_kernel(*compiled_for(space))(
        space.flat,
        space.dim,
        lookups.placed_in(space),
        bags.values,
        offsets_of(bags),
        bags.batch_size,
        lookups.width,
        num_parts(),
        result.numpy(),
        winners.numpy(),
    )


def max_gradients(
    space: RowSpace, lookups: Lookups, bags: Bags, winners: Tensor, gradient: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """What each row looked up gets of the gradient: the columns that it has won, else zeros.

    As if each had been a bag of its own; so they can stand in a ledger as one-hot bags.

    Args:
        space: The tables.
        lookups: What was looked up where.
        bags: The input, checked by `pooled_max`.
        winners: As `pooled_max` left them.
        gradient: Of the greatest numbers, (B, W), contiguous.

    Returns:
        By lookup: rows in lookup order, (n,) in the values' dtype, and each one's gradient, (n, D).
    """
    begins_L, ends_L = bounds_of(lookups, bags)
    counts_L = ends_L - begins_L
    starts_L = np.cumsum(counts_L) - counts_L
    found = gradient.new_zeros(int(counts_L.sum()), space.dim)
    _spread_kernel(
        space.dim,
        lookups.placed_in(space),
        (starts_L - begins_L) * space.dim,
        bags.batch_size,
        lookups.width,
        num_parts(),
        winners.numpy(),
        gradient.numpy(),
        found.view(-1).numpy(),
    )
    values = torch.from_numpy(bags.values)
    return [
        (values[begin:end], found[start : start + end - begin])
        for begin, end, start in zip(
            begins_L.tolist(), ends_L.tolist(), starts_L.tolist(), strict=True
        )
    ]


@cache
def _max_kernel(compiled_dim: int, line: int) -> Callable[..., int]:
    """The kernel for rows of this dim; 0 for one that takes any."""

    @parallel_kernel
    def pool(
        flat: NDArray[Any],
        any_dim: int,
        lookups_4L: NDArray[np.uint64],
        values_N: NDArray[Any],
        offsets: NDArray[Any],
        num_samples: int,
        width: int,
        num_parts: int,
        result_BW: NDArray[Any],
        winners_BW: NDArray[np.int64],
    ) -> int:
        """A part is a run of samples."""
        dim = np.uint64(compiled_dim) if compiled_dim else np.uint64(any_dim)
        result, winners = result_BW.reshape(-1), winners_BW.reshape(-1)
        bad = np.full(num_parts, -1)
        for part in prange(num_parts):
            begin, end = samples_of(part, num_parts, num_samples)
            for lookup in range(lookups_4L.shape[1]):
                base, size, position, column = lookups_4L[:, lookup]
                first = position * np.uint64(num_samples)
                last_place = np.uint64(offsets[first + end])
                target = begin * np.uint64(width) + column
                for bag in range(first + begin, first + end):
                    for d in range(dim):
                        result[target + d] = 0
                        winners[target + d] = -1
                    first_place, end_place = np.uint64(offsets[bag]), np.uint64(offsets[bag + _ONE])
                    for place in range(first_place, end_place):
                        if place + AHEAD < last_place:
                            ahead = base + np.uint64(values_N[place + AHEAD]) * dim
                            for d in range(np.uint64(0), dim, np.uint64(line)):
                                prefetch(flat, ahead + d)
                        row = np.uint64(values_N[place])
                        if row >= size:
                            if bad[part] < 0 or np.int64(place) < bad[part]:
                                bad[part] = np.int64(place)
                            continue
                        source = base + row * dim
                        is_first = place == first_place
                        for d in range(dim):
                            number, best = flat[source + d], result[target + d]
                            wins = is_first or number > best
                            winner = np.int64(place) if wins else winners[target + d]
                            result[target + d] = number if wins else best
                            winners[target + d] = winner
                    target += np.uint64(width)
        return first_bad(bad)

    return pool


@parallel_kernel
def _spread_kernel(
    any_dim: int,
    lookups_4L: NDArray[np.uint64],
    shifts_L: NDArray[np.int64],
    num_samples: int,
    width: int,
    num_parts: int,
    winners_BW: NDArray[np.int64],
    gradient_BW: NDArray[Any],
    found: NDArray[Any],
) -> None:
    """A part is a run of samples; a value is of one sample, so no two parts meet.

    The gradient of a lookup's value v begins at `found[v * D + shift]`.
    """
    dim = np.uint64(any_dim)
    gradient, winners = gradient_BW.reshape(-1), winners_BW.reshape(-1)
    for part in prange(num_parts):
        begin, end = samples_of(part, num_parts, num_samples)
        for lookup in range(lookups_4L.shape[1]):
            shift = np.uint64(shifts_L[lookup])  # may be below 0: sums wrap around and come back
            for sample in range(begin, end):
                source = sample * np.uint64(width) + lookups_4L[3, lookup]
                for d in range(dim):
                    winner = winners[source + d]
                    if winner >= 0:
                        found[np.uint64(winner) * dim + shift + d] = gradient[source + d]
