"""Which rows of a table are for training, validation and test.

Each function that splits returns a code for every row: the place of its split in `SPLITS`. In a
split, rows keep the order of the file.
"""

from __future__ import annotations

from functools import cached_property
from math import ceil, floor
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys.datasets.splits import SPLITS
from recsys.datasets.tabular.encode import GROUP, PART, TIME, labels_of
from recsys.datasets.tabular.numbering import HashedRows
from recsys.datasets.tabular.schema import (
    ColumnSplit,
    LastOneOutSplit,
    RandomSplit,
    TimestampSplit,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys.datasets.tabular.schema import Schema, SharesSplit
    from recsys.datasets.tabular.spool import Block, Spool

__all__ = ["TRAIN", "SpooledRows", "split_at_random", "split_in_order", "split_last_one_out"]

TRAIN: Final = SPLITS.index("train")
TEST: Final = SPLITS.index("test")
VALIDATION: Final = SPLITS.index("validation")

_NUM_ROWS = 1 << 20  # per block
_NUM_HASHES = 2**31 - 1  # of groups


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
        self.is_sample = np.ones(spool.num_rows, np.bool_)
        if schema.filter:
            self.is_sample = spool.column("/filter")
        self.codes = self._split(groups)

    def listed(self, name: str) -> NDArray[np.bool_]:
        """Whether each row may be in a history of later rows, (N,)."""
        if self.schema.history[name].where:
            return self.spool.column(f"/where/{name}")
        found = self.is_sample.copy()
        if labels := labels_of(self.schema):
            found &= np.any([self.spool.column(label) for label in labels], axis=0)
        return found

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
        num_samples = int(np.count_nonzero(self.is_sample))
        order, (num_validation, num_test) = None, _sizes(num_samples, split)
        if isinstance(split, TimestampSplit):
            times = self.spool.column(TIME)
            order = np.argsort(times, kind="stable")
            if split.test_from is not None:
                num_test = int(np.count_nonzero(self.is_sample & (times >= split.test_from)))
                num_validation = floor(num_samples * split.validation)
        return split_in_order(self.is_sample, num_validation, num_test, order)


def _sizes(num_samples: int, split: SharesSplit) -> tuple[int, int]:
    """How many samples are for validation and for test.

    Both together are a whole number of rows, rounded down; of these, the number for test is rounded
    up. With 1/14 each these are the sizes of `classic_splits`.
    """
    test, both = split.test, split.test + split.validation
    num_held = floor(num_samples * both)
    num_test = ceil(num_held * test / both) if both else 0
    return num_held - num_test, num_test


def split_in_order(
    is_sample: NDArray[np.bool_],
    num_validation: int,
    num_test: int,
    order: NDArray[np.int64] | None = None,
) -> NDArray[np.uint8]:
    """The last samples are for test, those before them for validation.

    A row that is no sample is in the part of the last sample before it.

    Args:
        is_sample: Whether each row is a sample.
        num_validation: Samples for validation.
        num_test: Samples for test.
        order: All rows, by time; by default the order of the file.

    Shape:
        is_sample, order, result (N,).
    """
    codes = np.full(len(is_sample), TRAIN, np.uint8)
    places: Any = range(len(codes))  # of the samples, in order
    if not is_sample.all():
        places = np.flatnonzero(is_sample if order is None else is_sample[order])
    for code, num_last in ((VALIDATION, num_validation + num_test), (TEST, num_test)):
        if num_last and len(places):
            codes[places[max(len(places) - num_last, 0)] :] = code
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
