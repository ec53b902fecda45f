"""What a tracker reports about its windows: at most 256 entries, however long a run is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.states import SavedState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.staleness.followed_rows import Decision

__all__ = ["MOST_WINDOWS", "by_decile", "read_windows", "thin_windows"]

MOST_WINDOWS = 256
_NUM_DECILES = 10
_WINDOW_KEYS = (
    "step",
    "threshold",
    "stale_rows",
    "num_followed",
    "num_judged",
    "num_thawed",
    "stale_share",
    "num_inputs",
    "drift_by_decile",
)


def thin_windows(windows: Sequence[dict[str, Any]], window_steps: int) -> list[dict[str, Any]]:
    """The entries that are kept of windows: the first, the newest, and every n-th.

    n is the least power of 2 with which there are at most `MOST_WINDOWS`. `num_thawed` of an entry
    counts the thawed rows of all windows since the entry before.

    Args:
        windows: The entries, which may be thinned already; at least one.
        window_steps: Steps per window.
    """
    newest, every = windows[-1]["step"] // window_steps, 1
    while newest > (MOST_WINDOWS - 2) * every:
        every *= 2
    kept: list[dict[str, Any]] = []
    num_thawed = 0
    for each in windows:
        num_thawed += each["num_thawed"]
        number = each["step"] // window_steps
        if not kept or number == newest or not number % every:
            kept.append(each | {"num_thawed": num_thawed})
            num_thawed = 0
    return kept


def by_decile(decisions: Sequence[Decision]) -> list[float | None]:
    """The median drift of each tenth of the judged rows, those with most updates first."""
    drifts = np.concatenate([each.drifts for each in decisions])
    counts = np.concatenate([each.counts for each in decisions])
    in_order = drifts[np.argsort(-counts, kind="stable")]
    tenths = np.array_split(in_order, _NUM_DECILES)
    found = [float(np.median(each)) if len(each) else None for each in tenths]
    return [None if each is None or not np.isfinite(each) else each for each in found]


def read_windows(found: SavedState, window_steps: int, num_steps: int) -> list[dict[str, Any]]:
    """The entry `windows` of a tracker's state: those of its report.

    Args:
        found: The state.
        window_steps: Steps per window.
        num_steps: Steps so far.

    Raises:
        ConfigError: it is not.
    """
    windows: list[dict[str, Any]] = []
    for each in found.items("windows", range(MOST_WINDOWS + 1), "windows"):
        window = SavedState("staleness state: windows", each, _WINDOW_KEYS)
        last = windows[-1]["step"] if windows else 0
        if window.whole("step", most=num_steps) % window_steps or window["step"] <= last:
            raise window.error("step", f"a multiple of {window_steps} above {last}")
        for name in ("num_followed", "num_judged", "num_thawed", "num_inputs"):
            window.whole(name)
        for name in ("threshold", "stale_share"):
            if window[name] is not None:
                window.number(name)
        stale, deciles = window["stale_rows"], window["drift_by_decile"]
        if not isinstance(stale, dict) or not all(isinstance(name, str) for name in stale):
            raise window.error("stale_rows", "a mapping from tables to numbers")
        SavedState("staleness state: stale_rows", {"of": list(stale.values())}, ["of"]).wholes(
            "of", len(stale)
        )
        if not isinstance(deciles, list):
            raise window.error("drift_by_decile", "a list")
        known = {"of": [drift for drift in deciles if drift is not None]}
        SavedState("staleness state: drift_by_decile", known, ["of"]).numbers("of", range(11))
        windows.append(dict(each))
    return windows
