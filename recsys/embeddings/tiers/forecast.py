"""How many rows a larger budget would have fetched, counted while training goes on.

Two miniature caches see the claims that the slots see: one as large as the slots, one as large as
the slots of twice the budget, both scaled down by the share of rows that are sampled. A row's hash
decides whether it is sampled, so all of its uses are, or none. That keeps the intervals between two
uses of a row, on which hits depend. Both miniatures evict by the slots' own rule, so nothing is
assumed of it, as counting the stack distances of an LRU cache would.

It takes at most 0.7 MB, far less where slots are few, and one multiplication for each value.
`Tiers.observe(Forecast.of)` attaches it; without that, no claim does any of this work.

References:
    Waldspurger, Park, Garthwaite and Ahmad (2015), Efficient MRC Construction with SHARDS, FAST:
    sampling by a hash of what is looked up, which keeps reuse distances to scale.
    Waldspurger, Saemundsson, Ahmad and Park (2017), Cache Modeling and Optimization using Miniature
    Simulations, USENIX ATC: scaled-down simulations on such a sample, for policies without a stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys.embeddings.kernels.cpu.miniature import Miniature, claim_in_miniature, sample_rows
from recsys.embeddings.kernels.cpu.slots import PINNED, SlotMap

if TYPE_CHECKING:
    from recsys.embeddings.rows.lookups import Bags, Lookups
    from recsys.embeddings.tiers.slots import Slots

__all__ = ["Forecast"]

_MOST_TRACKED = 8192  # slots of the larger miniature
_ENOUGH_TRACKED = 1024  # more than so many are followed only where a small share of rows is
_USUAL_RATE = 1 / 32
_MOST_PER_CLAIM = 8192  # lookups of sampled rows; further ones are not followed


class Forecast:
    """Follows the claims of some slots; a `ClaimObserver`.

    Args:
        slots: The map of the real slots.
        num_slots: How many of them are not pinned.
        num_more: How many there would be with a larger budget.
        rate: Share of the rows that are followed; None for a rate that costs little.

    Attributes:
        rate: As above, never None.
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

        None on a device, where only the device knows which lookups hit.
        """
        if not isinstance(hot.map, SlotMap):
            return None
        num_unpinned = int(((hot.map.flags & PINNED) == 0).sum())
        num_more = hot.slots_with(2 * hot.num_bytes) - hot.num_slots
        return cls(hot.map, num_unpinned, num_unpinned + num_more)

    def claimed(self, lookups: Lookups, bags: Bags) -> None:
        """Follow a claim that was made.

        Args:
            lookups: What was looked up where.
            bags: The input, by rows.
        """
        slots, requests = self._slots.arrays, self._slots.requests_of(lookups, bags)
        count = sample_rows(slots, requests, bags.values, self.rate, self._sampled)
        if count:
            for cache in (self._now, self._more):
                claim_in_miniature(slots, cache, self._sampled, count, self._missing)

    def cleared(self) -> None:
        """The slots have dropped their rows."""
        self._now.clear()
        self._more.clear()

    @property
    def fetched(self) -> tuple[int, int]:
        """Sampled rows that were fetched, and that would have been with more slots."""
        return int(self._now.counts[1]), int(self._more.counts[1])

    @property
    def evicted(self) -> tuple[int, int]:
        """Sampled rows that were evicted, and that would have been with more slots."""
        return int(self._now.counts[2]), int(self._more.counts[2])
