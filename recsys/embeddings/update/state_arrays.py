"""Optimizer state of a table group as kernels take it: each state array of all tables in one space.

The arrays belong to the optimizer, which has them by table. `load_state_dict` may replace them.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from recsys.embeddings.rows.row_space import RowSpace

__all__ = ["StateArrays", "require_state"]


class StateArrays(NamedTuple):
    """One state array of every table, as a row space."""

    name: str
    found: list[Tensor | None]  # the optimizer's; None for a table that was never updated
    is_whole: bool  # whether every table has one
    arrays: list[Tensor]  # as `found`, with an empty tensor instead of None
    space: RowSpace

    def replaces(self, other: StateArrays) -> bool:
        """Whether this replaces an array of `other`."""
        pairs = zip(other.found, self.found, strict=True)
        return any(old is not None and new is not old for old, new in pairs)

    def is_of(self, by_table: Sequence[dict[str, Any]], updated: Sequence[int]) -> bool:
        """Whether the optimizer still has these arrays, and one for each updated table."""
        found = [state.get(self.name) for state in by_table]
        return (
            all(map(is_, found, self.found))
            and (self.is_whole or all(found[table] is not None for table in updated))
            and self.space.holds(self.arrays)
        )


def require_state(
    name: str, columns: tuple[int, ...], weights: Sequence[Tensor], arrays: Sequence[Tensor]
) -> None:
    """Check the shapes of state arrays. Without this a kernel could write out of bounds.

    Args:
        name: The optimizer's name for the state.
        columns: Shape of one row's state, (D,) or ().
        weights: The tables.
        arrays: The array of each table; empty for one that was never updated.

    Raises:
        ValueError: an array belongs to another table or another formula.
    """
    for weight, state in zip(weights, arrays, strict=True):
        wanted = (len(weight), *columns)
        numel = len(weight) * (columns[0] if columns else 1)
        if state.numel() and (len(state), state.numel()) != (len(weight), numel):
            raise ValueError(
                f"optimizer state {name!r} of a table of shape {tuple(weight.shape)} must be "
                f"{wanted}, got {tuple(state.shape)}; load the state of the same table and "
                "optimizer, or delete it from the optimizer's state to start from zero"
            )
