"""Sums the gradients of each row, in an order that depends on the row's lookups alone.

Each chunk of a run is summed in lookup order, then the chunks of a run that has several. So a row
with at most `CHUNK` lookups has the same bits as on the CPU. Sums have places that follow from
places among the sorted lookups, so that no list of runs is needed:

    run of one lookup         none; its sum is its gradient
    run of two or more        p // 2, if it begins at p
    later chunk of a run      N // 2 + p // CHUNK, if it begins at p; the next run begins after p
    total of several chunks   p // 2 + 1, if the run begins at p; no other run begins so near

Letters: N lookups of a ledger, D dim.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from recsys._support.cuda.triton_launches import launched
from recsys._support.sizes import cdiv, next_power_of_2
from recsys.embeddings.kernels.triton.memory import BAD_GRADIENT, note
from recsys.embeddings.kernels.triton.row_sort import CHUNK, chunks_in, long_runs_in

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.embeddings.kernels.triton.memory import ErrorRecord
    from recsys.embeddings.kernels.triton.row_sort import Runs

__all__ = ["block_rows", "gradients_at", "num_programs", "sum_runs"]

_NUM_WARPS = 4
_TILE_BYTES = 4096  # of the rows that a program sums at once: 8 float32 per thread
_PROGRAMS_PER_MULTIPROCESSOR = 8
_UNROLLED = 4  # lookups of each chunk that are requested at once
_BAD_GRADIENT, _NONE = tl.constexpr(BAD_GRADIENT), tl.constexpr(2**31 - 1)


def sum_runs(runs: Runs, dim: int, num_rows: int, record: ErrorRecord) -> Tensor:
    """Sum the gradients of each run.

    Args:
        runs: The lookups.
        dim: D.
        num_rows: R, of all tables.
        record: Receives the number, over all tables, of a row whose sum is not finite.

    Returns:
        Sums in places that the module describes, (N / 2 + N / CHUNK + 1, D); other places are
        undefined.
    """
    num_lookups, gradient = len(runs.rows), runs.gradient
    num_places = num_lookups // 2 + cdiv(num_lookups, CHUNK) + 1
    sums = gradient.new_empty(num_places, dim)
    rows_at_once, block_dim = block_rows(dim, gradient.dtype), next_power_of_2(dim)
    _sum_kernel[(min(cdiv(num_lookups, rows_at_once), num_programs(gradient.device)),)](
        gradient,
        runs.order,
        runs.sources,
        runs.scales,
        runs.rows,
        runs.listed,
        sums,
        record.numbers,
        num_lookups,
        num_rows,
        DIM=dim,
        BLOCK_DIM=block_dim,
        BLOCK_ROWS=rows_at_once,
        CHUNK_SIZE=CHUNK,
        UNROLLED=_UNROLLED,
        VECTOR=runs.vector,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )
    if num_lookups > CHUNK:
        lanes = 4 * rows_at_once
        _join_kernel[(min(num_lookups // CHUNK, num_programs(gradient.device)),)](
            runs.listed,
            runs.rows,
            sums,
            record.numbers,
            num_lookups,
            DIM=dim,
            BLOCK_DIM=block_dim,
            LANES=lanes,
            LEVELS=lanes.bit_length() - 1,
            CHUNK_SIZE=CHUNK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
    return sums


def block_rows(dim: int, dtype: torch.dtype) -> int:
    """How many rows a program sums or updates at once."""
    row_bytes: int = next_power_of_2(dim) * dtype.itemsize
    return max(1, min(128, _TILE_BYTES // row_bytes))


@cache  # asking for the properties of a device takes longer than a launch should
def num_programs(device: torch.device) -> int:
    """How many programs share work whose extent only the device knows."""
    if device.type != "cuda":
        return 3  # interpreted, one after the other
    properties = torch.cuda.get_device_properties(device)
    num_multiprocessors: int = properties.multi_processor_count
    return num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR


@triton.jit
def gradients_at(
    gradient,
    order_N,
    sources_N,
    scales_N,
    places,
    is_lookup,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The scaled gradients of the lookups at some places in the order of rows; else zeros."""
    lookups = tl.load(order_N + places, is_lookup, 0)
    begins = tl.multiple_of(tl.load(sources_N + lookups, is_lookup, 0), [VECTOR])
    columns = tl.arange(0, BLOCK_DIM)
    is_number = is_lookup[:, None] & (columns < DIM)[None, :]
    result = tl.load(gradient + (begins[:, None] + columns[None, :]), is_number, 0)
    if scales_N is not None:
        result *= tl.load(scales_N + lookups, is_lookup, 0)[:, None]
    return result


@launched
@triton.jit(do_not_specialize=["num_lookups"])
def _sum_kernel(
    gradient,
    order_N,
    sources_N,
    scales_N,
    rows_N,
    listed,
    sums,
    record,
    num_lookups,
    num_rows,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    UNROLLED: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Sum BLOCK_ROWS chunks at a time; store the sums of those of several lookups."""
    num_chunks, chunks = tl.load(listed), chunks_in(listed)
    columns = tl.arange(0, BLOCK_DIM)
    bad_rows = tl.full([BLOCK_ROWS], 0, tl.int32) + _NONE
    tile = tl.program_id(0)  # no `range`: the interpreter cannot make one of numbers on a device
    while tile * BLOCK_ROWS < num_chunks:
        numbers = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_chunk = numbers < num_chunks
        begins = tl.load(chunks + numbers, is_chunk, 0)
        ends = tl.load(chunks + num_lookups + numbers, is_chunk, 0)
        rows = tl.load(rows_N + begins)
        lengths = tl.where(rows < num_rows, ends - begins, 0)
        is_first = tl.load(rows_N + begins - 1, begins > 0, -1) != rows
        summed = tl.zeros([BLOCK_ROWS, BLOCK_DIM], sums.dtype.element_ty)
        longest = tl.max(lengths, 0)
        number = longest * 0
        while number < longest:
            for ahead in tl.static_range(UNROLLED):
                summed += gradients_at(
                    gradient,
                    order_N,
                    sources_N,
                    scales_N,
                    begins + (number + ahead),
                    number + ahead < lengths,
                    DIM,
                    BLOCK_DIM,
                    VECTOR,
                )
            number += UNROLLED
        bad_rows = tl.minimum(bad_rows, _if_bad(summed, rows))
        at = tl.where(is_first, begins // 2, num_lookups // 2 + begins // CHUNK_SIZE)
        is_stored = (lengths > 0) & ((lengths > 1) | (is_first == 0))
        is_number = is_stored[:, None] & (columns < DIM)[None, :]
        tl.store(sums + (at.to(tl.int64)[:, None] * DIM + columns[None, :]), summed, is_number)
        tile += tl.num_programs(0)
    note(record, bad_rows < _NONE, _BAD_GRADIENT, 0, bad_rows, bad_rows)


@launched
@triton.jit(do_not_specialize=["num_lookups"])
def _join_kernel(
    listed,
    rows_N,
    sums,
    record,
    num_lookups,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
):
    """Sum the chunks of a run: every LANES-th one in order, then these sums in pairs.

    The sum is stored at a place that no program reads: of several threads that read the same
    number, one might be later than the store of another.
    """
    num_runs, long_runs = tl.load(listed + 1), long_runs_in(listed, num_lookups)
    columns = tl.arange(0, BLOCK_DIM)
    bad_rows = tl.full([1], 0, tl.int32) + _NONE
    number = tl.program_id(0)
    while number < num_runs:
        begin = tl.load(long_runs + number)
        row = tl.load(rows_N + begin)
        summed = tl.zeros([LANES, BLOCK_DIM], sums.dtype.element_ty)
        first = begin
        while tl.load(rows_N + first, first < num_lookups, -1) == row:
            begins = first + tl.arange(0, LANES) * CHUNK_SIZE
            is_chunk = tl.load(rows_N + begins, begins < num_lookups, -1) == row
            at = tl.where(begins == begin, begin // 2, num_lookups // 2 + begins // CHUNK_SIZE)
            is_number = is_chunk[:, None] & (columns < DIM)[None, :]
            of_chunks = sums + (at.to(tl.int64)[:, None] * DIM + columns[None, :])
            summed += tl.load(of_chunks, is_number, 0)
            first += LANES * CHUNK_SIZE
        for _ in tl.static_range(LEVELS):
            # Pairs of two: no layout of threads can change the order.
            summed = tl.sum(tl.reshape(summed, [2, summed.shape[0] // 2, BLOCK_DIM]), 0)
        bad_rows = tl.minimum(bad_rows, _if_bad(summed, row))
        at = (begin // 2 + 1).to(tl.int64)
        tl.store(sums + (at * DIM + columns[None, :]), summed, (columns < DIM)[None, :])
        number += tl.num_programs(0)
    note(record, bad_rows < _NONE, _BAD_GRADIENT, 0, bad_rows, bad_rows)


@triton.jit
def _if_bad(summed, rows):
    """The rows with sums that are not finite; `_NONE` for others."""
    is_bad = tl.max(((tl.abs(summed) < float("inf")) == 0).to(tl.int32), 1) > 0
    return tl.where(is_bad, rows, _NONE)
