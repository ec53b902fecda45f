"""The ledger of one row space: the gradients of backward passes, as arrays for a kernel.

A single entry is passed to the kernel as it is. Several entries are joined in order: their ids are
copied into one array, and their gradients stay where backward left them. Like the tables, a kernel
sees the gradients as one array that begins at the lowest address.

Letters: T tables, S segments (a feature of a ledger entry looked up in a table), N rows looked up.
"""

from __future__ import annotations

from bisect import insort
from functools import lru_cache
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys.embeddings.rows.lookups import Bags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.rows.row_space import RowSpace
    from recsys.embeddings.tiers.ticket import Ticket

__all__ = [
    "JoinedLedger",
    "LedgerEntry",
    "Segments",
    "add_in_order",
    "join_ledger",
    "next_lookup",
    "tables_in",
]

# Numbers lookups in the order of the calls.
next_lookup: Callable[[], int] = count(1).__next__


class LedgerEntry(NamedTuple):
    """The input and the gradient of one backward pass.

    Attributes:
        lookups: Which features were looked up in which tables.
        bags: The input, copied; in two tiers, with slots in place of rows.
        gradient: Gradient of the pooled rows, (B, W) or (B, F, W / F), in the compute dtype; each
            sample's numbers are contiguous, and samples are in ascending order of address.
        version: The gradient's version when backward passed it on; None if no caller can write to
            it.
        tables: The tables as of the lookup; in two tiers, the tables of the cold store.
        rows: In two tiers, the input with rows.
        ticket: In two tiers, the ticket that holds the slots.
        claimed: The lookups that the ticket has slots for: all of `lookups`, and those in tables
            that were frozen.
        is_cut: Whether the ticket has slots of further rows, which are not updated.
        number: The lookup's number, by `next_lookup`; 0 for a gradient that has no lookup.
    """

    lookups: Lookups
    bags: Bags
    gradient: Tensor
    version: int | None = None
    tables: Sequence[Tensor] = ()
    rows: Bags | None = None
    ticket: Ticket | None = None
    claimed: Lookups | None = None
    is_cut: bool = False
    number: int = 0

    def require_on(self, device: torch.device, names: Sequence[str]) -> None:
        """Check that the tables are where they were looked up.

        Args:
            device: Where rows are looked up now.
            names: Names of all tables, for the error.

        Raises:
            RuntimeError: the module was moved after the lookup.
        """
        if self.gradient.device != device:
            raise RuntimeError(
                f"table {names[self.lookups.distinct_tables[0]]!r}: was looked up on "
                f"'{self.gradient.device}' and moved to '{device}' before backward; call backward "
                "before .to(), or look the mini-batch up again"
            )

    def require_rows_in(self, tables: Sequence[Tensor]) -> None:
        """Check that tables still have the rows that were looked up.

        Without this check a kernel could write out of bounds.

        Raises:
            ValueError: a table has fewer rows than before (`weight.data = ...`), or another dim.
        """
        if self.tables is tables:
            return
        for table in self.lookups.distinct_tables:
            before, now = self.tables[table].shape, tables[table].shape
            if now[0] < before[0] or now[1:] != before[1:]:
                raise ValueError(
                    f"a table of shape {tuple(before)} was replaced by one of shape {tuple(now)} "
                    "after its lookup and before its update; set its grad to None to drop the "
                    "gradient, or restore the rows"
                )


def add_in_order(ledger: list[LedgerEntry], entry: LedgerEntry) -> None:
    """Add an entry to a ledger, in the order of the lookups.

    Autograd decides the order of backward, and it is another one for resident rows, where one node
    serves several lookups, than for rows in two tiers. Gradients of a row that several lookups
    share must be added in one order.
    """
    insort(ledger, entry, key=_number_of)


_number_of = attrgetter("number")


def tables_in(ledger: Sequence[LedgerEntry]) -> Sequence[int]:
    """Numbers of the tables that were looked up, ascending."""
    return sorted({table for entry in ledger for table in entry.lookups.distinct_tables})


class JoinedLedger(NamedTuple):
    """All entries of a ledger as one; do not write to the arrays.

    Attributes:
        order: `tables` and `of_table` of `Segments`, (2, T + 1).
        segments: The other arrays of `Segments`, (4, S).
        bags: The input; its batch size has no meaning.
        gradients: The gradient of each entry; they keep the memory alive.
        gradient_at: The lowest address of all gradients.
        num_gradients: Numbers from that address to the last gradient's end.
    """

    order: NDArray[np.uint64]
    segments: NDArray[np.uint64]
    bags: Bags
    gradients: Sequence[Tensor]
    gradient_at: int
    num_gradients: int


def join_ledger(ledger: Sequence[LedgerEntry], space: RowSpace) -> JoinedLedger:
    """Join all entries of a ledger.

    Args:
        ledger: At least one entry.
        space: The tables.
    """
    dtype, entries, shapes, spans = space.compute_dtype, [], [], []
    for entry in ledger:
        gradient = entry.gradient
        # The tables' dtype may have changed since the lookup; torch may store a tensor negated
        # (is_neg); and a view of bytes may be unaligned.
        if gradient.dtype is not dtype or gradient.is_neg():
            gradient = gradient.to(dtype).resolve_neg().contiguous()
        if gradient.data_ptr() % dtype.itemsize:
            gradient = gradient.clone()
        lookups, bags, stride = entry.lookups, entry.bags, gradient.stride(0)
        num_bags = len(bags.values) if bags.offsets is None else len(bags.offsets) - 1
        entries.append((bags, gradient, gradient.data_ptr()))
        shapes.append((lookups, bags.batch_size, num_bags, stride))
        # Numbers from the first to the last of the gradient, including gaps between samples.
        batch_size = gradient.shape[0]
        spans.append((batch_size - 1) * stride + lookups.width if batch_size else 0)
    order_2T, segments_4S, entry_of_segment = _segments(tuple(shapes), space.sizes_key)
    inputs, gradients, addresses = zip(*entries, strict=True)
    if len(entries) == 1:
        [bags], [address], [span] = inputs, addresses, spans
        return JoinedLedger(order_2T, segments_4S, bags, gradients, address, span)
    low = min(addresses)
    begins = [(address - low) // dtype.itemsize for address in addresses]
    segments_4S = segments_4S.copy()
    segments_4S[_FIRST_GRADIENTS] += np.array(begins, np.uint64)[entry_of_segment]
    num_gradients = max(begin + span for begin, span in zip(begins, spans, strict=True))
    bags = _join_bags(inputs, space.nothing.dtype)
    return JoinedLedger(order_2T, segments_4S, bags, gradients, low, num_gradients)


class Segments(NamedTuple):
    """Sorted by table; within a table, ledger entries stay in order."""

    tables: NDArray[np.uint64]  # (T + 1,) the largest first; the last number has no meaning
    of_table: NDArray[np.uint64]  # (T + 1,) where each table's segments begin
    first_bags: NDArray[np.uint64]  # (S,)
    num_bags: NDArray[np.uint64]  # (S,)
    first_gradients: NDArray[np.uint64]  # (S,) where the first bag's gradient begins
    widths: NDArray[np.uint64]  # (S,) from one bag's gradient to the next


_FIRST_GRADIENTS = 2  # among the last four rows of `Segments`


@lru_cache(maxsize=64)
def _segments(
    entries: tuple[tuple[Lookups, int, int, int], ...], sizes_T: bytes
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]:
    """Make the arrays of `Segments`; entries with the same shapes share one result.

    Args:
        entries: For each entry: its lookups, batch size, number of bags, and distance from one
            bag's gradient to the next.
        sizes_T: The bytes of the tables' sizes.

    Returns:
        `tables` and `of_table`; the other arrays, where gradients begin relative to their entry;
        and the entry of each segment.
    """
    segments = []
    first_bag = 0
    for number, (lookups, batch_size, num_bags, stride) in enumerate(entries):
        for table, position, column in zip(
            lookups.tables.tolist(),
            lookups.positions.tolist(),
            lookups.columns.tolist(),
            strict=True,
        ):
            bag = first_bag + position * batch_size
            segments.append((table, bag, batch_size, column, stride, number))
        first_bag += num_bags
    segments.sort(key=lambda segment: segment[0])  # stable
    columns = np.array(segments, np.uint64).T.copy()
    sizes = np.frombuffer(sizes_T, np.uint64).astype(np.int64)
    tables = np.append(np.argsort(-sizes, kind="stable"), 0)
    of_table = np.searchsorted(columns[0].astype(np.int64), np.arange(len(sizes) + 1))
    return (
        np.stack([tables, of_table]).astype(np.uint64),
        columns[1:5].copy(),
        columns[5].astype(np.int64),
    )


def _join_bags(bags: Sequence[Bags], dtype: np.dtype[Any]) -> Bags:
    """Join the bags of several entries; the batch size of the result has no meaning."""
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


def _join_offsets(bags: Sequence[Bags]) -> NDArray[Any]:
    begins, num_values = [], 0
    for each in bags:
        if each.offsets is None:
            begins.append(np.arange(num_values, num_values + len(each.values)))
        else:
            begins.append(each.offsets[:-1].astype(np.int64) + num_values)
        num_values += len(each.values)
    return np.concatenate([*begins, [num_values]])


def _mean_by_weights(bags: Bags, dtype: np.dtype[Any]) -> Bags:
    """Convert mean pooling to sum pooling with weights."""
    assert bags.offsets is not None
    lengths = np.diff(bags.offsets)
    shares = np.repeat(1 / np.maximum(lengths, 1), lengths).astype(dtype)
    weights = shares if bags.weights is None else bags.weights * shares
    return Bags(bags.values, bags.offsets, weights, bags.batch_size, is_mean=False)


def _weights_or_ones(bags: Bags, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.ones(len(bags.values), dtype) if bags.weights is None else bags.weights
