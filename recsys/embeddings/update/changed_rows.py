"""`ChangedRows`: which rows of a table group were changed, for checkpoints that save these alone.

An update marks its rows before it changes them. Another write to a table or its state is noticed by
its version and marks the whole table; so does another array in place of one of the state, or a read
of `weight.data`. Not seen are writes through numpy arrays, DLPack or addresses, and by a
`weight.data` that was read before the last `take`; read `weight.data` after one.

Letters: T tables, M rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import prange

from recsys._support.jit import num_parts, parallel_kernel
from recsys._support.torch_compat import version_of, versions_of
from recsys.embeddings.kernels.cpu.row_sort import Segments, ids_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.cpu.update import Joined
    from recsys.embeddings.rows.tables import TableGroup

__all__ = ["ChangedRows", "rows_of"]

_ALL = np.uint64(2**64 - 1)
_MIN_SHARED_IDS = 8192  # fewer are marked before a second thread wakes
_SHIFT, _BIT, _ONE = np.uint64(6), np.uint64(63), np.uint64(1)
_address = torch.Tensor.data_ptr


class ChangedRows:
    """One bit for each row of a table group; more rows may be marked than changed, never fewer.

    Args:
        group: The tables; no row is marked at first.

    Attributes:
        bits: Those of all tables.
    """

    def __init__(self, group: TableGroup) -> None:
        self._group = group
        # Every table begins with a word of its own, so no two threads write to one word.
        words = [-(-size // 64) for size in group.sizes.tolist()]
        self._first_words = np.cumsum([0, *words]).astype(np.uint64)
        self.bits: NDArray[np.uint64] = np.zeros(sum(words), np.uint64)
        self._known = self._read()
        self._made: list[tuple[int, int]] = []  # arrays of zeros
        if group.is_on_device:
            group.track_rows()  # type: ignore[attr-defined]

    def mark(self, joined: Joined | None) -> None:
        """Mark the rows that an update will change; `accept` comes after it.

        Args:
            joined: The ledger of the update; None without rows.
        """
        self._mark_written()
        if joined is not None and not self._group.is_on_device:  # where the update marks them
            is_small = joined.num_ids < _MIN_SHARED_IDS
            (_mark.alone if is_small else _mark)(
                self.bits, self._first_words, *joined.segments, 1 if is_small else num_parts()
            )

    def accept(self) -> None:
        """Take tables and state as known: an update has written to them."""
        self._known, self._made = self._read(), []

    def accept_new(self, array: Tensor) -> None:
        """Take a state array of zeros as known, which an update has made."""
        self._made.append((_address(array), version_of(array)))

    def _mark_table(self, number: int) -> None:
        """Mark every row of a table."""
        bits, size = self._bits_of(number), int(self._group.sizes[number])
        bits[:] = _ALL
        if size % 64:
            bits[-1] = _ALL >> np.uint64(64 - size % 64)

    def take(self) -> list[NDArray[np.uint64]]:
        """The bits of every table since the last call: row r is bit r % 64 of word r // 64."""
        self._mark_written()
        if self._group.is_on_device:
            found = self._group.take_changed()  # type: ignore[attr-defined]
            for number, of_table in enumerate(np.split(found, self._group.first_rows[1:-1])):
                packed = np.packbits(of_table, bitorder="little")
                self._bits_of(number).view(np.uint8)[: len(packed)] |= packed
        taken = [self._bits_of(number) for number in range(len(self._group.tables))]
        self.bits = np.zeros_like(self.bits)
        return taken

    def put_back(self, number: int, bits: NDArray[np.uint64]) -> None:
        """Mark rows of a table again that `take` gave, because they were not saved."""
        self._bits_of(number)[:] |= bits

    def _bits_of(self, number: int) -> NDArray[np.uint64]:
        return self.bits[int(self._first_words[number]) : int(self._first_words[number + 1])]

    def _read(self) -> list[tuple[int, int]]:
        """The address and version of every table and state array."""
        versions = versions_of(self._group.tensors)
        for number, reads in enumerate(self._group.data_reads):
            versions[number] += reads
        return list(zip(map(_address, self._group.tensors), versions, strict=True))

    def _mark_written(self) -> None:
        now = self._read()
        if now == self._known:
            return
        for number, found in enumerate(now):
            before = self._known[number] if number < len(self._known) else (0, 0)  # no state yet
            if found != before and found[0] and (before[0] or found not in self._made):
                self._mark_table(number % len(self._group.tables))
        self._known = now


def rows_of(bits: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The rows whose bit is set, ascending, (M,).

    Args:
        bits: As `ChangedRows.take` returns them for one table. For a part `bits[a:b]`, add 64 * a
            to the result.
    """
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


@parallel_kernel
def _mark(
    bits: NDArray[np.uint64],
    first_words: NDArray[np.uint64],
    entries_8E: NDArray[np.uint64],
    parts_3S: NDArray[np.uint64],
    of_table: NDArray[np.uint64],
    num_parts: int,
) -> None:
    """A part is a share of the tables."""
    segments = Segments(entries_8E, parts_3S, of_table)
    for part in prange(num_parts):
        for table in range(part, len(of_table) - 1, num_parts):
            first_word = first_words[table]
            for segment in range(of_table[table], of_table[table + 1]):
                entry, position = parts_3S[0, segment], parts_3S[1, segment]
                num_ids, num_samples, num_bags = entries_8E[1:4, entry]
                kept: Any = ids_of(segments, entry)
                begin, end = position * num_samples, (position + _ONE) * num_samples
                if num_bags:  # else bag i is id i
                    begin = np.uint64(kept[num_ids + begin])
                    end = np.uint64(kept[num_ids + end])
                for n in range(begin, end):
                    row = np.uint64(kept[n])
                    bits[first_word + (row >> _SHIFT)] |= _ONE << (row & _BIT)
