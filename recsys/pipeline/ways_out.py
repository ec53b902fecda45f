"""What would loosen a run's stalls, and what that would save.

    budget           twice of it: rows that would not have been fetched, nor written back, from the
                     forecasts of the slots; as many seconds less were transfers under way
    schedule         more looking ahead: no more can be hidden than there is to hide it behind, so
                     this is an upper bound
    prefetch         more reading ahead: likewise

Fewer transfers save at most what was waited for. Step by step: of a step that waited for its
transfers all the time, a share that is the transfers'; of one that waited for a tenth of them, all
of its waiting where a tenth of the transfers goes. So steps are kept by that ratio.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from recsys.pipeline.schedule import LookAhead
from recsys.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.tiers import Tiers
    from recsys.pipeline.schedule import Schedule
    from recsys.pipeline.stalls import StageClock

__all__ = ["WayOut", "of_budget", "of_load", "of_schedule"]

# Where fewer mini-batches ahead have slots than were asked for, more would have none.
_ENOUGH_ROOM = 0.9


@dataclass(frozen=True)
class WayOut:
    """A setting to be changed, and what it would save.

    Attributes:
        key: Of the configuration.
        value: To change it to; bytes for a budget.
        saved_seconds: Of training.
        is_upper_bound: Whether that is the most it could be, and may be less.
    """

    key: str
    value: int | str
    saved_seconds: float
    is_upper_bound: bool

    def describe(self, train_seconds: float) -> dict[str, Any]:
        """For a run record.

        Args:
            train_seconds: What was measured.
        """
        share = self.saved_seconds / train_seconds
        return {**asdict(self), "saved_share": share, "speedup": 1 / (1 - share)}

    @staticmethod
    def sentence(described: dict[str, Any]) -> str:
        """What `describe` has said, for people.

        Args:
            described: Of a run record.
        """
        key, value = described["key"], described["value"]
        setting = f"a budget of {format_bytes(value)}" if key == "budget" else f"{key}={value}"
        at_most = "at most " if described["is_upper_bound"] else ""
        return (
            f"{setting} would save {at_most}{described['saved_share']:.0%} of the time "
            f"({described['speedup']:.2f} times the speed)"
        )


def of_budget(clock: StageClock, tiers: Sequence[Tiers]) -> WayOut | None:
    """Twice the budget; None where there is none, or nothing is known of it.

    Args:
        clock: Of the run.
        tiers: Of the model.
    """
    if not tiers:
        return None
    budget = 2 * sum(each.hot.num_bytes for each in tiers)
    resident = sum(int(each.hot.first_rows[-1]) * each.hot.row_bytes for each in tiers)
    if resident <= budget and all(each.files is None for each in tiers):
        return WayOut("budget", budget, clock.waited_seconds, is_upper_bound=False)
    gone = busy = 0.0
    for each in tiers:
        forecast, times = each.residency.map.forecast, each.residency.times
        if forecast is None:
            return None
        gone += times.busy.fetch * _lost(*forecast.fetched)
        gone += times.busy.write_back * _lost(*forecast.evicted)
        busy += times.busy.total
    if not busy:
        return None
    return WayOut("budget", budget, clock.saved_without(gone / busy), is_upper_bound=False)


def of_schedule(
    clock: StageClock, tiers: Sequence[Tiers], schedule: Schedule, mean_depth: float
) -> WayOut | None:
    """More looking ahead; None where that is not to be had.

    Args:
        clock: Of the run.
        tiers: Of the model.
        schedule: Of the run.
        mean_depth: Mini-batches ahead whose rows had slots, on average.
    """
    if not tiers:
        return None
    key, value = "schedule.name", cast("int | str", "lookahead")
    if isinstance(schedule, LookAhead):
        if mean_depth < _ENOUGH_ROOM * schedule.depth:
            return None
        key, value = "schedule.depth", 2 * schedule.depth
    # Every group's transfers are made one after the other, so a run is as long as they are.
    busy = max(each.residency.times.busy.total for each in tiers)
    saved = min(clock.waited_seconds, clock.train_seconds - busy)
    return WayOut(key, value, max(0.0, saved), is_upper_bound=True)


def of_load(clock: StageClock, num_ahead: int) -> WayOut:
    """More mini-batches read ahead.

    Args:
        clock: Of the run.
        num_ahead: How many were.
    """
    load = clock.seconds["load"]
    saved = min(load, clock.train_seconds - load)
    return WayOut("prefetch", 2 * num_ahead, saved, is_upper_bound=True)


def _lost(count: int, with_more: int) -> float:
    """The share of a count that is gone with more slots."""
    return max(0.0, 1 - with_more / count) if count else 0.0
