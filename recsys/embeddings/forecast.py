"""How many rows would have been fetched with a larger budget, counted while training goes on.

Two caches in miniature see what the slots see: one as large as the slots, one as large as those of
twice the budget, both scaled down by the share of rows that are sampled. A row is in the sample by
its hash, so all of its uses are, or none: that keeps how long rows go unused between two uses, on
which hits rest. Both miniatures give up rows by the slots' own rule, so nothing is assumed of it,
as it would be where only the stack distances of an LRU cache are counted.

What it takes is at most 0.7 MB, far less where slots are few; and a multiplication for each value.

References:
    Waldspurger, Park, Garthwaite and Ahmad (2015), Efficient MRC Construction with SHARDS, FAST:
    sampling by a hash of what is looked up, which keeps reuse distances to scale.
    Waldspurger, Saemundsson, Ahmad and Park (2017), Cache Modeling and Optimization using Miniature
    Simulations, USENIX ATC: scaled-down simulations on such a sample, for policies without a stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.embeddings.kernels.miniature import Miniature, claim_in_miniature, sample_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.kernels.slots import Requests, SlotArrays

__all__ = ["Forecast"]

_MOST_TRACKED = 8192  # slots of the larger miniature
_ENOUGH_TRACKED = 1024  # more than so many are followed only where a small share of rows is
_USUAL_RATE = 1 / 32
_MOST_PER_CLAIM = 8192  # lookups of sampled rows; what is more is not followed


class Forecast:
    """Follows the claims of some slots.

    Args:
        slots: The real ones.
        num_slots: How many are not pinned.
        num_more: As many there would be with a larger budget.
        rate: Share of the rows that are followed; None for a rate that costs little.

    Attributes:
        rate: As above, with nothing left out.
    """

    def __init__(
        self, slots: SlotArrays, num_slots: int, num_more: int, rate: float | None = None
    ) -> None:
        num_slots, num_more = max(1, num_slots), max(1, num_more)
        if rate is None:
            rate = min(1.0, max(_USUAL_RATE, _ENOUGH_TRACKED / num_more), _MOST_TRACKED / num_more)
        self._slots, self.rate = slots, rate
        self._now = Miniature.of_size(max(1, round(num_slots * rate)))
        self._more = Miniature.of_size(max(1, round(num_more * rate)))
        self._sampled, self._missing = np.empty((2, _MOST_PER_CLAIM), np.int32)

    def add(self, requests: Requests, values: NDArray[Any]) -> None:
        """Follow a claim that has been made.

        Args:
            requests: Which values are rows of which table.
            values: (N,).
        """
        count = sample_rows(self._slots, requests, values, self.rate, self._sampled)
        if count:
            for cache in (self._now, self._more):
                claim_in_miniature(self._slots, cache, self._sampled, count, self._missing)

    def forget(self) -> None:
        """The slots have let go of their rows."""
        self._now.clear()
        self._more.clear()

    @property
    def fetched(self) -> tuple[int, int]:
        """Sampled rows that were fetched, and that would have been with more slots."""
        return int(self._now.counts[1]), int(self._more.counts[1])

    @property
    def evicted(self) -> tuple[int, int]:
        """Sampled rows that had to go for others, likewise."""
        return int(self._now.counts[2]), int(self._more.counts[2])
