"""The table of an ablation: for each variation, mean and spread over its seeds."""

from __future__ import annotations

from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from recsys.report.ablation_columns import column_notes, shown_metrics, spread_notes
from recsys.report.ablation_metrics import (
    ALWAYS,
    column_title,
    format_number,
    tabulated_metrics,
    value_of,
)
from recsys.report.paired import format_paired

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "format_ablation",
    "format_commits",
    "format_evaluations",
    "format_outcomes",
    "make_rows",
]


# Even the range of 5 values is not a 95 % interval of the median.
_MIN_VALUES_OF_INTERVAL = 6
# Metrics that every cell is to have; some variations measure no others, such as hit rates.
_EXPECTED = (*ALWAYS, "time_to_target_auc")


def make_rows(
    cells: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the benchmark schema, with the extra keys of the ablation's table.

    Args:
        cells: As in `ablate.json`.
        config: As in `ablate.json`.

    Returns:
        A row per variation and metric. Extra keys: `variation`; `mean`, `std` (sample standard
        deviation; null for a single run), `min`, `max`; `values`, one per cell in the order of the
        seeds; `num_cells`. Only `num_runs` of these cells have a value: the others diverged or
        never reached the target. All numbers are null if no cell has a value.
    """
    rows = []
    metrics = tabulated_metrics(cells, config)
    for variation in config["variations"]:
        own = [cell for cell in cells if cell["variation"] == variation]
        for metric in metrics if own else ():
            values = [value_of(metric, cell) for cell in own]
            provider = own[0]["run"]["config"]["embeddings"]
            case = variation if "=" in variation.split(",")[0] else f"variation={variation}"
            found = [value for value in values if value is not None]
            row = _row(case, provider, metric.name, metric.unit, found)
            rows.append(row | {"variation": variation, "num_cells": len(own), "values": values})
    return rows


def _row(
    case: str, provider: str, metric: str, unit: str, values: Sequence[float]
) -> dict[str, Any]:
    head = {"bench": "ablate", "case": case, "provider": provider, "metric": metric, "unit": unit}
    if not values:
        numbers = ("median", "p20", "p80", "low", "high", "mean", "std", "min", "max")
        return {**head, **dict.fromkeys(numbers), "num_runs": 0}
    p20, median, p80 = np.percentile(values, [20, 50, 80]).tolist()
    low, high = _interval_of_median(values)
    return {
        **head,
        "median": median,
        "p20": p20,
        "p80": p80,
        "num_runs": len(values),
        "low": low,
        "high": high,
        "mean": mean(values),
        "std": stdev(values) if len(values) > 1 else None,
        "min": min(values),
        "max": max(values),
    }


def _interval_of_median(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The median's 95 % interval, by bootstrap; none for fewer than 6 values."""
    if len(values) < _MIN_VALUES_OF_INTERVAL:
        return None, None
    drawn = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
    medians = np.median(np.asarray(values)[drawn], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5]).tolist()
    return low, high


def format_evaluations(record: Mapping[str, Any]) -> str:
    """How often the cells were evaluated, in words, for the note on the time to the target.

    Args:
        record: `ablate.json` of an ablation with a target.
    """
    runs = [cell["run"] for cell in record["cells"]]
    periodic = [run["config"] for run in runs if not _is_evaluated_only_at_its_end(run)]
    if runs and not periodic:
        return "the only one is made after the last step"
    configured = record["config"]["eval_every_samples"]
    found = {run["eval"]["every_steps"] * run["batch_size"] for run in periodic} or {configured}
    interval = " to ".join(f"{samples:,}" for samples in dict.fromkeys((min(found), max(found))))
    num_others = len(runs) - len(periodic)
    others = f", but in {num_others} of {len(runs)} cells only the last one" if num_others else ""
    return f"one is made every {interval} samples{others}"


def format_outcomes(record: Mapping[str, Any]) -> list[str]:
    """A sentence each on the cells that stopped early and on those that diverged, if there are any.

    Args:
        record: `ablate.json`.
    """
    cells = record["cells"]
    diverged = [cell["name"] for cell in cells if cell["run"]["status"] == "diverged"]
    ends = [
        cell["run"]["throughput"]["num_samples"]
        for cell in cells
        if cell["run"]["status"] == "finished" and cell["run"].get("stopped_early")
    ]
    notes = []
    if ends:
        span = " to ".join(f"{end:,}" for end in dict.fromkeys((min(ends), max(ends))))
        notes.append(f"{len(ends)} of {len(cells)} cells stopped early, after {span} samples.")
    if diverged:
        notes.append(
            f"{len(diverged)} of {len(cells)} cells diverged and have no value: "
            f"{'; '.join(diverged)}."
        )
    return notes


def format_commits(record: Mapping[str, Any]) -> list[str]:
    """A line per commit of the code with the cells that it ran; empty if one commit ran all."""
    by_commit: dict[str, list[str]] = {}
    for cell in record["cells"]:
        environment = cell["run"]["environment"]
        commit = str(environment.get("commit") or "unknown")[:10]
        changes = " with changes" if environment.get("dirty") else ""
        by_commit.setdefault(f"commit {commit}{changes}", []).append(cell["name"])
    if len(by_commit) < 2:
        return []
    return [f"{commit} ran {', '.join(names)}" for commit, names in by_commit.items()]


def _is_evaluated_only_at_its_end(run: Mapping[str, Any]) -> bool:
    config, throughput = run["config"], run["throughput"]
    # Evaluations go by the steps that a run without skipping makes for the samples seen.
    num_full_steps = -(-throughput["num_samples"] // config["batch_size"])
    num_steps: int = max(throughput["num_steps"], num_full_steps)
    every_steps: int = config["eval"]["every_steps"]
    return run["status"] == "finished" and every_steps >= num_steps


def format_ablation(record: Mapping[str, Any]) -> str:
    """What `recsys ablate` prints at the end."""
    config, shown = record["config"], shown_metrics(record)
    table = pd.DataFrame(
        [
            [
                row["variation"],
                column_title(row["metric"], config),
                format_number(row["metric"], row["mean"]),
                format_number(row["metric"], row["std"], mean=row["mean"]),
                *(format_number(row["metric"], row[key]) for key in ("min", "max")),
                f"{row['num_runs']} of {row['num_cells']}",
            ]
            for row in record["rows"]
            if row["metric"] in shown and (row["num_runs"] or row["metric"] in _EXPECTED)
        ],
        columns=["variation", "metric", "mean", "std", "min", "max", "runs"],
    ).set_index(["variation", "metric"])
    notes = []
    if (table["std"] == "-").all():
        table = table.drop(columns=["std", "min", "max"])  # of one seed
    runs = list(table["runs"].unique())
    if len(runs) == 1:
        table = table.drop(columns="runs")
        notes.append(f"Every mean is over {runs[0]} cells.")
    lines = [table.to_string() if len(table) else "no cell is finished", ""]
    notes += format_outcomes(record) + column_notes(record) + spread_notes(record)
    lines += [*notes, ""] if notes else []
    if record.get("differences"):
        lines += [*format_paired(record), ""]
    lines += format_commits(record)
    num_done, num_cells = len(record["cells"]), record["num_cells"]
    if num_done < num_cells:
        lines.append(f"{num_done} of {num_cells} cells were run; the same command runs the rest")
    if config["target_auc"] is not None:
        lines.append(
            "The time to an AUC is training time up to the first evaluation that reached it; "
            f"{format_evaluations(record)}. Evaluations are not timed."
        )
    return "\n".join(lines).rstrip()
