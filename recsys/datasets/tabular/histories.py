"""Histories: for each row, values of earlier positive rows of the same group.

Rows are ordered by time, or by their place in the file if there are no times; rows of equal time
keep the order of the file. A row's own value is not in its history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys._support.jit import kernel
from recsys.datasets.tabular.spool import Bags

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Histories", "in_group_order"]


def in_group_order(groups: NDArray[np.int32], times: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """All rows, group by group, in a group by time.

    Shape:
        groups, times, result (N,).
    """
    if times is None:
        return np.argsort(groups, kind="stable")
    return np.lexsort((times, groups))


class Histories:
    """The histories of all rows, as places in one array; 16 bytes a row beside `groups` and such.

    Args:
        order: All rows, by `in_group_order`.
        groups: The group of each row.
        labels: 1 for positive rows.

    Shape:
        order, groups, labels (N,).
    """

    def __init__(
        self, order: NDArray[np.int64], groups: NDArray[np.int32], labels: NDArray[np.int8]
    ) -> None:
        self._positives = np.empty(int(np.count_nonzero(labels)), np.int64)
        self._ends = np.empty(len(order), np.int64)
        self._lengths = np.empty(len(order), np.int32)
        _history_kernel(order, groups, labels, self._positives, self._ends, self._lengths)

    def of_rows(self, rows: NDArray[np.int64], values: NDArray[np.int32], max_length: int) -> Bags:
        """The histories of some rows: the newest `max_length` values, oldest first.

        Args:
            rows: Row numbers.
            values: The value of every row, (N,).
            max_length: The most values of a history.
        """
        lengths = np.minimum(self._lengths[rows], np.int32(max_length))
        history = np.empty(int(lengths.sum()), np.int32)
        _gather_kernel(self._positives, self._ends[rows], lengths, values, history)
        return Bags(history, lengths)


@kernel
def _history_kernel(
    order: NDArray[np.int64],
    groups: NDArray[np.int32],
    labels: NDArray[np.int8],
    positives: NDArray[np.int64],
    ends: NDArray[np.int64],
    lengths: NDArray[np.int32],
) -> None:
    """The positive rows in order; and how many of them end and form the history of each row."""
    num_positives, start, group = 0, 0, -1
    for row in order:
        if groups[row] != group:
            start, group = num_positives, groups[row]
        ends[row] = num_positives
        lengths[row] = num_positives - start
        if labels[row]:
            positives[num_positives] = row
            num_positives += 1


@kernel
def _gather_kernel(
    positives: NDArray[np.int64],
    ends: NDArray[np.int64],
    lengths: NDArray[np.int32],
    values: NDArray[np.int32],
    history: NDArray[np.int32],
) -> None:
    place = 0
    for row in range(len(ends)):
        for positive in positives[ends[row] - lengths[row] : ends[row]]:
            history[place] = values[positive]
            place += 1
