"""Counts of claims: lookups, hits, rows fetched and written back, since the tiers were made.

The host adds up the counts that it knows. Those of claims that it does not wait for are added up on
the device, and are read with the report that needs them.
"""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, NamedTuple

import torch

from recsys.embeddings.kernels.torch.slots import QueuedClaim

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from recsys.embeddings.kernels.cpu.slots import SlotClaim

__all__ = ["ClaimCounter", "HitRates", "TierCounts"]


class TierCounts(NamedTuple):
    """Counts since the tiers were made.

    Attributes:
        num_lookups: Values looked up.
        num_hits: Values whose row was in its slot.
        num_rows: Distinct rows of each claim, summed over claims.
        num_rows_hit: Distinct rows that were in their slot.
        num_fetched: Rows fetched from the cold store.
        num_written_back: Rows written back to it.
    """

    num_lookups: int = 0
    num_hits: int = 0
    num_rows: int = 0
    num_rows_hit: int = 0
    num_fetched: int = 0
    num_written_back: int = 0


_NUM_OF_LOOKUPS = 4  # the first counts; the others are of rows moved


class HitRates(NamedTuple):
    """What was in fast memory when mini-batches claimed slots, since the tiers were made.

    The padding row of an `nn.Embedding` is a row like any other; bags leave theirs out.

    Attributes:
        lookups: Share of the lookups whose row was there.
        distinct_rows: The same with every row counted once for each mini-batch.
    """

    lookups: float
    distinct_rows: float

    @classmethod
    def of(cls, counts: Iterable[TierCounts]) -> HitRates:
        """The rates of several tiers together; 0 before the first lookup."""
        known = list(counts)
        num_lookups = sum(each.num_lookups for each in known)
        num_rows = sum(each.num_rows for each in known)
        return cls(
            sum(each.num_hits for each in known) / max(1, num_lookups),
            sum(each.num_rows_hit for each in known) / max(1, num_rows),
        )


class ClaimCounter:
    """Adds up the counts of claims.

    Attributes:
        num_repeated: How many of the next claims repeat claims of an earlier run, for mini-batches
            that it had prepared. Their lookups are counted already; the rows they move are not.
    """

    def __init__(self) -> None:
        self.num_repeated = 0
        self._known = TierCounts()
        self._on_device: Tensor | None = None  # (6,) int64, not yet in `_known`

    def add(self, claim: SlotClaim | QueuedClaim) -> None:
        """Add a claim; the host does not wait for one that was queued."""
        is_repeated = self.num_repeated > 0
        self.num_repeated -= is_repeated
        if isinstance(claim, QueuedClaim):
            counts = claim.counts
            if is_repeated:
                counts = counts.clone()
                counts[:_NUM_OF_LOOKUPS] = 0
            if self._on_device is None:
                self._on_device = counts.to(torch.int64, copy=True)
            else:
                self._on_device += counts
            return
        of_lookups = claim.num_lookups, claim.num_hits, claim.num_rows, claim.num_rows_hit
        if is_repeated:
            of_lookups = 0, 0, 0, 0
        more = *of_lookups, len(claim.moves.fetched_rows), len(claim.moves.written_rows)
        self._known = TierCounts(*map(add, self._known, more))

    def add_written_back(self, count: int) -> None:
        """Add rows that were written back without a claim."""
        count += self._known.num_written_back
        self._known = self._known._replace(num_written_back=count)

    def read(self) -> TierCounts:
        """The sums; the host waits for a device that has a part of them."""
        if self._on_device is not None:
            more, self._on_device = self._on_device.tolist(), None
            self._known = TierCounts(*map(add, self._known, more))
        return self._known

    def start_from(self, counts: TierCounts, num_repeated: int = 0) -> None:
        """Continue with sums of an earlier run, or of other slots."""
        self._known, self._on_device, self.num_repeated = counts, None, num_repeated
