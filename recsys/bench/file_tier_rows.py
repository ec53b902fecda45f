"""What `recsys bench tiers --cold-tier file` says of the turns that were made."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys.bench.disk import PAGE_BYTES
from recsys.bench.harness import Row, ratio, summarize
from recsys.bench.scheduled import added_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.bench.scheduled import Turn

__all__ = ["Found", "rows_of_file_tier"]


class Found(NamedTuple):
    """What every turn has measured.

    Attributes:
        of_schedules: Turns of ours, by the schedule's name.
        of_hits: Turns of ours in which nothing was fetched.
        mmap: Turns of the mapped module.
        reads: Reads per second of the disk.
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
    found: Found,
    told: Mapping[str, Mapping[str, float]],
) -> list[Row]:
    """All rows but those of the empty cache.

    Args:
        case: What was measured.
        batch_size: B.
        row_bytes: Of a row in its file.
        num_bytes: Of all tables.
        num_timed_steps: Of a turn.
        found: By the turns.
        told: Memory, by provider.
    """
    row_of = partial(summarize, bench="tiers", case=case)
    mmap = [turn.seconds for turn in found.mmap]
    hits = added_up(turn.counts for turn in found.of_hits)
    once: dict[tuple[str, str, str], float] = {
        ("recsys", "compute_floor_hit_rate", "ratio"): hits.num_hits / max(1, hits.num_lookups),
        ("recsys", "hot_memory", "bytes"): told["recsys"]["hot_bytes"],
        ("disk", "num_bytes", "bytes"): num_bytes,
    }
    for provider, each in told.items():
        once[provider, "anonymous_memory_at_start", "bytes"] = each["anonymous_at_start"]
        once[provider, "peak_anonymous_memory", "bytes"] = each["peak_anonymous"]
    rows = [
        row_of(
            provider="mmap",
            metric="speed",
            unit="samples/s",
            values=[batch_size / seconds for seconds in mmap],
        ),
        row_of(provider="disk", metric="random_reads_of_4096", unit="reads/s", values=found.reads),
        row_of(
            provider="recsys",
            metric="compute_floor",
            unit="ms",
            values=[1e3 * turn.seconds for turn in found.of_hits],
        ),
        *(
            row_of(provider=provider, metric=metric, unit=unit, values=[float(value)])
            for (provider, metric, unit), value in once.items()
        ),
    ]
    # A row that lies across two pages is counted as one all the same: a floor must not be too high.
    pages_of_row = max(1, row_bytes // PAGE_BYTES)
    for name, turns in found.of_schedules.items():
        rows += _rows_of_schedule(
            f"{case},schedule={name}", name, turns, batch_size, num_timed_steps, pages_of_row, found
        )
    return rows


def _rows_of_schedule(
    case: str,
    name: str,
    turns: Sequence[Turn],
    batch_size: int,
    num_timed_steps: int,
    pages_of_row: int,
    found: Found,
) -> list[Row]:
    row_of: Any = partial(summarize, bench="tiers", case=case, provider="recsys")
    ratio_of: Any = partial(ratio, bench="tiers", case=case, provider="recsys")
    seconds = [turn.seconds for turn in turns]
    counts = added_up(turn.counts for turn in turns)
    num_steps = num_timed_steps * len(turns)
    fetched, pages_read = counts.num_fetched / num_steps, _pages_read(turns) / num_steps
    compute = [turn.seconds for turn in found.of_hits]
    floors = {
        "disk_floor": [fetched * pages_of_row / reads for reads in found.reads],
        "disk_floor_of_reads": [pages_read / reads for reads in found.reads],
    }
    limits = {
        "share_of_limit": _slower(compute, floors["disk_floor"]),
        "share_of_limit_of_reads": _slower(compute, floors["disk_floor_of_reads"]),
    }
    if np.isnan(pages_read):
        del floors["disk_floor_of_reads"], limits["share_of_limit_of_reads"]
    rows = [
        row_of(metric="speed", unit="samples/s", values=[batch_size / spent for spent in seconds]),
        row_of(metric="time", unit="ms", values=[1e3 * spent for spent in seconds]),
        row_of(
            metric="exposed_fetch",
            unit="ms",
            values=[1e3 * turn.exposed_seconds for turn in turns],
        ),
        row_of(metric="fetched_rows_per_sample", unit="rows", values=[fetched / batch_size]),
        row_of(metric="mean_depth", unit="mini-batches", values=[turns[-1].mean_depth]),
        row_of(
            metric="lookup_hit_rate",
            unit="ratio",
            values=[counts.num_hits / max(1, counts.num_lookups)],
        ),
        *(
            row_of(metric=metric, unit="ms", values=[1e3 * spent for spent in values])
            for metric, values in floors.items()
        ),
        # Speed over that of the limit is the limit's time over ours.
        *(
            ratio_of(metric=metric, values=seconds, baseline=limit)
            for metric, limit in limits.items()
        ),
        ratio_of(
            metric="speed_over_mmap",
            values=seconds,
            baseline=[turn.seconds for turn in found.mmap],
        ),
    ]
    if name != "sequential" and "sequential" in found.of_schedules:
        sequential = [turn.seconds for turn in found.of_schedules["sequential"]]
        rows.append(ratio_of(metric="speedup_over_sequential", values=seconds, baseline=sequential))
    return rows


def _pages_read(turns: Sequence[Turn]) -> float:
    """From the disk; NaN where the system does not say."""
    return sum(turn.disk_bytes for turn in turns) / PAGE_BYTES


def _slower(first: Sequence[float], second: Sequence[float]) -> Sequence[float]:
    """The one that binds, by its median: round by round, noise would decide."""
    return max(first, second, key=lambda seconds: float(np.median(seconds)))
