"""The counts and times of a model's tiers, saved so that a resumed run reports on the whole run."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from recsys._support.states import SavedState
from recsys.embeddings.tiers.counts import TierCounts
from recsys.embeddings.tiers.transfers import MoveSeconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.tiers.table_tiers import Tiers

__all__ = ["load_tiers_state", "tiers_state"]

_KEYS = ("num_rows", "counts", "exposed", "waiting")


def tiers_state(tiers: Sequence[Tiers]) -> list[dict[str, Any]]:
    """The counts and times of tiers, in JSON types.

    Args:
        tiers: Those of the model.
    """
    return [
        {
            "num_rows": sum(each.sizes),
            "counts": list(each.residency.counts),
            "exposed": list(astuple(each.residency.times.exposed)),
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
    found = [SavedState(place, each, _KEYS) for each in states]
    if [each["num_rows"] for each in found] != [sum(each.sizes) for each in tiers]:
        return
    loaded = [
        (
            TierCounts(*each.wholes("counts", len(TierCounts._fields))),
            MoveSeconds(*each.numbers("exposed", range(2, 3))),
            each.whole("waiting"),
        )
        for each in found
    ]
    for each, (counts, exposed, waiting) in zip(tiers, loaded, strict=True):
        each.residency.counter.start_from(counts, waiting)
        each.residency.times.exposed = exposed
