"""A budget of fast memory, and how row spaces share it.

What every one of them needs for its row map comes first (C3). The rest is theirs by the size of
their tables, so that a slot is as rare in one as in the other; none gets more slots than rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from recsys.embeddings.slots import floor_bytes, map_bytes, row_bytes, slot_bytes
from recsys.errors import BudgetTooSmall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from numpy.typing import NDArray
    from torch import nn

__all__ = ["NEEDS_OPTIMIZER", "SpaceSize", "divide_budget", "order_pinned"]

NEEDS_OPTIMIZER = (
    "budget= (or plan=) keeps some rows in slow memory, where an optimizer of torch's cannot move "
    "them; give optimizer=, too (recsys.embeddings.SGD, Adagrad, RowWiseAdagrad, ...)"
)


class SpaceSize(NamedTuple):
    """What there is of one row space.

    Attributes:
        num_rows: R.
        dim: D.
        dtype: Of the rows.
        state_sizes: Numbers per row of every state array, by name.
    """

    num_rows: int
    dim: int
    dtype: torch.dtype
    state_sizes: Mapping[str, int]

    @property
    def slot_bytes(self) -> int:
        """What a row takes in a slot."""
        return slot_bytes(self.dim, self.dtype, self.state_sizes)

    @property
    def resident_bytes(self) -> int:
        """What all rows and their state take where no slots are needed."""
        return self.num_rows * row_bytes(self.dim, self.dtype, self.state_sizes)


def divide_budget(
    budget_bytes: int,
    spaces: Sequence[SpaceSize],
    least: Sequence[int],
    *,
    may_stay: bool = True,
) -> list[int] | None:
    """Slots of each row space; None where all rows fit without any.

    Args:
        budget_bytes: Of fast memory.
        spaces: What is to share it.
        least: Slots that each must have.
        may_stay: Whether rows that all fit are to stay where they are, without slots.

    Raises:
        BudgetTooSmall: there is no room for these and the row maps.
    """
    if may_stay and sum(space.resident_bytes for space in spaces) <= budget_bytes:
        return None
    least = [max(1, count) for count in least]
    num_rows = sum(space.num_rows for space in spaces)
    floor = floor_bytes(
        num_rows, [(count, space.slot_bytes) for count, space in zip(least, spaces, strict=True)]
    )
    if budget_bytes < floor:
        rows = ", ".join(
            f"{count} of embedding_dim {space.dim}"
            for count, space in zip(least, spaces, strict=True)
        )
        raise BudgetTooSmall(
            f"budget: the rows that mini-batches under way need together ({rows}), their state and "
            f"the row map ({map_bytes(num_rows)} bytes) take {floor} bytes, and the budget is "
            f"{budget_bytes}; give that, or make the mini-batch smaller"
        )
    left, slots = budget_bytes - floor, list(least)
    hungry = [number for number, space in enumerate(spaces) if slots[number] < space.num_rows]
    while hungry:
        per_byte = left / sum(spaces[number].resident_bytes for number in hungry)
        shares = {
            number: int(spaces[number].resident_bytes * per_byte) // spaces[number].slot_bytes
            for number in hungry
        }
        filled = [
            number for number in hungry if slots[number] + shares[number] >= spaces[number].num_rows
        ]
        for number in filled or hungry:
            more = min(shares[number], spaces[number].num_rows - slots[number])
            slots[number] += more
            left -= more * spaces[number].slot_bytes
        # What those leave over that have all they can use is shared out among the others.
        hungry = [number for number in hungry if number not in filled] if filled else []
    return slots


def order_pinned(
    weights: Sequence[nn.Parameter],
    pinned: Mapping[nn.Parameter, tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> NDArray[np.int32]:
    """Rows to be pinned, numbered over all tables of a row space, those looked up most in front.

    Args:
        weights: The tables.
        pinned: By table: its rows, and how often each is looked up.
    """
    first, rows, counts = 0, [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for weight in weights:
        if weight in pinned:
            rows.append(pinned[weight][0] + first)
            counts.append(pinned[weight][1])
        first += len(weight)
    order = np.argsort(-np.concatenate(counts), kind="stable")
    return np.concatenate(rows)[order].astype(np.int32)
