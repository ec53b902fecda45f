"""Dense gradient of a table: the gradient of every row, summed over its lookups in lookup order.

For tables without a ledger, whose gradient is as large as the table.

Letters: B samples, L lookups in the table, N values, E rows, D dim, W columns of the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import prange

from recsys._support.jit import num_parts, parallel_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.lookups import Bags, Lookups

__all__ = ["row_gradients"]

_ONE = np.uint64(1)
_NO_WEIGHTS: dict[torch.dtype, NDArray[Any]] = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}


def row_gradients(
    lookups: Lookups, bags: Bags, gradient: Tensor, number: int, shape: Sequence[int]
) -> Tensor:
    """Sum the gradients of a table's rows.

    The result does not depend on the number of threads.

    Args:
        lookups: Lookups in this table and others.
        bags: The input, checked by `pooled_lookup`.
        gradient: Gradient of the pooled rows, contiguous.
        number: The table.
        shape: (E, D).

    Shape:
        gradient (B, W); result (E, D), in the dtype of `gradient`.
    """
    result = torch.zeros(*shape, dtype=gradient.dtype)
    is_here = lookups.tables == number
    offsets = bags.offsets
    if offsets is None:
        offsets = np.arange(len(bags.values) + 1, dtype=bags.values.dtype)
    _sum_kernel(
        lookups.positions[is_here],
        lookups.columns[is_here],
        bags.values,
        offsets,
        bags.weights is not None,
        _NO_WEIGHTS[gradient.dtype] if bags.weights is None else bags.weights,
        bags.is_mean,
        gradient.numpy(),
        num_parts(),
        result.numpy(),
    )
    return result


@parallel_kernel
def _sum_kernel(
    positions_L: NDArray[np.uint64],
    columns_L: NDArray[np.uint64],
    values_N: NDArray[Any],
    offsets: NDArray[Any],
    has_weights: bool,
    weights_N: NDArray[Any],
    is_mean: bool,
    gradient_BW: NDArray[Any],
    num_parts: int,
    result_ED: NDArray[Any],
) -> None:
    """A part has every row whose number leaves the same remainder."""
    num_samples, dim = np.uint64(len(gradient_BW)), np.uint64(result_ED.shape[1])
    for part in prange(num_parts):
        for lookup in range(len(positions_L)):
            first, column = positions_L[lookup] * num_samples, columns_L[lookup]
            for sample in range(num_samples):
                bag = first + sample
                begin, end = np.uint64(offsets[bag]), np.uint64(offsets[bag + _ONE])
                for place in range(begin, end):
                    row = np.uint64(values_N[place])
                    if row % np.uint64(num_parts) != np.uint64(part):
                        continue
                    for d in range(dim):
                        found = gradient_BW[sample, column + d]
                        if is_mean:
                            found /= result_ED.dtype.type(end - begin)
                        if has_weights:
                            found *= weights_N[place]
                        result_ED[row, d] += found
