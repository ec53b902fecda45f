"""The counts and times of a model's tiers, saved so that a resumed run reports on the whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys._support.states import SavedState
from recsys.embeddings.tiers.counts import TierCounts
from recsys.embeddings.tiers.transfers import MoveSeconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.tiers.table_tiers import Tiers

__all__ = ["load_tiers_state", "tiers_state"]

_KEYS = ("num_rows", "counts", "busy", "exposed")


def tiers_state(tiers: Sequence[Tiers]) -> list[dict[str, Any]]:
    """The counts and times of tiers, in JSON types.

    Args:
        tiers: Those of the model.
    """
    return [
        {
            "num_rows": _num_rows(each),
            "counts": list(each.residency.counts),
            "busy": _pair(each.residency.times.busy),
            "exposed": _pair(each.residency.times.exposed),
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
    found = [SavedState("pipeline state: tiers", each, _KEYS) for each in states]
    if [each["num_rows"] for each in found] != [_num_rows(each) for each in tiers]:
        return
    loaded = [
        (
            TierCounts(*each.wholes("counts", len(TierCounts._fields))),
            MoveSeconds(*each.numbers("busy", range(2, 3))),
            MoveSeconds(*each.numbers("exposed", range(2, 3))),
        )
        for each in found
    ]
    for each, (counts, busy, exposed) in zip(tiers, loaded, strict=True):
        each.residency.counter.start_from(counts)
        each.residency.times.busy, each.residency.times.exposed = busy, exposed


def _num_rows(tiers: Tiers) -> int:
    return int(tiers.hot.first_rows[-1])


def _pair(seconds: MoveSeconds) -> list[float]:
    return [seconds.fetch, seconds.write_back]
