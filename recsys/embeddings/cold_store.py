"""The cold tier: every row and its state, in slower memory than the slots.

`HostStore` is the tables themselves, in the memory of the machine: what `weight` and the
optimizer's state are anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from recsys.embeddings.kernels.row_moves import rows_from_slots, rows_to_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from recsys.embeddings.row_space import RowSpace

__all__ = ["ColdStore", "HostStore", "RowMemory"]


class RowMemory(Protocol):
    """The host's memory that rows come to: the slots themselves, or a place on their way there."""

    @property
    def arrays(self) -> Sequence[NDArray[Any]]:
        """Of rows and each state, (S, D) and (S, size), or of rows alone."""

    @property
    def first_rows(self) -> NDArray[np.uint64]:
        """Where each table's rows begin among all, (T + 1,)."""


class ColdStore(Protocol):
    """Where rows come from, and where they go back to."""

    def fetch(self, hot: RowMemory, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Copy rows and their state into slots.

        Args:
            hot: Has the slots, or a place for each row.
            rows: Counted over all tables, (M,).
            slots: Of each, (M,).
        """

    def write_back(self, hot: RowMemory, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Copy slots, rows and state, to where the rows lie; arguments as for `fetch`.

        Raises:
            OSError: they cannot be written; some may have been.
        """


class HostStore:
    """Tables and state that lie in the machine's memory.

    Args:
        spaces: Tells where they lie now: the tables, then each state array. A state array of no
            rows is that of a table whose rows have never moved: its state is zeros.
    """

    def __init__(self, spaces: Callable[[], Sequence[RowSpace]]) -> None:
        self._spaces = spaces

    def fetch(self, hot: RowMemory, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Copy rows and their state into slots; see `ColdStore`."""
        for space, target in zip(self._spaces(), hot.arrays, strict=False):
            rows_to_slots(space, hot.first_rows, rows, slots, target)

    def write_back(self, hot: RowMemory, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Copy slots, rows and state, to where the rows lie; see `ColdStore`."""
        for space, source in zip(self._spaces(), hot.arrays, strict=False):
            rows_from_slots(space, hot.first_rows, rows, slots, source)
