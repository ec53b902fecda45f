"""Leaves the lookups of stale rows out of a ledger, so that an update does not change these rows.

An entry that loses lookups gets bags of its own, one after another for each lookup. With mean
pooling, these have weights, because the rest of a bag is still divided by the whole bag's length.

Letters: B samples, L lookups, K ids that stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.jit import kernel
from recsys.embeddings.rows.bags import Lookups
from recsys.embeddings.staleness.host_ids import NO_LOOKUP, kept_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.rows.ledger import Entry

__all__ = ["LedgerCutter"]

_MOST_KEPT = 64


class LedgerCutter:
    """Cuts ledgers; keeps what depends on the lookups alone.

    Attributes:
        num_lookups: Lookups in the ledgers so far.
        num_left_out: How many of them were left out.
    """

    def __init__(self) -> None:
        self.num_lookups = self.num_left_out = 0
        self._in_order: dict[Lookups, Lookups] = {}

    def cut(
        self,
        entries: Sequence[Entry],
        stale: NDArray[np.uint64],
        first_words: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> list[Entry]:
        """The entries without lookups of stale rows.

        The gradients of other rows stay as they are: a mean is still divided by the length of the
        whole bag. An entry of stale rows only is left out.

        Args:
            entries: Those of the ledger.
            stale: One bit per row.
            first_words: Where the words of each table begin, (T + 1,).
            sizes: E of each table, (T,).
        """
        found = (self._cut_entry(entry, stale, first_words, sizes) for entry in entries)
        return [entry for entry in found if entry is not None]

    def count_whole(self, entries: Sequence[Entry]) -> None:
        """Count the lookups of a ledger of which none is left out."""
        for entry in entries:
            _, positions, ids, offsets, is_one_hot, size = kept_ids(entry.call)
            begins = positions.astype(np.int64) * size
            ends = begins + size
            if not is_one_hot:
                begins, ends = offsets[begins], offsets[ends]
            self.num_lookups += int((ends - begins).sum())
            if not entry.call.kept.is_cpu:
                for begin, end in zip(begins, ends, strict=True):
                    self.num_lookups -= int((ids[begin:end] < 0).sum())

    def _cut_entry(
        self,
        entry: Entry,
        stale: NDArray[np.uint64],
        first_words: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> Entry | None:
        call = entry.call
        _, positions, ids, offsets, is_one_hot, num_samples = given = kept_ids(call)
        num_bags = len(positions) * num_samples
        most = num_bags
        if not is_one_hot:
            firsts = positions.astype(np.int64) * num_samples
            most = int((offsets[firsts + num_samples] - offsets[firsts]).sum())
        places_K = np.empty(most, np.int64)
        bounds, lengths = np.zeros(num_bags + 1, np.int32), np.zeros(num_bags, np.int64)
        _cut_kernel(stale, first_words, sizes, places_K, bounds, lengths, *given)
        num_left, num_lookups = int(bounds[-1]), int(lengths.sum())
        self.num_lookups += num_lookups
        self.num_left_out += num_lookups - num_left
        if num_left == num_lookups:
            return entry
        if not num_left:
            return None
        places_K, device = places_K[:num_left], call.kept.device
        weights = call.weights
        if weights is not None:
            weights = weights[torch.from_numpy(places_K).to(device)]
        if call.lookups.is_mean and call.num_bounds:
            divisors = torch.from_numpy(lengths.repeat(np.diff(bounds)))
            divisors = divisors.to(device, entry.gradient.dtype)
            weights = (torch.ones_like(divisors) if weights is None else weights) / divisors
        # Kernels of a device read how long bags are, too.
        kept = np.concatenate([ids[places_K], bounds, np.diff(bounds)], dtype=np.int32)
        return entry._replace(
            call=call._replace(
                lookups=self._lookups_in_order(call.lookups),
                kept=torch.from_numpy(kept).to(device),
                num_ids=num_left,
                num_bounds=num_bags,
                weights=weights,
            )
        )

    def _lookups_in_order(self, lookups: Lookups) -> Lookups:
        """The same lookups of an input that has the bags of one lookup after another."""
        if lookups not in self._in_order:
            if len(self._in_order) > _MOST_KEPT:
                self._in_order.clear()
            locations = [
                (table, number, column)
                for number, (table, _, column) in enumerate(lookups.locations)
            ]
            self._in_order[lookups] = Lookups(locations, is_mean=False)
        return self._in_order[lookups]


_ONE = np.uint64(1)
_SHIFT = np.uint64(6)
_PLACE = np.uint64(63)


@kernel
def _cut_kernel(
    stale: NDArray[np.uint64],
    first_words: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    places_K: NDArray[np.int64],
    bounds: NDArray[np.int32],
    lengths: NDArray[np.int64],
    tables_L: NDArray[np.uint64],
    positions_L: NDArray[np.uint64],
    values: NDArray[Any],
    offsets: NDArray[Any],
    is_one_hot: int,
    batch_size: int,
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
                if row == NO_LOOKUP:
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
