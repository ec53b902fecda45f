"""State of a group's tables as kernels take it: for each name an array per table, in a row space.

Arrays are the optimizer's, by table; loading a state puts others there.
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
    found: list[Tensor | None]  # what the optimizer has; None of a table never updated
    is_whole: bool  # every table was updated
    arrays: list[Tensor]  # nothing in place of None
    space: RowSpace

    def replaces(self, other: StateArrays) -> bool:
        """Whether an array has come in the place of another one."""
        pairs = zip(other.found, self.found, strict=True)
        return any(old is not None and new is not old for old, new in pairs)

    def is_of(self, by_table: Sequence[dict[str, Any]], updated: Sequence[int]) -> bool:
        """Whether the optimizer has these very arrays, and one of each table that is updated."""
        found = [state.get(self.name) for state in by_table]
        return (
            all(map(is_, found, self.found))
            and (self.is_whole or all(found[table] is not None for table in updated))
            and self.space.holds(self.arrays)
        )


def require_state(
    name: str, columns: tuple[int, ...], weights: Sequence[Tensor], arrays: Sequence[Tensor]
) -> None:
    """Refuse state that is another table's or another formula's, before a kernel writes there.

    Args:
        name: The optimizer's.
        columns: What a row has of it, (D,) or ().
        weights: The tables.
        arrays: Of each one; empty of one never updated.

    Raises:
        ValueError: it is.
    """
    for weight, state in zip(weights, arrays, strict=True):
        wanted = (len(weight), *columns)
        numel = len(weight) * (columns[0] if columns else 1)
        if state.numel() and (len(state), state.numel()) != (len(weight), numel):
            raise ValueError(
                f"optimizer state {name!r} of a table of shape {tuple(weight.shape)} must be "
                f"{wanted}, got {tuple(state.shape)}; load the state of the same table and "
                "optimizer, or delete it from the optimizer's state to begin anew"
            )
