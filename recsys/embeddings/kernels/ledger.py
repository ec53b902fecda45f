"""The ledger of one row space: what backward passes leave behind, as arrays for a kernel.

One entry, the usual case, is handed on as it is; several are joined, in order.

Letters: T tables, S segments (a feature of a ledger entry looked up in a table), N rows looked up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys.embeddings.kernels.pooled_lookup import Bags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.pooled_lookup import Lookups
    from recsys.embeddings.residency import Ticket
    from recsys.embeddings.row_space import RowSpace

__all__ = ["LedgerEntry", "Segments", "join_ledger", "tables_in"]


class LedgerEntry(NamedTuple):
    """What one backward pass leaves behind.

    Attributes:
        lookups: What was looked up where.
        bags: The input. Unless rows are updated in the same backward, in memory of its own.
        gradient: Of the pooled rows, (B, W) or (B, F, W / F), in the dtype that rows are computed
            in; each of the B contiguous, and behind the one before.
        version: Of the gradient when backward handed it over; None where the gradient is our own.
        tables: What was looked up in, as it was then; in two tiers, what the slots' rows are of.
        rows: The input by rows, where `bags` has slots of them.
        ticket: Has the slots.
        claimed: What the ticket has slots of: more than `lookups` where a table was frozen.
    """

    lookups: Lookups
    bags: Bags
    gradient: Tensor
    version: int | None = None
    tables: Sequence[Tensor] = ()
    rows: Bags | None = None
    ticket: Ticket | None = None
    claimed: Lookups | None = None

    def require_unchanged(self) -> None:
        """Refuse a gradient that was overwritten since.

        Raises:
            RuntimeError: it was.
        """
        if self.version is not None and self.gradient._version != self.version:
            raise RuntimeError(
                "the gradient of a lookup was overwritten after its backward, before its rows were "
                "updated; step first, or overwrite a clone of it"
            )

    def require_rows_in(self, tables: Sequence[Tensor]) -> None:
        """Refuse tables that may lack rows which were looked up: they would be written to.

        Raises:
            ValueError: a table was exchanged for a shorter one, or one of another dim.
        """
        if self.tables is tables:
            return
        for table in self.lookups.distinct_tables:
            before, now = self.tables[table].shape, tables[table].shape
            if now[0] < before[0] or now[1:] != before[1:]:
                raise ValueError(
                    f"a table of shape {tuple(before)} was looked up, and before its gradient was "
                    f"used it was exchanged for one of {tuple(now)}; set the grad of that one to "
                    "None to forget the gradient, or give the rows back"
                )


def tables_in(ledger: Sequence[LedgerEntry]) -> Sequence[int]:
    """Numbers of the tables that were looked up, in order."""
    if len(ledger) == 1:
        return ledger[0].lookups.distinct_tables
    return sorted({table for entry in ledger for table in entry.lookups.distinct_tables})


def join_ledger(
    ledger: Sequence[LedgerEntry], space: RowSpace
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], Bags, Tensor, int]:
    """All entries as one: what was looked up in which table, its rows, and the gradients.

    Args:
        ledger: At least one entry.
        space: The tables.

    Returns:
        Two arrays whose rows are those of `Segments`, (2, T + 1) and (4, S), not to be written to;
        bags, whose batch size says nothing; and gradients, with how many numbers there are in
        memory from the first to the last.
    """
    ledger = [_as_it_lies(entry, space.computed) for entry in ledger]
    shapes = tuple(map(_shape, ledger))
    order_2T, segments_4S = _segments(shapes, space.sizes_key)
    if len(ledger) == 1:
        [(_, bags, gradient, *_)], [(*_, span)] = ledger, shapes
        return order_2T, segments_4S, bags, gradient, span
    bags = _join_bags([entry.bags for entry in ledger], space.compute_dtype)
    gradient = torch.cat([_flat(entry) for entry in ledger])
    return order_2T, segments_4S, bags, gradient, len(gradient)


def _as_it_lies(entry: LedgerEntry, dtype: torch.dtype) -> LedgerEntry:
    """With a gradient that kernels may read from memory.

    Tables may have become others of another dtype since; and a tensor may say of its memory that
    it is the negative.
    """
    gradient = entry.gradient
    if gradient.dtype is dtype and not gradient.is_neg():
        return entry
    return entry._replace(gradient=gradient.to(dtype).resolve_neg().contiguous())


class Segments(NamedTuple):
    """Sorted by table; within a table, ledger entries stay in order."""

    tables: NDArray[np.uint64]  # (T + 1,) the largest first; the last number is none
    of_table: NDArray[np.uint64]  # (T + 1,) where each table's segments begin
    first_bags: NDArray[np.uint64]  # (S,)
    num_bags: NDArray[np.uint64]  # (S,)
    first_gradients: NDArray[np.uint64]  # (S,) where the first bag's gradient begins
    widths: NDArray[np.uint64]  # (S,) from one bag's gradient to the next


def _shape(entry: LedgerEntry) -> tuple[Lookups, int, int, int, int]:
    """What its segments depend on."""
    lookups, bags, gradient, *_ = entry
    return lookups, bags.batch_size, _num_bags(bags), gradient.stride(0), _span(entry)


@lru_cache(maxsize=64)
def _segments(
    entries: tuple[tuple[Lookups, int, int, int, int], ...], sizes_T: bytes
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Of entries of these lookups, batch sizes, numbers of bags, distances from one bag's gradient
    to the next, and from the first number of all to the last; tables of these sizes.
    """  # noqa: D205  # one sentence
    segments = []
    first_bag = first_gradient = 0
    for lookups, batch_size, num_bags, stride, span in entries:
        for table, position, column in zip(
            lookups.tables.tolist(),
            lookups.positions.tolist(),
            lookups.columns.tolist(),
            strict=True,
        ):
            bag = first_bag + position * batch_size
            segments.append((table, bag, batch_size, first_gradient + column, stride))
        first_bag += num_bags
        first_gradient += span
    segments.sort(key=lambda segment: segment[0])  # stable
    columns = np.array(segments, np.uint64).T.copy()
    sizes = np.frombuffer(sizes_T, np.uint64).astype(np.int64)
    tables = np.append(np.argsort(-sizes, kind="stable"), 0)
    of_table = np.searchsorted(columns[0].astype(np.int64), np.arange(len(sizes) + 1))
    return np.stack([tables, of_table]).astype(np.uint64), columns[1:].copy()


def _join_bags(bags: Sequence[Bags], dtype: np.dtype[Any]) -> Bags:
    """Of several entries as of one; their batch sizes do not count here."""
    is_one_hot = all(each.offsets is None for each in bags)
    is_mean = any(each.is_mean for each in bags)
    if is_mean and not all(each.is_mean or each.offsets is None for each in bags):
        bags = [_mean_by_weights(each, dtype) if each.is_mean else each for each in bags]
        is_mean = False
    has_weights = any(each.weights is not None for each in bags)
    return Bags(
        np.concatenate([each.values for each in bags]),
        None if is_one_hot else _join_offsets(bags),
        np.concatenate([_weights_or_ones(each, dtype) for each in bags]) if has_weights else None,
        sum(each.batch_size for each in bags),
        is_mean,
    )


def _flat(entry: LedgerEntry) -> Tensor:
    """Its gradient from the first number to the last, with what lies between its rows."""
    return entry.gradient.as_strided((_span(entry),), (1,))


def _span(entry: LedgerEntry) -> int:
    """How many numbers that is."""
    batch_size, stride = entry.gradient.shape[0], entry.gradient.stride(0)
    return (batch_size - 1) * stride + entry.lookups.width if batch_size else 0


def _num_bags(bags: Bags) -> int:
    return len(bags.values) if bags.offsets is None else len(bags.offsets) - 1


def _join_offsets(bags: Sequence[Bags]) -> NDArray[Any]:
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
