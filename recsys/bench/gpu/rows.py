"""Rows of `recsys bench gpu`: what the turns of one case say.

time, throughput            of a step
host                        time until the host had queued a step; where it is nearly the step's
                            time, the host sets the speed
share_of_resident_speed     beside recsys with every row on the device, in the same rounds
exposed                     time of a step minus that of the resident tables
floor, floor_share          the least time by measured limits, and its share of the step
pcie_per_sample             bytes of rows or pooled vectors that cross PCIe, in both directions
missing_per_sample          bytes of the distinct rows without a slot: the least to be fetched
distinct_per_sample         bytes of all distinct rows: the least without hot rows
budget, hot_memory          bytes that tables may use, and do use, of fast memory
peak_memory                 hot_memory and everything else that a step allocates
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from recsys.bench.lookup import step_bytes
from recsys.bench.parts.harness import modelled, ratio, summarize
from recsys.bench.parts.scheduled import sum_counts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recsys.bench.gpu.cases import Case
    from recsys.bench.gpu.clock import Limits
    from recsys.bench.gpu.providers import Turn
    from recsys.bench.parts.harness import Row

__all__ = ["RESIDENT", "Floor", "Measured", "rows_of_case", "table_of_case"]

RESIDENT = "resident"
_FLOAT_BYTES = 4


class Floor(NamedTuple):
    """What bounds a step of a case from below.

    Attributes:
        gemm_seconds: Time of the matrix products alone.
        num_lookups: Lookups of a mini-batch.
        num_distinct: Mean number of its distinct rows.
        limits: Measured bandwidths.
    """

    gemm_seconds: float
    num_lookups: int
    num_distinct: float
    limits: Limits

    def seconds(self, dim: int, bytes_to_device: float, bytes_to_host: float) -> float:
        """The least time of a step.

        Products and the memory traffic of rows come one after the other. Transfers in either
        direction may go on beside them.
        """
        on_device = step_bytes(self.num_lookups, self.num_distinct, dim, "sgd")
        return max(
            self.gemm_seconds + on_device / self.limits.on_device,
            bytes_to_device / self.limits.to_device,
            bytes_to_host / self.limits.to_host,
        )


class Measured(NamedTuple):
    """A provider's turns in a case.

    Attributes:
        provider: Its name.
        schedule: The schedule, for recsys in two tiers; else empty.
        turns: By round.
        hot_bytes: Bytes of fast memory that its tables use.
        budget: Bytes that they may use; None without a budget.
        to_device: Bytes of a step that cross PCIe to the device; None if the tiers count them.
        to_host: The same in the other direction.
        mean_depth: Mean number of mini-batches ahead with slots.
    """

    provider: str
    schedule: str
    turns: Sequence[Turn]
    hot_bytes: int
    budget: int | None = None
    to_device: float | None = None
    to_host: float | None = None
    mean_depth: float = 0.0


def rows_of_case(
    case: Case, found: Sequence[Measured], floor: Floor, row_bytes: int, everything: int
) -> list[Row]:
    """The rows of all providers; the first of `found` is the resident tables.

    Args:
        case: The case.
        found: The turns of each provider, with the same number of rounds.
        floor: What bounds a step.
        row_bytes: Bytes of a row.
        everything: Bytes of all rows.
    """
    resident = [turn.seconds for turn in found[0].turns]
    return [
        row
        for each in found
        for row in _rows_of_provider(case, each, resident, floor, row_bytes, everything)
    ]


def _rows_of_provider(
    case: Case,
    found: Measured,
    resident: Sequence[float],
    floor: Floor,
    row_bytes: int,
    everything: int,
) -> list[Row]:
    name = f"{case.name},schedule={found.schedule}" if found.schedule else case.name
    size, seconds = case.model.batch_size, [turn.seconds for turn in found.turns]
    about = "gpu", name, found.provider
    rows = [
        summarize(*about, "time", "ms", [1e3 * each for each in seconds]),
        summarize(*about, "throughput", "samples/s", [size / each for each in seconds]),
        summarize(*about, "host", "ms", [1e3 * turn.host_seconds for turn in found.turns]),
    ]
    if found.provider != RESIDENT:
        exposed = [1e3 * (a - b) for a, b in zip(seconds, resident, strict=True)]
        rows += [
            ratio(*about, "share_of_resident_speed", values=seconds, baseline=resident),
            summarize(*about, "exposed", "ms", exposed),
        ]
    counts = sum_counts(turn.counts for turn in found.turns)
    num_steps = sum(turn.num_steps for turn in found.turns)
    to_device, to_host = found.to_device, found.to_host
    if to_device is None or to_host is None:
        to_device = counts.num_fetched * row_bytes / num_steps
        to_host = counts.num_written_back * row_bytes / num_steps
    least = floor.seconds(case.model.dim, to_device, to_host)
    rows += [
        modelled(*about, "floor", "ms", [1e3 * least]),
        modelled(*about, "floor_share", "ratio", [least / each for each in seconds]),
    ]
    values: dict[tuple[str, str], float] = {
        ("pcie_per_sample", "bytes"): (to_device + to_host) / size,
        ("distinct_per_sample", "bytes"): floor.num_distinct * row_bytes / size,
        ("hot_memory", "bytes"): found.hot_bytes,
        ("peak_memory", "bytes"): found.hot_bytes + max(turn.beside_bytes for turn in found.turns),
    }
    if found.budget is not None:
        missing = counts.num_rows - counts.num_rows_hit
        values |= {
            ("budget", "bytes"): found.budget,
            ("budget_share", "ratio"): found.budget / everything,
            ("missing_per_sample", "bytes"): missing * row_bytes / (size * num_steps),
            ("lookup_hit_rate", "ratio"): counts.num_hits / max(1, counts.num_lookups),
            ("unique_hit_rate", "ratio"): counts.num_rows_hit / max(1, counts.num_rows),
            ("mean_depth", "mini-batches"): found.mean_depth,
        }
    rows += [
        summarize(*about, metric, unit, [float(value)]) for (metric, unit), value in values.items()
    ]
    return rows


def table_of_case(rows: Sequence[Row]) -> str:
    """The most important rows of a case as text, one line per provider and schedule."""
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        cells.setdefault((row.case, row.provider), {})[row.metric] = row.median
    lines = [
        "  provider             ms/step  host ms   samples/s  of resident  exposed ms PCIe B/sample"
    ]
    lines += [
        f"  {_label(case, provider):<19}"
        f"{of['time']:9.2f}{of['host']:9.2f}{of['throughput']:12,.0f}"
        f"{of.get('share_of_resident_speed', 1):13.1%}{of.get('exposed', 0):12.2f}"
        f"{of['pcie_per_sample']:14,.0f}"
        for (case, provider), of in cells.items()
    ]
    return "\n".join(lines)


def _label(case: str, provider: str) -> str:
    keys: Mapping[str, str] = dict(pair.split("=") for pair in case.split(","))
    return f"{provider} {keys.get('schedule', '')}".rstrip()
