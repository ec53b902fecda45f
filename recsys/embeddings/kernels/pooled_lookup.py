"""Pooled lookup: the rows of every bag, summed or averaged, for all tables of one dim at once.

Letters: B samples, L lookups (a feature in a table), N rows looked up, D dim, W columns of the
output. Numbers that index are unsigned: of each signed one numba asks whether it counts from the
end, and a loop with that question in it is not vectorised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch.nn import functional

from recsys.embeddings.kernels.addresses import array_at
from recsys.embeddings.kernels.copying import copy_run
from recsys.embeddings.kernels.prefetch import LINE_BYTES, prefetch
from recsys.embeddings.kernels.rounding import widen
from recsys.jit import ParallelKernel, kernel, num_parts, parallel_kernel

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.row_space import RowSpace

__all__ = [
    "MIN_SHARED_BYTES",
    "Bags",
    "Lookups",
    "counts_up",
    "pooled_lookup",
    "pooled_lookup_reference",
    "row_gradient_dots",
]

_ONE = np.uint64(1)
# Fewer bytes of one-hot rows are copied by one thread before a second one is awake. Inside of a
# whole step two took a fifth to a quarter less for 208 KiB (D=16, 128 samples), for 104 as long.
MIN_SHARED_BYTES = 2**17
# Lookups from a row's being named to its being read.
_AHEAD = np.uint64(8)
# One-hot lookups have a kernel for each of these dims: a row is then a few moves without a loop.
# Other dims share one, and so do all dims where rows are added or widened: LLVM unrolls a loop of
# known length before it thinks of vectors. At 16, adding took twice as long, and widening float16
# three times.
_COMPILED_DIMS = range(8, 257, 8)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lookups:
    """Which feature is looked up in which table, and where the result goes.

    Attributes:
        tables: Number of the table in the row space, (L,) uint64.
        positions: Number of the feature in the input, (L,) uint64.
        columns: First column of the output, (L,) uint64.
        width: W.
        distinct_tables: Those in `tables`, in ascending order.

    The arrays must not be written to.
    """

    tables: NDArray[np.uint64]
    positions: NDArray[np.uint64]
    columns: NDArray[np.uint64]
    width: int
    distinct_tables: Sequence[int] = field(init=False)
    _placed: tuple[NDArray[np.uint64], NDArray[np.uint64]] | None = field(
        default=None, init=False, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "distinct_tables", sorted(set(self.tables.tolist())))

    @classmethod
    def nothing(cls) -> Lookups:
        """No lookup."""
        none = np.empty(0, np.uint64)
        return cls(tables=none, positions=none, columns=none, width=0)

    @classmethod
    def one(cls, table: int, dim: int) -> Lookups:
        """One lookup, in a table of this dim."""
        first = np.zeros(1, np.uint64)
        tables = np.array([table], np.uint64)
        return cls(tables=tables, positions=first, columns=first, width=dim)

    def of_tables(self, tables: Container[int]) -> Lookups:
        """Those of some tables, in the same order."""
        is_kept = [table in tables for table in self.tables.tolist()]
        return Lookups(
            tables=self.tables[is_kept],
            positions=self.positions[is_kept],
            columns=self.columns[is_kept],
            width=self.width,
        )

    def placed_in(self, space: RowSpace) -> NDArray[np.uint64]:
        """What kernels ask of each lookup, (4, L): base, number of rows, position, column.

        Kept for the row space last asked for: making it takes longer than a small lookup.
        """
        if self._placed is None or self._placed[0] is not space.bases:
            found = np.stack(
                [
                    space.bases[self.tables],
                    space.sizes[self.tables],
                    self.positions,
                    self.columns,
                ]
            )
            object.__setattr__(self, "_placed", (space.bases, found))  # frozen but for this
            return found
        return self._placed[1]


class Bags(NamedTuple):
    """The input of one lookup: F features of B samples.

    Attributes:
        values: Rows, (N,) int32 or int64, feature by feature.
        offsets: Where bags begin, (F * B + 1,), of the same dtype; None where bag i is value i.
        weights: One factor per value, (N,), in the dtype that rows are computed in; None for 1.
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
        is_one_hot: bool | None = None,
    ) -> Bags:
        """Views of tensors.

        Args:
            values: As above.
            offsets: As above, never None.
            weights: As above.
            batch_size: B.
            is_mean: Whether a bag is averaged.
            is_one_hot: Whether bag i is value i, where the caller knows; None where the offsets
                have to tell.
        """
        values_N = values.numpy()
        bounds = None if is_one_hot else offsets.numpy()
        if is_one_hot is None and bounds is not None:
            is_one_hot = len(values_N) == len(bounds) - 1 and counts_up(bounds)
        return cls(
            values_N,
            None if is_one_hot else bounds,
            None if weights is None else weights.detach().contiguous().numpy(),
            batch_size,
            is_mean and not is_one_hot,
        )

    def at_slots(self, slot_of_value: NDArray[np.int32]) -> Bags:
        """The same with slots in place of rows."""
        return self._replace(values=slot_of_value)

    def values_of(self, feature: int) -> NDArray[Any]:
        """The rows of one feature."""
        begin, end = feature * self.batch_size, (feature + 1) * self.batch_size
        if self.offsets is not None:
            begin, end = int(self.offsets[begin]), int(self.offsets[end])
        return self.values[begin:end]

    def copied(self) -> Bags:
        """The same in memory of its own: the caller may refill that of the input at any time."""
        values, offsets, weights, batch_size, is_mean = self
        return Bags(
            values.copy(),
            None if offsets is None else offsets.copy(),
            None if weights is None else weights.copy(),
            batch_size,
            is_mean,
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
        result: (B, W) or, of vectors of one dim, (B, F, D), contiguous, in the dtype that rows are
            computed in; other columns are left alone.

    Returns:
        The first value that is no row of its table, by position; -1 where there is none. The
        columns of `result` are undefined where there is one.

    Raises:
        ValueError: `result` is of another dtype, as when tables of several are looked up together.
    """
    if result.dtype is not space.computed:
        raise ValueError(
            f"tables that are computed in {space.computed} cannot be looked up together with some "
            f"that are computed in {result.dtype}; convert all tables of the module, not some"
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
    return _bags_kernel(
        space.flat,
        space.dim,
        line,
        lookups.placed_in(space),
        bags.values,
        _offsets_of(bags),
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
    """The gradient of every value's weight: its row times its bag's gradient, shared out by a mean.

    Args:
        space: The tables.
        lookups: What was looked up where.
        bags: The input, checked by `pooled_lookup`.
        gradient: Of the pooled rows, (B, W), contiguous.
        result: (N,), added to, for a feature may be looked up in several tables.
    """
    _dots_kernel(
        space.flat,
        space.dim,
        lookups.placed_in(space),
        bags.values,
        _offsets_of(bags),
        bags.is_mean,
        gradient.numpy(),
        bags.batch_size,
        lookups.width,
        num_parts(),
        result.numpy(),
    )


def _offsets_of(bags: Bags) -> NDArray[Any]:
    """Where bags begin, of one-hot ones too."""
    if bags.offsets is not None:
        return bags.offsets
    return np.arange(len(bags.values) + 1, dtype=bags.values.dtype)


@kernel
def counts_up(offsets: NDArray[Any]) -> bool:
    """Whether they are 0, 1, 2, ...; in runs, inside of which the processor compares by vectors."""
    run = np.uint64(1024)
    end = np.uint64(len(offsets))
    for begin in range(np.uint64(0), end, run):
        differing = np.uint64(0)
        for number in range(begin, min(begin + run, end)):
            differing |= np.uint64(offsets[number]) ^ number
        if differing:
            return False
    return True


@kernel
def _samples_of(part: int, num_parts: int, num_samples: int) -> tuple[np.uint64, np.uint64]:
    """The run of samples that is a part's."""
    begin, end = part * num_samples // num_parts, (part + 1) * num_samples // num_parts
    return np.uint64(begin), np.uint64(end)


@kernel
def _first_bad(bad_P: NDArray[np.int64]) -> int:
    """The first value that some part found to be no row; -1 where none did."""
    first = -1
    for place in bad_P:
        if place >= 0 and (first < 0 or place < first):
            first = place
    return first


@cache
def _one_hot_kernel(compiled_dim: int, line: int, is_narrow: bool) -> ParallelKernel[..., int]:
    """The kernel for one-hot bags of this dim; 0 for one that takes any."""

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
        """A part is a run of samples: one row per lookup and sample, copied."""
        result = array_at(result_at, num_samples * width, like_result)
        bad = np.full(num_parts, -1)
        for part in prange(num_parts):
            # Not before the loop: numba hands its body what was found there, known or not.
            dim = np.uint64(compiled_dim) if compiled_dim else np.uint64(any_dim)
            begin, end = _samples_of(part, num_parts, num_samples)
            for lookup in range(lookups_4L.shape[1]):
                base, size, position, column = lookups_4L[:, lookup]
                first = position * np.uint64(num_samples)
                target = begin * np.uint64(width) + column
                for place in range(first + begin, first + end):
                    if place + _AHEAD < first + end:
                        ahead = base + np.uint64(values_N[place + _AHEAD]) * dim
                        for d in range(np.uint64(0), dim, np.uint64(line)):
                            prefetch(flat, ahead + d)
                    row = np.uint64(values_N[place])
                    if row >= size:  # a negative one is among the largest
                        if bad[part] < 0 or np.int64(place) < bad[part]:
                            bad[part] = np.int64(place)
                    elif is_narrow:  # known when the kernel is compiled
                        for d in range(dim):
                            result[target + d] = widen(flat[base + row * dim + d])
                    else:
                        copy_run(result, target, flat, base + row * dim, dim)
                    target += np.uint64(width)
        return _first_bad(bad)

    return one_hot


@parallel_kernel
def _bags_kernel(
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
    """A part is a run of samples: any number of rows per lookup and sample, added in order."""
    dim = np.uint64(any_dim)
    result = array_at(result_at, num_samples * width, like_result)
    bad = np.full(num_parts, -1)
    for part in prange(num_parts):
        begin, end = _samples_of(part, num_parts, num_samples)
        for lookup in range(lookups_4L.shape[1]):
            base, size, position, column = lookups_4L[:, lookup]
            first = position * np.uint64(num_samples)
            last_place = np.uint64(offsets[first + end])
            target = begin * np.uint64(width) + column
            for bag in range(first + begin, first + end):
                for d in range(dim):
                    result[target + d] = 0
                first_place, end_place = np.uint64(offsets[bag]), np.uint64(offsets[bag + _ONE])
                for place in range(first_place, end_place):
                    if place + _AHEAD < last_place:
                        ahead = base + np.uint64(values_N[place + _AHEAD]) * dim
                        for d in range(np.uint64(0), dim, np.uint64(line)):
                            prefetch(flat, ahead + d)
                    row = np.uint64(values_N[place])
                    if row >= size:
                        if bad[part] < 0 or np.int64(place) < bad[part]:
                            bad[part] = np.int64(place)
                        continue
                    source = base + row * dim
                    if has_weights:
                        weight = weights_N[place]
                        for d in range(dim):
                            result[target + d] += weight * widen(flat[source + d])
                    else:
                        for d in range(dim):
                            result[target + d] += widen(flat[source + d])
                if is_mean and end_place > first_place:
                    count = result.dtype.type(end_place - first_place)
                    for d in range(dim):
                        result[target + d] /= count
                target += np.uint64(width)
    return _first_bad(bad)


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
    """A part is a run of samples."""
    dim = np.uint64(any_dim)
    gradient = gradient_BW.reshape(-1)
    for part in prange(num_parts):
        begin, end = _samples_of(part, num_parts, num_samples)
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
