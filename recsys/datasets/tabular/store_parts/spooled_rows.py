"""The rows of a spool, and which of them are for training, test and validation."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from recsys.datasets.tabular.encoding.row_encoder import GROUP, LABEL, PART, TIME
from recsys.datasets.tabular.schemas.schema_parts import (
    ColumnSplit,
    LastOneOutSplit,
    RandomSplit,
    TimestampSplit,
)
from recsys.datasets.tabular.store_parts.histories import in_group_order
from recsys.datasets.tabular.store_parts.splits import (
    TEST,
    halve_test,
    split_at_random,
    split_at_times,
    split_by_fractions,
    split_last_one_out,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from recsys.datasets.tabular.schemas.schema import Schema
    from recsys.datasets.tabular.store_parts.spool import Block, Spool

__all__ = ["SpooledRows"]


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
