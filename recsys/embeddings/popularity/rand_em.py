"""Estimate how many rows of a table are hot from a sample of its rows.

FAE's profiler does not read every count of a large table. It reads 35 random chunks of 1,024
consecutive rows, counts the hot rows in each, and computes an interval by Student's t at 99.9 %.
The paper calls this the Rand-Em Box. (The numbers are from published descriptions; neither FAE's
code nor the text of the paper that was available has them.)

The interval is correct if hot rows are scattered over the table. If ids are numbered by first
appearance, as by facebookresearch/dlrm, hot rows are at the beginning: a few chunks have nearly all
of them, and 35 chunks are too few for an estimate. The same number of rows drawn one by one takes
as long to read and does not depend on the order of rows. docs/popularity.md measures both.

Planning does not need estimates, because a `PopularityProfile` has every count. This module exists
to compare with FAE.

    y_g    hot rows in group g of m rows, of n groups
    estimate = E / m * (mean(y) +- t * s / sqrt(n)),  t with n - 1 degrees of freedom

Letters: E rows of the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["METHODS", "HotRowEstimate", "estimate_hot_rows"]

METHODS = ("chunks", "rows")
_NUM_GROUPS, _ROWS_PER_GROUP = 35, 1024
_STUDENT_T = 3.6007157973863255  # of 34 degrees of freedom: |t| is below it at 99.9 %


@dataclass(frozen=True, kw_only=True)
class HotRowEstimate:
    """An estimate of the number of hot rows of a table.

    Attributes:
        num_rows: The estimate.
        low: Lower end of its interval, at least 0.
        high: Upper end of its interval, at most E.
        num_rows_read: How many rows were read; a small table is read completely.
    """

    num_rows: float
    low: float
    high: float
    num_rows_read: int


def estimate_hot_rows(
    counts: NDArray[Any],
    min_count: int,
    *,
    method: str = "chunks",
    seed: int = 0,
) -> HotRowEstimate:
    """Estimate how many rows have a count of `min_count` or more.

    Args:
        counts: Lookups of each row of one table, (E,).
        min_count: The least count of a hot row.
        method: "chunks": groups of consecutive rows, as in FAE; "rows": groups of rows drawn one by
            one without replacement. A table of 35 * 1,024 rows or fewer is counted completely.
        seed: Seed of the draw.

    Raises:
        ConfigError: the method is unknown.
    """
    if method not in METHODS:
        raise ConfigError(f"rand-em: the method must be one of {METHODS}, got {method!r}")
    num_rows, num_read = len(counts), _NUM_GROUPS * _ROWS_PER_GROUP
    if num_rows <= num_read:
        hot = int(np.count_nonzero(counts >= min_count))
        return HotRowEstimate(num_rows=hot, low=hot, high=hot, num_rows_read=num_rows)
    rng = np.random.Generator(np.random.PCG64(seed))
    if method == "chunks":
        first = rng.integers(0, num_rows - _ROWS_PER_GROUP + 1, (_NUM_GROUPS, 1))
        read = first + np.arange(_ROWS_PER_GROUP)
    else:
        read = rng.choice(num_rows, (_NUM_GROUPS, _ROWS_PER_GROUP), replace=False)
    hot_per_group = np.count_nonzero(counts[read] >= min_count, axis=1)
    share = hot_per_group.mean() / _ROWS_PER_GROUP
    error = _STUDENT_T * hot_per_group.std(ddof=1)
    error /= math.sqrt(_NUM_GROUPS) * _ROWS_PER_GROUP
    return HotRowEstimate(
        num_rows=num_rows * share,
        low=max(num_rows * (share - error), 0.0),
        high=min(num_rows * (share + error), float(num_rows)),
        num_rows_read=num_read,
    )
