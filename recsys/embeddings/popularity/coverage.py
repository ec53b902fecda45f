"""Coverage: the share of given lookups that a set of hot rows would serve.

Nested sets are measured in one pass. The level of a row is the number of the smallest set that has
it, or the number of sets if none has it. The level of a sample is the highest level of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Coverage", "coverages_by_level", "format_coverages", "text_table"]

_BLOCK_ROWS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The share of lookups, rows and samples that hot rows serve.

    Attributes:
        num_rows: Hot rows.
        num_lookups: Measured lookups.
        lookup_hit_rate: Share of the lookups that go to hot rows.
        num_distinct_rows: Distinct rows that are looked up.
        num_distinct_hot_rows: How many of these are hot.
        num_samples: Measured samples; None if only counts per row were known.
        hot_sample_share: Share of samples all of whose lookups go to hot rows; None if there are no
            samples or only counts per row were known.
    """

    num_rows: int
    num_lookups: int
    lookup_hit_rate: float
    num_distinct_rows: int
    num_distinct_hot_rows: int
    num_samples: int | None
    hot_sample_share: float | None


def coverages_by_level(
    levels: NDArray[np.uint8],
    num_levels: int,
    counts: NDArray[np.uint32] | NDArray[np.int64],
    samples: NDArray[np.int64] | None,
) -> list[Coverage]:
    """The coverage of every set of rows: level 0, levels 0 and 1, and so on.

    Args:
        levels: The level of each row; `num_levels` if no set has it.
        num_levels: How many sets there are.
        counts: Lookups of each row.
        samples: The number of samples of each level; None if not known.

    Shape:
        levels (R,); counts (R,); samples (num_levels + 1,); R rows of all tables.

    Raises:
        ConfigError: there are no lookups.
    """
    rows, lookups, distinct = (np.zeros(num_levels + 1, np.int64) for _ in range(3))
    for begin in range(0, len(levels), _BLOCK_ROWS):
        block, times = levels[begin : begin + _BLOCK_ROWS], counts[begin : begin + _BLOCK_ROWS]
        for level in range(num_levels + 1):
            of_level = times[block == level]
            rows[level] += len(of_level)
            lookups[level] += of_level.sum(dtype=np.int64)
            distinct[level] += np.count_nonzero(of_level)
    num_lookups = int(lookups.sum())
    if not num_lookups:
        raise ConfigError("coverage: there must be lookups to measure, got none; use other samples")
    num_samples = None if samples is None else int(samples.sum())
    return [
        Coverage(
            num_rows=int(rows[: level + 1].sum()),
            num_lookups=num_lookups,
            lookup_hit_rate=int(lookups[: level + 1].sum()) / num_lookups,
            num_distinct_rows=int(distinct.sum()),
            num_distinct_hot_rows=int(distinct[: level + 1].sum()),
            num_samples=num_samples,
            hot_sample_share=None
            if samples is None or not num_samples
            else int(samples[: level + 1].sum()) / num_samples,
        )
        for level in range(num_levels)
    ]


def format_coverages(coverages: Sequence[Coverage], num_rows_seen: int) -> str:
    """A text table with one line per set of hot rows.

    Args:
        coverages: Of the sets, measured on the same lookups.
        num_rows_seen: The number of rows that the sets were chosen from.
    """
    header = ("hot rows", "of rows seen", "lookups", "distinct rows", "whole samples")
    lines = [
        (
            f"{found.num_rows:,}",
            f"{found.num_rows / max(num_rows_seen, 1):.1%}",
            f"{found.lookup_hit_rate:.1%}",
            f"{found.num_distinct_hot_rows / found.num_distinct_rows:.1%}",
            "-" if found.hot_sample_share is None else f"{found.hot_sample_share:.1%}",
        )
        for found in coverages
    ]
    return text_table([header, *lines])


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
