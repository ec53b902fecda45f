"""Leaves the lookups of stale rows out of a ledger, so that an update does not change these rows.

An entry that loses lookups gets bags of its own, one after another for each lookup. With mean
pooling, these have weights, because the rest of a bag is still divided by the whole bag's length.

Letters: B samples, L lookups, K values that stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.jit import kernel
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.rows.lookups import Bags, Lookups
from recsys.embeddings.staleness.host_bags import NO_PADDING, kernel_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.rows.ledger import LedgerEntry

__all__ = ["LedgerCutter"]

_MOST_KEPT = 64


class LedgerCutter:
    """Cuts ledgers; keeps what depends on the lookups alone.

    Attributes:
        num_lookups: Lookups in the ledgers so far, without padding.
        num_left_out: How many of them were left out.
    """

    def __init__(self) -> None:
        self.num_lookups = self.num_left_out = 0
        self._in_order: dict[Lookups, Lookups] = {}

    def cut(
        self,
        ledger: Sequence[LedgerEntry],
        stale: NDArray[np.uint64],
        first_words: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> list[LedgerEntry]:
        """The entries without lookups of stale rows.

        The gradients of other rows stay as they are: a mean is still divided by the length of the
        whole bag. An entry of stale rows only is left out.

        Args:
            ledger: The entries.
            stale: One bit per row.
            first_words: Where the words of each table begin, (T + 1,).
            sizes: E of each table, (T,).
        """
        found = (self._cut_entry(entry, stale, first_words, sizes) for entry in ledger)
        return [entry for entry in found if entry is not None]

    def count_whole(self, ledger: Sequence[LedgerEntry]) -> None:
        """Count the lookups of a ledger of which none is left out."""
        for entry in ledger:
            rows = entry.bags if entry.rows is None else entry.rows
            _, positions, values, offsets, is_one_hot, size, padding = kernel_arguments(
                entry.lookups, rows
            )
            begins = positions.astype(np.int64) * size
            ends = begins + size
            if not is_one_hot:
                begins, ends = offsets[begins], offsets[ends]
            self.num_lookups += int((ends - begins).sum())
            if padding != NO_PADDING:
                for begin, end in zip(begins, ends, strict=True):
                    self.num_lookups -= int((values[begin:end] == padding).sum())

    def _cut_entry(
        self,
        entry: LedgerEntry,
        stale: NDArray[np.uint64],
        first_words: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> LedgerEntry | None:
        rows: Any = entry.bags if entry.rows is None else entry.rows
        arguments = kernel_arguments(entry.lookups, rows)
        _, positions, values, offsets, is_one_hot, batch_size, _ = arguments
        num_bags = len(positions) * batch_size
        most = num_bags
        if not is_one_hot:
            first_bags = positions.astype(np.int64) * batch_size
            most = int((offsets[first_bags + batch_size] - offsets[first_bags]).sum())
        places_K = np.empty(most, np.int64)
        bounds = np.zeros(num_bags + 1, values.dtype)
        lengths = np.zeros(num_bags, np.int64)
        _cut_kernel(stale, first_words, sizes, places_K, bounds, lengths, *arguments)
        num_left, num_lookups = int(bounds[-1]), int(lengths.sum())
        self.num_lookups += num_lookups
        self.num_left_out += num_lookups - num_left
        if num_left == num_lookups:
            return entry
        if not num_left:
            return None
        places_K = places_K[:num_left]
        divisors = lengths.repeat(np.diff(bounds)) if entry.bags.is_mean else None
        is_on_device = isinstance(rows, TorchBags)
        choose: Any = _choose_on_device if is_on_device else _choose
        chosen = places_K, bounds, divisors, entry.gradient.dtype
        return entry._replace(
            lookups=self._lookups_in_order(entry.lookups),
            bags=choose(entry.bags, *chosen),
            rows=None if entry.rows is None else choose(entry.rows, *chosen),
            is_cut=True,
        )

    def _lookups_in_order(self, lookups: Lookups) -> Lookups:
        """The same lookups of an input that has the bags of one lookup after another."""
        if lookups not in self._in_order:
            if len(self._in_order) > _MOST_KEPT:
                self._in_order.clear()
            self._in_order[lookups] = Lookups(
                tables=lookups.tables,
                positions=np.arange(len(lookups.tables), dtype=np.uint64),
                columns=lookups.columns,
                width=lookups.width,
            )
        return self._in_order[lookups]


def _choose(
    bags: Bags,
    places_K: NDArray[np.int64],
    bounds: NDArray[Any],
    divisors: NDArray[np.int64] | None,
    dtype: torch.dtype,
) -> Bags:
    """Make bags of some of the values.

    Args:
        bags: The input.
        places_K: The places of the values.
        bounds: Where the new bags begin.
        divisors: What each value is divided by; None for 1.
        dtype: The compute dtype.
    """
    weights = None if bags.weights is None else bags.weights[places_K]
    if divisors is not None:
        counts = torch.from_numpy(divisors).to(dtype).numpy()
        weights = (np.ones_like(counts) if weights is None else weights) / counts
    return Bags(bags.values[places_K], bounds, weights, bags.batch_size, is_mean=False)


def _choose_on_device(
    bags: TorchBags,
    places_K: NDArray[np.int64],
    bounds: NDArray[Any],
    divisors: NDArray[np.int64] | None,
    dtype: torch.dtype,
) -> TorchBags:
    """As `_choose`; padding ids are left out."""
    device = bags.values.device
    places = torch.from_numpy(places_K).to(device)
    weights = None if bags.weights is None else bags.weights[places]
    if divisors is not None:
        counts = torch.from_numpy(divisors).to(device, dtype)
        weights = (torch.ones_like(counts) if weights is None else weights) / counts
    return TorchBags(
        bags.values[places],
        torch.from_numpy(bounds).to(device),
        weights,
        bags.batch_size,
        is_mean=False,
    )


_ONE = np.uint64(1)
_SHIFT = np.uint64(6)
_PLACE = np.uint64(63)


@kernel
def _cut_kernel(
    stale: NDArray[np.uint64],
    first_words: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    places_K: NDArray[np.int64],
    bounds: NDArray[Any],
    lengths: NDArray[np.int64],
    tables_L: NDArray[np.uint64],
    positions_L: NDArray[np.uint64],
    values: NDArray[Any],
    offsets: NDArray[Any],
    is_one_hot: int,
    batch_size: int,
    padding: np.uint64,
) -> None:
    """Find the values that are not stale, the bounds of the bags left, and the old lengths."""
    num_left, bag = 0, 0
    for lookup in range(len(tables_L)):
        first_word, size = first_words[tables_L[lookup]], sizes[tables_L[lookup]]
        first_bag = positions_L[lookup] * np.uint64(batch_size)
        for sample in range(batch_size):
            begin = first_bag + np.uint64(sample)
            end = begin + _ONE
            if not is_one_hot:
                begin, end = np.uint64(offsets[begin]), np.uint64(offsets[end])
            for place in range(begin, end):
                row = np.uint64(values[place])
                if row == padding:
                    continue
                lengths[bag] += 1
                is_kept = row >= size  # of a device, whose errors are raised later
                if not is_kept:
                    is_kept = not (stale[first_word + (row >> _SHIFT)] >> (row & _PLACE)) & _ONE
                if is_kept:
                    places_K[num_left] = place
                    num_left += 1
            bag += 1
            bounds[bag] = num_left
