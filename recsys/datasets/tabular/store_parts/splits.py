"""Which rows are for training, test and validation.

Each function returns a code for every row: the place of its split in `SPLITS`. In a split, rows
keep the order of the file.
"""

from __future__ import annotations

from math import ceil, floor
from typing import TYPE_CHECKING, Final

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys.datasets.splits import SPLITS

if TYPE_CHECKING:
    from fractions import Fraction

    from numpy.typing import NDArray

__all__ = [
    "TEST",
    "TRAIN",
    "VALIDATION",
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
