"""Sort the lookups of a ledger by row, and cut each row's lookups into chunks.

    locate   the row of every lookup, and where its gradient is; one launch for the whole ledger
    sort     by row, with torch; the lookups of one row, a run, stay in lookup order
    list     chunks: `CHUNK` lookups of a run each, counted from its first lookup

Only the device knows how many chunks there are. In which places of the list they are depends on the
order in which programs finish; what is computed of them must not.

Lookups are in the order of entries, then of layers (the k-th lookup of every feature), then of ids.

Letters: E entries, P parts (one layer of an entry), N lookups of a ledger, D dim.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from recsys._support.cuda.triton_launches import launched
from recsys._support.sizes import cdiv
from recsys.embeddings.kernels.triton.memory import count_at_most, divided, first_step, upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.embeddings.kernels.triton.lookup import DeviceLookups

__all__ = ["CHUNK", "DeviceEntry", "Runs", "chunks_in", "long_runs_in", "sort_rows"]

CHUNK = 32
_MOST_LOOKUPS = 2**30  # places, and some more, are int32
_NUM_COUNTS = 16  # two and then unused ones, so that the chunks begin at a multiple of 64 bytes
_BLOCK, _NUM_WARPS = 256, 2  # lookups that a program locates or lists


class DeviceEntry(NamedTuple):
    """A lookup that waits for its update, and the gradient of its result.

    Attributes:
        lookups: What was looked up.
        kept: As `pool` wrote it.
        num_ids: Of the input.
        num_samples: B.
        num_bounds: Bags of all features; 0 if bag i is id i.
        is_mean: Whether bags were averaged.
        weights: Factors of the ids, in the dtype of the gradient; None for 1.
        gradient: (B, W); the numbers of each sample are contiguous.
    """

    lookups: DeviceLookups
    kept: Tensor
    num_ids: int
    num_samples: int
    num_bounds: int
    is_mean: bool
    weights: Tensor | None
    gradient: Tensor


class Runs(NamedTuple):
    """The lookups of a ledger, sorted by row, and where their gradients are.

    Attributes:
        rows: The row of each lookup, ascending, (N,) int32; the number of all rows for no row.
        order: Number of each of these lookups in the ledger, (N,) int64.
        listed: Chunks and long runs, those of several chunks, in any order, int32: the number of
            chunks and of long runs; from `chunks_in` on, where chunks begin, (N,), and end, (N,);
            then where long runs begin, (N / CHUNK,).
        gradient: The gradient with the lowest address.
        sources: Where the gradient of each lookup of the ledger begins, in numbers from there,
            (N,) int64.
        scales: Factor of each lookup of the ledger, (N,); None for 1.
        vector: A number that all beginnings are multiples of, for wide loads.
    """

    rows: Tensor
    order: Tensor
    listed: Tensor
    gradient: Tensor
    sources: Tensor
    scales: Tensor | None
    vector: int


def sort_rows(entries: Sequence[DeviceEntry], num_rows: int, dim: int) -> Runs | None:
    """Sort the lookups of a ledger by row; the host waits for nothing.

    Args:
        entries: In the order of lookups.
        num_rows: R, of all tables.
        dim: D.

    Returns:
        The runs; None if there are no lookups.
    """
    lowest = min((entry.gradient for entry in entries), key=torch.Tensor.data_ptr)
    itemsize, device = lowest.itemsize, lowest.device
    parts: list[tuple[int, ...]] = []
    num_programs = num_lookups = 0
    for lookups, kept, num_ids, num_samples, num_bounds, is_mean, weights, gradient in entries:
        numbers_at, num = lookups.numbers.data_ptr(), lookups.num_lookups
        layers_at = numbers_at + 5 * num * lookups.numbers.itemsize
        for layer in range(lookups.num_layers if num_bounds else 1):
            num_places = num_ids if num_bounds else num * num_samples
            of_part = num_programs, num_lookups, num_places
            of_kept = kept.data_ptr(), num_ids, num_samples, num_bounds
            begin = (gradient.data_ptr() - lowest.data_ptr()) // itemsize
            of_gradient = begin, gradient.stride(0), is_mean and num_bounds > 0
            weights_at = 0 if weights is None else weights.data_ptr()
            layer_at = layers_at + layer * lookups.num_features * lookups.numbers.itemsize
            of_lookups = numbers_at, num, layer_at, lookups.num_features, first_step(num_bounds + 1)
            if num_places:
                parts.append((*of_part, *of_kept, *of_gradient, weights_at, *of_lookups))
            num_programs += cdiv(num_places, _BLOCK)
            num_lookups += num_places
    if not num_lookups or not num_rows:
        return None
    assert num_lookups < _MOST_LOOKUPS
    is_scaled = any(part[9] or part[10] for part in parts)
    wide = 16 // itemsize
    multiple = gcd(dim, *(n for part in parts for n in part[7:9]))
    multiple = gcd(multiple, *(entry.lookups.multiple for entry in entries))
    rows = torch.empty(num_lookups, dtype=torch.int32, device=device)
    num_listed = _NUM_COUNTS + 2 * num_lookups + num_lookups // CHUNK
    listed = torch.empty(num_listed, dtype=torch.int32, device=device)
    sources = torch.empty(num_lookups, dtype=torch.int64, device=device)
    scales = torch.empty(num_lookups, dtype=lowest.dtype, device=device) if is_scaled else None
    parts_16P = np.array(parts, np.int64).T.reshape(-1).copy()
    _locate_kernel[(num_programs,)](
        rows,
        sources,
        scales,
        listed,
        upload(parts_16P, device),
        len(parts),
        first_step(len(parts)),
        num_rows,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    rows, order = rows.sort(stable=True)
    _list_kernel[(cdiv(num_lookups, _BLOCK),)](
        rows,
        listed,
        num_lookups,
        first_step(num_lookups),
        num_rows,
        CHUNK_SIZE=CHUNK,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    is_wide = multiple % wide == 0 and lowest.data_ptr() % 16 == 0
    return Runs(rows, order, listed, lowest, sources, scales, wide if is_wide else 1)


@triton.jit
def chunks_in(listed):
    """Where the chunks of `Runs.listed` begin: after `_NUM_COUNTS` places."""
    return listed + 16


@triton.jit
def long_runs_in(listed, num_lookups):
    """Where the long runs of `Runs.listed` begin."""
    return chunks_in(listed) + 2 * num_lookups


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@launched
@triton.jit(do_not_specialize=["num_parts", "step"])
def _locate_kernel(
    rows_N,
    sources_N,
    scales_N,
    listed,
    parts_16P,
    num_parts,
    step,
    num_rows,
    BLOCK: tl.constexpr,
):
    """Locate BLOCK lookups of one part: feature by feature if bags are one-hot, else id by id."""
    if tl.program_id(0) == 0:
        tl.store(listed + tl.arange(0, 2), tl.zeros([2], tl.int32))
    program = tl.program_id(0).to(tl.int64)
    of_part = parts_16P + (count_at_most(parts_16P, program, num_parts, step) - 1)
    places = (program - tl.load(of_part)) * BLOCK + tl.arange(0, BLOCK)
    first, is_place = tl.load(of_part + num_parts), places < tl.load(of_part + 2 * num_parts)
    kept = tl.load(of_part + 3 * num_parts).to(tl.pointer_type(tl.int32))
    num_ids, num_samples = tl.load(of_part + 4 * num_parts), tl.load(of_part + 5 * num_parts)
    num_bounds, source = tl.load(of_part + 6 * num_parts), tl.load(of_part + 7 * num_parts)
    stride, is_mean = tl.load(of_part + 8 * num_parts), tl.load(of_part + 9 * num_parts)
    numbers_5L = tl.load(of_part + 11 * num_parts).to(tl.pointer_type(tl.int64))
    num_lookups = tl.load(of_part + 12 * num_parts)
    bags, at = places, places
    lookups = tl.where(is_place, places // num_samples, num_lookups)
    if num_bounds > 0:
        # Invalid offsets give some bag that exists; then an error is recorded.
        bounds = kept + num_ids
        step_of_bounds = tl.load(of_part + 15 * num_parts)
        bags = count_at_most(bounds, places.to(tl.int32), num_bounds + 1, step_of_bounds) - 1
        bags = tl.minimum(tl.maximum(bags, 0).to(tl.int64), num_bounds - 1)
        layer_F = tl.load(of_part + 13 * num_parts).to(tl.pointer_type(tl.int64))
        features = bags // num_samples
        is_feature = is_place & (features < tl.load(of_part + 14 * num_parts))
        lookups = tl.load(layer_F + features, is_feature, num_lookups)
    is_lookup = is_place & (lookups < num_lookups)
    samples, of_lookup = bags % num_samples, numbers_5L + lookups
    if num_bounds == 0:
        at = tl.load(of_lookup + 3 * num_lookups, is_lookup, 0) * num_samples + samples
    ids = tl.load(kept + at, is_lookup, -1).to(tl.int64)
    is_row = (ids >= 0) & (ids < tl.load(of_lookup + num_lookups, is_lookup, 0))
    rows = ids + tl.load(of_lookup + 2 * num_lookups, is_lookup, 0)
    tl.store(rows_N + first + places, tl.where(is_row, rows, num_rows).to(tl.int32), is_place)
    begins = source + samples * stride + tl.load(of_lookup + 4 * num_lookups, is_lookup, 0)
    tl.store(sources_N + first + places, begins, is_place)
    if scales_N is not None:
        weights_at = tl.load(of_part + 10 * num_parts)
        weights_N = weights_at.to(tl.pointer_type(scales_N.dtype.element_ty))
        scales = tl.load(weights_N + at, is_lookup & (weights_at != 0), 1)
        counts = kept + (num_ids + num_bounds + 1)
        lengths = tl.load(counts + bags, is_lookup & (is_mean != 0), 1)
        scales = divided(scales, tl.maximum(lengths, 1).to(scales.dtype))
        tl.store(scales_N + first + places, scales, is_place)


@launched
@triton.jit(do_not_specialize=["num_lookups", "step"])
def _list_kernel(
    rows_N,
    listed,
    num_lookups,
    step,
    num_rows,
    CHUNK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the chunks that begin at BLOCK places, and the runs of several chunks."""
    first = tl.program_id(0) * BLOCK
    places = first + tl.arange(0, BLOCK)
    is_place = places < num_lookups
    rows = tl.load(rows_N + places, is_place, num_rows)
    is_first = rows != tl.load(rows_N + places - 1, is_place & (places > 0), -1)
    # Only if the first place's run begins before it, that place is searched.
    row = tl.load(rows_N + first)
    step = tl.where(tl.load(rows_N + first - 1, first > 0, -1) == row, step, 0)
    begin = count_at_most(rows_N, row - 1, first, step).to(tl.int32)
    begins = tl.associative_scan(tl.where(is_first, places, begin), 0, _larger)
    is_chunk = is_place & ((places - begins) % CHUNK_SIZE == 0)
    numbers = tl.cumsum(is_chunk.to(tl.int32), 0) - 1
    num_chunks = tl.sum(is_chunk.to(tl.int32), 0)
    chunks = chunks_in(listed) + tl.atomic_add(listed, num_chunks)
    tl.store(chunks + numbers, places, is_chunk)
    # A chunk ends where the next one begins; the end of the last one is found.
    tl.store(chunks + (num_lookups + numbers - 1), places, is_chunk & (numbers > 0))
    last = tl.max(tl.where(is_chunk, places, -1), 0)
    # In Triton's interpreter a scalar bool in a mask makes it int32, which Triton 3.9 refuses.
    following = tl.where(last >= 0, last, num_lookups) + tl.arange(0, CHUNK_SIZE)
    is_following = following < num_lookups
    of_last = tl.load(rows_N + last, last >= 0, -1)
    is_same = tl.load(rows_N + following, is_following, -1) == of_last
    end = last + tl.sum((is_following & is_same).to(tl.int32), 0)
    tl.store(chunks + (num_lookups + num_chunks - 1), end, num_chunks > 0)
    after = places + CHUNK_SIZE
    is_long = is_place & is_first & (rows < num_rows)
    is_long &= tl.load(rows_N + after, after < num_lookups, -1) == rows
    at = tl.atomic_add(listed + 1, tl.sum(is_long.to(tl.int32), 0))
    tl.store(
        long_runs_in(listed, num_lookups) + (at + tl.cumsum(is_long.to(tl.int32), 0) - 1),
        places,
        is_long,
    )
