"""Watches the updates of some table groups: counts rows, and leaves out the lookups of stale ones.

An entry of a ledger that loses lookups gets bags of its own, one after another for each lookup.
With mean pooling, these have weights, because the rest of a bag is still divided by the whole bag's
length.

Letters: V ids of the lookup.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys.embeddings.rows.bags import Lookups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.rows.ledger import Entry
    from recsys.embeddings.rows.tables import TableGroup
    from recsys.embeddings.staleness.marks import LookedUp, RowMarks

__all__ = ["UpdateWatch"]


class UpdateWatch:
    """Sees the ledgers of all groups of some marks before each update.

    Args:
        marks: The marks of the rows.

    Attributes:
        is_counting: Whether the next updates are counted.
        freezes: Whether updates leave out stale rows; None if they never do.
        num_lookups: Lookups in the updates so far, unless they never leave any out.
        num_left_out: How many of them were left out.

    Raises:
        ValueError: something else sees the ledger of a group.
    """

    def __init__(self, marks: RowMarks) -> None:
        self._marks, self.is_counting = marks, False
        self.freezes: bool | None = None
        self.num_lookups = self.num_left_out = 0
        for group in marks.groups:
            if group.before_update is not None:
                raise ValueError(
                    f"tables {group.names} already have a StalenessTracker; close it first: "
                    "call its close(), or pipeline.skipping.close() if it is a TrainPipeline's"
                )
        self._hooks = {group: partial(self._before_update, group) for group in marks.groups}
        for group, hook in self._hooks.items():
            group.before_update = hook

    def close(self) -> None:
        """See no ledger any more."""
        for group, hook in self._hooks.items():
            if group.before_update is hook:
                group.before_update = None

    def _before_update(self, group: TableGroup, entries: Sequence[Entry]) -> Sequence[Entry]:
        """See `TableGroup.before_update`. Rows that are left out are not counted."""
        if self.freezes is None and not self.is_counting:
            return entries
        found = [self._marks.rows_of_call(group, entry.call) for entry in entries]
        rows = np.concatenate([np.empty(0, np.int64), *(each.rows for each in found)])
        if self.freezes is not None:
            self.num_lookups += len(rows)
        if self.freezes and len(self._marks.stale):
            are_kept = [~self._marks.are_stale(each.rows) for each in found]
            cut = map(_keep_lookups, entries, found, are_kept)
            entries = [entry for entry in cut if entry is not None]
            num_before, rows = len(rows), rows[np.concatenate([np.empty(0, np.bool_), *are_kept])]
            self.num_left_out += num_before - len(rows)
        if self.is_counting:
            self._marks.count(rows)
        return entries


def _keep_lookups(entry: Entry, found: LookedUp, is_kept: NDArray[np.bool_]) -> Entry | None:
    """The entry with some of its lookups; None if there are none.

    The gradients of their rows stay as they are.

    Args:
        entry: The entry of a ledger.
        found: What it has looked up.
        is_kept: Which of these stay, (V,).
    """
    if is_kept.all():
        return entry
    if not is_kept.any():
        return None
    call, device, bags = entry.call, entry.call.kept.device, found.bags[is_kept]
    num_bags = len(call.lookups.locations) * call.num_samples
    lengths = np.bincount(bags, minlength=num_bags)
    weights = call.weights
    if weights is not None:
        weights = weights[torch.from_numpy(found.places[is_kept]).to(device)]
    if call.lookups.is_mean and call.num_bounds:
        divisors = torch.from_numpy(np.bincount(found.bags)[bags])
        divisors = divisors.to(device, entry.gradient.dtype)
        weights = (torch.ones_like(divisors) if weights is None else weights) / divisors
    # Kernels of a device read how long bags are, too.
    parts = [found.ids[is_kept], np.zeros(1, np.int64), lengths.cumsum(), lengths]
    changed = call._replace(
        lookups=_in_order(call.lookups),
        kept=torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device),
        num_ids=len(bags),
        num_bounds=num_bags,
        weights=weights,
    )
    return entry._replace(call=changed)


@lru_cache(maxsize=64)
def _in_order(lookups: Lookups) -> Lookups:
    """The same lookups of an input that has the bags of one lookup after another."""
    locations = [
        (table, number, column) for number, (table, _, column) in enumerate(lookups.locations)
    ]
    return Lookups(locations, is_mean=False)
