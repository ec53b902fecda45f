"""Results of a run as text: the table that `recsys train` prints at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys._support.sizes import format_bytes
from recsys.pipeline.stalls import format_stalls, stage_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "METRIC_NAMES",
    "NO_METRICS",
    "format_auc_error",
    "format_best_auc",
    "format_metric",
    "format_metrics",
    "format_run",
]

METRIC_NAMES = ("auc", "logloss", "normalized_entropy", "calibration", "accuracy", "num_samples")
NO_METRICS = "no evaluation was made, or the run diverged"


def format_metric(value: Any) -> str:
    """Value of a metric for readers."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def format_metrics(metrics: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Table with a line per metric and a column per split."""
    measured = {split: values for split, values in metrics.items() if values is not None}
    if not measured:
        return NO_METRICS
    lines = [" " * 20 + "".join(f"{split:>14}" for split in measured)]
    for name in METRIC_NAMES:
        cells = "".join(f"{format_metric(values.get(name)):>14}" for values in measured.values())
        lines.append(f"{name.replace('_', ' '):<20}{cells}")
    return "\n".join([*lines, *format_auc_error(measured)])


def format_auc_error(metrics: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """One line with the largest possible error of the AUCs; empty if they are exact."""
    found = [(values or {}).get("max_auc_error") for values in metrics.values()]
    errors = [error for error in found if error]
    if not errors:
        return []
    return [f"auc was counted in bins; it is wrong by at most {max(errors):.1e}"]


def format_best_auc(data: Mapping[str, Any]) -> list[str]:
    """One line with the AUC of the true click probabilities; empty for data without them."""
    best_auc = data.get("best_auc")
    return [] if best_auc is None else [f"{'best AUC possible':<20}{format_metric(best_auc):>14}"]


def format_run(record: Mapping[str, Any], run_dir: Path) -> str:
    """The text that `recsys train` prints at its end."""
    throughput = record["throughput"]
    rate = throughput["samples_per_second"]
    seconds = stage_seconds(record["stalls"])
    evaluate = seconds.pop("evaluate")
    total = sum(seconds.values())
    config, sizes = record["config"], record["data"]["table_sizes"].values()
    dim, optimizer = config["model"]["embedding_dim"], config["optimizer"]
    peak = record["peak_memory_bytes"]
    files = sorted(file.name for file in run_dir.iterdir())
    lines = []
    if record["status"] != "finished":
        lines += [f"{record['status']} at step {throughput['num_steps']:,}; measured so far:", ""]
    lines += [
        format_metrics(record["metrics"]),
        *format_best_auc(record["data"]),
        "",
        f"data                {record['data']['name']}, {record['data']['num_samples']:,} samples",
        f"tables              {len(sizes)}, {sum(sizes):,} rows of {dim}: "
        f"{sum(sizes) * dim * 4 / 2**30:.2f} GiB, embeddings {config['embeddings']}",
        f"recipe              {optimizer['name']} {optimizer['lr']:g}, B={config['batch_size']}, "
        f"{config['epochs']} epoch{'s' if config['epochs'] > 1 else ''}, seed {config['seed']}",
        f"samples/s           {'-' if rate is None else format(rate, ',.0f')}",
        f"training            {throughput['num_samples']:,} samples in {total:.1f} s; "
        f"evaluation took {evaluate:.1f} s more",
        *_tier_lines(record["tiers"]),
        f"peak memory         {'-' if peak is None else f'{peak / 2**30:.2f} GiB'}",
        f"saved               {run_dir}/: {', '.join(files)}",
        "",
        format_stalls(record["stalls"]),
    ]
    return "\n".join(lines)


def _tier_lines(tiers: dict[str, Any] | None) -> list[str]:
    if tiers is None:
        return []
    return [
        f"tiers               {format_bytes(tiers['hot_bytes'])} hot, {tiers['num_slots']:,} of "
        f"{tiers['num_rows']:,} rows; the rest: {tiers['cold_tier']}",
        f"hits                {tiers['lookup_hit_rate']:.1%} of lookups, "
        f"{tiers['unique_hit_rate']:.1%} of distinct rows",
        f"moved               {format_bytes(tiers['fetched_bytes'])} fetched, "
        f"{format_bytes(tiers['written_back_bytes'])} written back; "
        f"{tiers['exposed_fetch_seconds']:.1f} s of waiting",
    ]
