"""Settings that would shorten a run's stalls, and the time that each would save.

    budget           twice the budget: a forecast counts the rows that would then not have been
                     fetched or written back, and transfers are shorter by their share
    schedule         a larger look-ahead depth: an upper bound, because transfers are hidden only
                     while something else is computed
    prefetch         more mini-batches read ahead: an upper bound for the same reason

Fewer transfers save at most the time that was waited for them. This is counted step by step. A step
that waited during all of its transfers saves the share of the transfers that goes. A step that
waited during a tenth of them saves all of its waiting once a tenth of the transfers goes. So steps
are grouped by that ratio.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from recsys._support.sizes import format_bytes
from recsys.pipeline.schedule import LookAhead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.tiers.table_tiers import Tiers
    from recsys.pipeline.auto import Auto
    from recsys.pipeline.schedule import Schedule
    from recsys.pipeline.stalls import StageClock

__all__ = [
    "Suggestion",
    "forecast_budget",
    "of_budget",
    "of_load",
    "of_schedule",
    "other_ids",
    "too_deep",
]

# If fewer mini-batches ahead have slots than the schedule asks for, further ones would have none.
_ENOUGH_ROOM = 0.9


@dataclass(frozen=True)
class Suggestion:
    """A setting to change, and the time that it would save.

    Attributes:
        key: Of the configuration.
        value: The new value; bytes for a budget.
        saved_seconds: Of training.
        is_upper_bound: Whether it saves at most so much, and maybe less.
    """

    key: str
    value: int | str
    saved_seconds: float
    is_upper_bound: bool

    def describe(self, train_seconds: float) -> dict[str, Any]:
        """For a run record.

        Args:
            train_seconds: The measured time of training.
        """
        share = self.saved_seconds / train_seconds
        return {**asdict(self), "saved_share": share, "speedup": 1 / (1 - share)}

    @staticmethod
    def sentence(described: dict[str, Any]) -> str:
        """A sentence of what `describe` returned.

        Args:
            described: From a run record.
        """
        key, value = described["key"], described["value"]
        setting = f"a budget of {format_bytes(value)}" if key == "budget" else f"{key}={value}"
        at_most = "at most " if described["is_upper_bound"] else ""
        return (
            f"{setting} would save {at_most}{described['saved_share']:.0%} of the time "
            f"({described['speedup']:.2f} times the speed)"
        )


def forecast_budget(tiers: Sequence[Tiers]) -> None:
    """Count from now on the rows that twice the budget would fetch, for `of_budget`.

    Args:
        tiers: Of the model.
    """
    for each in tiers:
        each.forecast()


def of_budget(clock: StageClock, tiers: Sequence[Tiers]) -> Suggestion | None:
    """Twice the budget; None without a budget, and where no forecast was made.

    Args:
        clock: Of the run.
        tiers: Of the model.
    """
    if not tiers:
        return None
    budget = 2 * sum(each.hot.num_bytes for each in tiers)
    resident = sum(sum(each.sizes) * each.hot.row_bytes for each in tiers)
    if resident <= budget and all(each.files is None for each in tiers):
        return Suggestion("budget", budget, clock.waited_seconds, is_upper_bound=False)
    saved = busy = 0.0
    for each in tiers:
        forecast, times = each.hot.forecast, each.residency.times
        if forecast is None:
            return None
        saved += times.busy.fetch * _saved_share(*forecast.fetched)
        saved += times.busy.write_back * _saved_share(*forecast.evicted)
        busy += times.busy.total
    if not busy:
        return None
    return Suggestion("budget", budget, clock.saved_without(saved / busy), is_upper_bound=False)


def of_schedule(
    clock: StageClock, tiers: Sequence[Tiers], schedule: Schedule, mean_depth: float
) -> Suggestion | None:
    """A larger look-ahead depth; None where that is impossible.

    Args:
        clock: Of the run.
        tiers: Of the model.
        schedule: Of the run.
        mean_depth: The mean number of mini-batches ahead whose rows had slots.
    """
    if not tiers:
        return None
    setting: tuple[str, int | str] = "schedule.name", "lookahead"
    if isinstance(schedule, LookAhead):
        if mean_depth < _ENOUGH_ROOM * schedule.depth:
            return None
        setting = "schedule.depth", 2 * schedule.depth
    # A group's transfers run one after the other, so a run is at least as long as these.
    busy = max(each.residency.times.busy.total for each in tiers)
    saved = min(clock.waited_seconds, clock.train_seconds - busy)
    return Suggestion(*setting, max(0.0, saved), is_upper_bound=True)


def of_load(clock: StageClock, num_ahead: int) -> Suggestion:
    """More mini-batches read ahead.

    Args:
        clock: Of the run.
        num_ahead: How many were read ahead.
    """
    load = clock.seconds["load"]
    saved = min(load, clock.train_seconds - load)
    return Suggestion("prefetch", 2 * num_ahead, saved, is_upper_bound=True)


def too_deep(schedule: Schedule | Auto, tiers: Sequence[Tiers], wanted: int, depth: int) -> str:
    """What to say if there is no room for as many mini-batches ahead as wanted.

    Args:
        schedule: As the user gave it.
        tiers: Of the model.
        wanted: Mini-batches ahead that the schedule wants.
        depth: Those that there is room for.
    """
    slots = ", ".join(
        f"{each.hot.num_slots} rows of embedding_dim {each.hot.rows.shape[1]}" for each in tiers
    )
    remedy = f"or LookAhead(depth={depth})" if depth else "or Sequential()"
    # The host does not wait to learn how many rows the last one has, so it counts the most.
    may = "may have" if any(each.are_reached for each in tiers) else "has"
    return (
        f"schedule={schedule}: a budget with slots for {slots} "
        f"({format_bytes(sum(each.hot.num_bytes for each in tiers))}) {may} room for {depth} of "
        f"{wanted} mini-batches ahead; rows of the others are fetched when there is room. Give a "
        f"larger budget, {remedy}"
    )


def other_ids(schedule: Schedule | Auto) -> str:
    """What to say if the model looks up other ids than were fetched ahead."""
    return (
        f"schedule={schedule}: the model has looked up other ids than were fetched ahead for its "
        "mini-batch, or a part or another order of its KeyedJaggedTensor (split, permute), so rows "
        "were fetched only when they were needed; give TrainPipeline(..., ids=fn) a function that "
        "returns the input of each module, and an iterator that does not change a mini-batch "
        "before its step"
    )


def _saved_share(count: int, with_more: int) -> float:
    """The share of rows that more slots would save."""
    return max(0.0, 1 - with_more / count) if count else 0.0
