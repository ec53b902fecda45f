"""The counts of a model's fetchers, saved so that a resumed run reports on the whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from recsys._support.states import SavedState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.tiers.fetch import Fetcher

__all__ = ["load_tiers_state", "tiers_state"]

_KEYS = ("num_rows", "counts", "waited")


def tiers_state(fetchers: Sequence[Fetcher]) -> list[dict[str, Any]]:
    """The counts and times of a model's fetchers, in JSON types."""
    found = []
    for fetcher in fetchers:
        fetcher.settle()
        found.append(
            {
                "num_rows": len(fetcher.marks.slot_of_row),
                "counts": fetcher.sums.tolist(),
                "waited": [fetcher.waited],
            }
        )
    return found


def load_tiers_state(fetchers: Sequence[Fetcher], states: Any) -> None:
    """Continue with saved counts; ignored if the saved fetchers had other tables.

    Args:
        fetchers: Those of the model.
        states: What `tiers_state` returned.

    Raises:
        ConfigError: `states` is no such list.
    """
    holder = SavedState("pipeline state", {"tiers": states}, ["tiers"])
    if not isinstance(states, list):
        raise holder.error("tiers", "a list")
    found = [SavedState("pipeline state: tiers", each, _KEYS) for each in states]
    if [each["num_rows"] for each in found] != [len(one.marks.slot_of_row) for one in fetchers]:
        return
    loaded = [
        (each.wholes("counts", len(one.sums)), each.numbers("waited", range(1, 2)))
        for each, one in zip(found, fetchers, strict=True)
    ]
    for one, (counts, [waited]) in zip(fetchers, loaded, strict=True):
        one.sums[:] = torch.as_tensor(counts)
        one.waited = waited
