"""What every benchmark needs: rows, their summary, a process of one's own, a file and a table."""

from __future__ import annotations

import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd

from recsys.machine import describe_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Row", "in_own_process", "print_rows", "ratio", "summarize", "write_rows"]

_T = TypeVar("_T")

# Least to most of n runs holds the median with probability 1 - 2 / 2**n: from 6 on over 95 %.
_MIN_RUNS_OF_INTERVAL = 6


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured quantity of one provider in one case.

    Attributes:
        bench: The benchmark's name.
        case: Its parameters, comma-joined key=value.
        provider: Who was measured; ours is "recsys".
        metric: What was measured.
        unit: In what.
        median: Over the runs; `p20` and `p80` likewise.
        num_runs: How many.
        low: Lower end of the median's 95 % interval, by bootstrap; `high` likewise. Both are None
            for the median of fewer than 6 runs, which even from least to most is no 95 % interval.
    """

    bench: str
    case: str
    provider: str
    metric: str
    unit: str
    median: float
    p20: float
    p80: float
    num_runs: int
    low: float | None
    high: float | None


def summarize(
    *, bench: str, case: str, provider: str, metric: str, unit: str, values: Sequence[float]
) -> Row:
    """A row from the values of several runs."""
    p20, median, p80 = np.percentile(values, [20, 50, 80]).tolist()
    low = high = None
    if len(values) >= _MIN_RUNS_OF_INTERVAL:
        medians = np.median(np.asarray(values)[_resampled(len(values))], axis=1)
        low, high = np.percentile(medians, [2.5, 97.5]).tolist()
    return Row(
        bench=bench,
        case=case,
        provider=provider,
        metric=metric,
        unit=unit,
        median=median,
        p20=p20,
        p80=p80,
        num_runs=len(values),
        low=low,
        high=high,
    )


def ratio(
    *,
    bench: str,
    case: str,
    provider: str,
    metric: str,
    values: Sequence[float],
    baseline: Sequence[float],
) -> Row:
    """How many times faster than a baseline, from the times of rounds in which both took turns.

    `median` is the ratio of the medians and `low` to `high` its interval, rounds drawn in pairs;
    `p20` and `p80` are those of the rounds' own ratios.
    """
    ours, theirs = np.asarray(values), np.asarray(baseline)
    rounds = _resampled(len(ours))
    ratios = np.median(theirs[rounds], axis=1) / np.median(ours[rounds], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5]).tolist()
    p20, p80 = np.percentile(theirs / ours, [20, 80]).tolist()
    return Row(
        bench=bench,
        case=case,
        provider=provider,
        metric=metric,
        unit="ratio",
        median=float(np.median(theirs) / np.median(ours)),
        p20=p20,
        p80=p80,
        num_runs=len(ours),
        low=low,
        high=high,
    )


def _resampled(num_values: int) -> NDArray[np.int64]:
    """Draws with replacement for the bootstrap; always the same, so that tables can be remade."""
    return np.random.default_rng(0).integers(0, num_values, (2000, num_values))


def in_own_process(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a top-level function in a fresh process, so that its memory is its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write `{"command", "environment", "rows"}` as JSON."""
    record = {
        "command": " ".join(["recsys", *sys.argv[1:]]),
        "environment": describe_environment(),
        "rows": [asdict(row) for row in rows],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=2) + "\n")


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table with a line per row."""
    table = pd.DataFrame([asdict(row) for row in rows])
    print(table.to_string(index=False, float_format=lambda value: f"{value:,.2f}"))
