"""How far rows move: their snapshots, and what is known about each row that is followed.

A row is followed from the end of a window in which it was updated often enough. Then it has a
snapshot, and its history begins. It is followed as long as it is stale, or among the rows that are
updated most.

Letters: M rows, S inputs.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys.embeddings.staleness.marks import RowMarks, marks_bytes
from recsys.embeddings.tiers.write_back import write_back

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.staleness.settings import Staleness

__all__ = ["FollowedRows", "history_type", "input_levels", "table_rows", "tracked_bytes"]

_REST = 4  # windows in which a stale row is not judged before its trial
_FLAG_BYTES = 2 * 8  # in the lists of rows that are stale now, and for mini-batches taken ahead


def history_type(patience: int) -> np.dtype[Any]:
    """What is kept about a followed row.

    Fields:
        row: Its number, counted over all tables.
        judged_in: The last window in which its drift was measured.
        num_judged: Windows in a row in which it was measured.
        is_stale: Whether it is stale; also while it is on trial.
        drifts: Its last `patience` drifts, the oldest first.
    """
    return np.dtype(
        [
            ("row", np.int64),
            ("judged_in", np.int32),
            ("num_judged", np.int32),
            ("is_stale", np.bool_),
            ("drifts", np.float32, (patience,)),
        ]
    )


def tracked_bytes(tables: Sequence[Tensor], staleness: Staleness) -> int:
    """The most bytes that a tracker takes: marks, snapshots, history, and lists of stale rows.

    Args:
        tables: All tables that it follows; only their shapes and dtypes are read.
        staleness: The settings.
    """
    num_rows = sum(map(len, tables))
    of_row = max(table.shape[1] * table.dtype.itemsize for table in tables)
    of_row += history_type(staleness.patience).itemsize + _FLAG_BYTES
    return marks_bytes(num_rows) + min(staleness.max_rows, num_rows) * of_row


def table_rows(marks: RowMarks, rows: NDArray[np.int64]) -> Iterator[tuple[slice, Tensor]]:
    """The newest values of rows, (M,) ascending, table by table, where kernels run.

    Yields:
        Which of the rows are of the table, and their values.

    Raises:
        ConflictingWrite: a table was written to while slots had newer rows.
        TiersFailed: a transfer of rows has failed.
    """
    ends, number = np.searchsorted(rows, marks.first_rows).tolist(), 0
    for group in marks.groups:
        write_back(group)
        for table in group.tensors[: len(group.tables)]:  # not their states
            chosen = slice(ends[number], ends[number + 1])
            at = torch.from_numpy(rows[chosen] - marks.first_rows[number])
            yield chosen, table.index_select(0, at.to(table.device)).to(group.device)
            number += 1


def input_levels(
    inputs: Sequence[NDArray[np.int64]], rows: NDArray[np.int64], levels: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The level of each input, (S,): the greatest level of its rows; infinite if it has no rows.

    Args:
        inputs: The rows of each input.
        rows: The rows that have a level, (M,) ascending; the level of others is infinite.
        levels: Their levels, (M,).
    """
    looked_up = np.concatenate([np.empty(0, np.int64), *inputs])
    places = np.searchsorted(rows, looked_up)
    of_rows = np.append(levels, inf)[places]
    of_rows[np.append(rows, -1)[places] != looked_up] = inf
    found = np.full(len(inputs), -inf)
    np.maximum.at(found, np.arange(len(inputs)).repeat(list(map(len, inputs))), of_rows)
    found[found == -inf] = inf
    return found


class FollowedRows:
    """The followed rows.

    Args:
        marks: Bits and counts of all rows.
        staleness: The settings.
        freezes_rows: Whether steps leave out stale rows.

    Attributes:
        history: A `history_type` for each followed row, (M,), ascending by row.
        snapshots: The rows when the window began, table by table.
    """

    def __init__(self, marks: RowMarks, staleness: Staleness, *, freezes_rows: bool) -> None:
        self._marks, self._staleness, self._freezes_rows = marks, staleness, freezes_rows
        self.reset()

    def reset(self) -> None:
        """Follow no row."""
        self.history: NDArray[Any] = np.empty(0, history_type(self._staleness.patience))
        self.snapshots = [now for _, now in table_rows(self._marks, self.history["row"])]

    def judge(self, window: int) -> NDArray[np.float64]:
        """Measure how far each row has moved in a window.

        Args:
            window: Number of the window that ends.

        Returns:
            The level of each row, (M,): the greatest of its last `patience` drifts; infinite if it
            is unknown.
        """
        settings, history = self._staleness, self.history
        num_judged, drifts = history["num_judged"], history["drifts"]
        updates = self._marks.counts_of(history["row"]).astype(np.int64) * settings.count_every
        is_judged = updates >= settings.min_updates
        # A row that was stale in the window before is so for 32 steps more. If it freezes, it does
        # not move in these, so it is judged by the next window.
        rests = history["is_stale"] & (window - history["judged_in"] <= _REST + self._freezes_rows)
        if self._freezes_rows:
            is_judged &= ~rests
        drifts[is_judged, :-1] = drifts[is_judged, 1:]
        drifts[is_judged, -1] = self._measure()[is_judged]
        history["judged_in"][is_judged] = window
        num_judged[is_judged] += 1
        num_judged[~is_judged & ~rests] = 0
        return np.where(num_judged >= settings.patience, drifts.max(1), inf).astype(np.float64)

    def _measure(self) -> NDArray[np.float32]:
        """The drift of each row, (M,): the mean change of its numbers; 16 bits count as 32.

        That of a row that is no number, then or now, is infinite.
        """
        found = np.empty(len(self.history), np.float32)
        of_tables = table_rows(self._marks, self.history["row"])
        for before, (chosen, now) in zip(self.snapshots, of_tables, strict=True):
            dtype = torch.promote_types(now.dtype, torch.float32)
            change = (now.to(dtype) - before.to(now.device, dtype)).abs().mean(1).float()
            found[chosen] = change.nan_to_num(nan=inf, posinf=inf).cpu().numpy()
        return found

    def stale_in(self, window: int) -> NDArray[np.int64]:
        """The rows that count as stale in a window: stale and not on trial, ascending."""
        history = self.history
        is_resting = history["is_stale"] & (window - history["judged_in"] <= _REST)
        return history["row"][is_resting].copy()

    def follow(self) -> None:
        """Choose the rows to follow in the next window, take their snapshots, and count anew."""
        settings, history = self._staleness, self.history
        stale = history["row"][history["is_stale"]]
        rows, counts = self._marks.counted(-(-settings.min_updates // settings.count_every))
        is_other = ~np.isin(rows, stale, assume_unique=True)
        rows, counts = rows[is_other], counts[is_other]
        most = min(settings.max_rows, sum(self._marks.sizes)) - len(stale)
        rows = rows[np.argsort(np.uint16(2**15) - counts, kind="stable")[:most]]
        rows = np.sort(np.concatenate([stale, rows]))
        self.history = np.zeros(len(rows), history.dtype)
        self.history["row"] = rows
        _, new, old = np.intersect1d(rows, history["row"], True, True)
        self.history[new] = history[old]
        self.snapshots = [now for _, now in table_rows(self._marks, rows)]
        self._marks.set_counts(rows[:0], counts[:0])
