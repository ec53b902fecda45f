"""The rows that `recsys bench tiers --cold-tier file` reports."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from recsys.bench.parts.disk import PAGE_BYTES
from recsys.bench.parts.harness import Row, ratio, summarize
from recsys.bench.parts.scheduled import sum_counts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.bench.parts.scheduled import Turn

__all__ = ["FileTierTurns", "rows_of_file_tier"]


class FileTierTurns(NamedTuple):
    """The results of all turns that count.

    Attributes:
        of_schedules: Turns of recsys, by the schedule's name.
        of_hits: Turns of recsys in which no row was fetched.
        mmap: Turns of the mapped module.
        reads: Reads per second in the turns of the disk.
    """

    of_schedules: Mapping[str, Sequence[Turn]]
    of_hits: Sequence[Turn]
    mmap: Sequence[Turn]
    reads: Sequence[float]


def rows_of_file_tier(
    case: str,
    *,
    batch_size: int,
    row_bytes: int,
    num_bytes: int,
    num_timed_steps: int,
    turns: FileTierTurns,
    memory: Mapping[str, Mapping[str, float]],
) -> list[Row]:
    """All rows except those of the empty page cache.

    Args:
        case: Name of the case.
        batch_size: B.
        row_bytes: Bytes of a row in its file.
        num_bytes: Bytes of all tables.
        num_timed_steps: Timed steps of a turn.
        turns: Results of the turns.
        memory: Bytes of memory, by provider.
    """
    row_of = partial(summarize, "tiers", case)
    mmap = [turn.seconds for turn in turns.mmap]
    hits = sum_counts(turn.counts for turn in turns.of_hits)
    once: dict[tuple[str, str, str], float] = {
        ("recsys", "compute_floor_hit_rate", "ratio"): hits.num_hits / max(1, hits.num_lookups),
        ("recsys", "hot_memory", "bytes"): memory["recsys"]["hot_bytes"],
        ("disk", "num_bytes", "bytes"): num_bytes,
    }
    for provider, each in memory.items():
        once[provider, "anonymous_memory_at_start", "bytes"] = each["anonymous_at_start"]
        once[provider, "peak_anonymous_memory", "bytes"] = each["peak_anonymous"]
    rows = [
        row_of("mmap", "speed", "samples/s", [batch_size / seconds for seconds in mmap]),
        row_of("disk", "random_reads_of_4096", "reads/s", turns.reads),
        row_of("recsys", "compute_floor", "ms", [1e3 * turn.seconds for turn in turns.of_hits]),
        *(
            row_of(provider, metric, unit, [float(value)])
            for (provider, metric, unit), value in once.items()
        ),
    ]
    # A row across two pages counts as one page, because a floor must not be too high.
    pages_of_row = max(1, row_bytes // PAGE_BYTES)
    for name in turns.of_schedules:
        rows += _rows_of_schedule(
            f"{case},schedule={name}", name, turns, batch_size, num_timed_steps, pages_of_row
        )
    return rows


def _rows_of_schedule(
    case: str,
    name: str,
    turns: FileTierTurns,
    batch_size: int,
    num_timed_steps: int,
    pages_of_row: int,
) -> list[Row]:
    row_of = partial(summarize, "tiers", case, "recsys")
    ratio_of = partial(ratio, "tiers", case, "recsys")
    own = turns.of_schedules[name]
    seconds = [turn.seconds for turn in own]
    counts = sum_counts(turn.counts for turn in own)
    num_steps = num_timed_steps * len(own)
    fetched, pages_read = counts.num_fetched / num_steps, _pages_read(own) / num_steps
    compute = [turn.seconds for turn in turns.of_hits]
    floors = {
        "disk_floor": [fetched * pages_of_row / reads for reads in turns.reads],
        "disk_floor_of_reads": [pages_read / reads for reads in turns.reads],
    }
    limits = {
        "share_of_limit": _slower(compute, floors["disk_floor"]),
        "share_of_limit_of_reads": _slower(compute, floors["disk_floor_of_reads"]),
    }
    if np.isnan(pages_read):
        del floors["disk_floor_of_reads"], limits["share_of_limit_of_reads"]
    rows = [
        row_of("speed", "samples/s", [batch_size / spent for spent in seconds]),
        row_of("time", "ms", [1e3 * spent for spent in seconds]),
        row_of("exposed_fetch", "ms", [1e3 * turn.exposed_seconds for turn in own]),
        row_of("fetched_rows_per_sample", "rows", [fetched / batch_size]),
        row_of("mean_depth", "mini-batches", [own[-1].mean_depth]),
        row_of("lookup_hit_rate", "ratio", [counts.num_hits / max(1, counts.num_lookups)]),
        *(
            row_of(metric, "ms", [1e3 * spent for spent in values])
            for metric, values in floors.items()
        ),
        # The share of the limit's speed is the limit's time divided by the step's.
        *(ratio_of(metric, values=seconds, baseline=limit) for metric, limit in limits.items()),
        ratio_of("speed_over_mmap", values=seconds, baseline=[turn.seconds for turn in turns.mmap]),
    ]
    if name != "sequential" and "sequential" in turns.of_schedules:
        sequential = [turn.seconds for turn in turns.of_schedules["sequential"]]
        rows.append(ratio_of("speedup_over_sequential", values=seconds, baseline=sequential))
    return rows


def _pages_read(turns: Sequence[Turn]) -> float:
    """Pages read from the disk; NaN if the system does not report it."""
    return sum(turn.disk_bytes for turn in turns) / PAGE_BYTES


def _slower(first: Sequence[float], second: Sequence[float]) -> Sequence[float]:
    """The one with the larger median; a comparison round by round would be decided by noise."""
    return max(first, second, key=lambda seconds: float(np.median(seconds)))
