"""How many rows of a table are hot, estimated from a few of them.

FAE's profiler does not look at every count of a large table. It takes 35 chunks of 1,024
consecutive rows at random, counts the hot rows in each, and gives an interval by Student's t at
99.9 %: the paper calls it the Rand-Em Box. (Neither the shipped code nor the paper's text that was
at hand has these numbers; they are the published description's, as it is retold.)

The interval is right where hot rows lie scattered over the table. Where ids are numbered by first
appearance, as facebookresearch/dlrm numbers them, they lie at its beginning: a few chunks have
nearly all of them, and 35 are too few to say how many those are. As many rows drawn one by one cost
the same to read and do not depend on the order at all. docs/popularity.md has both, measured.

A `PopularityProfile` knows every count, so neither is needed to plan with; this is what FAE's way
is compared by.

    y_g    hot rows in group g of m rows, of n groups
    estimate = E / m * (mean(y) +- t * s / sqrt(n)),  t of n - 1 degrees of freedom

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

    from recsys.embeddings.popularity import PopularityProfile

__all__ = ["METHODS", "HotRowEstimate", "estimate_by_table", "estimate_hot_rows", "student_t"]

METHODS = ("chunks", "rows")


@dataclass(frozen=True, kw_only=True)
class HotRowEstimate:
    """How many rows of a table are hot.

    Attributes:
        num_rows: The estimate.
        low: Lower end of its interval, at least the hot rows that were read.
        high: Upper end, at most the rows that may be hot.
        num_rows_read: How many rows it rests on; all, where the table has no more.
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
        min_count: What makes a row hot.
        method: "chunks": groups of consecutive rows, as FAE takes them; "rows": groups of rows
            drawn one by one, none twice.
        num_groups: n, 2 or more.
        rows_per_group: m. A table of n * m rows or fewer is counted whole.
        confidence: How often the truth is to lie inside of the interval.
        seed: Of the draw.

    Raises:
        ConfigError: the method is unknown, or a number is out of range.
    """
    if method not in METHODS:
        raise ConfigError(f"rand-em: the method must be one of {METHODS}, got {method!r}")
    if num_groups < 2 or rows_per_group < 1:
        raise ConfigError(
            "rand-em: there must be 2 groups or more of 1 row or more, got "
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


def estimate_by_table(
    profile: PopularityProfile, threshold: float, *, method: str = "chunks", seed: int = 0
) -> dict[str, HotRowEstimate]:
    """The same for every table: rows that take more than a share of their table's lookups.

    Args:
        profile: Of the tables.
        threshold: The share; FAE begins at 1e-5 and moves it until the hot rows fit.
        method: As of `estimate_hot_rows`.
        seed: Of the draw; every table has one of its own.

    Raises:
        ConfigError: the method is unknown, or the threshold is not in [0, 1).
    """
    if not 0 <= threshold < 1:
        raise ConfigError(f"rand-em: the threshold must lie in [0, 1), got {threshold}")
    found = {}
    for position, table in enumerate(profile.table_sizes):
        counts = profile.counts(table)
        min_count = math.floor(threshold * int(counts.sum(dtype=np.int64))) + 1
        seed_of_table = int(np.random.SeedSequence([seed, position]).generate_state(1)[0])
        found[table] = estimate_hot_rows(counts, min_count, method=method, seed=seed_of_table)
    return found


def student_t(confidence: float, degrees: int) -> float:
    """How far from 0 a value of Student's t lies at most, with that probability.

    For a whole number of degrees of freedom the probability is a finite sum of powers of sine and
    cosine, so nothing but its inversion is approximated, to the last bits.

    Args:
        confidence: Of both sides together, in (0, 1).
        degrees: Degrees of freedom, 1 or more.

    Raises:
        ConfigError: an argument is out of range.
    """
    if not 0 < confidence < 1 or degrees < 1:
        raise ConfigError(
            "student_t: confidence must lie in (0, 1) and degrees of freedom be 1 or more, got "
            f"{confidence} and {degrees}"
        )
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """The probability that a value of Student's t is less than sqrt(degrees) tan(angle) from 0."""
    cosine = math.cos(angle)
    is_odd = degrees % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for power in range(1 + is_odd, degrees, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total
