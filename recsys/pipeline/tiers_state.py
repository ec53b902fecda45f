"""The counts and times of a model's tiers, saved so that a resumed run reports on the whole run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from recsys._support.states import SavedState
from recsys.embeddings.tiers.counts import TableHits, TierCounts
from recsys.embeddings.tiers.transfers import MoveSeconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.tiers.table_tiers import Tiers

__all__ = ["load_tiers_state", "tiers_state"]

_KEYS = ("num_rows", "counts", "tables", "busy", "exposed", "waiting")


def tiers_state(tiers: Sequence[Tiers]) -> list[dict[str, Any]]:
    """The counts and times of tiers, in JSON types.

    Args:
        tiers: Those of the model.
    """
    return [
        {
            "num_rows": sum(each.sizes),
            "counts": list(each.residency.counts),
            "tables": _flat(each.residency.counter.table_sums.hits()),
            "busy": _pair(each.residency.times.busy),
            "exposed": _pair(each.residency.times.exposed),
            # Claims of mini-batches that are taken ahead; a resumed run repeats them first.
            "waiting": each.ahead.num_claims() + each.residency.counter.num_repeated,
        }
        for each in tiers
    ]


def load_tiers_state(tiers: Sequence[Tiers], states: Any) -> None:
    """Continue with saved counts and times; ignored if the saved tiers had other tables.

    Args:
        tiers: Those of the model.
        states: What `tiers_state` returned.

    Raises:
        ConfigError: `states` is no such list.
    """
    holder = SavedState("pipeline state", {"tiers": states}, ["tiers"])
    if not isinstance(states, list):
        raise holder.error("tiers", "a list")
    place = "pipeline state: tiers"
    # States of older versions lack the counts by table and the number of waiting claims.
    absent = {"tables": None, "waiting": 0}
    found = [
        SavedState(place, {**absent, **each} if isinstance(each, Mapping) else each, _KEYS)
        for each in states
    ]
    if [each["num_rows"] for each in found] != [sum(each.sizes) for each in tiers]:
        return
    loaded = [
        (
            TierCounts(*each.wholes("counts", len(TierCounts._fields))),
            _table_hits(each, len(own.sizes)),
            MoveSeconds(*each.numbers("busy", range(2, 3))),
            MoveSeconds(*each.numbers("exposed", range(2, 3))),
            each.whole("waiting"),
        )
        for own, each in zip(tiers, found, strict=True)
    ]
    for each, (counts, tables, busy, exposed, waiting) in zip(tiers, loaded, strict=True):
        each.residency.counter.start_from(counts, waiting)
        each.residency.counter.table_sums.start_from(tables)
        each.residency.times.busy, each.residency.times.exposed = busy, exposed


def _flat(hits: Sequence[TableHits] | None) -> list[int] | None:
    """Lookups and hits of each table in turn; None if they are not known."""
    return None if hits is None else list(chain.from_iterable(hits))


def _table_hits(state: SavedState, num_tables: int) -> list[TableHits] | None:
    if state["tables"] is None:
        return None
    flat = state.wholes("tables", 2 * num_tables)
    return [TableHits(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)]


def _pair(seconds: MoveSeconds) -> list[float]:
    return [seconds.fetch, seconds.write_back]
