"""Pooled lookup in one table, for models that call their bags one by one.

Making numpy arrays of the arguments would take as long as a small lookup. So this kernel takes
addresses, and reads offsets as the caller of `nn.EmbeddingBag` passed them. It checks ids and
offsets during the lookup. For invalid input it returns `REFUSED`; the caller then repeats the
lookup by `pooled_lookup`, which finds the invalid value.

Letters as in `pooled_lookup`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import prange

from recsys._support.jit import ParallelKernel, num_parts, parallel_kernel
from recsys.embeddings.kernels.cpu.intrinsics.addresses import array_at
from recsys.embeddings.kernels.cpu.intrinsics.copying import copy_run
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import LINE_BYTES, prefetch_run
from recsys.embeddings.kernels.cpu.intrinsics.summing import add_bag
from recsys.embeddings.kernels.cpu.pooled_lookup import MIN_SHARED_BYTES
from recsys.embeddings.rows.lookups import counts_up

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["BAGS", "ONE_HOT", "REFUSED", "TableMemory", "pool_one_table"]

REFUSED, BAGS, ONE_HOT = range(-1, 2)

_LIKE: dict[torch.dtype, NDArray[Any]] = {
    torch.int32: np.empty(0, np.int32),
    torch.int64: np.empty(0, np.int64),
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}
_AHEAD = np.uint64(8)  # a row is prefetched this many lookups before it is read
_COMPILED_DIMS = range(8, 257, 8)  # other dims share one kernel


class TableMemory:
    """The address and shape of a float32 or float64 table, and the kernel for it.

    Args:
        table: (E, D), contiguous, on the CPU.
    """

    __slots__ = ("address", "dim", "dtype", "like", "num_rows", "pool", "row_bytes")

    def __init__(self, table: Tensor) -> None:
        self.address = table.data_ptr()
        self.num_rows, self.dim = table.shape
        self.dtype, self.like = table.dtype, _LIKE[table.dtype]
        self.row_bytes = self.dim * table.itemsize
        compiled_dim = self.dim if self.dim in _COMPILED_DIMS else 0
        self.pool = _kernel(compiled_dim, LINE_BYTES // table.itemsize)


def pool_one_table(
    table: TableMemory,
    ids: Tensor,
    offsets: Tensor | None,
    num_bags: int,
    result: Tensor,
    kept: NDArray[Any] | None,
    *,
    is_mean: bool,
) -> int:
    """Write the pooled rows of every bag to `result`.

    Args:
        table: The rows.
        ids: Contiguous, int32 or int64.
        offsets: Where bags begin, with or without the end of the last one; contiguous, of the dtype
            of `ids`. None if all bags have the same number of ids.
        num_bags: B.
        result: Contiguous, of the table's dtype.
        kept: Receives a copy of the ids and, after them, where bags begin and the last one ends
            (left undefined if bag i is id i). None if the copy is not needed.
        is_mean: Whether a bag is averaged.

    Shape:
        ids (N,), or any shape if offsets is None; offsets (B,) or (B + 1,); result (B, D), or any
        shape with B * D numbers; kept (N + B + 1,), of the dtype of `ids`.

    Returns:
        `ONE_HOT` if bag i is id i, otherwise `BAGS`. `REFUSED` if an id is not a row, or offsets do
        not ascend from 0 to N; then `result` and `kept` are undefined.
    """
    num_ids, like_ids = ids.numel(), _LIKE[ids.dtype]
    is_small = num_ids * table.row_bytes < MIN_SHARED_BYTES
    return (table.pool.alone if is_small else table.pool)(
        table.address,
        table.num_rows,
        table.dim,
        ids.data_ptr(),
        num_ids,
        0 if offsets is None else offsets.data_ptr(),
        0 if offsets is None else len(offsets),
        num_bags,
        int(is_mean),
        result.data_ptr(),
        like_ids if kept is None else kept,
        table.like,
        like_ids,
        1 if is_small else num_parts(),
    )


@cache
def _kernel(compiled_dim: int, line: int) -> ParallelKernel[..., int]:
    """The kernel for rows of this dim; with 0, the one for any dim."""

    @parallel_kernel
    def pool(
        table_at: int,
        num_rows: int,
        any_dim: int,
        ids_at: int,
        num_ids: int,
        offsets_at: int,
        num_offsets: int,
        num_bags: int,
        is_mean: int,
        result_at: int,
        kept: NDArray[Any],
        like_rows: NDArray[Any],
        like_ids: NDArray[Any],
        num_parts: int,
    ) -> int:
        """A part is a range of bags."""
        rows = array_at(table_at, num_rows * any_dim, like_rows)
        result = array_at(result_at, num_bags * any_dim, like_rows)
        ids = array_at(ids_at, num_ids, like_ids)
        offsets = array_at(offsets_at, num_offsets, like_ids)
        length = num_ids // num_bags if num_offsets == 0 else 0
        if num_offsets == 0:
            is_one_hot = length == 1
        else:
            if offsets[0] != 0 or (num_offsets > num_bags and offsets[num_bags] != num_ids):
                return REFUSED
            is_one_hot = num_ids == num_bags and counts_up(offsets)
        is_bad = np.zeros(num_parts, np.bool_)
        for part in prange(num_parts):
            # Inside the prange loop: numba would pass a constant from outside as a variable.
            dim = np.uint64(compiled_dim) if compiled_dim else np.uint64(any_dim)
            size, end_id = np.uint64(num_rows), np.uint64(num_ids)
            begin = np.uint64(part * num_bags // num_parts)
            end = np.uint64((part + 1) * num_bags // num_parts)
            target = begin * dim
            if len(kept):
                first_kept = np.uint64(part * num_ids // num_parts)
                end_kept = np.uint64((part + 1) * num_ids // num_parts)
                copy_run(kept, first_kept, ids, first_kept, end_kept - first_kept)
            if is_one_hot:
                for place in range(begin, end):
                    if place + _AHEAD < end:
                        ahead = np.uint64(ids[place + _AHEAD]) * dim
                        prefetch_run(rows, ahead, dim, np.uint64(line))
                    row = np.uint64(ids[place])  # a negative id becomes a very large number
                    if row >= size:
                        is_bad[part] = True
                    else:
                        copy_run(result, target, rows, row * dim, dim)
                    target += dim
                continue
            for bag in range(begin, end):
                if num_offsets == 0:
                    first, last = bag * np.uint64(length), (bag + np.uint64(1)) * np.uint64(length)
                else:
                    first, last = np.uint64(offsets[bag]), end_id
                    if bag + np.uint64(1) < np.uint64(num_offsets):
                        last = np.uint64(offsets[bag + np.uint64(1)])
                if first > last or last > end_id:
                    is_bad[part] = True
                    break
                if len(kept):
                    kept[end_id + bag] = first
                    kept[end_id + bag + np.uint64(1)] = last
                for d in range(dim):
                    result[target + d] = 0
                where = result, target, rows, np.uint64(0), size, dim, dim, np.uint64(line)
                # Written for invalid ids alone: the threads' flags share a cache line.
                if add_bag(*where, ids, None, first, last, end_id) >= 0:
                    is_bad[part] = True
                if is_mean and last > first:
                    count = like_rows.dtype.type(last - first)
                    for d in range(dim):
                        result[target + d] /= count
                target += dim
        return REFUSED if is_bad.any() else int(is_one_hot)

    return pool
