"""Pooled lookup: sum or average the rows of every bag, for all tables of one dim at once.

Letters: B samples, L lookups (pairs of feature and table), N values, E rows, D dim, W columns of
the output. Indices are unsigned: numba checks every signed index for a negative value, and a loop
with this check is not vectorised.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import prange

from recsys._support.jit import ParallelKernel, kernel_part, num_parts, parallel_kernel
from recsys.embeddings.kernels.cpu.intrinsics.addresses import array_at
from recsys.embeddings.kernels.cpu.intrinsics.copying import copy_run
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import LINE_BYTES, prefetch_run
from recsys.embeddings.kernels.cpu.intrinsics.summing import add_bag
from recsys.embeddings.kernels.cpu.rounding import widen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.lookups import Bags, Lookups
    from recsys.embeddings.rows.row_space import RowSpace

__all__ = [
    "MIN_SHARED_BYTES",
    "first_bad",
    "offsets_of",
    "pooled_lookup",
    "row_gradient_dots",
    "row_gradients",
    "samples_of",
]

_ONE = np.uint64(1)
_NO_WEIGHTS: dict[torch.dtype, NDArray[Any]] = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}
# Smaller copies of one-hot rows end before a second thread wakes up. Inside a complete step, two
# threads took 20 to 25 % less time for 208 KiB (D=16, 128 samples), and the same for 104 KiB.
MIN_SHARED_BYTES = 2**17
# A row is prefetched this many lookups before it is read.
_AHEAD = np.uint64(8)
# One-hot lookups have a kernel for each of these dims, which copies a row in a few moves without a
# loop. Other dims share one kernel, and so do all dims if rows are added or widened: LLVM unrolls a
# loop of known length before it vectorises it. At D=16, adding took twice as long, and widening
# rows of 16 bits up to three times.
_COMPILED_DIMS = range(8, 257, 8)


def pooled_lookup(space: RowSpace, lookups: Lookups, bags: Bags, result: Tensor) -> int:
    """Write the pooled rows of every lookup to its columns of `result`.

    An empty bag gives zeros. The rows of a bag are added in lookup order, so results do not depend
    on the number of threads.

    Args:
        space: The tables.
        lookups: Which feature is looked up in which table.
        bags: The input.
        result: (B, W), or (B, F, D) if all lookups have one dim; contiguous, in the dtype of the
            computation. Columns of other lookups are not written.

    Returns:
        The position of the first value that is not a row of its table, or -1. If there is one, the
        lookups' columns of `result` are undefined.

    Raises:
        ValueError: `result` has another dtype, because tables of several dtypes are looked up
            together.
    """
    if result.dtype is not space.compute_dtype:
        raise ValueError(
            f"tables that are computed in {space.compute_dtype} cannot be looked up together with "
            f"tables computed in {result.dtype}; convert all tables of the module, not some"
        )
    line = LINE_BYTES // space.dtype.itemsize  # how many numbers a cache line holds
    if bags.offsets is None and bags.weights is None:
        has_kernel = space.dim in _COMPILED_DIMS and not space.is_narrow
        compiled_dim = space.dim if has_kernel else 0
        one_hot = _one_hot_kernel(compiled_dim, line, space.is_narrow)
        num_bytes = len(lookups.tables) * bags.batch_size * space.dim * space.dtype.itemsize
        is_small = num_bytes < MIN_SHARED_BYTES
        return (one_hot.alone if is_small else one_hot)(
            space.flat,
            space.dim,
            lookups.placed_in(space),
            bags.values,
            bags.batch_size,
            lookups.width,
            1 if is_small else num_parts(),
            result.data_ptr(),
            space.nothing,
        )
    return _bags_kernel(space.is_narrow)(
        space.flat,
        space.dim,
        line,
        lookups.placed_in(space),
        np.ascontiguousarray(bags.values),
        offsets_of(bags),
        bags.weights is not None,
        space.nothing if bags.weights is None else bags.weights,
        bags.is_mean,
        bags.batch_size,
        lookups.width,
        num_parts(),
        result.data_ptr(),
        space.nothing,
    )


def row_gradient_dots(
    space: RowSpace, lookups: Lookups, bags: Bags, gradient: Tensor, result: Tensor
) -> None:
    """The gradient of every value's weight: the dot product of its row and its bag's gradient.

    If bags are averaged, it is divided by the length of the bag.

    Args:
        space: The tables.
        lookups: Which feature was looked up in which table.
        bags: The input, checked by `pooled_lookup`.
        gradient: Gradient of the pooled rows, (B, W), contiguous.
        result: (N,); is added to, because a feature may be looked up in several tables.
    """
    _dots_kernel(
        space.flat,
        space.dim,
        lookups.placed_in(space),
        bags.values,
        offsets_of(bags),
        bags.is_mean,
        gradient.numpy(),
        bags.batch_size,
        lookups.width,
        num_parts(),
        result.numpy(),
    )


def row_gradients(
    lookups: Lookups, bags: Bags, gradient: Tensor, number: int, shape: Sequence[int]
) -> Tensor:
    """Sum the gradients of a table's rows in lookup order, for a table without a ledger.

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
    _sum_kernel(
        lookups.positions[is_here],
        lookups.columns[is_here],
        bags.values,
        offsets_of(bags),
        bags.weights is not None,
        _NO_WEIGHTS[gradient.dtype] if bags.weights is None else bags.weights,
        bags.is_mean,
        gradient.numpy(),
        num_parts(),
        result.numpy(),
    )
    return result


def offsets_of(bags: Bags) -> NDArray[Any]:
    """Where bags begin, for one-hot bags too."""
    if bags.offsets is not None:
        return bags.offsets
    return np.arange(len(bags.values) + 1, dtype=bags.values.dtype)


@kernel_part
def samples_of(part: int, num_parts: int, num_samples: int) -> tuple[np.uint64, np.uint64]:
    """The range of samples of a part."""
    begin, end = part * num_samples // num_parts, (part + 1) * num_samples // num_parts
    return np.uint64(begin), np.uint64(end)


@kernel_part
def first_bad(bad_P: NDArray[np.int64]) -> int:
    """The first position of an invalid value that any part found; -1 if there is none."""
    first = -1
    for place in bad_P:
        if place >= 0 and (first < 0 or place < first):
            first = place
    return first


@cache
def _one_hot_kernel(compiled_dim: int, line: int, is_narrow: bool) -> ParallelKernel[..., int]:
    """The kernel for one-hot bags of this dim; with 0, the one for any dim."""

    @parallel_kernel
    def one_hot(
        flat: NDArray[Any],
        any_dim: int,
        lookups_4L: NDArray[np.uint64],
        values_N: NDArray[Any],
        num_samples: int,
        width: int,
        num_parts: int,
        result_at: int,
        like_result: NDArray[Any],
    ) -> int:
        """Copy one row per lookup and sample. A part is a range of samples."""
        result = array_at(result_at, num_samples * width, like_result)
        bad = np.full(num_parts, -1)
        for part in prange(num_parts):
            # Inside the prange loop: numba would pass a constant from outside as a variable.
            dim = np.uint64(compiled_dim) if compiled_dim else np.uint64(any_dim)
            begin, end = samples_of(part, num_parts, num_samples)
            for lookup in range(lookups_4L.shape[1]):
                base, size, position, column = lookups_4L[:, lookup]
                first = position * np.uint64(num_samples)
                target = begin * np.uint64(width) + column
                for place in range(first + begin, first + end):
                    if place + _AHEAD < first + end:
                        ahead = base + np.uint64(values_N[place + _AHEAD]) * dim
                        prefetch_run(flat, ahead, dim, np.uint64(line))
                    row = np.uint64(values_N[place])
                    if row >= size:  # a negative value became a very large unsigned one
                        if bad[part] < 0 or np.int64(place) < bad[part]:
                            bad[part] = np.int64(place)
                    elif is_narrow:  # a constant when the kernel is compiled
                        for d in range(dim):
                            result[target + d] = widen(flat[base + row * dim + d])
                    else:
                        copy_run(result, target, flat, base + row * dim, dim)
                    target += np.uint64(width)
        return first_bad(bad)

    return one_hot


@cache
def _bags_kernel(is_narrow: bool) -> ParallelKernel[..., int]:
    """The kernel for bags of any length."""

    @parallel_kernel
    def bags(
        flat: NDArray[Any],
        any_dim: int,
        line: int,
        lookups_4L: NDArray[np.uint64],
        values_N: NDArray[Any],
        offsets: NDArray[Any],
        has_weights: bool,
        weights_N: NDArray[Any],
        is_mean: bool,
        num_samples: int,
        width: int,
        num_parts: int,
        result_at: int,
        like_result: NDArray[Any],
    ) -> int:
        """Add any number of rows per lookup and sample, in order. A part is a range of samples."""
        dim = np.uint64(any_dim)
        result = array_at(result_at, num_samples * width, like_result)
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
                    first_place, end_place = np.uint64(offsets[bag]), np.uint64(offsets[bag + _ONE])
                    found = np.int64(-1)
                    if is_narrow:  # a constant when the kernel is compiled
                        for place in range(first_place, end_place):
                            if place + _AHEAD < last_place:
                                ahead = base + np.uint64(values_N[place + _AHEAD]) * dim
                                prefetch_run(flat, ahead, dim, np.uint64(line))
                            row = np.uint64(values_N[place])
                            if row >= size:
                                found = np.int64(place)
                                break
                            for d in range(dim):
                                added = widen(flat[base + row * dim + d])
                                result[target + d] += (
                                    weights_N[place] * added if has_weights else added
                                )
                    else:
                        of_bag = target, flat, base, size, dim, dim, np.uint64(line), values_N
                        places = first_place, end_place, last_place
                        if has_weights:
                            found = add_bag(result, *of_bag, weights_N, *places)
                        else:
                            found = add_bag(result, *of_bag, None, *places)
                    if found >= 0 and (bad[part] < 0 or found < bad[part]):
                        bad[part] = found
                    if is_mean and end_place > first_place:
                        count = result.dtype.type(end_place - first_place)
                        for d in range(dim):
                            result[target + d] /= count
                    target += np.uint64(width)
        return first_bad(bad)

    return bags


@parallel_kernel
def _dots_kernel(
    flat: NDArray[Any],
    any_dim: int,
    lookups_4L: NDArray[np.uint64],
    values_N: NDArray[Any],
    offsets: NDArray[Any],
    is_mean: bool,
    gradient_BW: NDArray[Any],
    num_samples: int,
    width: int,
    num_parts: int,
    result_N: NDArray[Any],
) -> None:
    """A part is a range of samples."""
    dim = np.uint64(any_dim)
    gradient = gradient_BW.reshape(-1)
    for part in prange(num_parts):
        begin, end = samples_of(part, num_parts, num_samples)
        for lookup in range(lookups_4L.shape[1]):
            base, _, position, column = lookups_4L[:, lookup]
            first = position * np.uint64(num_samples)
            of_bag = begin * np.uint64(width) + column
            for bag in range(first + begin, first + end):
                first_place, end_place = np.uint64(offsets[bag]), np.uint64(offsets[bag + _ONE])
                for place in range(first_place, end_place):
                    source = base + np.uint64(values_N[place]) * dim
                    dot = result_N.dtype.type(0)
                    for d in range(dim):
                        dot += widen(flat[source + d]) * gradient[of_bag + d]
                    if is_mean:
                        dot /= result_N.dtype.type(end_place - first_place)
                    result_N[place] += dot
                of_bag += np.uint64(width)


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
