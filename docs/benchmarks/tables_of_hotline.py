"""The table of `recsys ablate examples/ablation/hotline.toml`: what either half of Hotline buys."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING, Any

from table_cells import markdown, read_record
from tables_of_pairs import caption_of, difference, means_of, measured_in, paired_with

from recsys.report.ablation_metrics import format_number
from recsys.report.ablation_pictures import stage_shares

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["hotline_table"]

_WAITS = ("prefetch_wait", "write_back_wait")
_OF_CELLS = ("fast_memory", "lookup_hit_rate", "moved_bytes")


def hotline_table(file: str) -> str:
    """Speed, waiting and quality of each schedule and budget, beside every row resident."""
    record = read_record(file)
    baseline = record["config"]["baseline"]
    means, pairs, shares = means_of(record), paired_with(record, baseline), stage_shares(record)
    lines = []
    for variation in measured_in(record):
        line = [variation]
        line += [
            format_number(metric, means.get((variation, metric)))
            for metric in ("throughput", *_OF_CELLS)
        ]
        line += [_waiting(shares[variation]), _split(record, variation)]
        for metric, kind in (("throughput", "ratio"), ("auc", "difference")):
            entry = pairs.get((variation, metric, kind))
            line.append("" if entry is None else difference(entry))
        lines.append(line)
    header = ["variation", "samples/s", "MiB of fast memory", "lookup hit rate", "MiB moved"]
    header += ["waiting for rows", "mini-batches split"]
    header += [f"samples/s, times that of {baseline}", f"test AUC less that of {baseline}"]
    caption = f"{caption_of(record)} In brackets: 95 % intervals of pairs of equal seeds."
    return markdown(caption, header, lines)


def _waiting(shares: Mapping[str, float]) -> str:
    """The share of the training time that waited for rows to be fetched or written back."""
    return f"{100 * sum(shares.get(stage, 0.0) for stage in _WAITS):.1f} %"


def _split(record: Mapping[str, Any], variation: str) -> str:
    """The share of the steps that Hotline computed in two parts; empty for other schedules."""
    found = [
        cell["run"]["schedule"]["split_step_share"]
        for cell in record["cells"]
        if cell["variation"] == variation and "split_step_share" in cell["run"]["schedule"]
    ]
    return f"{100 * mean(found):.0f} %" if found else ""
