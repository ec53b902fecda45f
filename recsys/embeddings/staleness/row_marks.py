"""What is kept about every row of a table group: whether it is stale, and how often it is updated.

    before an update   updates are counted, and stale rows are left out of the ledger if they freeze
    before a step      samples whose rows are all stale are found

Every row has one bit and a count of 16 bits. Every line of 64 rows has a byte that says whether one
of them was counted, so that a window's end reads the counts of these lines alone. Rows are numbered
over all tables of the group.

Letters: B samples, T tables, L lookups, N values, M rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import prange

from recsys._support.jit import kernel, kernel_part, num_parts, parallel_kernel
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import prefetch_to_write
from recsys.embeddings.staleness.frozen_rows import LedgerCutter
from recsys.embeddings.staleness.host_ids import NO_LOOKUP, given_ids, kept_ids
from recsys.embeddings.update.changed_rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.rows.bags import Bags, Lookups
    from recsys.embeddings.rows.ledger import Entry
    from recsys.embeddings.staleness.host_ids import HostIds

__all__ = ["MOST_COUNTED", "RowMarks", "marks_bytes"]

MOST_COUNTED = 2**15 - 1  # the 16th bit of a count is set while a step is counted
_WORD_BITS = 64
_LINE_ROWS = 64
_LINE_WORDS = _LINE_ROWS // 4  # of 64 bits, with four counts each
_LINES_AHEAD = 16
_MIN_SHARED_VALUES = 8192  # fewer are counted before another thread wakes up
_MARK, _CLEAR = 1, 2  # the passes of a count


def marks_bytes(sizes: Sequence[int]) -> int:
    """Bytes of the `RowMarks` of tables with so many rows each."""
    num_lines = -(-sum(sizes) // _LINE_ROWS)
    return 8 * sum(-(-size // _WORD_BITS) for size in sizes) + num_lines * (2 * _LINE_ROWS + 1)


class RowMarks:
    """A bit and a count for every row of a table group.

    Args:
        sizes: E of each table.

    Attributes:
        sizes: As given.
        first_rows: Where each table's rows begin, (T + 1,) uint64.
        is_counting: Whether the next updates are counted.
        is_freezing: Whether updates leave out stale rows.
        is_counting_lookups: Whether the lookups of updates are counted, and those that are left
            out.
        num_stale: Number of stale rows.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.is_counting = self.is_freezing = self.is_counting_lookups = False
        self.num_stale = 0
        self._sizes = np.array(self.sizes, np.uint64)
        self.first_rows = np.cumsum([0, *self.sizes]).astype(np.uint64)
        # Each table begins with a word of its own, as in `ChangedRows`.
        words = [-(-size // _WORD_BITS) for size in self.sizes]
        self._first_words = np.cumsum([0, *words]).astype(np.uint64)
        self._stale = np.zeros(sum(words), np.uint64)
        self._is_counted = np.zeros(-(-sum(self.sizes) // _LINE_ROWS), np.uint8)
        self._counts = np.zeros(len(self._is_counted) * _LINE_ROWS, np.uint16)
        self._cutter = LedgerCutter()

    @property
    def lookups(self) -> tuple[int, int]:
        """Lookups of updates so far, and how many of them were left out; it may be set."""
        return self._cutter.num_lookups, self._cutter.num_left_out

    @lookups.setter
    def lookups(self, counts: tuple[int, int]) -> None:
        self._cutter.num_lookups, self._cutter.num_left_out = counts

    def before_update(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """See `TableGroup.before_update`. Rows that are left out are not counted."""
        if self.is_freezing and self.num_stale:
            entries = self._cutter.cut(entries, self._stale, self._first_words, self._sizes)
        elif self.is_counting_lookups:
            self._cutter.count_whole(entries)
        if self.is_counting:
            self.count(entries)
        return entries

    def count(self, entries: Sequence[Entry]) -> None:
        """Add one to the count of each distinct row of one update; it ends at `MOST_COUNTED`."""
        inputs = [kept_ids(entry.call) for entry in entries]
        # With several entries, the bit that a row was counted stays set until all are counted.
        if len(inputs) == 1:
            self._count(inputs[0], _MARK | _CLEAR)
            return
        for passes in (_MARK, _CLEAR):
            for arguments in inputs:
                self._count(arguments, passes)

    def _count(self, given: HostIds, passes: int) -> None:
        is_small = len(given.ids) < _MIN_SHARED_VALUES
        (_count_kernel.alone if is_small else _count_kernel)(
            self._counts,
            self._is_counted,
            self.first_rows,
            self._sizes,
            passes,
            1 if is_small else num_parts(),
            *given,
        )

    def counts_of(self, rows: NDArray[np.int64]) -> NDArray[np.uint16]:
        """The counts of rows, (M,)."""
        found: NDArray[np.uint16] = self._counts[rows]
        return found

    def take_counts(
        self, least: int, most: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
        """List the rows that were counted at least so often, and set every count to 0.

        Args:
            least: The least count, at least 1.
            most: The greatest number of rows, those with the highest counts; of equal counts, the
                first rows. None for no limit.

        Returns:
            Rows, (M,) ascending, and their counts, (M,).
        """
        num_with = np.zeros(MOST_COUNTED + 1, np.int64)
        _tally(self._counts, self._counted_lines(), num_with)
        num_with[:least] = 0
        num_found = num_at_least = int(num_with.sum())
        if most is not None and num_found > most:
            from_top = num_with[::-1].cumsum()[::-1]  # rows with this count or a higher one
            least = int(np.flatnonzero(from_top > most)[-1])
            num_at_least = most - int(from_top[least] - num_with[least])
            num_found = most
        return self._list(least, num_at_least, num_found, is_taken=True)

    def counted(self) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
        """The rows whose count is not 0, (M,) ascending, and their counts, (M,)."""
        num_found = int(np.count_nonzero(self._counts))
        return self._list(1, num_found, num_found, is_taken=False)

    def _list(
        self, least: int, num_at_least: int, num_found: int, *, is_taken: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
        """List rows by their counts.

        Args:
            least: The least count.
            num_at_least: How many of the rows with exactly this count are listed.
            num_found: How many rows are listed.
            is_taken: Whether all counts are set to 0.
        """
        rows, counts = np.empty(num_found, np.int64), np.empty(num_found, np.uint16)
        lines = self._counted_lines()
        _list_counts(self._counts, lines, least, num_at_least, is_taken, rows, counts)
        if is_taken:
            self._is_counted.fill(0)
        return rows, counts

    def _counted_lines(self) -> NDArray[np.uint64]:
        """The lines of which a row was counted, ascending."""
        return np.flatnonzero(self._is_counted.view(np.bool_)).view(np.uint64)

    def set_counts(self, rows: NDArray[np.int64], counts: NDArray[np.uint16]) -> None:
        """Set the counts of rows, (M,), and all others to 0."""
        self._counts.fill(0)
        self._is_counted.fill(0)
        self._counts[rows] = counts
        self._is_counted[rows // _LINE_ROWS] = 1

    def set_stale(self, rows: NDArray[np.int64], is_stale: bool) -> None:
        """Mark distinct rows, (M,), as stale or as not stale."""
        self.num_stale += _set_bits(self._stale, self._first_words, self.first_rows, rows, is_stale)

    def stale_rows(self, table: int) -> NDArray[np.int64]:
        """The stale rows of a table, (M,) ascending."""
        begin, end = self._first_words[table : table + 2].astype(np.int64).tolist()
        return rows_of(self._stale[begin:end])

    def all_stale(
        self,
        lookups: Lookups,
        bags: Bags,
        is_stale: NDArray[np.bool_],
        has_rows: NDArray[np.bool_] | None = None,
    ) -> None:
        """Set `is_stale` to False where a bag has a row that is not stale.

        Args:
            lookups: Which features are looked up in which tables.
            bags: The input.
            is_stale: (B,), one per bag of a feature. A bag without values changes nothing. A value
                that is not a row counts as not stale, so that the lookup raises its error.
            has_rows: (B,), set to True where `is_stale` is still True and a bag has a value.
        """
        _all_stale_kernel(
            self._stale,
            self._first_words,
            self._sizes,
            is_stale,
            np.empty_like(is_stale) if has_rows is None else has_rows,
            *given_ids(lookups, bags),
        )


_ONE = np.uint64(1)
_SHIFT = np.uint64(6)
_PLACE = np.uint64(63)
_FOUR = np.uint64(4)
_AHEAD = np.uint64(16)
_IS_MARKED = np.uint16(2**15)
_MOST = np.uint16(MOST_COUNTED)


@parallel_kernel
def _count_kernel(
    counts: NDArray[np.uint16],
    is_counted: NDArray[np.uint8],
    first_rows: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    passes: int,
    num_parts: int,
    tables_L: NDArray[np.uint64],
    positions_L: NDArray[np.uint64],
    values: NDArray[Any],
    offsets: NDArray[Any],
    is_one_hot: int,
    batch_size: int,
) -> None:
    """A part is a share of the tables. The first pass counts, the second clears the marks."""
    for part in prange(num_parts):
        for each in (_MARK, _CLEAR):
            if not passes & each:
                continue
            for lookup in range(len(tables_L)):
                table = tables_L[lookup]
                if table % np.uint64(num_parts) != np.uint64(part):
                    continue
                begin = positions_L[lookup] * np.uint64(batch_size)
                end = begin + np.uint64(batch_size)
                if not is_one_hot:
                    begin, end = np.uint64(offsets[begin]), np.uint64(offsets[end])
                first_row, size = first_rows[table], sizes[table]
                for place in range(begin, end):
                    if place + _AHEAD < end:
                        ahead = first_row + np.uint64(values[place + _AHEAD])
                        prefetch_to_write(counts, ahead)
                    row = np.uint64(values[place])
                    if row >= size:  # a negative id becomes a very large number
                        continue
                    count = counts[first_row + row]
                    if each == _CLEAR:
                        counts[first_row + row] = count & _MOST
                    elif count < _IS_MARKED:
                        more = count + np.uint16(count < _MOST)
                        counts[first_row + row] = np.uint16(more) | _IS_MARKED
                        is_counted[(first_row + row) >> _SHIFT] = 1


@kernel
def _tally(
    counts: NDArray[np.uint16], lines: NDArray[np.uint64], num_with: NDArray[np.int64]
) -> None:
    """Add the rows with each count to `num_with`, not all of those with the count 0."""
    words = counts.view(np.uint64)
    for number in range(len(lines)):
        if number + _LINES_AHEAD < len(lines):
            _prefetch_line(counts, lines[number + _LINES_AHEAD])
        first = lines[number] * np.uint64(_LINE_WORDS)
        for word in range(first, first + np.uint64(_LINE_WORDS)):
            if words[word]:
                for row in range(word * _FOUR, (word + _ONE) * _FOUR):
                    num_with[counts[row]] += 1


@kernel
def _list_counts(
    counts: NDArray[np.uint16],
    lines: NDArray[np.uint64],
    least: int,
    num_at_least: int,
    is_taken: bool,
    rows_M: NDArray[np.int64],
    counts_M: NDArray[np.uint16],
) -> None:
    words, found = counts.view(np.uint64), 0
    for number in range(len(lines)):
        if number + _LINES_AHEAD < len(lines):
            _prefetch_line(counts, lines[number + _LINES_AHEAD])
        first = lines[number] * np.uint64(_LINE_WORDS)
        for word in range(first, first + np.uint64(_LINE_WORDS)):
            if not words[word]:
                continue
            for row in range(word * _FOUR, (word + _ONE) * _FOUR):
                count = counts[row]
                if count < least or (count == least and num_at_least == 0):
                    continue
                if count == least:
                    num_at_least -= 1
                rows_M[found], counts_M[found] = row, count
                found += 1
            if is_taken:
                words[word] = 0


@kernel_part
def _prefetch_line(counts: NDArray[np.uint16], line: np.uint64) -> None:
    """Fetch the counts of 64 rows, which are two cache lines."""
    prefetch_to_write(counts, line * np.uint64(_LINE_ROWS))
    prefetch_to_write(counts, line * np.uint64(_LINE_ROWS) + np.uint64(_LINE_ROWS // 2))


@kernel
def _set_bits(
    bits: NDArray[np.uint64],
    first_words: NDArray[np.uint64],
    first_rows: NDArray[np.uint64],
    rows_M: NDArray[np.int64],
    is_set: bool,
) -> int:
    """Set or clear the bits of rows; returns how many more are set."""
    num_more = 0
    for number in range(len(rows_M)):
        row = np.uint64(rows_M[number])
        table = np.searchsorted(first_rows, row, "right") - 1
        row -= first_rows[table]
        word, bit = first_words[table] + (row >> _SHIFT), _ONE << (row & _PLACE)
        was_set = bits[word] & bit != 0
        if is_set and not was_set:
            bits[word] |= bit
            num_more += 1
        elif was_set and not is_set:
            bits[word] &= ~bit
            num_more -= 1
    return num_more


@kernel
def _all_stale_kernel(
    stale: NDArray[np.uint64],
    first_words: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    is_stale_B: NDArray[np.bool_],
    has_rows_B: NDArray[np.bool_],
    tables_L: NDArray[np.uint64],
    positions_L: NDArray[np.uint64],
    values: NDArray[Any],
    offsets: NDArray[Any],
    is_one_hot: int,
    batch_size: int,
) -> None:
    for lookup in range(len(tables_L)):
        first_word, size = first_words[tables_L[lookup]], sizes[tables_L[lookup]]
        first_bag = positions_L[lookup] * np.uint64(batch_size)
        for sample in range(batch_size):
            if not is_stale_B[sample]:
                continue
            begin = first_bag + np.uint64(sample)
            end = begin + _ONE
            if not is_one_hot:
                begin, end = np.uint64(offsets[begin]), np.uint64(offsets[end])
            for place in range(begin, end):
                row = np.uint64(values[place])
                if row == NO_LOOKUP:
                    continue
                if row < size:
                    is_row_stale = stale[first_word + (row >> _SHIFT)] >> (row & _PLACE) & _ONE
                else:
                    is_row_stale = np.uint64(0)
                if not is_row_stale:
                    is_stale_B[sample] = False
                    break
                has_rows_B[sample] = True
