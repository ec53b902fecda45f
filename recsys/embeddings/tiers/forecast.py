"""Counts during training how many rows a larger budget would have fetched.

Two miniature caches simulate the claims of training: one for the present slots, one for the slots
of twice the budget. Both are scaled down by the fraction of rows that are sampled. A row's hash
decides whether it is sampled, so either all uses of a row are counted, or none. That preserves the
intervals between uses of a row, on which hits depend. Both miniatures evict like the real slots;
counting stack distances would assume an LRU cache.

A forecast takes at most 0.7 MB, far less with few slots, and one multiplication per value.
`Tiers.forecast` attaches it; without a forecast, claims do none of this work.

References:
    Waldspurger, Park, Garthwaite and Ahmad (2015), Efficient MRC Construction with SHARDS, FAST:
    sampling by a hash of the key, which scales reuse distances.
    Waldspurger, Saemundsson, Ahmad and Park (2017), Cache Modeling and Optimization using Miniature
    Simulations, USENIX ATC: scaled-down simulations on such a sample, for policies without a stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys.embeddings.kernels.cpu.miniature import Miniature, claim_in_miniature, sample_rows
from recsys.embeddings.kernels.cpu.slot_arrays import PINNED
from recsys.embeddings.kernels.cpu.slots import SlotMap

if TYPE_CHECKING:
    from recsys.embeddings.rows.lookups import Bags, Lookups
    from recsys.embeddings.tiers.slots import Slots

__all__ = ["Forecast"]

_MOST_TRACKED = 8192  # slots of the larger miniature
_ENOUGH_TRACKED = 1024  # with fewer than this at the usual rate, the rate is raised
_USUAL_RATE = 1 / 32
_MOST_PER_CLAIM = 8192  # lookups of sampled rows; further ones are not counted


class Forecast:
    """Simulates the claims of some slots.

    Args:
        slots: The map of the real slots.
        num_slots: Number of slots that are not pinned.
        num_more: Number of slots that would not be pinned with a larger budget.
        rate: Fraction of the rows to sample; None for a rate that costs little.

    Attributes:
        rate: Fraction of the rows that is sampled.
    """

    def __init__(
        self, slots: SlotMap, num_slots: int, num_more: int, rate: float | None = None
    ) -> None:
        num_slots, num_more = max(1, num_slots), max(1, num_more)
        if rate is None:
            rate = min(1.0, max(_USUAL_RATE, _ENOUGH_TRACKED / num_more), _MOST_TRACKED / num_more)
        self._slots, self.rate = slots, rate
        self._now = Miniature.of_size(max(1, round(num_slots * rate)))
        self._more = Miniature.of_size(max(1, round(num_more * rate)))
        self._sampled, self._missing = np.empty((2, _MOST_PER_CLAIM), np.int32)

    @classmethod
    def of(cls, hot: Slots) -> Forecast | None:
        """A forecast for twice the budget of these slots.

        None for slots on a device: the host does not know which lookups hit there.
        """
        if not isinstance(hot.map, SlotMap):
            return None
        num_unpinned = int(((hot.map.flags & PINNED) == 0).sum())
        num_more = hot.slots_with(2 * hot.num_bytes) - hot.num_slots
        return cls(hot.map, num_unpinned, num_unpinned + num_more)

    def claimed(self, lookups: Lookups, bags: Bags) -> None:
        """Simulate a claim.

        Args:
            lookups: Which features were looked up in which tables.
            bags: The input; its values are rows.
        """
        slots, requests = self._slots.arrays, self._slots.requests_of(lookups, bags)
        count = sample_rows(slots, requests, bags.values, self.rate, self._sampled)
        if count:
            for cache in (self._now, self._more):
                claim_in_miniature(slots, cache, self._sampled, count, self._missing)

    def cleared(self) -> None:
        """Empty the miniatures, because the slots dropped their rows."""
        self._now.clear()
        self._more.clear()

    @property
    def fetched(self) -> tuple[int, int]:
        """Sampled rows that were fetched, and that would have been fetched with more slots."""
        return int(self._now.counts[1]), int(self._more.counts[1])

    @property
    def evicted(self) -> tuple[int, int]:
        """Sampled rows that were evicted, and that would have been evicted with more slots."""
        return int(self._now.counts[2]), int(self._more.counts[2])
