"""The counts of a model's fetchers, saved so that a resumed run reports on the whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.tiers.fetch import Fetcher

__all__ = ["load_tiers_state", "tiers_state"]


def tiers_state(fetchers: Sequence[Fetcher]) -> list[dict[str, Any]]:
    """The counts and times of a model's fetchers, in JSON types."""
    found = []
    for fetcher in fetchers:
        fetcher.settle()
        found.append(
            {
                "num_rows": len(fetcher.marks.slot_of_row),
                "counts": fetcher.sums.tolist(),
                "waited": fetcher.waited,
            }
        )
    return found


def load_tiers_state(fetchers: Sequence[Fetcher], states: Any) -> None:
    """Continue with saved counts; ignored if the saved fetchers had other tables.

    Args:
        fetchers: Those of the model.
        states: What `tiers_state` returned.
    """
    if [state["num_rows"] for state in states] != [len(one.marks.slot_of_row) for one in fetchers]:
        return
    for one, state in zip(fetchers, states, strict=True):
        one.sums[:] = torch.as_tensor(state["counts"])
        one.waited = state["waited"]
