"""Which rows count as stale for which mini-batch.

A window's end changes the rows that count as stale, from a later mini-batch on. Until that one is
trained, the rows of both are kept, because mini-batches are taken ahead, and taken again after
look-ahead was dropped.

Letters: G groups, M rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys._support.states import SavedState
from recsys.embeddings.staleness.settings import LEAD
from recsys.embeddings.staleness.tracker_state import read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.staleness.row_marks import RowMarks

__all__ = ["FlagSet", "FlagSets"]


class FlagSet(NamedTuple):
    """The rows that count as stale from a mini-batch on.

    Attributes:
        first_number: Number of the first mini-batch.
        rows: For each group, the rows, (M,) ascending, counted over its tables.
    """

    first_number: int
    rows: Sequence[NDArray[np.int64]]


class FlagSets:
    """The flag sets of the next mini-batches; one of them is set in the groups' marks.

    Args:
        marks: The marks of each group.
    """

    def __init__(self, marks: Sequence[RowMarks]) -> None:
        self._marks = list(marks)
        self._sets = [self._no_rows()]
        self._used = self._sets[0]

    def clear(self) -> None:
        """Forget all sets: no row counts as stale."""
        self.replace([self._no_rows()], 0)

    def add(self, flags: FlagSet) -> None:
        """Add the rows that a window's end has chosen; the first number is the highest so far."""
        self._sets.append(flags)

    def forget_before(self, number: int) -> None:
        """Forget the sets that only mini-batches before `number` need."""
        while len(self._sets) > 1 and self._sets[1].first_number <= number:
            del self._sets[0]

    def use(self, number: int) -> None:
        """Mark the rows that count as stale for a mini-batch."""
        chosen = self._sets[0]
        for each in self._sets[1:]:
            if each.first_number <= number:
                chosen = each
        if chosen is self._used:
            return
        for marks, old, new in zip(self._marks, self._used.rows, chosen.rows, strict=True):
            marks.set_stale(np.setdiff1d(old, new, assume_unique=True), False)
            marks.set_stale(np.setdiff1d(new, old, assume_unique=True), True)
        self._used = chosen

    def state(self) -> list[dict[str, Any]]:
        """The sets, in JSON types and tensors."""
        return [
            {
                "first_number": each.first_number,
                "rows": [torch.from_numpy(rows.copy()) for rows in each.rows],
            }
            for each in self._sets
        ]

    def read(self, found: SavedState, num_steps: int, max_rows: Sequence[int]) -> list[FlagSet]:
        """Check sets that `state` returned once, for `replace`.

        Args:
            found: A tracker's state; its entry `flag_sets` has the sets.
            num_steps: Steps so far.
            max_rows: The greatest number of rows of each group.

        Raises:
            ConfigError: they are no flag sets of a tracker after so many steps.
        """
        place, entries = "staleness state: flag_sets", found.items("flag_sets", (1, 2), "states")
        sets: list[FlagSet] = []
        ranges = [(0, max(0, num_steps - 1)), (num_steps, num_steps + LEAD)]
        for each, (least, most) in zip(entries, ranges, strict=False):
            of_set = SavedState(place, each, ("first_number", "rows"))
            first_number = of_set.whole("first_number", least=least, most=most)
            rows, of_groups = [], of_set.items("rows", (len(self._marks),), "tensors")
            for of_group, marks, limit in zip(of_groups, self._marks, max_rows, strict=True):
                holder = SavedState(place, {"rows": of_group}, ["rows"])
                rows.append(read_rows(holder, "rows", sum(marks.sizes), limit))
            sets.append(FlagSet(first_number, rows))
        return sets

    def replace(self, sets: list[FlagSet], number: int) -> None:
        """Use other sets, those of `read`, and mark the rows for mini-batch `number`."""
        self._sets = sets
        self.use(number)

    def _no_rows(self) -> FlagSet:
        return FlagSet(0, [np.empty(0, np.int64)] * len(self._marks))
