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

__all__ = ["METHODS", "HotRowEstimate", "estimate_hot_rows", "student_t"]

METHODS = ("chunks", "rows")


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
    num_groups: int = 35,
    rows_per_group: int = 1024,
    confidence: float = 0.999,
    seed: int = 0,
) -> HotRowEstimate:
    """Estimate how many rows have a count of `min_count` or more.

    Args:
        counts: Lookups of each row of one table, (E,).
        min_count: The least count of a hot row.
        method: "chunks": groups of consecutive rows, as in FAE; "rows": groups of rows drawn one by
            one without replacement.
        num_groups: n, at least 2.
        rows_per_group: m. A table of n * m rows or fewer is counted completely.
        confidence: Probability that the interval contains the true number.
        seed: Seed of the draw.

    Raises:
        ConfigError: the method is unknown, or a number is out of range.
    """
    if method not in METHODS:
        raise ConfigError(f"rand-em: the method must be one of {METHODS}, got {method!r}")
    if num_groups < 2 or rows_per_group < 1:
        raise ConfigError(
            "rand-em: there must be at least 2 groups of at least 1 row, got "
            f"{num_groups} of {rows_per_group}"
        )
    num_rows, num_read = len(counts), num_groups * rows_per_group
    if num_rows <= num_read:
        hot = int(np.count_nonzero(counts >= min_count))
        return HotRowEstimate(num_rows=hot, low=hot, high=hot, num_rows_read=num_rows)
    rng = np.random.Generator(np.random.PCG64(seed))
    if method == "chunks":
        first = rng.integers(0, num_rows - rows_per_group + 1, (num_groups, 1))
        read = first + np.arange(rows_per_group)
    else:
        read = rng.choice(num_rows, (num_groups, rows_per_group), replace=False)
    hot_per_group = np.count_nonzero(counts[read] >= min_count, axis=1)
    share = hot_per_group.mean() / rows_per_group
    error = student_t(confidence, num_groups - 1) * hot_per_group.std(ddof=1)
    error /= math.sqrt(num_groups) * rows_per_group
    return HotRowEstimate(
        num_rows=num_rows * share,
        low=max(num_rows * (share - error), 0.0),
        high=min(num_rows * (share + error), float(num_rows)),
        num_rows_read=num_read,
    )


def student_t(confidence: float, degrees: int) -> float:
    """The two-sided quantile of Student's t: |t| is below it with probability `confidence`.

    For an integer number of degrees of freedom, the probability is a finite sum of powers of sine
    and cosine. Only its inversion, by bisection, is approximate, to the last bits.

    Args:
        confidence: Probability of both sides together, in (0, 1).
        degrees: Degrees of freedom, at least 1.

    Raises:
        ConfigError: an argument is out of range.
    """
    if not 0 < confidence < 1 or degrees < 1:
        raise ConfigError(
            "student_t: confidence must lie in (0, 1) and degrees of freedom be at least 1, got "
            f"{confidence} and {degrees}"
        )
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """The probability that |t| is less than sqrt(degrees) * tan(angle)."""
    cosine = math.cos(angle)
    is_odd = degrees % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for power in range(1 + is_odd, degrees, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total
