"""Divides a budget of fast memory among table groups.

    bytes = rows * 4                                  the row map
          + slots * (row + its state + 11)            and the marks of each slot

The rest after the row maps is divided so that every table could have the same number of slots, or
one for each of its rows if it has fewer. Most models look up about as many rows of each table in a
mini-batch. So small tables are in fast memory as a whole. Every group has at least one slot. The
rows of a plan have slots of their own, if there is room for them.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

from recsys._support.sizes import format_bytes
from recsys._support.user_warnings import warn_caller
from recsys.engine.tiers.fetch import Fetcher
from recsys.engine.tiers.row_map import MAP_BYTES_PER_ROW, MARK_BYTES_PER_SLOT
from recsys.errors import BudgetTooSmall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.engine.rows.tables import TableGroup

__all__ = ["give_slots"]


def give_slots(
    groups: Sequence[TableGroup],
    formula: RowOptimizer,
    budget: int,
    pinned: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64]]] | None = None,
) -> None:
    """Give each group its slots; if all rows fit and none is in a file, warn and give none.

    Args:
        groups: Of one optimizer.
        formula: Of the optimizer.
        budget: Bytes.
        pinned: By table: rows that are not to leave their slots, and how often each is looked up,
            (P,) both. If slots are too few, those that are looked up most are pinned, and one slot
            is left for others.

    Raises:
        BudgetTooSmall: the budget is smaller than the row maps and one slot of each group.
    """
    row_bytes = [
        group.dim * group.dtype.itemsize
        + sum(formula.state_sizes(group.dim).values()) * group.compute_dtype.itemsize
        for group in groups
    ]
    all_rows = [int(group.first_rows[-1]) for group in groups]
    needed = sum(count * cost for count, cost in zip(all_rows, row_bytes, strict=True))
    if needed <= budget and all(group.files is None for group in groups):
        warn_caller(
            f"budget={format_bytes(budget)!r}: all {format_bytes(needed)} of rows and state fit; "
            "no cold tier is needed"
        )
        return
    slot_bytes = [cost + MARK_BYTES_PER_SLOT for cost in row_bytes]
    left = budget - sum(all_rows) * MAP_BYTES_PER_ROW
    if left < sum(slot_bytes):
        raise BudgetTooSmall(
            f"budget must be at least {budget - left + sum(slot_bytes)} bytes, for the row maps "
            f"and a slot of each dim and dtype, got {budget}"
        )
    planned = [_most_looked_up(group, pinned or {}) for group in groups]

    def slots_at(level: int, beside: Sequence[int]) -> list[int]:
        shares = [sum(min(size, level) for size in group.sizes.tolist()) for group in groups]
        wanted = zip(all_rows, beside, shares, strict=True)
        return [max(1, min(most, pins + max(1, share))) for most, pins, share in wanted]

    def bytes_at(level: int) -> int:
        return sum(map(mul, slots_at(level, beside), slot_bytes))

    beside = list(map(len, planned))
    if bytes_at(0) > left:
        beside = [0] * len(groups)
    most = max(max(group.sizes.tolist()) for group in groups)
    level = bisect_right(range(most + 1), left, key=bytes_at) - 1
    for group, num_slots, rows in zip(groups, slots_at(level, beside), planned, strict=True):
        _fetcher_of(group)(group, num_slots, rows[: num_slots - 1])


def _fetcher_of(group: TableGroup) -> type[Fetcher]:
    if not group.is_on_device:
        return Fetcher
    from recsys.engine.tiers.device_fetch import DeviceFetcher  # needs triton

    return DeviceFetcher


def _most_looked_up(
    group: TableGroup, pinned: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
) -> NDArray[np.int32]:
    """The pinned rows of a group, counted over all its tables, the most looked-up first."""
    found = [
        (pinned[name][0] + first, pinned[name][1])
        for name, first in zip(group.names, group.first_rows.tolist(), strict=False)
        if name in pinned
    ]
    if not found:
        return np.empty(0, np.int32)
    rows, counts = map(np.concatenate, zip(*found, strict=True))
    return rows[np.argsort(-counts, kind="stable")].astype(np.int32)
