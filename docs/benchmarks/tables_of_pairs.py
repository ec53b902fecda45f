"""What tables of `recsys ablate --results` share: means, differences in pairs, and a caption."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING, Any

from table_cells import machine

from recsys.report.ablation_table import make_rows
from recsys.report.paired import format_difference, make_differences

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["caption_of", "difference", "means_of", "measured_in", "paired_with"]


def means_of(record: Mapping[str, Any]) -> dict[tuple[str, str], float | None]:
    """The mean of every variation and metric."""
    rows = make_rows(record["cells"], record["config"])
    return {(row["variation"], row["metric"]): row["mean"] for row in rows}


def paired_with(
    record: Mapping[str, Any], baseline: str
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Differences and ratios by variation, metric and kind."""
    found = make_differences(record["cells"], {**record["config"], "baseline": baseline})
    return {(each["variation"], each["metric"], each["kind"]): each for each in found}


def measured_in(record: Mapping[str, Any]) -> list[str]:
    """The variations that have a finished cell, in the order of the configuration."""
    names = {cell["variation"] for cell in record["cells"] if cell["run"]["status"] == "finished"}
    return [variation for variation in record["config"]["variations"] if variation in names]


def difference(entry: Mapping[str, Any]) -> str:
    """A difference, or a ratio, with its interval."""
    middle, low, high = (format_difference(entry, key) for key in ("mean", "low", "high"))
    text = middle if entry["low"] is None else f"{middle} ({low} to {high})"
    if entry["num_pairs"] < len(entry["seeds"]):
        text += f", {entry['num_pairs']} of {len(entry['seeds'])} pairs"
    return text


def caption_of(record: Mapping[str, Any]) -> str:
    """What was run, where, and by which commits."""
    runs = [cell["run"] for cell in record["cells"] if cell["run"]["status"] == "finished"]
    config, data = runs[0]["config"], runs[0]["data"]
    seen = mean(run["throughput"]["num_samples"] for run in runs)
    optimizer = config["optimizer"]
    commits = dict.fromkeys(str(run["environment"].get("commit"))[:10] for run in runs)
    environment = runs[0]["environment"]
    epochs = f", {config['epochs']} epochs" if config["epochs"] > 1 else ""
    seeds = ", ".join(map(str, record["config"]["seeds"]))
    text = (
        f"{seen:,.0f} training samples of {data['name']}{epochs}, tested on "
        f"{runs[0]['metrics']['test']['num_samples']:,}; {optimizer['name']} {optimizer['lr']:g}, "
        f"B={config['batch_size']}, seeds {seeds}; {machine(environment)}; "
        f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}."
    )
    num_done, num_cells = len(record["cells"]), record["num_cells"]
    if num_done < num_cells:
        text += f" So far {num_done} of {num_cells} cells were run."
    return text
