"""Tables of models on the same tables of embeddings, compared with DLRM.

They are made from the files of results of `recsys ablate --results`, for the configurations
`examples/ablation/{models,sequences}*.toml`, and of `quantized.py`.
"""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING, Any

from table_cells import machine, markdown, read_record
from tables_of_pairs import caption_of, difference, measured_in, paired_with

from recsys.report.ablation_metrics import column_title

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["compared_table", "days_table", "quantized_table"]

# The metrics of a table, by the one that models are compared in.
_METRICS = {
    "auc": ("auc", "logloss", "calibration"),
    "recall_at_k": ("recall_at_k", "ndcg_at_k"),
}


def compared_table(file: str, metric: str = "auc") -> str:
    """Quality of each model over the seeds, compared with the baseline in one metric."""
    record = read_record(file)
    config = record["config"]
    paired = paired_with(record, config["baseline"])
    lines = []
    for variation in measured_in(record):
        tests = [run["metrics"]["test"] for run in _runs(record, variation)]
        line = [variation]
        for name in _METRICS[metric]:
            found = [test[name] for test in tests]
            middle, low, high = (f"{of(found):.4f}" for of in (mean, min, max))
            line.append(f"{middle} ({low} to {high})")
        entry = paired.get((variation, metric, "difference"))
        line.insert(2, "" if entry is None else difference(entry))
        lines.append(line)
    caption = caption_of(record) + (
        " Mean (least to most) over the seeds; differences in pairs of equal seeds: mean (95 % "
        "interval by Student's t)."
    )
    header = ["model", *(column_title(name, config) for name in _METRICS[metric])]
    header.insert(2, f"less that of {config['baseline']}")
    return markdown(caption, header, lines)


def days_table(file: str) -> str:
    """The AUC of each whole day of the test part, mean over the seeds."""
    record = read_record(file)
    found = {
        variation: [run["metrics"]["test"]["auc_by_day"] for run in _runs(record, variation)]
        for variation in measured_in(record)
    }
    # The last day of the test part is cut off.
    days = sorted(next(iter(found.values()))[0])[:-1]
    lines = [
        [variation, *(f"{mean(by_day[day] for by_day in of_seeds):.4f}" for day in days)]
        for variation, of_seeds in found.items()
    ]
    size = record["cells"][0]["run"]["config"]["synthetic"]["samples_per_day"]
    caption = (
        f"Test AUC of each day after the training, {size:,} samples each: mean over the seeds."
    )
    header = ["model", *(f"day {number}" for number in range(1, len(days) + 1))]
    return markdown(caption, header, lines)


def quantized_table(file: str) -> str:
    """What int8 rows change, by embedding_dim: the size of the tables, AUC and logloss."""
    record = read_record(file)
    by_dim: dict[int, list[dict[str, Any]]] = {}
    for model in record["models"]:
        by_dim.setdefault(model["embedding_dim"], []).append(model)
    lines = []
    for dim, models in by_dim.items():
        size = models[0]["table_bytes"]
        line = [str(dim), f"{size['float32'] / 2**20:.1f}", f"{size['int8'] / size['float32']:.3f}"]
        line.append(f"{mean(model['test']['float32']['auc'] for model in models):.4f}")
        for metric in ("auc", "logloss"):
            changes = [
                model["test"]["int8"][metric] - model["test"]["float32"][metric] for model in models
            ]
            line.append(f"{min(changes):+.6f} to {max(changes):+.6f}")
        lines.append(line)
    seeds = ", ".join(str(model["seed"]) for model in next(iter(by_dim.values())))
    caption = (
        f"DLRM on a real sample of Criteo Kaggle, seeds {seeds}, the same run exported twice: "
        f"least to most change; {machine(record['environment'])}."
    )
    header = ["embedding_dim", "tables in float32, MiB", "bytes of int8 over float32"]
    header += ["AUC in float32, mean", "AUC, int8 less float32", "logloss, int8 less float32"]
    return markdown(caption, header, lines)


def _runs(record: Mapping[str, Any], variation: str) -> list[dict[str, Any]]:
    """The finished runs of a variation."""
    return [
        cell["run"]
        for cell in record["cells"]
        if cell["variation"] == variation and cell["run"]["status"] == "finished"
    ]
