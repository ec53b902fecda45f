"""Histories: for each row, values of earlier positive rows of the same group.

Rows are ordered by time, or by their place in the file if there are no times; rows of equal time
keep the order of the file. A row's own value is not in its history.

A history must not tell the label of its row. In an impression log, the clicked item and the items
shown beside it have one time: an item of the same impression in a history says that it was the one
that was clicked. For data with labels and times, a history therefore ends before the first row of
its group with an equal time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys._support.jit import kernel
from recsys.datasets.tabular.encode import Bags, places_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Histories"]

_NO_TIMES = np.empty(0, np.int64)


class Histories:
    """The histories of all rows, as places in one array; 16 bytes a row beside `groups` and such.

    Args:
        order: All rows, group by group, in a group by time.
        groups: The group of each row.
        is_listed: Whether a row is in the histories of later rows.
        times: The time of each row, by which `order` is sorted: a history ends before the first
            row of its group with an equal time. None: it ends before the row itself.
        values: The value of each row.
        max_length: The most values of a history.

    Shape:
        order, groups, is_listed, times, values (N,).
    """

    def __init__(
        self,
        order: NDArray[np.int64],
        groups: NDArray[np.int32],
        is_listed: NDArray[np.bool_],
        times: NDArray[np.int64] | None,
        values: NDArray[np.int32],
        max_length: int,
    ) -> None:
        self._values, self._max_length = values, np.int32(max_length)
        self._listed = np.empty(int(np.count_nonzero(is_listed)), np.int64)
        self._ends = np.empty(len(order), np.int64)
        self._lengths = np.empty(len(order), np.int32)
        _history_kernel(
            order,
            groups,
            is_listed,
            _NO_TIMES if times is None else times,
            self._listed,
            self._ends,
            self._lengths,
        )

    def of_rows(self, rows: NDArray[np.int64]) -> Bags:
        """The histories of some rows, by their numbers: the newest values, oldest first."""
        lengths = np.minimum(self._lengths[rows], self._max_length)
        places = places_of(self._ends[rows] - lengths, lengths)
        return Bags(self._values[self._listed[places]], lengths)


@kernel
def _history_kernel(
    order: NDArray[np.int64],
    groups: NDArray[np.int32],
    is_listed: NDArray[np.bool_],
    times: NDArray[np.int64],
    listed: NDArray[np.int64],
    ends: NDArray[np.int64],
    lengths: NDArray[np.int32],
) -> None:
    """The listed rows in order; and how many of them end and form the history of each row."""
    num_listed, start, end, group, time = 0, 0, 0, -1, 0
    for row in order:
        is_first = groups[row] != group
        if is_first:
            start, group = num_listed, groups[row]
        if is_first or not len(times) or times[row] != time:
            end = num_listed
            if len(times):
                time = times[row]
        ends[row] = end
        lengths[row] = end - start
        if is_listed[row]:
            listed[num_listed] = row
            num_listed += 1
