"""The rows of a spool, and which of them are for training, test and validation.

Each function that splits returns a code for every row: the place of its split in `SPLITS`. In a
split, rows keep the order of the file.
"""

from __future__ import annotations

from functools import cached_property
from math import ceil, floor
from typing import TYPE_CHECKING, Final

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys.datasets.splits import SPLITS
from recsys.datasets.tabular.encoding.row_encoder import GROUP, LABEL, PART, TIME
from recsys.datasets.tabular.schemas.schema_parts import (
    ColumnSplit,
    LastOneOutSplit,
    RandomSplit,
    TimestampSplit,
)
from recsys.datasets.tabular.store_parts.histories import in_group_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

    from recsys.datasets.tabular.schemas.schema import Schema
    from recsys.datasets.tabular.store_parts.spool import Block, Spool

__all__ = [
    "TEST",
    "TRAIN",
    "VALIDATION",
    "SpooledRows",
    "halve_test",
    "split_at_random",
    "split_at_times",
    "split_by_fractions",
    "split_last_one_out",
]

TRAIN: Final = SPLITS.index("train")
TEST: Final = SPLITS.index("test")
VALIDATION: Final = SPLITS.index("validation")

_NUM_ROWS = 1 << 20  # per block


class SpooledRows:
    """All rows of a table, spooled.

    Args:
        spool: The rows; nothing is appended any more.
        schema: What its columns mean.
        are_for_test: Whether all rows are for test; else `schema.split` divides them.

    Attributes:
        are_for_test: As given.
        codes: The part of each row: its place in `SPLITS`, (N,) uint8.
    """

    def __init__(self, spool: Spool, schema: Schema, *, are_for_test: bool = False) -> None:
        self.spool = spool
        self.schema = schema
        self.are_for_test = are_for_test
        if are_for_test:
            self.codes = np.full(spool.num_rows, TEST, np.uint8)
        else:
            self.codes = self._split()

    @cached_property
    def labels(self) -> NDArray[np.int8]:
        """The label of each row, (N,); 1 for all without a label."""
        if not self.schema.label:
            return np.ones(self.spool.num_rows, np.int8)
        return self.spool.column(LABEL)

    @cached_property
    def groups(self) -> NDArray[np.int32]:
        """The group of each row, (N,)."""
        return self.spool.column(GROUP)

    @cached_property
    def in_group_order(self) -> NDArray[np.int64]:
        """All rows, group by group, in a group by time, (N,)."""
        times = self.spool.column(TIME) if self.schema.timestamp else None
        return in_group_order(self.groups, times)

    def blocks(self, code: int, names: Sequence[str]) -> Iterator[Block]:
        """Some columns of the rows of a part, block by block."""
        return self.spool.blocks(names, self.codes == code)

    def _split(self) -> NDArray[np.uint8]:
        split, num_rows = self.schema.split, self.spool.num_rows
        if isinstance(split, LastOneOutSplit):
            return split_last_one_out(self.in_group_order, self.groups)
        if isinstance(split, ColumnSplit):
            codes = self.spool.column(PART)
            if not split.validation:
                halve_test(codes)
            return codes
        if isinstance(split, TimestampSplit):
            times = self.spool.column(TIME)
            if split.test_from is not None:
                codes = split_at_times(times, split.test_from, split.validation_from)
                if split.validation_from is None:
                    halve_test(codes)
                return codes
            order = np.argsort(times, kind="stable")
            return split_by_fractions(num_rows, split.test_share, split.validation_share, order)
        shares = split.test_share, split.validation_share
        if isinstance(split, RandomSplit):
            return split_at_random(num_rows, *shares, split.seed)
        return split_by_fractions(num_rows, *shares)


def split_by_fractions(
    num_rows: int, test: Fraction, validation: Fraction, order: NDArray[np.int64] | None = None
) -> NDArray[np.uint8]:
    """The last rows are for test and validation, the test part first.

    `test` and `validation` together take a whole number of rows, rounded down; of these, the number
    for test is rounded up. With 1/14 each this is `classic_splits`.

    Args:
        num_rows: All rows.
        test: Fraction of the rows.
        validation: Fraction of the rows.
        order: All rows, by time; by default the order of the file.

    Shape:
        order, result (num_rows,).
    """
    both = test + validation
    num_held = floor(num_rows * both)
    num_test = ceil(num_held * test / both) if both else 0
    in_order = np.zeros(num_rows, np.uint8)
    in_order[num_rows - num_held :] = VALIDATION
    in_order[num_rows - num_held : num_rows - num_held + num_test] = TEST
    if order is None:
        return in_order
    codes = np.empty(num_rows, np.uint8)
    codes[order] = in_order
    return codes


def split_at_times(
    times: NDArray[np.int64], test_from: int, validation_from: int | None
) -> NDArray[np.uint8]:
    """Train on rows before both times; the later part lasts to the end.

    Args:
        times: Of every row.
        test_from: When the test part begins.
        validation_from: When the validation part begins; None: no such part.
    """
    codes = np.zeros(len(times), np.uint8)
    starts = [(test_from, TEST)]
    if validation_from is not None:
        starts.append((validation_from, VALIDATION))
    for start, code in sorted(starts):
        codes[times >= start] = code
    return codes


def split_at_random(
    num_rows: int, test: Fraction, validation: Fraction, seed: int
) -> NDArray[np.uint8]:
    """Each row by a number u in [0, 1): u < test; u < test + validation; the rest for training.

    u is the upper 53 bits of `mix64(row * GOLDEN + mix64(seed))`, divided by 2**53.
    """
    codes = np.zeros(num_rows, np.uint8)
    offset = mix64(np.array([seed], np.uint64))
    for start in range(0, num_rows, _NUM_ROWS):
        rows = np.arange(start, min(start + _NUM_ROWS, num_rows), dtype=np.uint64)
        uniform = (mix64(rows * GOLDEN + offset) >> np.uint64(11)) * 2.0**-53
        block = codes[start : start + len(rows)]
        block[uniform < float(test + validation)] = VALIDATION
        block[uniform < float(test)] = TEST
    return codes


def split_last_one_out(order: NDArray[np.int64], groups: NDArray[np.int32]) -> NDArray[np.uint8]:
    """The last row of each group is for test, the row before it for validation.

    Groups with fewer than three rows are for training, with all their rows.

    Args:
        order: All rows, by `in_group_order`.
        groups: The group of each row.

    Shape:
        all (N,).
    """
    sizes = np.bincount(groups)
    ends = np.cumsum(sizes)[sizes >= 3]
    codes = np.zeros(len(order), np.uint8)
    codes[order[ends - 1]] = TEST
    codes[order[ends - 2]] = VALIDATION
    return codes


def halve_test(codes: NDArray[np.uint8]) -> None:
    """Keep the first half of the test part, rounded up; its rest becomes the validation part."""
    rows = np.flatnonzero(codes == TEST)
    codes[rows[(len(rows) + 1) // 2 :]] = VALIDATION
