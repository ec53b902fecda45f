"""Numbers the distinct ids of a column 0, 1, 2, ... by first appearance.

A hash table with open addressing in one array of 64-bit entries. A lookup that misses the caches
waits for memory once.

    entry = id << 32 | row + 1          0: free

The table doubles when it is 70 % full, so it takes 11 to 23 bytes per id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys._support.hashing import GOLDEN
from recsys._support.jit import kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RowNumbers"]

_MAX_LOAD = 0.7


class RowNumbers:
    """The row of every id seen so far. Not thread-safe."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._entries = np.zeros(1 << 12, np.uint64)

    def number(self, ids: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Replace ids by rows, in place; new ids get the next numbers, in order.

        Shape:
            ids (n,) contiguous; result: the same memory, as int32.
        """
        size = len(self._entries)
        while size * _MAX_LOAD < self.num_rows + len(ids):
            size *= 2
        if size > len(self._entries):
            old, self._entries = self._entries, np.zeros(size, np.uint64)
            _rehash_kernel(old, self._entries)
        rows = ids.view(np.int32)
        self.num_rows = _number_kernel(ids, rows, self._entries, self.num_rows)
        return rows

    def ids_by_row(self) -> NDArray[np.uint32]:
        """The id of every row, (num_rows,)."""
        entries = self._entries[self._entries != 0]
        ids = np.empty(self.num_rows, np.uint32)
        ids[(entries & np.uint64(0xFFFFFFFF)).astype(np.int64) - 1] = entries >> np.uint64(32)
        return ids


@kernel
def _number_kernel(
    ids: NDArray[np.uint32], rows: NDArray[np.int32], entries: NDArray[np.uint64], num_rows: int
) -> int:
    mask = np.uint64(len(entries) - 1)
    for position in range(len(ids)):
        key = np.uint64(ids[position])
        slot = (key * GOLDEN) >> np.uint64(32) & mask  # Fibonacci hashing
        entry = entries[slot]
        while entry != 0 and (entry >> np.uint64(32)) != key:
            slot = (slot + np.uint64(1)) & mask
            entry = entries[slot]
        if entry == 0:
            num_rows += 1
            entry = (key << np.uint64(32)) | np.uint64(num_rows)
            entries[slot] = entry
        rows[position] = np.int32(entry & np.uint64(0xFFFFFFFF)) - 1
    return num_rows


@kernel
def _rehash_kernel(old: NDArray[np.uint64], entries: NDArray[np.uint64]) -> None:
    mask = np.uint64(len(entries) - 1)
    for entry in old:
        if entry != 0:
            slot = ((entry >> np.uint64(32)) * GOLDEN) >> np.uint64(32) & mask
            while entries[slot] != 0:
                slot = (slot + np.uint64(1)) & mask
            entries[slot] = entry
