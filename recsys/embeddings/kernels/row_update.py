"""Row update: gradients of equal rows summed in lookup order, each row moved once.

A table belongs to one part, or several parts share its rows by a hash of them, so no two threads
touch a row. A part takes its tables one after the other, because what a table needs then fits the
processor's caches:

    1. Every lookup of the table is chained to the one before it of the same row; a hash table
       knows the last of every row met.
    2. Row by row in order of first appearance, the chain's gradients are summed, read where
       backward left them, and the row and its state are moved.

Letters: T tables, S segments (a feature of a ledger entry looked up in a table), N rows looked up,
D dim. Numbers that index are unsigned, for the reason given in `pooled_lookup`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import prange

from recsys.embeddings.kernels.pooled_lookup import Bags
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.jit import kernel, num_parts, parallel_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.pooled_lookup import Lookups
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.row_space import RowSpace

__all__ = ["LedgerEntry", "row_update"]

_SGD, _ADAGRAD, _ROWWISE_ADAGRAD, _ADAM, _PARTIAL_ROWWISE_ADAM = range(5)
_KINDS = {
    SGD: _SGD,
    Adagrad: _ADAGRAD,
    RowWiseAdagrad: _ROWWISE_ADAGRAD,
    Adam: _ADAM,
    PartialRowWiseAdam: _PARTIAL_ROWWISE_ADAM,
}

# 2**64 / golden ratio: spreads neighbouring rows over the hash table.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NONE = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.uint64(1)


@dataclass(frozen=True)
class LedgerEntry:
    """What one backward pass leaves behind.

    Attributes:
        lookups: What was looked up where.
        bags: The input.
        gradient: Of the pooled rows, (B, W), contiguous.
    """

    lookups: Lookups
    bags: Bags
    gradient: Tensor


def row_update(
    space: RowSpace,
    states: Sequence[RowSpace],
    optimizer: RowOptimizer,
    rates_T2: NDArray[np.float64],
    ledger: Sequence[LedgerEntry],
) -> None:
    """Sum what the ledger holds for each row, in lookup order, and move each row once.

    The result does not depend on the number of threads. `update_reference` says what it is.

    Args:
        space: The tables.
        states: The tables' state, in the order of the optimizer's `state_sizes`.
        optimizer: The formula.
        rates_T2: What the optimizer's `rate_and_eps` gives for each table's learning rate and step.
        ledger: One entry per backward pass since the last update, in order.
    """
    if not ledger:
        return
    nothing = np.empty(0, space.dtype)
    first, second = (
        (states[number].flat, states[number].bases)
        if number < len(states)
        else (nothing, space.bases)
        for number in range(2)
    )
    beta1, beta2 = getattr(optimizer, "betas", (0.0, 0.0))
    _row_update_kernel(
        _Rows(space.flat, space.bases, *first, *second),
        _KINDS[type(optimizer)],
        rates_T2.astype(space.dtype),
        space.dtype.type(1 - beta1),
        space.dtype.type(1 - beta2),
        _segments(
            tuple(
                (entry.lookups, entry.bags.batch_size, _num_bags(entry.bags)) for entry in ledger
            ),
            len(space.sizes),
        ),
        _values(ledger, space.dtype),
        _join([entry.gradient.view(-1).numpy() for entry in ledger]),
        np.uint64(space.dim),
        num_parts(),
    )


class _Rows(NamedTuple):
    """The tables and their state; the latter empty where there is none."""

    flat: NDArray[Any]
    bases: NDArray[np.uint64]  # (T,)
    first: NDArray[Any]
    first_bases: NDArray[np.uint64]  # (T,)
    second: NDArray[Any]
    second_bases: NDArray[np.uint64]  # (T,)


class _Segments(NamedTuple):
    """Sorted by table; within a table, ledger entries stay in order."""

    of_table: NDArray[np.uint64]  # (T + 1,) where each table's segments begin
    first_bags: NDArray[np.uint64]  # (S,)
    num_bags: NDArray[np.uint64]  # (S,)
    first_gradients: NDArray[np.uint64]  # (S,) where the first bag's gradient begins
    widths: NDArray[np.uint64]  # (S,) from one bag's gradient to the next


class _Values(NamedTuple):
    """What was looked up: `Bags` of several entries as one, empty arrays in place of None."""

    rows: NDArray[Any]  # (N,)
    is_one_hot: bool
    offsets: NDArray[Any]
    has_weights: bool
    weights: NDArray[Any]
    is_mean: bool


class _Chains(NamedTuple):
    """The lookups of one table: those of the same row one behind the other."""

    nexts: NDArray[np.uint64]  # by lookup: the next of the same row
    sources: NDArray[np.uint64]  # by lookup: where its gradient begins
    scales: NDArray[Any]  # by lookup: its factor; empty where all are 1
    rows: NDArray[np.uint64]  # by distinct row
    firsts: NDArray[np.uint64]  # by distinct row: its first lookup
    lasts: NDArray[np.uint64]  # by distinct row: its last lookup
    hash_rows: NDArray[np.uint64]
    hash_numbers: NDArray[np.uint64]


@lru_cache(maxsize=64)
def _segments(entries: tuple[tuple[Lookups, int, int], ...], num_tables: int) -> _Segments:
    """Of entries of these lookups, batch sizes and numbers of bags."""
    segments = []
    first_bag = first_gradient = 0
    for lookups, batch_size, num_bags in entries:
        for table, position, column in zip(
            lookups.tables.tolist(),
            lookups.positions.tolist(),
            lookups.columns.tolist(),
            strict=True,
        ):
            bag = first_bag + position * batch_size
            segments.append((table, bag, batch_size, first_gradient + column, lookups.width))
        first_bag += num_bags
        first_gradient += batch_size * lookups.width
    segments.sort(key=lambda segment: segment[0])  # stable
    columns = np.array(segments, np.uint64).T.copy()
    of_table = np.searchsorted(columns[0].astype(np.int64), np.arange(num_tables + 1))
    return _Segments(of_table.astype(np.uint64), *columns[1:])


def _values(ledger: Sequence[LedgerEntry], dtype: np.dtype[Any]) -> _Values:
    bags = [entry.bags for entry in ledger]
    rows = _join([each.values for each in bags])
    is_one_hot = all(each.offsets is None for each in bags)
    is_mean = any(each.is_mean for each in bags)
    if is_mean and not all(each.is_mean or each.offsets is None for each in bags):
        bags = [_mean_by_weights(each, dtype) if each.is_mean else each for each in bags]
        is_mean = False
    has_weights = any(each.weights is not None for each in bags)
    return _Values(
        rows,
        is_one_hot,
        rows[:0] if is_one_hot else _join_offsets(bags),
        has_weights,
        _join([_weights_or_ones(each, dtype) for each in bags])
        if has_weights
        else np.empty(0, dtype),
        is_mean,
    )


def _num_bags(bags: Bags) -> int:
    return len(bags.values) if bags.offsets is None else len(bags.offsets) - 1


def _join(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _join_offsets(bags: Sequence[Bags]) -> NDArray[Any]:
    if len(bags) == 1 and bags[0].offsets is not None:
        return bags[0].offsets
    lengths = [
        np.ones(len(each.values), np.int64) if each.offsets is None else np.diff(each.offsets)
        for each in bags
    ]
    return np.concatenate([[0], np.cumsum(np.concatenate(lengths))])


def _mean_by_weights(bags: Bags, dtype: np.dtype[Any]) -> Bags:
    """Bags that are averaged, as bags that are summed with weights."""
    assert bags.offsets is not None
    lengths = np.diff(bags.offsets)
    shares = np.repeat(1 / np.maximum(lengths, 1), lengths).astype(dtype)
    weights = shares if bags.weights is None else bags.weights * shares
    return Bags(bags.values, bags.offsets, weights, bags.batch_size, is_mean=False)


def _weights_or_ones(bags: Bags, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.ones(len(bags.values), dtype) if bags.weights is None else bags.weights


@parallel_kernel
def _row_update_kernel(
    rows: _Rows,
    kind: int,
    rates_T2: NDArray[Any],
    share1: float,
    share2: float,
    segments: _Segments,
    values: _Values,
    gradient: NDArray[Any],
    dim: np.uint64,
    num_parts: int,
) -> None:
    """A part is a run of tables, or, of fewer tables than parts, a share of the rows of one."""
    num_tables = len(rows.bases)
    num_shares = 1 if num_tables >= num_parts else (num_parts + num_tables - 1) // num_tables
    num_lookups_T = np.zeros(num_tables, np.int64)
    for table in range(num_tables):
        for segment in range(segments.of_table[table], segments.of_table[table + 1]):
            first, count = segments.first_bags[segment], segments.num_bags[segment]
            if values.is_one_hot:
                num_lookups_T[table] += np.int64(count)
            else:
                begin, end = values.offsets[first], values.offsets[first + count]
                num_lookups_T[table] += np.int64(end) - np.int64(begin)
    total = num_lookups_T.sum() * num_shares
    most = num_lookups_T.max()
    for part in prange(num_parts):
        chains = _make_chains(most, values.has_weights or values.is_mean, rows.flat)
        summed_D = np.empty(dim, rows.flat.dtype)
        begin = 0
        for table in range(num_tables):
            for share in range(num_shares):
                middle = begin + num_lookups_T[table] // 2
                begin += num_lookups_T[table]
                if num_lookups_T[table] == 0 or middle * num_parts // total != part:
                    continue
                num_rows = _chain_lookups(
                    segments,
                    values,
                    segments.of_table[table],
                    segments.of_table[table + 1],
                    np.uint64(share),
                    np.uint64(num_shares),
                    chains,
                )
                _move_rows(
                    rows,
                    table,
                    chains,
                    num_rows,
                    gradient,
                    kind,
                    rates_T2[table, 0],
                    rates_T2[table, 1],
                    share1,
                    share2,
                    summed_D,
                )


@kernel
def _make_chains(most: int, is_scaled: bool, flat: NDArray[Any]) -> _Chains:
    """Room for a table's lookups, and a hash table that stays at most half full."""
    hash_size = 2
    while hash_size < 2 * most:
        hash_size *= 2
    return _Chains(
        np.empty(most, np.uint64),
        np.empty(most, np.uint64),
        np.empty(most if is_scaled else 0, flat.dtype),
        np.empty(most, np.uint64),
        np.empty(most, np.uint64),
        np.empty(most, np.uint64),
        np.empty(hash_size, np.uint64),
        np.empty(hash_size, np.uint64),
    )


@kernel
def _chain_lookups(
    segments: _Segments,
    values: _Values,
    first_segment: np.uint64,
    end_segment: np.uint64,
    share: np.uint64,
    num_shares: np.uint64,
    chains: _Chains,
) -> Any:
    """Chain one table's lookups of the rows of one share; the number of distinct rows."""
    hash_rows, hash_numbers = chains.hash_rows, chains.hash_numbers
    nexts, sources, scales = chains.nexts, chains.sources, chains.scales
    mask = np.uint64(len(hash_rows)) - _ONE
    is_scaled = len(scales) > 0
    hash_rows[:] = _NONE
    num_rows = num_lookups = np.uint64(0)
    for segment in range(first_segment, end_segment):
        source = segments.first_gradients[segment]
        first_bag = segments.first_bags[segment]
        for bag in range(first_bag, first_bag + segments.num_bags[segment]):
            begin, end = np.uint64(bag), np.uint64(bag) + _ONE
            if not values.is_one_hot:
                begin = np.uint64(values.offsets[bag])
                end = np.uint64(values.offsets[bag + _ONE])
            for position in range(begin, end):
                row = np.uint64(values.rows[position])
                spread = (row * _GOLDEN) >> np.uint64(32)
                if num_shares > _ONE and (spread >> np.uint64(16)) % num_shares != share:
                    continue
                nexts[num_lookups] = _NONE
                sources[num_lookups] = source
                if is_scaled:
                    scale = scales.dtype.type(1)
                    if values.has_weights:
                        scale = values.weights[position]
                    if values.is_mean:
                        scale /= scales.dtype.type(end - begin)
                    scales[num_lookups] = scale
                entry = spread & mask
                while hash_rows[entry] != row and hash_rows[entry] != _NONE:
                    entry = (entry + _ONE) & mask
                if hash_rows[entry] == row:
                    number = hash_numbers[entry]
                    nexts[chains.lasts[number]] = num_lookups
                else:
                    number = num_rows
                    hash_rows[entry] = row
                    hash_numbers[entry] = number
                    chains.rows[number] = row
                    chains.firsts[number] = num_lookups
                    num_rows += _ONE
                chains.lasts[number] = num_lookups
                num_lookups += _ONE
            source += segments.widths[segment]
    return num_rows


@kernel
def _move_rows(
    rows: _Rows,
    table: int,
    chains: _Chains,
    num_rows: int,
    gradient: NDArray[Any],
    kind: int,
    rate: float,
    eps: float,
    share1: float,
    share2: float,
    summed_D: NDArray[Any],
) -> None:
    """Sum every chain's gradients in lookup order and move its row.

    By the formulas of `recsys.embeddings.optimizer`. One function for a whole table: called for
    each row, it would hand over its arrays' fifty numbers each time, which takes longer than the
    row itself.
    """
    flat, first_state, second_state = rows.flat, rows.first, rows.second
    base, base1, base2 = rows.bases[table], rows.first_bases[table], rows.second_bases[table]
    nexts, sources, scales = chains.nexts, chains.sources, chains.scales
    dim = np.uint64(len(summed_D))
    is_scaled = len(scales) > 0
    for number in range(num_rows):
        lookup = chains.firsts[number]
        source = sources[lookup]
        if is_scaled:
            scale = scales[lookup]
            for d in range(dim):
                summed_D[d] = scale * gradient[source + d]
        else:
            for d in range(dim):
                summed_D[d] = gradient[source + d]
        lookup = nexts[lookup]
        while lookup != _NONE:
            source = sources[lookup]
            if is_scaled:
                scale = scales[lookup]
                for d in range(dim):
                    summed_D[d] += scale * gradient[source + d]
            else:
                for d in range(dim):
                    summed_D[d] += gradient[source + d]
            lookup = nexts[lookup]
        row = chains.rows[number]
        first = base + row * dim
        if kind == _SGD:
            for d in range(dim):
                flat[first + d] -= rate * summed_D[d]
        elif kind == _ADAGRAD:
            of_row = base1 + row * dim
            for d in range(dim):
                squares = first_state[of_row + d] + summed_D[d] * summed_D[d]
                first_state[of_row + d] = squares
                flat[first + d] -= rate * summed_D[d] / (np.sqrt(squares) + eps)
        elif kind == _ROWWISE_ADAGRAD:
            of_row = base1 + row
            first_state[of_row] += _sum_of_squares(summed_D) / flat.dtype.type(dim)
            step = rate / (np.sqrt(first_state[of_row]) + eps)
            for d in range(dim):
                flat[first + d] -= step * summed_D[d]
        elif kind == _ADAM:
            of_row, of_row2 = base1 + row * dim, base2 + row * dim
            for d in range(dim):
                average = first_state[of_row + d]
                average += share1 * (summed_D[d] - average)
                squares = second_state[of_row2 + d]
                squares += share2 * (summed_D[d] * summed_D[d] - squares)
                first_state[of_row + d] = average
                second_state[of_row2 + d] = squares
                flat[first + d] -= rate * (average / (np.sqrt(squares) + eps))
        else:
            of_row, of_row2 = base1 + row * dim, base2 + row
            squares = second_state[of_row2]
            squares += share2 * (_sum_of_squares(summed_D) / flat.dtype.type(dim) - squares)
            second_state[of_row2] = squares
            step = rate / (np.sqrt(squares) + eps)
            for d in range(dim):
                average = first_state[of_row + d]
                average += share1 * (summed_D[d] - average)
                first_state[of_row + d] = average
                flat[first + d] -= step * average


@kernel
def _sum_of_squares(summed_D: NDArray[Any]) -> Any:
    """In eight sums that the processor can make side by side, always the same eight."""
    zero = summed_D.dtype.type(0)
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = zero
    whole = len(summed_D) - len(summed_D) % 8
    for d in range(np.uint64(0), np.uint64(whole), np.uint64(8)):
        s0 += summed_D[d] * summed_D[d]
        s1 += summed_D[d + np.uint64(1)] * summed_D[d + np.uint64(1)]
        s2 += summed_D[d + np.uint64(2)] * summed_D[d + np.uint64(2)]
        s3 += summed_D[d + np.uint64(3)] * summed_D[d + np.uint64(3)]
        s4 += summed_D[d + np.uint64(4)] * summed_D[d + np.uint64(4)]
        s5 += summed_D[d + np.uint64(5)] * summed_D[d + np.uint64(5)]
        s6 += summed_D[d + np.uint64(6)] * summed_D[d + np.uint64(6)]
        s7 += summed_D[d + np.uint64(7)] * summed_D[d + np.uint64(7)]
    for d in range(np.uint64(whole), np.uint64(len(summed_D))):
        s0 += summed_D[d] * summed_D[d]
    return ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))
