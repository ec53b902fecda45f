"""The table of what a plan's budget and others would serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys._support.sizes import format_bytes

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
                format_bytes(budget),
                f"{min(budget / plan.everything_bytes, 1):.1%}",
                f"{planned.num_pinned:,}",
                f"{found.lookup_hit_rate:.1%}",
                f"{found.num_distinct_hot_rows / found.num_distinct_rows:.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = (
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(rows)


def _budgets(plan: HotPlan) -> list[int]:
    """The plan's budget, and others whose room above the floor doubles up to all counted rows.

    Doublings of the budget itself would say nothing where the row map is most of it.
    """
    room = sum(
        int(np.count_nonzero(plan.profile.counts(name))) * table.slot_bytes
        for name, table in plan.tables.items()
    )
    found, everything = {plan.budget_bytes}, plan.everything_bytes
    for halvings in range(_NUM_OTHERS):
        part = room >> halvings
        step = 1 << max(part.bit_length() - 3, 0)  # rounds up by less than a quarter of the room
        rounded = -(-(plan.floor_bytes + part) // step) * step
        found.add(rounded if rounded < everything else max(everything, plan.budget_bytes))
    return sorted(found)
