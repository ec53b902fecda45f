"""Divides a budget of fast memory among table groups.

    bytes = rows * 4                                  the row map
          + slots * (row + its state + 10)            and the marks of each slot

The rest after the row maps is divided so that every table could have the same number of slots, or
one for each of its rows if it has fewer. Most models look up about as many rows of each table in a
mini-batch. So small tables are in fast memory as a whole. Every group has at least one slot.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from recsys.engine.tiers.fetch import Fetcher
from recsys.engine.tiers.row_map import MAP_BYTES_PER_ROW, MARK_BYTES_PER_SLOT
from recsys.errors import BudgetTooSmall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.engine.rows.tables import TableGroup

__all__ = ["give_slots"]


def give_slots(groups: Sequence[TableGroup], formula: RowOptimizer, budget: int) -> None:
    """Give each group its slots.

    Args:
        groups: Of one optimizer.
        formula: Of the optimizer.
        budget: Bytes.

    Raises:
        BudgetTooSmall: the budget is smaller than the row maps and one slot of each group.
    """
    slot_bytes = [
        group.dim * group.dtype.itemsize
        + sum(formula.state_sizes(group.dim).values()) * group.compute_dtype.itemsize
        + MARK_BYTES_PER_SLOT
        for group in groups
    ]
    all_rows = [int(group.first_rows[-1]) for group in groups]
    left = budget - sum(all_rows) * MAP_BYTES_PER_ROW
    if left < sum(slot_bytes):
        raise BudgetTooSmall(
            f"budget must be at least {budget - left + sum(slot_bytes)} bytes, for the row maps "
            f"and a slot of each dim and dtype, got {budget}"
        )

    def slots_at(level: int) -> list[int]:
        return [max(1, sum(min(size, level) for size in group.sizes.tolist())) for group in groups]

    def bytes_at(level: int) -> int:
        return sum(slots * cost for slots, cost in zip(slots_at(level), slot_bytes, strict=True))

    most = max(max(group.sizes.tolist()) for group in groups)
    level = bisect_right(range(most + 1), left, key=bytes_at) - 1
    for group, num_slots in zip(groups, slots_at(level), strict=True):
        Fetcher(group, num_slots)
