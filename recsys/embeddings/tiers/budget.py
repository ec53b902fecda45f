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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from recsys._support.sizes import format_bytes, round_up_as_written
from recsys._support.user_code import warn_caller
from recsys.embeddings.kernels.cpu.row_map import MAP_BYTES_PER_ROW, MARK_BYTES_PER_SLOT
from recsys.embeddings.rows.tables import compute_dtype
from recsys.embeddings.tiers.fetch import Fetcher
from recsys.errors import BudgetTooSmall

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from numpy.typing import NDArray
    from torch import nn

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.rows.tables import TableGroup

__all__ = [
    "SpaceSize",
    "divide_budget",
    "floor_bytes",
    "give_slots",
    "map_bytes",
    "row_bytes",
    "slot_bytes",
]


def map_bytes(num_rows: int) -> int:
    """Bytes of the row map of `num_rows` rows."""
    return num_rows * MAP_BYTES_PER_ROW


def row_bytes(dim: int, dtype: torch.dtype, state_sizes: Mapping[str, int]) -> int:
    """Bytes of a row and its state."""
    return dim * dtype.itemsize + sum(state_sizes.values()) * compute_dtype(dtype).itemsize


def slot_bytes(dim: int, dtype: torch.dtype, state_sizes: Mapping[str, int]) -> int:
    """Bytes of one slot: a row, its state, and the slot's marks."""
    return row_bytes(dim, dtype, state_sizes) + MARK_BYTES_PER_SLOT


def floor_bytes(num_rows: int, slots: Iterable[tuple[int, int]]) -> int:
    """The fast memory with which all rows of a mini-batch have a slot.

    Args:
        num_rows: Number of rows of all tables.
        slots: For every group, its number of slots and the bytes of one slot.
    """
    return map_bytes(num_rows) + sum(count * num_bytes for count, num_bytes in slots)


class SpaceSize(NamedTuple):
    """The size of one group of tables.

    Attributes:
        sizes: E of each table.
        dim: D.
        dtype: Dtype of the rows.
        state_sizes: Numbers per row in each state array, by name.
    """

    sizes: Sequence[int]
    dim: int
    dtype: torch.dtype
    state_sizes: Mapping[str, int]

    @classmethod
    def of(cls, tables: Sequence[nn.Parameter], state_sizes: Mapping[str, int]) -> SpaceSize:
        """The size of tables of one dim and dtype; reads only their shapes."""
        return cls(list(map(len, tables)), tables[0].shape[1], tables[0].dtype, state_sizes)

    @property
    def num_rows(self) -> int:
        """The rows of all its tables."""
        return sum(self.sizes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return slot_bytes(self.dim, self.dtype, self.state_sizes)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all rows and their state, without slots."""
        return self.num_rows * row_bytes(self.dim, self.dtype, self.state_sizes)

    def slots_at(self, level: int, num_pinned: int) -> int:
        """Slots for the rows of a plan, and `level` for each table, but not more than rows."""
        shares = sum(min(size, level) for size in self.sizes)
        return max(1, min(self.num_rows, num_pinned + max(1, shares)))


def divide_budget(budget: int, spaces: Sequence[SpaceSize], num_pinned: Sequence[int]) -> list[int]:
    """The number of slots of each group.

    Args:
        budget: Bytes.
        spaces: The groups that share it.
        num_pinned: How many rows of each do not leave their slots; none of them if there is no room
            for all.

    Raises:
        BudgetTooSmall: the budget is smaller than the row maps and one slot of each group.
    """
    costs = [space.slot_bytes for space in spaces]
    left = budget - map_bytes(sum(space.num_rows for space in spaces))
    if left < sum(costs):
        least = budget - left + sum(costs)
        raise BudgetTooSmall(
            f"budget must be at least {least} bytes ({format_bytes(round_up_as_written(least))}), "
            f"for the row maps and a slot of each dim and dtype, got {budget} "
            f"({format_bytes(budget)})"
        )
    beside = list(num_pinned)

    def slots_at(level: int) -> list[int]:
        return [space.slots_at(level, pins) for space, pins in zip(spaces, beside, strict=True)]

    def bytes_at(level: int) -> int:
        return sum(map(mul, slots_at(level), costs))

    if bytes_at(0) > left:
        beside = [0] * len(spaces)
    most = max(max(space.sizes) for space in spaces)
    level = bisect_right(range(most + 1), left, key=bytes_at) - 1
    slots = slots_at(level)
    left -= bytes_at(level)
    for number, more in enumerate(slots_at(level + 1)):  # what is left goes to the first groups
        added = min(more - slots[number], left // costs[number])
        slots[number] += added
        left -= added * costs[number]
    return slots


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
    spaces = [SpaceSize.of(group.tables, formula.state_sizes(group.dim)) for group in groups]
    needed = sum(space.resident_bytes for space in spaces)
    if needed <= budget and all(group.files is None for group in groups):
        warn_caller(
            f"budget={format_bytes(budget)!r}: all {format_bytes(needed)} of rows and state fit; "
            "no cold tier is needed"
        )
        return
    planned = [_most_looked_up(group, pinned or {}) for group in groups]
    slots = divide_budget(budget, spaces, list(map(len, planned)))
    for group, num_slots, rows in zip(groups, slots, planned, strict=True):
        _fetcher_of(group)(group, num_slots, rows[: num_slots - 1])


def _fetcher_of(group: TableGroup) -> type[Fetcher]:
    if not group.is_on_device:
        return Fetcher
    from recsys.embeddings.tiers.device_fetch import DeviceFetcher  # needs triton

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
