"""Runs: the lookups of a ledger sorted by row, and cut into chunks.

    locate   the row of every lookup; if it cannot be computed later, where its gradient is
    sort     by row, with torch; the lookups of one row, a run, stay in lookup order
    list     chunks: `CHUNK` lookups of a run each, counted from its first lookup

Only the device knows how many chunks there are. In which places of the list they are depends on the
order in which programs finish; what is computed of them must not.

Letters: L lookups (a feature in a table), F features, B samples, N lookups of a ledger, D dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from recsys._support.cuda.triton_launches import launched
from recsys._support.cuda.triton_support import cdiv
from recsys.embeddings.kernels.torch.bags import layers_of, lengths_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from torch import Tensor

    from recsys.embeddings.kernels.torch.bags import Layer, TorchBags
    from recsys.embeddings.kernels.torch.row_space import TorchRows
    from recsys.embeddings.rows.ledger import LedgerEntry

__all__ = [
    "CHUNK",
    "Runs",
    "chunks_in",
    "count_at_most",
    "divided",
    "find_runs",
    "first_step",
    "long_runs_in",
]

CHUNK = 32
_MOST_LOOKUPS = 2**30  # places, and some more, are int32
_NUM_COUNTS = 16  # two and then unused ones, so that the chunks begin at a multiple of 64 bytes
_BLOCK, _NUM_WARPS = 256, 2  # lookups that a program locates or lists


class Runs(NamedTuple):
    """The lookups of a ledger, sorted by row, and where their gradients are.

    Attributes:
        rows: The row of each lookup, ascending, (N,) int32 or int64; R or more for no row.
        order: Number of each of these lookups in the ledger, (N,) int64.
        listed: Chunks and long runs, those of several chunks, in any order, int32: the number of
            chunks and of long runs; from `chunks_in` on, where chunks begin, (N,), and end, (N,);
            then where long runs begin, (N / CHUNK,). One array, since each argument of a launch
            takes time on the host.
        gradients: All gradients, (B, W) each. Kernels find the others from the first one; they are
            kept here, since some are copies.
        sources: Where the gradient of each lookup of the ledger begins, in numbers from the first
            one, (N,) int64; None for one-hot bags of one entry, where it is computed.
        scales: Factor of each lookup of the ledger, (N,); None for 1.
        first_columns: First column of each lookup, as every D-th number; None if there are no
            columns between lookups. For `sources` of None, as is `batch_size`.
        batch_size: B.
        vector: A number that all beginnings are multiples of, for wide loads.
    """

    rows: Tensor
    order: Tensor
    listed: Tensor
    gradients: Sequence[Tensor]
    sources: Tensor | None
    scales: Tensor | None
    first_columns: Tensor | None
    batch_size: int
    vector: int


class _Part(NamedTuple):
    """Some lookups of one entry.

    Attributes:
        layer: The lookups.
        bags: The input.
        gradient: Of all columns, (B, W); each sample's columns are contiguous.
        num_places: The number of lookups, and of values without a lookup.
        is_wide: Whether each gradient begins at a multiple of 16 bytes.
    """

    layer: Layer
    bags: TorchBags
    gradient: Tensor
    num_places: int
    is_wide: bool


def find_runs(space: TorchRows, ledger: Sequence[LedgerEntry]) -> Runs | None:
    """Sort the lookups of a ledger by row.

    Args:
        space: The tables.
        ledger: One entry per backward pass, in order; bags are `TorchBags`.

    Returns:
        The runs; None if the ledger has no lookups or the tables have no rows.
    """
    parts = list(_parts(space, ledger))
    num_lookups = sum(part.num_places for part in parts)
    if not num_lookups or not space.num_rows:
        return None
    assert num_lookups < _MOST_LOOKUPS
    device, numbers_of_16_bytes = space.device, 16 // space.compute_dtype.itemsize
    num_listed = _NUM_COUNTS + 2 * num_lookups + num_lookups // CHUNK
    listed = torch.empty(num_listed, dtype=torch.int32, device=device)
    rows, sources, scales = _located(space, parts, num_lookups, listed)
    rows, order = rows.sort(stable=True)
    found = Runs(
        rows,
        order,
        listed,
        [part.gradient for part in parts],
        sources,
        scales,
        parts[0].layer.columns,
        parts[0].bags.batch_size,
        numbers_of_16_bytes if all(part.is_wide for part in parts) else 1,
    )
    _list_kernel[(cdiv(num_lookups, _BLOCK),)](
        rows,
        listed,
        num_lookups,
        first_step(num_lookups),
        space.num_rows,
        CHUNK_SIZE=CHUNK,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return found


def first_step(num: int) -> int:
    """The first step of `count_at_most` among `num` numbers."""
    return 1 << max(num.bit_length() - 1, 0)


def _parts(space: TorchRows, ledger: Sequence[LedgerEntry]) -> Iterator[_Part]:
    """The lookups of every entry, in the order of the torch kernel."""
    for lookups, any_bags, gradient, *_ in ledger:
        bags: Any = any_bags  # `TorchBags`
        if not bags.batch_size or not len(lookups.tables):
            continue
        gradient_BW = gradient.to(space.compute_dtype).resolve_neg().flatten(1)
        if gradient_BW.stride(1) != 1:
            gradient_BW = gradient_BW.contiguous()
        whole, layers = layers_of(space, lookups, bags.num_features)
        # What must be a multiple of 16 bytes for every gradient to be one.
        numbers = 16 // gradient_BW.dtype.itemsize
        is_wide = (
            gradient_BW.data_ptr() % 16 == 0
            and gradient_BW.stride(0) % numbers == 0
            and space.dim % numbers == 0
            and whole.multiple % numbers == 0
        )
        if bags.is_plain:
            yield _Part(whole, bags, gradient_BW, len(lookups.tables) * bags.batch_size, is_wide)
            continue
        for layer in layers:
            yield _Part(layer, bags, gradient_BW, len(bags.values), is_wide)


def _located(
    space: TorchRows, parts: Sequence[_Part], num_lookups: int, listed: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`rows` before they are sorted, `sources` and `scales`; the counts in `listed` become 0."""
    device, dtype = space.device, space.compute_dtype
    is_small = space.num_rows < 2**31  # half the bytes to sort
    rows = torch.empty(num_lookups, dtype=torch.int32 if is_small else torch.int64, device=device)
    sources = scales = None
    if len(parts) > 1 or not parts[0].bags.is_plain:
        sources = torch.empty(num_lookups, dtype=torch.int64, device=device)
    if any(part.bags.weights is not None or part.bags.is_mean for part in parts):
        scales = torch.empty(num_lookups, dtype=dtype, device=device)
    first_address = parts[0].gradient.data_ptr()
    first = 0
    for layer, bags, gradient, num_places, _ in parts:
        if not num_places:
            continue
        num_bags = bags.num_features * bags.batch_size
        are_counted = bags.is_mean and bags.padding is not None
        _locate_kernel[(cdiv(num_places, _BLOCK),)](
            rows,
            sources,
            scales,
            listed,
            first,
            bags.values,
            bags.offsets,
            bags.weights,
            lengths_of(bags) if are_counted else None,
            layer.positions,
            layer.first_rows,
            layer.sizes,
            layer.columns,
            layer.lookup_of_feature,
            num_places,
            bags.batch_size,
            num_bags,
            first_step(num_bags + 1),
            (gradient.data_ptr() - first_address) // dtype.itemsize,
            gradient.stride(0),
            bags.padding or 0,
            space.num_rows,
            layer.positions.numel(),
            DIM=space.dim,
            IS_PLAIN=bags.is_plain,
            IS_MEAN=bags.is_mean,
            HAS_PADDING=bags.padding is not None,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
        first += num_places
    return rows, sources, scales


@triton.jit
def count_at_most(array, limits, num, step):
    """How many of the first `num` numbers of an ascending array are at most each limit.

    If the array is not ascending, as invalid offsets are not, the result is still 0 to `num`.
    `step` is a power of two that is greater than `num` / 2.
    """
    count = limits * 0
    while step > 0:
        probe = count + step.to(limits.dtype)
        is_in = probe <= num
        is_counted = is_in & (tl.load(array + probe - 1, is_in, 0) <= limits)
        count = tl.where(is_counted, probe, count)
        step = step // 2
    return count


@triton.jit
def chunks_in(listed):
    """Where the chunks of `Runs.listed` begin: after `_NUM_COUNTS` places."""
    return listed + 16


@triton.jit
def long_runs_in(listed, num_lookups):
    """Where the long runs of `Runs.listed` begin."""
    return chunks_in(listed) + 2 * num_lookups


@triton.jit
def divided(dividend, divisor):
    """Rounded to nearest, as torch does it."""
    return tl.div_rn(dividend, divisor) if dividend.dtype == tl.float32 else dividend / divisor


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@launched
@triton.jit(
    do_not_specialize=[
        "first",
        "num_places",
        "batch_size",
        "num_bags",
        "step",
        "gradient_at",
        "stride",
        "padding",
        "num_lookups",
    ],
    do_not_specialize_on_alignment=["values", "offsets", "weights"],
)
def _locate_kernel(
    rows_N,
    sources_N,
    scales_N,
    listed,
    first,
    values,
    offsets,
    weights,
    lengths,
    positions,
    first_rows,
    sizes,
    first_columns,
    lookup_of_feature,
    num_places,
    batch_size,
    num_bags,
    step,
    gradient_at: tl.int64,  # always: gradients may be more than 2**31 numbers apart
    stride,
    padding,
    num_rows,
    num_lookups,
    DIM: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    IS_MEAN: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Locate BLOCK lookups: feature by feature if bags are one-hot, else value by value."""
    if tl.program_id(0) == 0:
        tl.store(listed + tl.arange(0, 2), tl.zeros([2], tl.int32))
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_place = places < num_places
    if IS_PLAIN:
        lookups = tl.where(is_place, places // batch_size, num_lookups).to(tl.int64)
        samples = places % batch_size
        position = tl.load(positions + lookups, is_place, 0)
        ids = tl.load(values + position * batch_size + samples, is_place, -1).to(tl.int64)
    else:
        bags = places
        if offsets is not None:
            limits = places.to(offsets.dtype.element_ty)
            bags = tl.maximum(count_at_most(offsets, limits, num_bags + 1, step) - 1, 0)
        samples = bags % batch_size
        lookups = tl.load(lookup_of_feature + bags // batch_size, is_place, num_lookups)
        ids = tl.load(values + places, is_place, -1).to(tl.int64)
    is_row = (ids >= 0) & (ids < tl.load(sizes + lookups))
    if HAS_PADDING:
        is_row &= ids != padding
    rows = tl.where(is_row, ids + tl.load(first_rows + lookups), num_rows)
    tl.store(rows_N + first + places, rows.to(rows_N.dtype.element_ty), is_place)
    if sources_N is not None:
        begins = gradient_at + samples.to(tl.int64) * stride
        if first_columns is not None:
            begins += tl.load(first_columns + lookups * DIM, lookups < num_lookups, 0)
        else:
            begins += lookups * DIM
        tl.store(sources_N + first + places, begins, is_place)
    if scales_N is not None:
        scales = tl.full([BLOCK], 1, scales_N.dtype.element_ty)
        if weights is not None:
            scales = tl.load(weights + places, is_place, 0).to(scales.dtype)
        if IS_MEAN:
            is_bag = bags < num_bags
            if lengths is not None:
                length = tl.load(lengths + bags, is_bag, 1)
            else:
                length = tl.load(offsets + bags + 1, is_bag, 1) - tl.load(offsets + bags, is_bag, 0)
            scales = divided(scales, tl.maximum(length, 1).to(scales.dtype))
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
