"""The part of a run record that describes the tiers of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys.embeddings.lookup.abstract_tables import tiers_of
from recsys.embeddings.tiers.counts import HitRates

if TYPE_CHECKING:
    from torch import nn

__all__ = ["describe_tiers"]


def describe_tiers(model: nn.Module) -> dict[str, Any] | None:
    """Hit rates since the tiers were made, bytes moved, memory; None where all rows are resident.

    A lookup hits if its row was in fast memory when its mini-batch claimed slots;
    `unique_hit_rate` counts each row once per mini-batch. `exposed_fetch_seconds` is the time spent
    waiting for transfers, of rows fetched and of rows written back.
    """
    tiers = tiers_of(model)
    if not tiers:
        return None
    rates = HitRates.of(each.residency.counts for each in tiers)
    return {
        "cold_tier": "host" if all(each.files is None for each in tiers) else "file",
        "hot_bytes": sum(each.hot.num_bytes for each in tiers),
        "num_slots": sum(each.hot.num_slots for each in tiers),
        "num_rows": sum(sum(each.sizes) for each in tiers),
        "num_lookups": sum(each.residency.counts.num_lookups for each in tiers),
        "lookup_hit_rate": rates.lookups,
        "unique_hit_rate": rates.distinct_rows,
        "fetched_bytes": sum(
            each.residency.counts.num_fetched * each.hot.row_bytes for each in tiers
        ),
        "written_back_bytes": sum(
            each.residency.counts.num_written_back * each.hot.row_bytes for each in tiers
        ),
        "exposed_fetch_seconds": sum(each.residency.times.exposed.total for each in tiers),
    }
