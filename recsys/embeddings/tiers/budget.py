"""Divides a budget of fast memory among row spaces.

The budget first pays for the row maps (C3), and for the slots that each row space must have. The
rest is divided so that every table could have the same number of slots, or one for each of its rows
if it has fewer. Most models look up about as many rows of each table in a mini-batch; so small
tables are in fast memory as a whole, and no row space is short of slots while another has plenty.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from contextlib import suppress
from operator import ge, mul
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from recsys._support.sizes import round_up_bytes
from recsys.embeddings.tiers.slot_costs import map_bytes, row_bytes, slot_bytes
from recsys.errors import BudgetTooSmall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from numpy.typing import NDArray
    from torch import nn

__all__ = [
    "NEEDS_OPTIMIZER",
    "SpaceSize",
    "divide_budget",
    "divide_for_pinned",
    "enough_bytes",
    "order_pinned",
    "require_room_beside_rows",
]

NEEDS_OPTIMIZER = (
    "budget= (or plan=) keeps some rows in slow memory, and recsys must update them; give "
    "optimizer=, too: a formula (recsys.embeddings.SGD, Adagrad, RowWiseAdagrad, ...), or, to "
    "recsys.accelerate and recsys.estimate, the model's torch optimizer"
)


class SpaceSize(NamedTuple):
    """The size of one row space.

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
        dim, dtype = tables[0].shape[1], tables[0].dtype
        return cls(list(map(len, tables)), dim, dtype, state_sizes)

    @property
    def num_rows(self) -> int:
        """R, the rows of all its tables."""
        return sum(self.sizes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return slot_bytes(self.dim, self.dtype, self.state_sizes)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all rows and their state, without slots."""
        return self.num_rows * row_bytes(self.dim, self.dtype, self.state_sizes)


def divide_budget(
    budget_bytes: int,
    spaces: Sequence[SpaceSize],
    least: Sequence[int],
    *,
    pinned: Sequence[int] | None = None,
    may_stay: bool = True,
    tracker_bytes: int = 0,
) -> list[int] | None:
    """The number of slots of each row space; None if all rows fit without slots.

    Args:
        budget_bytes: The budget of fast memory, in bytes.
        spaces: The row spaces that share it.
        least: The least number of slots of each space, besides those of pinned rows.
        pinned: The number of pinned rows of each space; None for none.
        may_stay: Whether the result may be None.
        tracker_bytes: Bytes of the budget that a `StalenessTracker` takes.

    Raises:
        BudgetTooSmall: the budget is too small for the least slots, the row maps and the tracker.
    """
    if may_stay and sum(space.resident_bytes for space in spaces) <= budget_bytes:
        return None
    pinned = [0] * len(spaces) if pinned is None else pinned
    num_rows = sum(space.num_rows for space in spaces)
    fixed_bytes = tracker_bytes + map_bytes(num_rows)
    needed, least = least, _slots(spaces, least, pinned, 0)
    floor = fixed_bytes + _num_bytes(spaces, least)
    of_tracker = f", with the staleness tracker ({tracker_bytes} bytes)," if tracker_bytes else ""
    if budget_bytes < floor and max(least) == 1:
        per_row = ", ".join(f"{space.slot_bytes} (embedding_dim {space.dim})" for space in spaces)
        raise BudgetTooSmall(
            f"budget: the row map of {num_rows} rows and one row{of_tracker} take {floor} bytes, "
            f"and the budget is {budget_bytes}; each distinct row that a mini-batch looks up takes "
            f"{per_row} bytes more, so raise it to {floor} ({round_up_bytes(floor)}) plus the "
            "bytes of these rows"
        )
    if budget_bytes < floor:
        rows = ", ".join(
            f"{count} of embedding_dim {space.dim}"
            for count, space in zip(least, spaces, strict=True)
        )
        raise BudgetTooSmall(
            "budget: the rows that this mini-batch needs, with those of earlier ones whose loss or "
            "outputs still exist, or whose gradients no step has used yet "
            f"({rows}), their state and the row map ({map_bytes(num_rows)} "
            f"bytes){of_tracker} take {floor} bytes, and the budget is {budget_bytes}; raise it to "
            f"{floor} ({round_up_bytes(floor)}), and further for later mini-batches that need "
            "more, or make the mini-batch smaller, or delete the loss and outputs of earlier ones, "
            "or accumulate gradients over fewer"
        )
    left = budget_bytes - fixed_bytes

    def slots_with(per_table: int) -> list[int]:
        return _slots(spaces, needed, pinned, per_table)

    # The most slots per table for which there is room; then what is left goes to the first spaces.
    per_table = bisect_right(
        _per_table(spaces), left, key=lambda each: _num_bytes(spaces, slots_with(each))
    )
    slots = slots_with(per_table - 1)
    left -= _num_bytes(spaces, slots)
    for number, more in enumerate(slots_with(per_table)):
        of_slot = spaces[number].slot_bytes
        added = min(more - slots[number], left // of_slot)
        slots[number] += added
        left -= added * of_slot
    return slots


def require_room_beside_rows(budget_bytes: int, rows_bytes: int, tracker_bytes: int) -> None:
    """Check that a budget that holds all rows and their state holds a tracker, too.

    Args:
        budget_bytes: The budget of fast memory, in bytes.
        rows_bytes: Bytes of all rows and their state.
        tracker_bytes: Bytes that a `StalenessTracker` takes.

    Raises:
        BudgetTooSmall: it does not.
    """
    wanted = rows_bytes + tracker_bytes
    if wanted > budget_bytes:
        raise BudgetTooSmall(
            f"budget: all rows and their state ({rows_bytes} bytes), with the staleness tracker "
            f"({tracker_bytes} bytes), take {wanted} bytes, and the budget is {budget_bytes}; "
            f"raise it to {wanted} ({round_up_bytes(wanted)}), or leave budget= out, because "
            "all rows are in fast memory"
        )


def _slots(
    spaces: Sequence[SpaceSize], least: Sequence[int], pinned: Sequence[int], per_table: int
) -> list[int]:
    """The slots of each space: its pinned rows, and `per_table` for each table, `least` or more."""
    found = []
    for space, needed, num_pinned in zip(spaces, least, pinned, strict=True):
        shares = sum(min(size, per_table) for size in space.sizes)
        found.append(max(1, min(space.num_rows, num_pinned + max(needed, shares, 1))))
    return found


def _per_table(spaces: Sequence[SpaceSize]) -> range:
    """How many slots a table can have."""
    return range(max(max(space.sizes, default=0) for space in spaces) + 1)


def _num_bytes(spaces: Sequence[SpaceSize], slots: Sequence[int]) -> int:
    return sum(map(mul, slots, [space.slot_bytes for space in spaces]))


def enough_bytes(
    spaces: Sequence[SpaceSize],
    needed: Sequence[int],
    pinned: Sequence[int],
    tracker_bytes: int,
) -> int:
    """A budget that gives each row space the slots it needs when it is first divided.

    Args:
        spaces: The row spaces that share it.
        needed: The slots that each needs, besides those of pinned rows.
        pinned: The number of pinned rows of each space.
        tracker_bytes: As for `divide_budget`.
    """
    least = [1] * len(spaces)
    wanted = _slots(spaces, needed, pinned, 0)

    def is_enough(per_table: int) -> bool:
        return all(map(ge, _slots(spaces, least, pinned, per_table), wanted))

    per_table = bisect_left(_per_table(spaces), True, key=is_enough)
    num_rows = sum(space.num_rows for space in spaces)
    slots = _slots(spaces, least, pinned, per_table)
    return tracker_bytes + map_bytes(num_rows) + _num_bytes(spaces, slots)


def divide_for_pinned(
    budget_bytes: int,
    spaces: Sequence[SpaceSize],
    pinned: Sequence[NDArray[np.int32]],
    *,
    may_stay: bool,
) -> list[tuple[int, NDArray[np.int32]]] | None:
    """Divide a budget so that the pinned rows of each space fit, or as without a plan.

    Args:
        budget_bytes: The budget of fast memory, in bytes.
        spaces: The row spaces that share it.
        pinned: The pinned rows of each, from `order_pinned`.
        may_stay: Whether the result may be None.

    Returns:
        The number of slots of each space, and the pinned rows that have one; None if all rows fit
        without slots.

    Raises:
        BudgetTooSmall: the budget is smaller than the row maps and a slot of each space.
    """

    def divide(num_pinned: Sequence[int]) -> list[tuple[int, NDArray[np.int32]]] | None:
        slots = divide_budget(
            budget_bytes, spaces, [1] * len(spaces), pinned=num_pinned, may_stay=may_stay
        )
        if slots is None:
            return None
        return [(num, rows[: num - 1]) for num, rows in zip(slots, pinned, strict=True)]

    with suppress(BudgetTooSmall):  # the plan assumed less state or a larger budget
        return divide(list(map(len, pinned)))
    return divide([0] * len(spaces))


def order_pinned(
    weights: Sequence[nn.Parameter],
    pinned: Mapping[nn.Parameter, tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> NDArray[np.int32]:
    """The pinned rows of a row space, numbered over all its tables, most lookups first.

    Args:
        weights: The tables of the row space.
        pinned: For each table, the pinned rows and their counts of lookups.

    Shape:
        rows and counts of a table (P,) each; result (sum of P,) int32.
    """
    first, rows, counts = 0, [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for weight in weights:
        if weight in pinned:
            rows.append(pinned[weight][0] + first)
            counts.append(pinned[weight][1])
        first += len(weight)
    order = np.argsort(-np.concatenate(counts), kind="stable")
    return np.concatenate(rows)[order].astype(np.int32)
