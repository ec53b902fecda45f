"""The arrays of a cold store, where rows are fetched from and written back to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.embeddings.rows.row_space import RowSpace

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ColdSpaces"]


class ColdSpaces:
    """The tables and their state arrays. Calling it returns the tables, then each state array.

    The tiers and what moves their rows share it. So neither refers to the other, and a deleted
    model frees its memory at once.

    Attributes:
        tables: The tables; None before the first lookup.
        states: Each state array of all tables.
    """

    def __init__(self, states: Sequence[RowSpace]) -> None:
        self.tables: RowSpace | None = None
        self.states = states

    def __call__(self) -> Sequence[RowSpace]:
        """The arrays where they lie now: `share_memory_` moves a storage in place."""
        assert self.tables is not None
        return [
            space if space.holds(space.tables) else RowSpace(space.tables)
            for space in (self.tables, *self.states)
        ]
