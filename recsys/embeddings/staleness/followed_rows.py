"""The rows of one table group whose drift is followed, and what is known about each.

A row is followed from the end of a window in which it was updated often enough. Then it has a
snapshot, and its history begins. It is followed as long as it is stale, or among the rows that are
updated most.

    judge    at a window's end: measure the drift of each row
    decide   by the threshold: which rows are stale in the next window, which are on trial
    follow   choose the rows to follow next, and take their snapshots

Letters: M rows, C the greatest number of rows, D dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys.embeddings.staleness.drift import mean_change
from recsys.embeddings.staleness.row_marks import RowMarks, marks_bytes
from recsys.embeddings.staleness.tracked_tables import read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.tables import TableGroup
    from recsys.embeddings.staleness.settings import Staleness

__all__ = ["Decision", "FollowedRows", "GroupState", "history_type", "tracked_bytes"]

_BLOCK = 8192  # rows that are read at once
_FLAG_SETS = 2  # the rows that count as stale now, and those of the mini-batches taken ahead


def history_type(patience: int) -> np.dtype[Any]:
    """What is kept about a followed row.

    Fields:
        row: Its number, counted over all tables.
        drifts: Its last `patience` drifts, the oldest first.
        num_judged: Windows in a row in which its drift was measured, at most `patience`.
        is_stale: Whether it is stale; also while it is on trial.
        period: Windows that it is stale before its next trial.
        next_trial: Number of the window in which its next trial begins.
    """
    return np.dtype(
        [
            ("row", np.int64),
            ("next_trial", np.int64),
            ("period", np.int64),
            ("num_judged", np.int16),
            ("is_stale", np.bool_),
            ("drifts", np.float32, (patience,)),
        ]
    )


def tracked_bytes(tables: Sequence[Tensor], staleness: Staleness) -> int:
    """Bytes that a tracker takes for a group: marks, snapshots, history, and lists of stale rows.

    Args:
        tables: The tables of the group; only their shapes and dtypes are read.
        staleness: The settings.
    """
    sizes = list(map(len, tables))
    of_row = tables[0].shape[1] * tables[0].dtype.itemsize
    of_row += history_type(staleness.patience).itemsize
    of_row += _FLAG_SETS * np.dtype(np.int64).itemsize
    return marks_bytes(sizes) + min(staleness.max_rows, sum(sizes)) * of_row


class Decision(NamedTuple):
    """What a window has decided about a group.

    Attributes:
        flagged: Rows that count as stale in the next window: stale and not on trial, ascending.
        num_judged: Rows whose drift was measured.
        num_thawed: Rows that were stale and have moved too far.
    """

    flagged: NDArray[np.int64]
    num_judged: int
    num_thawed: int


class GroupState(NamedTuple):
    """The checked state of a group.

    Attributes:
        history: A `history_type` for each followed row, (M,).
        before: Their snapshots, (M, D).
        counted: Rows that were updated in the window, ascending.
        counts: How often each was counted.
        lookups: Lookups of updates, and how many of them were left out.
    """

    history: NDArray[Any]
    before: Tensor
    counted: NDArray[np.int64]
    counts: NDArray[np.uint16]
    lookups: tuple[int, int]


class FollowedRows:
    """The followed rows of a group.

    Args:
        group: The tables.
        staleness: The settings.
        freezes_rows: Whether steps leave out rows that count as stale. After a window with such a
            step, rows that are stale and not on trial cannot be judged.

    Attributes:
        marks: Bits and counts of all rows.
        max_rows: C.
        history: A `history_type` for each followed row, (M,), ascending by row.
        levels: The level of each, (M,): the greatest of its last `patience` drifts; infinite
            if it is unknown. Set by `judge`.
    """

    def __init__(self, group: TableGroup, staleness: Staleness, *, freezes_rows: bool) -> None:
        self._group, self._staleness, self._freezes_rows = group, staleness, freezes_rows
        sizes = list(map(len, group.tables))
        self.marks = RowMarks(sizes)
        self.max_rows = min(staleness.max_rows, sum(sizes))
        self._memory: Any = np.empty(self.max_rows, history_type(staleness.patience))
        self.history = self._memory[:0]
        self._before = self._make_snapshots()
        self._forget_window()

    @property
    def num_bytes(self) -> int:
        """Bytes of marks, snapshots, history, and lists of stale rows."""
        return tracked_bytes(self._group.tables, self._staleness)

    def judge(self, window: int, frozen_until: int) -> None:
        """Measure how far each row has moved in a window.

        Args:
            window: Number of the window that ends.
            frozen_until: Number of steps up to the last one that left out stale rows; 0 if none
                did.
        """
        settings, history, marks = self._staleness, self.history, self.marks
        updates = marks.counts_of(history["row"]).astype(np.int64) * settings.count_every
        least = -(-settings.min_updates // settings.count_every)
        # Stale rows are always followed, so they are among these, or take the place of some.
        self._most_updated, self._counts = marks.take_counts(least, self.max_rows)
        # The flags of a trial change `LEAD` steps late, and a frozen row does not move until then.
        # So it is judged at the end of the trial's second window, in which it moves throughout.
        first = window if self._freezes_rows else window + 1
        self._is_resting = history["is_stale"] & (history["next_trial"] >= first)
        is_judged = updates >= settings.min_updates
        if self._freezes_rows and frozen_until > window * settings.window:
            is_judged &= ~self._is_resting
        judged = np.flatnonzero(is_judged)
        drifts = self._drifts_of(judged)
        history["drifts"][judged, :-1] = history["drifts"][judged, 1:]
        history["drifts"][judged, -1] = drifts
        num_judged = history["num_judged"]
        num_judged[judged] = np.minimum(num_judged[judged] + 1, settings.patience)
        num_judged[~is_judged & ~self._is_resting] = 0
        self._is_judged = is_judged
        self.levels = np.where(
            num_judged >= settings.patience, history["drifts"].max(1), np.inf
        ).astype(np.float64)

    def decide(self, threshold: float, window: int) -> Decision:
        """Decide which rows are stale in the next window.

        Args:
            threshold: The highest level of a stale row.
            window: Number of the window that ends.
        """
        settings, history = self._staleness, self.history
        was_stale = history["is_stale"].copy()
        is_stale = self.levels <= threshold
        was_on_trial = was_stale & ~self._is_resting
        is_unknown = ~np.isfinite(self.levels)
        has_passed = was_on_trial & is_stale
        has_thawed = was_stale & ~is_stale & ~is_unknown
        period = history["period"]
        period[has_passed] = np.maximum(period[has_passed] + settings.period_step, 1)
        period[has_thawed] = np.floor(period[has_thawed] * settings.period_cut)
        # A stale row that other inputs still update has shown that it rests, without a trial.
        starts = is_stale & self._is_judged
        history["next_trial"][starts] = window + 1 + period[starts]
        history["is_stale"] = is_stale
        num_judged = int(self._is_judged.sum())
        return Decision(self.flagged(window + 1), num_judged, int(has_thawed.sum()))

    def flagged(self, window: int) -> NDArray[np.int64]:
        """The rows that count as stale in a window: stale and not on trial, ascending."""
        history = self.history
        rows: NDArray[np.int64] = history["row"][
            history["is_stale"] & (history["next_trial"] > window)
        ]
        return rows

    def num_stale_by_table(self) -> list[int]:
        """Stale rows of each table, on trial or not."""
        rows = self.history["row"][self.history["is_stale"]]
        counts: list[int] = np.diff(
            np.searchsorted(rows, self.marks.first_rows.astype(np.int64))
        ).tolist()
        return counts

    def follow(self) -> None:
        """Choose the rows to follow in the next window, and take their snapshots."""
        history = self.history
        stale = history["row"][history["is_stale"]]
        is_other = ~np.isin(self._most_updated, stale, assume_unique=True)
        others, counts = self._most_updated[is_other], self._counts[is_other]
        num_others = self.max_rows - len(stale)
        if len(others) > num_others:
            others = others[np.argsort(-counts.astype(np.int64), kind="stable")[:num_others]]
        rows = np.sort(np.concatenate([stale, others]))
        found: Any = np.zeros(len(rows), history.dtype)
        found["row"], found["period"] = rows, self._staleness.first_period
        places = np.searchsorted(history["row"], rows)
        is_known = places < len(history)
        is_known[is_known] = history["row"][places[is_known]] == rows[is_known]
        found[is_known] = history[places[is_known]]
        self.history = self._memory[: len(rows)]
        self.history[:] = found
        self._take_snapshots()
        self._forget_window()

    @property
    def snapshots(self) -> Tensor:
        """The rows when the window began, (M, D)."""
        return self._before[: len(self.history)]

    def reset(self) -> None:
        """Follow no row, and forget all counts."""
        self.history = self._memory[:0]
        self._forget_window()
        self.marks.set_counts(np.empty(0, np.int64), np.empty(0, np.uint16))

    def restore(self, state: GroupState) -> None:
        """Continue from a checked state."""
        count = len(state.history)
        self.history = self._memory[:count]
        self.history[:] = state.history
        self._before[:count] = state.before.to(self._before.device)
        self.marks.set_counts(state.counted, state.counts)

    def _forget_window(self) -> None:
        """Free what only a window's end needs: it is not part of the budget."""
        self.levels = np.empty(0)
        self._is_judged = self._is_resting = np.empty(0, bool)
        self._most_updated, self._counts = np.empty(0, np.int64), np.empty(0, np.uint16)

    def _drifts_of(self, judged: NDArray[np.int64]) -> NDArray[np.float32]:
        """The drifts of some rows, by their places in the history."""
        drifts = np.empty(len(judged), np.float32)
        for begin in range(0, len(judged), _BLOCK):
            places = judged[begin : begin + _BLOCK]
            now = read_rows(self._group, self.history["row"][places])
            at = torch.from_numpy(places).to(self._before.device)
            found = mean_change(self._before[at].to(now.device), now)
            drifts[begin : begin + len(places)] = found.cpu().numpy()
        return drifts

    def _take_snapshots(self) -> None:
        rows, device = self.history["row"], self._group.device
        if self._before.device != device:
            self._before = self._make_snapshots()
        for begin in range(0, len(rows), _BLOCK):
            found = read_rows(self._group, rows[begin : begin + _BLOCK].copy())
            self._before[begin : begin + len(found)] = found

    def _make_snapshots(self) -> Tensor:
        group = self._group
        return torch.empty(
            self.max_rows, group.dim, dtype=group.tables[0].dtype, device=group.device
        )
