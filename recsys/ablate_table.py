"""The table of an ablation: for each variation, mean and spread over its seeds."""

from __future__ import annotations

from dataclasses import asdict
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from recsys.bench.harness import summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["column_title", "format_ablation", "format_evaluations", "format_number", "make_rows"]


def _test_metric(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda cell: (cell["run"]["metrics"]["test"] or {}).get(name)


def _milliseconds_to_target(cell: Mapping[str, Any]) -> float | None:
    seconds: float | None = cell["seconds_to_target_auc"]
    return None if seconds is None else seconds * 1e3


# By metric: its unit, and its value in a cell that finished, None where that has none.
_METRICS: dict[str, tuple[str, Callable[[Mapping[str, Any]], float | None]]] = {
    "auc": ("1", _test_metric("auc")),
    "logloss": ("nats", _test_metric("logloss")),
    "throughput": ("samples/s", lambda cell: cell["run"]["throughput"]["samples_per_second"]),
    "time_to_target_auc": ("ms", _milliseconds_to_target),
}


def make_rows(
    cells: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the benchmark schema, each with what the table needs besides.

    Args:
        cells: As in `ablate.json`.
        config: As in `ablate.json`.

    Returns:
        A row per variation and metric. Beside the schema's keys: `variation`; `mean`, `std` (of a
        sample; null for a single run), `min`, `max`; `values` by cell, in the order of the seeds;
        `num_cells`, of which `num_runs` have a value. The rest never reached the target, or
        diverged. Numbers are null where no cell has a value.
    """
    rows = []
    for variation in config["variations"]:
        own = [cell for cell in cells if cell["variation"] == variation]
        for metric, (unit, value_of) in _METRICS.items():
            if own and (metric != "time_to_target_auc" or config["target_auc"] is not None):
                # What a run measured before it diverged is not what came out of it.
                values = [
                    value_of(cell) if cell["run"]["status"] == "finished" else None for cell in own
                ]
                provider = own[0]["run"]["config"]["embeddings"]
                case = variation if "=" in variation.split(",")[0] else f"variation={variation}"
                row = _row(case, provider, metric, unit, [v for v in values if v is not None])
                rows.append(row | {"variation": variation, "num_cells": len(own), "values": values})
    return rows


def _row(
    case: str, provider: str, metric: str, unit: str, values: Sequence[float]
) -> dict[str, Any]:
    head = {"bench": "ablate", "case": case, "provider": provider, "metric": metric, "unit": unit}
    if not values:
        numbers = ("median", "p20", "p80", "low", "high", "mean", "std", "min", "max")
        return {**head, **dict.fromkeys(numbers), "num_runs": 0}
    row = summarize(
        bench="ablate", case=case, provider=provider, metric=metric, unit=unit, values=values
    )
    return {
        **asdict(row),
        "mean": mean(values),
        "std": stdev(values) if len(values) > 1 else None,
        "min": min(values),
        "max": max(values),
    }


def column_title(metric: str, config: Mapping[str, Any]) -> str:
    """What a person calls a metric; `config` as in `ablate.json`."""
    titles = {
        "auc": "test AUC",
        "logloss": "test logloss",
        "throughput": "samples/s",
        "time_to_target_auc": f"seconds to {config['target_split']} AUC {config['target_auc']}",
    }
    return titles[metric]


def format_number(metric: str, value: float | None) -> str:
    """A metric's value as a person reads it; times in seconds."""
    if value is None:
        return "-"
    if metric == "throughput":
        return f"{value:,.0f}"
    return f"{value / 1e3:.2f}" if metric == "time_to_target_auc" else f"{value:.4f}"


def format_evaluations(record: Mapping[str, Any]) -> str:
    """When the cells were evaluated: every how many training samples, least to most, or when else.

    Args:
        record: As in `ablate.json`, of an ablation with a target.
    """
    runs = [cell["run"] for cell in record["cells"]]
    on_the_way = [run["config"] for run in runs if not _is_evaluated_at_its_end_alone(run)]
    if runs and not on_the_way:
        return "the only one is made behind the last step"
    asked = record["config"]["eval_every_samples"]
    found = {run["eval"]["every_steps"] * run["batch_size"] for run in on_the_way} or {asked}
    interval = " to ".join(f"{samples:,}" for samples in dict.fromkeys((min(found), max(found))))
    num_others = len(runs) - len(on_the_way)
    others = f", but in {num_others} of {len(runs)} cells the last one alone" if num_others else ""
    return f"one is made every {interval} samples{others}"


def _is_evaluated_at_its_end_alone(run: Mapping[str, Any]) -> bool:
    every_steps: int = run["config"]["eval"]["every_steps"]
    num_steps: int = run["throughput"]["num_steps"]
    return run["status"] == "finished" and every_steps > num_steps


def format_ablation(record: Mapping[str, Any]) -> str:
    """What `recsys ablate` prints at the end."""
    config, rows = record["config"], record["rows"]
    title_width = max([len(column_title(metric, config)) for metric in _METRICS])
    name_width = max([len("variation"), *(len(row["variation"]) for row in rows)])
    columns = "".join(f"{name:>10}" for name in ("mean", "std", "min", "max", "runs"))
    lines = [f"{'variation':<{name_width}}  {'':<{title_width}}{columns}"]
    for row in rows:
        metric = row["metric"]
        name = row["variation"] if metric == "auc" else ""
        numbers = [format_number(metric, row[key]) for key in ("mean", "std", "min", "max")]
        numbers.append(f"{row['num_runs']} of {row['num_cells']}")
        cells = "".join(f"{number:>10}" for number in numbers)
        lines.append(f"{name:<{name_width}}  {column_title(metric, config):<{title_width}}{cells}")
    num_done, num_cells = len(record["cells"]), record["num_cells"]
    lines.append("")
    if num_done < num_cells:
        lines.append(f"{num_done} of {num_cells} cells were run; the same command runs the rest")
    if config["target_auc"] is not None:
        lines.append(
            "The time to an AUC is training time up to the first evaluation that reached it; "
            f"{format_evaluations(record)}. Evaluations are not timed."
        )
    return "\n".join(lines).rstrip()
