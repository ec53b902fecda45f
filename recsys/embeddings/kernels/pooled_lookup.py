"""Pooled lookup: the rows of every bag, summed or averaged, for all tables of one dim at once.

Letters: B samples, L lookups (a feature in a table), N rows looked up, D dim, W columns of the
output. Numbers that index are unsigned: of each signed one numba asks whether it counts from the
end, and a loop with that question in it is not vectorised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import prange
from torch.nn import functional

from recsys.jit import kernel, num_parts, parallel_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.row_space import RowSpace

__all__ = ["Bags", "Lookups", "pooled_lookup", "pooled_lookup_reference", "row_gradient_dots"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Lookups:
    """Which feature is looked up in which table, and where the result goes.

    Attributes:
        tables: Number of the table in the row space, (L,) uint64.
        positions: Number of the feature in the input, (L,) uint64.
        columns: First column of the output, (L,) uint64.
        width: W.
    """

    tables: NDArray[np.uint64]
    positions: NDArray[np.uint64]
    columns: NDArray[np.uint64]
    width: int


@dataclass(frozen=True)
class Bags:
    """The input of one lookup: F features of B samples.

    Attributes:
        values: Rows, (N,) int32 or int64, feature by feature.
        offsets: Where bags begin, (F * B + 1,), of the same dtype; None where bag i is value i.
        weights: One factor per value, (N,), in the rows' dtype; None for 1.
        batch_size: B.
        is_mean: Whether a bag is averaged.
    """

    values: NDArray[Any]
    offsets: NDArray[Any] | None
    weights: NDArray[Any] | None
    batch_size: int
    is_mean: bool

    @classmethod
    def from_tensors(
        cls,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
        *,
        is_mean: bool,
    ) -> Bags:
        """Views of tensors; one-hot bags are recognised."""
        values_N, bounds = values.numpy(), offsets.numpy()
        is_one_hot = len(values_N) == len(bounds) - 1 and bool(_counts_up(bounds))
        return cls(
            values_N,
            None if is_one_hot else bounds,
            None if weights is None else weights.detach().contiguous().numpy(),
            batch_size,
            is_mean and not is_one_hot,
        )


def pooled_lookup_reference(
    weights: Sequence[Tensor],
    lookups: Lookups,
    values: Tensor,
    offsets: Tensor,
    bag_weights: Tensor | None,
    batch_size: int,
    *,
    is_mean: bool,
) -> Tensor:
    """Every lookup by `torch.nn.functional.embedding_bag`, side by side; see `pooled_lookup`."""
    pooled = []
    for table, position in zip(lookups.tables, lookups.positions, strict=True):
        first = int(position) * batch_size
        bounds = offsets[first : first + batch_size + 1]
        of_bags = slice(int(bounds[0]), int(bounds[-1]))
        pooled.append(
            functional.embedding_bag(
                values[of_bags],
                weights[int(table)],
                bounds - bounds[0],
                mode="mean" if is_mean else "sum",
                per_sample_weights=None if bag_weights is None else bag_weights[of_bags],
                include_last_offset=True,
            )
        )
    return torch.cat(pooled, dim=1)


def pooled_lookup(space: RowSpace, lookups: Lookups, bags: Bags, result: Tensor) -> int:
    """Write the pooled rows of every lookup into its columns.

    An empty bag is zeros. A bag's rows are added in their order, so results do not depend on the
    number of threads.

    Args:
        space: The tables.
        lookups: What is looked up where.
        bags: The input.
        result: (B, W), contiguous, in the rows' dtype; other columns are left alone.

    Returns:
        The first value that is no row of its table, by position; -1 where there is none. The
        columns of `result` are undefined where there is one.
    """
    bad = np.full(num_parts(), -1, np.int64)
    shared = (
        space.flat,
        np.uint64(space.dim),
        space.bases[lookups.tables],
        space.sizes[lookups.tables],
        lookups.positions,
        lookups.columns,
        bags.values,
    )
    rest = (bags.batch_size, np.uint64(lookups.width), len(bad), result.view(-1).numpy(), bad)
    if bags.offsets is None and bags.weights is None:
        _one_hot_kernel(*shared, *rest)
    else:
        offsets = _every_bag_one(bags) if bags.offsets is None else bags.offsets
        has_weights = bags.weights is not None
        weights = bags.weights if bags.weights is not None else np.empty(0, space.dtype)
        _bags_kernel(*shared, offsets, has_weights, weights, bags.is_mean, *rest)
    found = bad[bad >= 0]
    return int(found.min()) if len(found) else -1


def row_gradient_dots(
    space: RowSpace, lookups: Lookups, bags: Bags, gradient: Tensor, result: Tensor
) -> None:
    """The gradient of every value's weight: its row times its bag's gradient.

    Args:
        space: The tables.
        lookups: What was looked up where.
        bags: The input, checked by `pooled_lookup`.
        gradient: Of the pooled rows, (B, W), contiguous.
        result: (N,), added to, for a feature may be looked up in several tables.
    """
    offsets = _every_bag_one(bags) if bags.offsets is None else bags.offsets
    _dots_kernel(
        space.flat,
        np.uint64(space.dim),
        space.bases[lookups.tables],
        lookups.positions,
        lookups.columns,
        bags.values,
        offsets,
        gradient.view(-1).numpy(),
        bags.batch_size,
        np.uint64(lookups.width),
        num_parts(),
        result.numpy(),
    )


def _every_bag_one(bags: Bags) -> NDArray[Any]:
    return np.arange(len(bags.values) + 1, dtype=bags.values.dtype)


@kernel
def _counts_up(offsets: NDArray[Any]) -> bool:
    for number in range(len(offsets)):  # noqa: SIM110  # numba has no all()
        if offsets[number] != number:
            return False
    return True


@parallel_kernel
def _one_hot_kernel(
    flat: NDArray[Any],
    dim: np.uint64,
    bases_L: NDArray[np.uint64],
    sizes_L: NDArray[np.uint64],
    positions_L: NDArray[np.uint64],
    columns_L: NDArray[np.uint64],
    values_N: NDArray[Any],
    num_samples: int,
    width: np.uint64,
    num_parts: int,
    result: NDArray[Any],
    bad: NDArray[np.int64],
) -> None:
    """A part is a run of samples: one row per lookup and sample, copied."""
    for part in prange(num_parts):
        begin = np.uint64(part * num_samples // num_parts)
        end = np.uint64((part + 1) * num_samples // num_parts)
        for lookup in range(len(bases_L)):
            base, size, column = bases_L[lookup], sizes_L[lookup], columns_L[lookup]
            first = positions_L[lookup] * np.uint64(num_samples)
            for sample in range(begin, end):
                row = np.uint64(values_N[first + sample])
                if row >= size:  # a negative one is among the largest
                    if bad[part] < 0 or np.int64(first + sample) < bad[part]:
                        bad[part] = np.int64(first + sample)
                    continue
                source = base + row * dim
                target = sample * width + column
                for d in range(dim):
                    result[target + d] = flat[source + d]


@parallel_kernel
def _bags_kernel(
    flat: NDArray[Any],
    dim: np.uint64,
    bases_L: NDArray[np.uint64],
    sizes_L: NDArray[np.uint64],
    positions_L: NDArray[np.uint64],
    columns_L: NDArray[np.uint64],
    values_N: NDArray[Any],
    offsets: NDArray[Any],
    has_weights: bool,
    weights_N: NDArray[Any],
    is_mean: bool,
    num_samples: int,
    width: np.uint64,
    num_parts: int,
    result: NDArray[Any],
    bad: NDArray[np.int64],
) -> None:
    """A part is a run of samples: any number of rows per lookup and sample, added in order."""
    for part in prange(num_parts):
        begin = np.uint64(part * num_samples // num_parts)
        end = np.uint64((part + 1) * num_samples // num_parts)
        for lookup in range(len(bases_L)):
            base, size, column = bases_L[lookup], sizes_L[lookup], columns_L[lookup]
            first = positions_L[lookup] * np.uint64(num_samples)
            for sample in range(begin, end):
                target = sample * width + column
                for d in range(dim):
                    result[target + d] = 0
                first_value = np.uint64(offsets[first + sample])
                last_value = np.uint64(offsets[first + sample + np.uint64(1)])
                for position in range(first_value, last_value):
                    row = np.uint64(values_N[position])
                    if row >= size:
                        if bad[part] < 0 or np.int64(position) < bad[part]:
                            bad[part] = np.int64(position)
                        continue
                    source = base + row * dim
                    if has_weights:
                        weight = weights_N[position]
                        for d in range(dim):
                            result[target + d] += weight * flat[source + d]
                    else:
                        for d in range(dim):
                            result[target + d] += flat[source + d]
                if is_mean and last_value > first_value:
                    count = flat.dtype.type(last_value - first_value)
                    for d in range(dim):
                        result[target + d] /= count


@parallel_kernel
def _dots_kernel(
    flat: NDArray[Any],
    dim: np.uint64,
    bases_L: NDArray[np.uint64],
    positions_L: NDArray[np.uint64],
    columns_L: NDArray[np.uint64],
    values_N: NDArray[Any],
    offsets: NDArray[Any],
    gradient: NDArray[Any],
    num_samples: int,
    width: np.uint64,
    num_parts: int,
    result_N: NDArray[Any],
) -> None:
    """A part is a run of samples."""
    for part in prange(num_parts):
        begin = np.uint64(part * num_samples // num_parts)
        end = np.uint64((part + 1) * num_samples // num_parts)
        for lookup in range(len(bases_L)):
            base, column = bases_L[lookup], columns_L[lookup]
            first = positions_L[lookup] * np.uint64(num_samples)
            for sample in range(begin, end):
                of_bag = sample * width + column
                for position in range(
                    np.uint64(offsets[first + sample]),
                    np.uint64(offsets[first + sample + np.uint64(1)]),
                ):
                    source = base + np.uint64(values_N[position]) * dim
                    dot = flat.dtype.type(0)
                    for d in range(dim):
                        dot += flat[source + d] * gradient[of_bag + d]
                    result_N[position] += dot
