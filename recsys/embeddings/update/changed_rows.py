"""Records which rows of a table group were changed, for checkpoints that save only these rows.

Tables in fast memory report the rows of every update before it happens. Tables in two tiers report
the rows that are written back to the cold store, so rows in slots must be written back before the
record is taken (`SavedTables.flush`).

Letters: T tables, L lookups, N values, M rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch
from numba import prange

from recsys._support.jit import kernel, num_parts, parallel_kernel
from recsys._support.torch_compat import version_of
from recsys.embeddings.kernels.cpu.file_moves import table_of
from recsys.embeddings.kernels.torch import bags as torch_bags
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.row_space import RowNumbers
from recsys.embeddings.rows.lookups import NO_OFFSETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.ledger import LedgerEntry
    from recsys.embeddings.rows.lookups import Bags, Lookups

__all__ = ["ChangedRows", "rows_of"]

_WORD_BITS = 64
_MIN_SHARED_VALUES = 8192  # fewer are marked before another thread wakes up


class ChangedRows:
    """The rows of a table group that were changed since the last `take`: one bit per row.

    More rows may be marked than were changed, never fewer. A write that is not an update marks the
    whole table. These writes are seen:

    - torch operations in place on `weight`, on its views, or on an array of the optimizer's state
    - another tensor in place of `weight.data`, or of an array of the state
    - any write through a `weight.data` that was read since the last `take`

    Not seen are writes through numpy arrays, DLPack or pointers to the memory of a table or its
    state, and writes through a `weight.data` that was read before the last `take`. (If the table is
    in two tiers, torch operations on that `weight.data` are seen.) After such a write, read
    `weight.data` once: this counts as a write to the whole table.

    Args:
        tables: The tables of the group.
        are_tiered: Whether the tables are in two tiers, which then report writes themselves.

    Attributes:
        sizes: E of each table when the record began.
    """

    def __init__(self, tables: Sequence[Tensor], *, are_tiered: bool = False) -> None:
        sizes = self.sizes = [len(table) for table in tables]
        self._tables = [] if are_tiered else list(tables)
        self._versions = list(map(version_of, self._tables))
        self._sizes = np.array(sizes, np.uint64)
        self._first_rows = np.cumsum([0, *sizes]).astype(np.uint64)
        # Each table begins with a word of its own, so no two threads write to one word.
        words = [-(-size // _WORD_BITS) for size in sizes]
        self._first_words = np.cumsum([0, *words]).astype(np.uint64)
        self._bits = np.zeros(sum(words), np.uint64)
        self._on_device: _DeviceFlags | None = None
        self._new_states: list[tuple[ref[Tensor], int]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the record; on a device it takes a byte per row there, too."""
        flags = 0 if self._on_device is None else self._on_device.flags.nbytes
        return self._bits.nbytes + flags

    def mark(self, ledger: Iterable[LedgerEntry]) -> None:
        """Mark the rows that an update of resident tables is about to change.

        Called before the update, so that Ctrl-C between the two loses no mark; call `accept` after
        it.

        Args:
            ledger: The entries of the update.
        """
        self._mark_written()
        for entry in ledger:
            bags: Any = entry.bags
            if isinstance(bags, TorchBags):
                self._flags_on(bags.values.device).mark(entry.lookups, bags)
            else:
                self._mark_bags(entry.lookups, bags)

    def accept(self) -> None:
        """Take the present versions of the tables as those after an update that was marked.

        Tables may share a version, so one update may increase it several times.
        """
        self._versions = list(map(version_of, self._tables))

    def note_new_state(self, array: Tensor) -> None:
        """Note a state array of zeros that an update makes for a table without one."""
        self._new_states.append((ref(array), version_of(array)))

    def is_new_state(self, array: Tensor) -> bool:
        """Whether an update has made a state array since the last `take`, and it alone wrote it."""
        return any(
            made() is array and version_of(array) == version for made, version in self._new_states
        )

    def mark_rows(self, rows: NDArray[Any]) -> None:
        """Mark rows, (M,) int32 or int64, counted over all tables."""
        _mark_rows(self._bits, self._first_words, self._first_rows, rows)

    def mark_table(self, table: int) -> None:
        """Mark every row of a table."""
        size = int(self._sizes[table])
        bits = self._bits_of(table)
        bits[: size // _WORD_BITS] = np.uint64(2**_WORD_BITS - 1)
        if size % _WORD_BITS:
            bits[-1] = np.uint64(2 ** (size % _WORD_BITS) - 1)

    def mark_all(self) -> None:
        """Mark every row of every table."""
        for table in range(len(self._sizes)):
            self.mark_table(table)

    def take(self) -> list[NDArray[np.uint64]]:
        """Take the record, and begin a new one.

        Returns:
            For each table, one bit per row: row r is bit r % 64 of word r // 64. See `rows_of`.
        """
        self._mark_written()
        if self._on_device is not None:
            self._bits |= self._on_device.take()
        taken = [self._bits_of(table) for table in range(len(self._sizes))]
        self._bits, self._new_states = np.zeros_like(self._bits), []
        return taken

    def put_back(self, table: int, bits: NDArray[np.uint64]) -> None:
        """Mark the rows that `take` returned for a table again, because they were not saved."""
        of_table = self._bits_of(table)
        of_table |= bits

    def _mark_written(self) -> None:
        """Mark the tables whose version is not the accepted one."""
        now = list(map(version_of, self._tables))
        if now != self._versions:
            for table, (known, found) in enumerate(zip(self._versions, now, strict=True)):
                if known != found:
                    self.mark_table(table)
            self._versions = now

    def _mark_bags(self, lookups: Lookups, bags: Bags) -> None:
        is_small = len(bags.values) < _MIN_SHARED_VALUES
        (_mark_bags.alone if is_small else _mark_bags)(
            self._bits,
            self._first_words,
            self._sizes,
            lookups.tables,
            lookups.positions,
            bags.values,
            NO_OFFSETS if bags.offsets is None else bags.offsets,
            int(bags.offsets is None),
            bags.batch_size,
            1 if is_small else num_parts(),
        )

    def _bits_of(self, table: int) -> NDArray[np.uint64]:
        return self._bits[int(self._first_words[table]) : int(self._first_words[table + 1])]

    def _flags_on(self, device: torch.device) -> _DeviceFlags:
        """The flags on a device."""
        known = self._on_device
        if known is None or known.flags.device != device:  # a table that moves is marked whole
            first_rows = (self._first_words * np.uint64(_WORD_BITS)).tolist()
            known = self._on_device = _DeviceFlags(first_rows, self._sizes.tolist(), device)
        return known


class _DeviceFlags:
    """Changed rows of tables on a device: one byte per row, as torch operations can write it.

    Args:
        first_rows: Where the flags of each table begin, and where those of the last one end, (T +
            1,); multiples of 64.
        sizes: E of each table.
        device: Their device.

    Attributes:
        flags: (R + 1,) bool; the last one is for values that are not rows.
    """

    def __init__(
        self, first_rows: Sequence[int], sizes: Sequence[int], device: torch.device
    ) -> None:
        num_rows = first_rows[-1]
        self._numbers = RowNumbers(first_rows[:-1], sizes, num_rows, 1, torch.float32, device)
        self.flags = torch.zeros(num_rows + 1, dtype=torch.bool, device=device)

    def mark(self, lookups: Lookups, bags: TorchBags) -> None:
        """Set the flags of all rows that are looked up; the host does not wait."""
        if not bags.batch_size or not len(lookups.tables):
            return
        whole, layers = torch_bags.layers_of(self._numbers, lookups, bags.num_features)
        if bags.is_plain:
            found = [torch_bags.locate_one_hot(self._numbers, whole, bags)]
        else:
            found = [torch_bags.rows_of(self._numbers, layer, bags)[0] for layer in layers]
        for rows in found:
            self.flags.index_fill_(0, rows.flatten(), True)

    def take(self) -> NDArray[np.uint64]:
        """The flags as bits, on the host; clears them."""
        by_byte = self.flags[:-1].view(torch.uint8).view(-1, 8)
        powers = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
        packed = (by_byte * powers.to(by_byte.device)).sum(1, dtype=torch.uint8)
        found: NDArray[np.uint8] = packed.cpu().numpy()
        self.flags.zero_()
        return found.view(np.uint64)


def rows_of(bits: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The rows whose bit is set, ascending, (M,).

    Args:
        bits: As `ChangedRows.take` returns them for one table. For a part `bits[a:b]`, add 64 * a
            to the result.
    """
    rows = np.empty(int(np.bitwise_count(bits).sum()), np.int64)
    _list_rows(bits, rows)
    return rows


_ONE = np.uint64(1)
_SHIFT = np.uint64(6)
_PLACE = np.uint64(63)


@parallel_kernel
def _mark_bags(
    bits: NDArray[np.uint64],
    first_words: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    tables_L: NDArray[np.uint64],
    positions_L: NDArray[np.uint64],
    values: NDArray[Any],
    offsets: NDArray[Any],
    is_one_hot: int,
    batch_size: int,
    num_parts: int,
) -> None:
    """A part is a share of the tables."""
    for part in prange(num_parts):
        for lookup in range(len(tables_L)):
            table = tables_L[lookup]
            if table % np.uint64(num_parts) != np.uint64(part):
                continue
            begin = positions_L[lookup] * np.uint64(batch_size)
            end = begin + np.uint64(batch_size)
            if not is_one_hot:
                begin, end = np.uint64(offsets[begin]), np.uint64(offsets[end])
            first_word, size = first_words[table], sizes[table]
            for place in range(begin, end):
                row = np.uint64(values[place])
                if row < size:  # a negative id becomes a very large number
                    bits[first_word + (row >> _SHIFT)] |= _ONE << (row & _PLACE)


@kernel
def _mark_rows(
    bits: NDArray[np.uint64],
    first_words: NDArray[np.uint64],
    first_rows: NDArray[np.uint64],
    rows_M: NDArray[Any],
) -> None:
    for number in range(len(rows_M)):
        row = np.uint64(rows_M[number])
        table = table_of(first_rows, row)
        row -= first_rows[table]
        bits[first_words[table] + (row >> _SHIFT)] |= _ONE << (row & _PLACE)


@kernel
def _list_rows(bits: NDArray[np.uint64], rows_M: NDArray[np.int64]) -> None:
    count = 0
    for number in range(len(bits)):
        word, row = bits[number], np.int64(number) << 6
        while word:
            if word & _ONE:
                rows_M[count] = row
                count += 1
            word >>= _ONE
            row += 1
