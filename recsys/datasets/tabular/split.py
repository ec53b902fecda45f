"""The rows of a table between the two passes of a preparation, and the part of each.

`Spool` keeps encoded rows in files. `SpooledRows` says which of them are for training, validation
and test, and what is in their histories. Each function that splits returns a code for every row:
the place of its split in `SPLITS`. In a split, rows keep the order of the file.
"""

from __future__ import annotations

import shutil
from functools import cached_property
from math import ceil, floor
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys._support.jit import kernel
from recsys.datasets.numbering import HashedRows
from recsys.datasets.store_writer import SPLITS
from recsys.datasets.tabular.encode import Bags, places_of
from recsys.datasets.tabular.schema import (
    GROUP,
    PART,
    TIME,
    ColumnSplit,
    LastOneOutSplit,
    RandomSplit,
    TimestampSplit,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys.datasets.tabular.encode import Columns
    from recsys.datasets.tabular.schema import Schema, SharesSplit

__all__ = ["TRAIN", "Block", "Spool", "SpooledRows"]

TRAIN: Final = SPLITS.index("train")
TEST: Final = SPLITS.index("test")
VALIDATION: Final = SPLITS.index("validation")

_NUM_ROWS = 1 << 20  # per block
_NUM_HASHES = 2**31 - 1  # of groups


BLOCK_ROWS = 1 << 16


class Block(NamedTuple):
    """Some rows of some columns.

    Attributes:
        rows: Their row numbers, ascending, (n,).
        columns: An array, or `Bags`, for each column.
    """

    rows: NDArray[np.int64]
    columns: Columns


class Spool:
    """Columns of encoded rows in files; use it as a context manager, which removes them.

    Blocks of rows are appended in file order, and read back block by block. Each array has a file
    of its own in a temporary folder:

        NUMBER.bin                        one value for each row
        NUMBER.lengths.bin, NUMBER.bin    a bag for each row: its length, and the values of all bags

    Args:
        parent: An existing folder, which holds the temporary one.

    Attributes:
        num_rows: Rows appended so far.
        names: The columns, of the first block and all others.
    """

    def __init__(self, parent: Path) -> None:
        self.num_rows = 0
        self.names: list[str] = []
        self._kinds: dict[str, tuple[np.dtype[Any], bool]] = {}  # dtype of values; are they bags
        self._folder = Path(mkdtemp(prefix="spool-", dir=parent))

    def append(self, num_rows: int, columns: Columns) -> None:
        """Add rows at the end; columns have the names, kinds and dtypes of the first block."""
        self.names = list(columns)
        for name, column in columns.items():
            values, is_bag = column, isinstance(column, Bags)
            if isinstance(column, Bags):
                values = column.values
                self._write(name, column.lengths, ".lengths")
            self._kinds[name] = np.asarray(values).dtype, is_bag
            self._write(name, np.asarray(values))
        self.num_rows += num_rows

    def column(self, name: str) -> NDArray[Any]:
        """All values of a column without bags, in memory, (num_rows,)."""
        return self._read(name, self._kinds[name][0], 0, self.num_rows)

    def blocks(self, names: Sequence[str], wanted: NDArray[np.bool_]) -> Iterator[Block]:
        """Some columns of the wanted rows, block by block, in file order.

        Args:
            names: The columns.
            wanted: Whether each row is wanted, (num_rows,).

        Yields:
            Blocks of 1 to `BLOCK_ROWS` rows.
        """
        ends = dict.fromkeys(names, 0)  # of bags, in the file of values
        for start in range(0, self.num_rows, BLOCK_ROWS):
            rows = np.flatnonzero(wanted[start : start + BLOCK_ROWS])
            size = min(BLOCK_ROWS, self.num_rows - start)
            columns: Columns = {}
            for name in names:
                begin, count, lengths = start, size, None
                dtype, is_bag = self._kinds[name]
                if is_bag:
                    lengths = self._read(name, np.dtype(np.int32), start, size, ".lengths")
                    begin, count = ends[name], int(lengths.sum(dtype=np.int64))
                    ends[name] += count
                if len(rows):
                    values = self._read(name, dtype, begin, count)
                    column = values if lengths is None else Bags(values, lengths)
                    columns[name] = column if len(rows) == size else column.take(rows)
            if len(rows):
                yield Block(rows + start, columns)

    def _path(self, name: str, kind: str = "") -> Path:
        return self._folder / f"{self.names.index(name)}{kind}.bin"

    def _write(self, name: str, values: NDArray[Any], kind: str = "") -> None:
        with self._path(name, kind).open("ab") as file:
            file.write(np.ascontiguousarray(values).data)

    def _read(
        self, name: str, dtype: np.dtype[Any], start: int, count: int, kind: str = ""
    ) -> NDArray[Any]:
        return np.fromfile(self._path(name, kind), dtype, count, offset=start * dtype.itemsize)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class SpooledRows:
    """All rows of a table, spooled, and the part of each.

    Rows that the schema's filter leaves out are no samples. They have a part all the same, as
    histories may list them: that of the rows around them.

    Args:
        spool: The rows; nothing is appended any more.
        schema: What its columns mean.
        groups: The value of each group, by number; None without groups.

    Attributes:
        is_sample: Whether the filter keeps each row, (N,).
        codes: The part of each row: its place in `SPLITS`, (N,) uint8.
    """

    def __init__(self, spool: Spool, schema: Schema, groups: pa.Array = None) -> None:
        self.spool = spool
        self.schema = schema
        everything = np.ones(spool.num_rows, np.bool_)
        self.is_sample = spool.column("/filter") if schema.filter else everything
        self.codes = self._split(groups)

    def listed(self, name: str) -> NDArray[np.bool_]:
        """Whether each row may be in a history of later rows, (N,)."""
        if self.schema.history[name].where:
            return self.spool.column(f"/where/{name}")
        labels = [name for name in self.spool.names if name.startswith("/label/")]
        if not labels:
            return self.is_sample
        found: NDArray[np.bool_] = np.any([self.spool.column(name) for name in labels], axis=0)
        return found & self.is_sample

    @cached_property
    def groups(self) -> NDArray[np.int32]:
        """The group of each row, (N,)."""
        return self.spool.column(GROUP)

    @cached_property
    def in_group_order(self) -> NDArray[np.int64]:
        """All rows, group by group, in a group by time, (N,)."""
        if self.schema.timestamp:
            return np.lexsort((self.spool.column(TIME), self.groups))
        return np.argsort(self.groups, kind="stable")

    def histories(self, code: int) -> dict[str, Histories]:
        """Each history, for the rows of a part; those of training rows list training rows alone."""
        schema, found = self.schema, {}
        has_both = schema.label_columns and schema.timestamp
        times = self.spool.column(TIME) if has_both else None
        for name, history in schema.history.items():
            is_listed = self.listed(name)
            if code == TRAIN:
                is_listed = is_listed & (self.codes == TRAIN)
            order = self.in_group_order, self.groups
            values = self.spool.column(history.of)
            found[name] = Histories(*order, is_listed, times, values, history.max_length)
        return found

    def in_part(self, code: int) -> NDArray[np.bool_]:
        """Whether each row is a sample of a part, (N,)."""
        found: NDArray[np.bool_] = (self.codes == code) & self.is_sample
        return found

    def blocks(self, code: int, names: Sequence[str]) -> Iterator[Block]:
        """Some columns of the samples of a part, block by block."""
        return self.spool.blocks(names, self.in_part(code))

    def _split(self, groups: pa.Array) -> NDArray[np.uint8]:
        split, num_rows = self.schema.split, self.spool.num_rows
        if isinstance(split, LastOneOutSplit):
            return split_last_one_out(self.in_group_order, self.groups, self.is_sample)
        if isinstance(split, ColumnSplit):
            codes: NDArray[np.uint8] = self.spool.column(PART)
            if not split.validation:
                rows = np.flatnonzero((codes == TEST) & self.is_sample)
                codes[rows[: len(rows) // 2]] = VALIDATION
            return codes
        if isinstance(split, RandomSplit):
            if split.by == "random":
                return split_at_random(np.arange(num_rows, dtype=np.uint64), split, split.seed)
            hashes = HashedRows(_NUM_HASHES).number(groups.cast("large_string"))
            return split_at_random(hashes.astype(np.uint64), split, split.seed)[self.groups]
        num_samples, order = int(np.count_nonzero(self.is_sample)), None
        # Both parts together are rounded down; of these rows, those for test are rounded up. With
        # 1/14 each these are the sizes of `classic_splits`.
        both = split.test + split.validation
        num_held = floor(num_samples * both)
        num_test = ceil(num_held * split.test / both) if both else 0
        if isinstance(split, TimestampSplit):
            times = self.spool.column(TIME)
            order = np.argsort(times, kind="stable")
            if split.test_from is not None:
                num_test = int(np.count_nonzero(self.is_sample & (times >= split.test_from)))
                num_held = num_test + floor(num_samples * split.validation)
        return split_in_order(self.is_sample, num_held, num_test, order)


def split_in_order(
    is_sample: NDArray[np.bool_],
    num_held: int,
    num_test: int,
    order: NDArray[np.int64] | None = None,
) -> NDArray[np.uint8]:
    """The last samples are for test, those before them for validation.

    A row that is no sample is in the part of the last sample before it.

    Args:
        is_sample: Whether each row is a sample.
        num_held: Samples for validation and test.
        num_test: Samples for test.
        order: All rows, by time; by default the order of the file.

    Shape:
        is_sample, order, result (N,).
    """
    codes = np.full(len(is_sample), TRAIN, np.uint8)
    positions: Any = range(len(codes))  # of the samples, in order
    if not is_sample.all():
        positions = np.flatnonzero(is_sample if order is None else is_sample[order])
    for code, num_last in ((VALIDATION, num_held), (TEST, num_test)):
        if num_last and len(positions):
            codes[positions[max(len(positions) - num_last, 0)] :] = code
    if order is not None:
        codes[order] = codes.copy()
    return codes


def split_at_random(
    numbers: NDArray[np.uint64], shares: SharesSplit, seed: int
) -> NDArray[np.uint8]:
    """Each number by a u in [0, 1): u < test; u < test + validation; the rest for training.

    u is the upper 53 bits of `mix64(number * GOLDEN + mix64(seed))`, divided by 2**53.
    """
    test, validation = shares.test, shares.validation
    codes = np.full(len(numbers), TRAIN, np.uint8)
    offset = mix64(np.array([seed], np.uint64))
    for start in range(0, len(numbers), _NUM_ROWS):
        block = numbers[start : start + _NUM_ROWS]
        uniform = (mix64(block * GOLDEN + offset) >> np.uint64(11)) * 2.0**-53
        found = codes[start : start + _NUM_ROWS]
        found[uniform < float(test + validation)] = VALIDATION
        found[uniform < float(test)] = TEST
    return codes


def split_last_one_out(
    order: NDArray[np.int64], groups: NDArray[np.int32], is_sample: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """The last sample of each group is for test, the one before it for validation.

    Groups with fewer than three samples are for training, with all their rows.

    Args:
        order: All rows, group by group, in a group by time.
        groups: The group of each row.
        is_sample: Whether each row is a sample; others are for training.

    Shape:
        all (N,).
    """
    codes = np.full(len(order), TRAIN, np.uint8)
    order = order[is_sample[order]]
    sizes = np.bincount(groups[order])
    ends = np.cumsum(sizes)[sizes >= 3]
    codes[order[ends - 1]] = TEST
    codes[order[ends - 2]] = VALIDATION
    return codes


class Histories:
    """For each row, values of earlier positive rows of its group; 16 bytes a row beside `groups`.

    Rows are ordered by time, or by their position in the file if there are no times; rows of equal
    time keep the order of the file. A row's own value is not in its history.

    A history must not tell the label of its row. In an impression log, the clicked item and the
    items shown beside it have one time: an item of the same impression in a history says that it
    was the one that was clicked. For data with labels and times, a history therefore ends before
    the first row of its group with an equal time.

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
            np.empty(0, np.int64) if times is None else times,
            self._listed,
            self._ends,
            self._lengths,
        )

    def of_rows(self, rows: NDArray[np.int64]) -> Bags:
        """The histories of some rows, by their numbers: the newest values, oldest first."""
        lengths = np.minimum(self._lengths[rows], self._max_length)
        positions = places_of(self._ends[rows] - lengths, lengths)
        return Bags(self._values[self._listed[positions]], lengths)


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
