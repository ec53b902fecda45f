"""Tables of single training runs and of ablations."""

from __future__ import annotations

import json
from statistics import mean
from typing import TYPE_CHECKING, Any

from table_cells import (
    RECORDS,
    machine,
    markdown,
    read_record,
)

from recsys.report.ablation_metrics import column_title, format_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "ablate_table",
    "last_batch_table",
    "reached_table",
    "reference_table",
    "schedules_table",
    "synthetic_table",
]

_ABLATED = ("auc", "logloss", "throughput", "time_to_target_auc")
_LAST_STEPS = {
    "none": "whole mini-batches only",
    "1": "1 sample, as every other step",
    "1-scaled": "1 sample, by its share",
    "37": "37 samples, as every other step",
    "37-scaled": "37 samples, by their share",
}


def reference_table(folder: str) -> str:
    """The reference recipes on the real sample: quality and speed by provider."""
    runs: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for file in sorted((RECORDS / folder).glob("*.json")):
        run = json.loads(file.read_text())
        optimizer = run["config"]["optimizer"]
        recipe = f"{optimizer['name']} {optimizer['lr']:g}, B={run['config']['batch_size']}"
        runs.setdefault((recipe, run["config"]["embeddings"]), []).append(run)
    lines = []
    for (recipe, provider), group in sorted(runs.items(), key=lambda item: item[0], reverse=True):
        group.sort(key=lambda run: int(run["config"]["seed"]))
        test = [run["metrics"]["test"] for run in group]
        rates = [run["throughput"]["samples_per_second"] for run in group]
        lines.append(
            [
                recipe,
                provider,
                f"**{mean(metrics['auc'] for metrics in test):.4f}**",
                ", ".join(f"{metrics['auc']:.4f}" for metrics in test),
                f"{mean(metrics['logloss'] for metrics in test):.4f}",
                f"{mean(rates):,.0f}",
            ]
        )
    sample = next(iter(runs.values()))[0]
    caption = (
        f"One epoch on a uniform sample of {sample['data']['num_samples']:,} lines of Criteo "
        f"Kaggle, tested on {sample['metrics']['test']['num_samples']:,} of them (the first half "
        f"of the last of seven parts{_standard_error(runs)}); {machine(sample['environment'])}."
    )
    header = ["recipe", "embeddings", "mean test AUC", "by seed", "logloss", "samples/s"]
    return markdown(caption, header, lines)


def last_batch_table(file: str) -> str:
    """What a last step on few samples does to a model: metrics after it, over the seeds."""
    record = read_record(file)
    recipes: dict[str, list[dict[str, Any]]] = {}
    for run in record["runs"]:
        recipes.setdefault(run["recipe"], []).append(run)
    lines = []
    for recipe, runs in recipes.items():
        for step, name in _LAST_STEPS.items():
            line = [recipe, name]
            for metric in ("auc", "logloss", "calibration"):
                found = [run[step][metric] for run in runs]
                line.append(f"{mean(found):.4f} ({min(found):.4f} to {max(found):.4f})")
            lines.append(line)
    seeds = len(next(iter(recipes.values())))
    caption = (
        f"The same model before and after a last step, {seeds} seeds: mean (least to most) on the "
        f"test part of a real sample of Criteo Kaggle; {machine(record['environment'])}."
    )
    return markdown(caption, ["recipe", "last step", "AUC", "logloss", "calibration"], lines)


def synthetic_table(file: str) -> str:
    """The default run, as in `make train`."""
    run = read_record(file)
    sizes = run["data"]["table_sizes"].values()
    train_seconds = run["throughput"]["train_seconds"]
    caption = (
        f"{run['throughput']['num_samples']:,} training samples, {len(sizes)} tables, "
        f"{sum(sizes):,} rows of {run['config']['model']['embedding_dim']}, embeddings "
        f"{run['config']['embeddings']}; {machine(run['environment'])}."
    )
    line = [
        f"{run['metrics']['test']['auc']:.4f}",
        f"{run['data']['best_auc']:.4f}",
        f"{run['throughput']['samples_per_second']:,.0f}",
        f"{run['stalls']['load_seconds'] / train_seconds:.0%}",
        f"{run['peak_memory_bytes'] / 2**30:.2f}",
    ]
    header = ["test AUC", "best AUC possible", "samples/s", "waiting for data", "peak memory, GiB"]
    return markdown(caption, header, [line])


def ablate_table(file: str) -> str:
    """`recsys ablate`: mean and spread over seeds, one line for each variation."""
    record = read_record(file)
    config, run = record["config"], record["cells"][0]["run"]
    rows = {(row["variation"], row["metric"]): row for row in record["rows"]}
    titles = {
        row["metric"]: column_title(row["metric"], config)
        for row in record["rows"]
        if row["metric"] in _ABLATED
    }
    lines = []
    for variation in config["variations"]:
        line = [variation]
        for metric in titles:
            row = rows[variation, metric]
            low, mid, high, std = (
                format_number(metric, row[key]) for key in ("min", "mean", "max", "std")
            )
            text = f"{mid} ({low}-{high}; {std})" if row["num_runs"] else mid
            if row["num_runs"] < row["num_cells"]:
                text += f", {row['num_runs']} of {row['num_cells']} runs"
            line.append(text)
        lines.append(line)
    seeds = ", ".join(map(str, config["seeds"]))
    caption = (
        f"{run['throughput']['num_samples']:,} training samples, tested on "
        f"{run['metrics']['test']['num_samples']:,}, seeds {seeds}: mean (least-most; standard "
        f"deviation of a sample); {machine(record['environment'])}."
    )
    return markdown(caption, ["variation", *titles.values()], lines)


def schedules_table(file: str) -> str:
    """`recsys ablate examples/ablate_schedules.toml`: quality, compared with the first schedule."""
    record = read_record(file)
    runs: dict[str, dict[int, Any]] = {}
    for cell in record["cells"]:
        runs.setdefault(cell["variation"], {})[cell["seed"]] = cell["run"]
    first = next(iter(runs.values()))
    lines = []
    for variation, by_seed in runs.items():
        tests = {seed: run["metrics"]["test"] for seed, run in by_seed.items()}
        line = [variation]
        for metric, places in (("auc", 4), ("logloss", 4), ("calibration", 2)):
            found = [test[metric] for test in tests.values()]
            middle, low, high = (f"{of(found):.{places}f}" for of in (mean, min, max))
            line.append(f"{middle} ({low}-{high})")
        is_same = all(test == first[seed]["metrics"]["test"] for seed, test in tests.items())
        apart = [
            test["auc"] - first[seed]["metrics"]["test"]["auc"] for seed, test in tests.items()
        ]
        line.append("none" if is_same else f"{min(apart):+.4f} to {max(apart):+.4f}")
        schedule = next(iter(by_seed.values()))["schedule"]
        share = schedule.get("hot_sample_share", schedule.get("popular_sample_share"))
        line.append("" if share is None else f"{share:.0%}")
        lines.append(line)
    run, seeds = next(iter(first.values())), ", ".join(map(str, record["config"]["seeds"]))
    caption = (
        f"One epoch of {run['throughput']['num_samples']:,} training samples of Criteo Kaggle, "
        f"tested on {run['metrics']['test']['num_samples']:,}; B={run['config']['batch_size']}, "
        f"budget={run['config']['budget']}, seeds {seeds}: mean (least-most); "
        f"{machine(record['environment'])}."
    )
    header = ["schedule", "test AUC", "logloss", "calibration"]
    header += [f"AUC less that of {next(iter(runs))}, by seed", "hot or popular samples"]
    return markdown(caption, header, lines)


def reached_table(file: str) -> str:
    """How close training comes to the best possible AUC."""
    run = read_record(file)
    config, data, test = run["config"], run["data"], run["metrics"]["test"]
    recipe = (
        f"{config['optimizer']['name']} {config['optimizer']['lr']:g}, B={config['batch_size']}"
    )
    line = [
        recipe,
        f"{test['auc']:.4f}",
        f"{run['best_auc']:.4f}",
        f"{run['best_auc'] - test['auc']:.4f}",
    ]
    caption = (
        f"One epoch of the default model on {data['num_samples']:,} samples of the full-size "
        f"tables ({sum(data['table_sizes'].values()):,} rows), both AUCs on the same "
        f"{test['num_samples']:,} test samples."
    )
    return markdown(caption, ["recipe", "test AUC", "best AUC possible", "left over"], [line])


def _standard_error(runs: Mapping[Any, Sequence[Mapping[str, Any]]]) -> str:
    """A phrase with the standard error of one test AUC; empty if an older record lacks it."""
    tests = [run["metrics"]["test"] for group in runs.values() for run in group]
    errors = [metrics.get("auc_standard_error") for metrics in tests]
    if None in errors:
        return ""
    return f"; the standard error of one AUC is {min(errors):.4f} to {max(errors):.4f}"
