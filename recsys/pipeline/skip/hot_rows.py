"""The hot rows of a table group, and how far each has moved between two snapshots.

Letters: M hot rows, D embedding_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys.embeddings.staleness.drift import largest_change
from recsys.embeddings.staleness.row_marks import RowMarks, marks_bytes
from recsys.embeddings.staleness.tracked_tables import read_rows
from recsys.embeddings.tiers.budget import map_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.tables import TableGroup

__all__ = ["HotRows", "budget_beside_hot_rows"]

_ROWS_AT_ONCE = 2**16
_BYTES_PER_ROW = 8 + 8  # a row number and a change


def budget_beside_hot_rows(
    budget_bytes: int, sizes: Sequence[int], row_bytes: int, slot_bytes: int
) -> int:
    """The part of a budget for the tables of one dim, so that the rest suffices for `HotRows`.

    Args:
        budget_bytes: The budget for both.
        sizes: E of each table.
        row_bytes: Bytes of a row, without its state.
        slot_bytes: Bytes of a slot.

    Returns:
        Bytes. They may be below the floor of a budget; then no plan can be made.
    """
    of_map = map_bytes(sum(sizes))
    left = max(0, budget_bytes - of_map - marks_bytes(sizes))
    of_tables = of_map + left * slot_bytes // (slot_bytes + row_bytes + _BYTES_PER_ROW)
    return min(budget_bytes, of_tables)


class HotRows:
    """The rows of a table group that a plan pins, or all rows if all are resident.

    Updates of the group are counted between the snapshots.

    Args:
        group: The group.

    Attributes:
        group: As given.
        rows: The hot rows, counted over all tables, (M,) ascending.
        marks: Which rows are stale, and which were updated since the first snapshot.
        before: The first snapshot, (M, D) in the dtype of the rows; None if there is none.
        changes: The change of each hot row, (M,); None before the second snapshot. A row that
            cannot be stale has the change inf.
    """

    def __init__(self, group: TableGroup) -> None:
        self.group = group
        sizes = [len(table) for table in group.tables]
        fetcher = group.fetcher
        pinned = np.arange(sum(sizes)) if fetcher is None else np.sort(fetcher.planned)
        self.rows: NDArray[np.int64] = pinned.astype(np.int64)
        self.marks = RowMarks(sizes)
        self.before: Tensor | None = None
        self.changes: NDArray[np.float64] | None = None

    @property
    def num_bytes(self) -> int:
        """The most bytes that it takes."""
        row_bytes = self.group.dim * self.group.tables[0].dtype.itemsize
        return marks_bytes(self.marks.sizes) + len(self.rows) * (row_bytes + _BYTES_PER_ROW)

    def begin(self) -> None:
        """Take the first snapshot, and note from now on which rows are updated."""
        self.before = torch.empty(
            len(self.rows),
            self.group.dim,
            dtype=self.group.tables[0].dtype,
            device=self.group.device,
        )
        for block in self._blocks():
            self.before[block] = read_rows(self.group, self.rows[block])
        self.marks.is_counting = True

    def end(self, *, counts_unseen_rows_as_stale: bool) -> int:
        """Find the changes since the first snapshot.

        Args:
            counts_unseen_rows_as_stale: Whether a row that was not updated since can be stale.

        Returns:
            The number of hot rows that were not updated since.
        """
        before = self.before
        assert before is not None
        changes = np.empty(len(self.rows))
        for block in self._blocks():
            now = read_rows(self.group, self.rows[block])
            changes[block] = largest_change(before[block], now).cpu().numpy()
        seen, _ = self.marks.counted()
        is_unseen = ~np.isin(self.rows, seen, assume_unique=True)
        if not counts_unseen_rows_as_stale:
            changes[is_unseen] = np.inf
        self.changes = changes
        return int(is_unseen.sum())

    def forget(self) -> None:
        """Drop snapshot, changes and the record of updates; stale rows stay marked."""
        self.before = self.changes = None
        self.marks.is_counting = False
        self.marks.set_counts(np.empty(0, np.int64), np.empty(0, np.uint16))

    def mark_stale(self, threshold: float) -> None:
        """Mark the rows with a change under the threshold as stale, and no other row."""
        assert self.changes is not None
        self.mark_fresh()
        self.marks.set_stale(self.rows[self.changes < np.float32(threshold)], True)

    def mark_fresh(self) -> None:
        """Mark no row as stale."""
        self.marks.set_stale(self.stale_rows(), False)

    def stale_rows(self) -> NDArray[np.int64]:
        """The stale rows, counted over all tables, ascending."""
        first_rows = self.marks.first_rows.astype(np.int64)[:-1].tolist()
        return np.concatenate(
            [self.marks.stale_rows(table) + first for table, first in enumerate(first_rows)]
        )

    def fits(self, snapshot: Tensor) -> bool:
        """Whether a snapshot, flattened, has a number for each column of each hot row."""
        return snapshot.numel() == len(self.rows) * self.group.dim

    def has_rows(self, rows: Tensor) -> bool:
        """Whether these are rows of the tables, ascending, (n,) int64."""
        if rows.dtype != torch.int64 or not bool((rows[1:] > rows[:-1]).all()):
            return False
        return not len(rows) or (int(rows[0]) >= 0 and int(rows[-1]) < sum(self.marks.sizes))

    def restore(self, snapshot: Tensor | None, updated: Tensor, stale: Tensor) -> None:
        """Continue with what was saved.

        Args:
            snapshot: The first snapshot, flattened; None if there was none.
            updated: The rows that were updated since.
            stale: The stale rows.
        """
        self.forget()
        self.mark_fresh()
        self.marks.set_stale(stale.cpu().numpy(), True)
        if snapshot is None:
            return
        dtype = self.group.tables[0].dtype
        self.before = snapshot.to(self.group.device, dtype).view(len(self.rows), self.group.dim)
        rows = updated.cpu().numpy()
        self.marks.set_counts(rows, np.ones(len(rows), np.uint16))
        self.marks.is_counting = True

    def _blocks(self) -> Iterator[slice]:
        for begin in range(0, len(self.rows), _ROWS_AT_ONCE):
            yield slice(begin, min(begin + _ROWS_AT_ONCE, len(self.rows)))
