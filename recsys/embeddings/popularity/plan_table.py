"""The table of what a plan's budget and others would serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys._support.sizes import format_bytes, parse_bytes, round_up_as_written
from recsys.embeddings.popularity.coverage import text_table

if TYPE_CHECKING:
    from recsys.embeddings.popularity.plan import HotPlan

__all__ = ["format_budgets"]

_NUM_OTHERS = 5
_HEADER = ("budget", "of everything", "pinned rows", "lookups", "distinct rows")


def format_budgets(plan: HotPlan) -> str:
    """Lines of the coverage of the counted lookups under the budget of a plan and under others."""
    lines = [_HEADER]
    for budget in _budgets(plan):
        planned = plan if budget == plan.budget_bytes else plan.retarget(budget)
        found = planned.coverage()
        lines.append(
            (
                _written(budget),
                f"{min(budget / plan.everything_bytes, 1):.1%}",
                f"{planned.num_pinned:,}",
                f"{found.lookup_hit_rate:.1%}",
                f"{found.num_distinct_hot_rows / found.num_distinct_rows:.1%}",
            )
        )
    return text_table(lines)


def _written(budget: int) -> str:
    """Text of exactly this budget."""
    text = format_bytes(budget)
    return text if parse_bytes(text) == budget else f"{budget} B"


def _budgets(plan: HotPlan) -> list[int]:
    """The plan's budget, and others whose room above the floor doubles up to all counted rows.

    Doublings of the budget itself would say nothing where the row map is most of it.
    """
    room = _room_of_counted(plan)
    others = {_with_room(plan, room >> halvings) for halvings in range(_NUM_OTHERS)}
    return sorted(others | {plan.budget_bytes})


def _room_of_counted(plan: HotPlan) -> int:
    """Bytes above the floor that pin all counted rows, after the small tables, pinned whole."""
    tables = [
        (
            int(np.count_nonzero(plan.profile.counts(name))) * table.slot_bytes,
            size * table.slot_bytes,
        )
        for (name, table), size in zip(
            plan.tables.items(), plan.profile.table_sizes.values(), strict=True
        )
    ]
    room, last = sum(counted for counted, _ in tables), -1
    while room != last:  # a larger budget may make more tables small
        last, most = room, plan.small_share * _with_room(plan, room)
        room = sum(whole if whole <= most else counted for counted, whole in tables)
    return room


def _with_room(plan: HotPlan, room: int) -> int:
    """A budget with at least this room above the floor, rounded up by less than a quarter of it.

    It is rounded further to what is written of it, and holds all rows where these take no more.
    """
    step = 1 << max(room.bit_length() - 3, 0)
    rounded = round_up_as_written(-(-(plan.floor_bytes + room) // step) * step)
    if rounded < plan.everything_bytes:
        return rounded
    return max(round_up_as_written(plan.everything_bytes), plan.budget_bytes)
