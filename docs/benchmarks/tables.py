"""Tables in the docs, made from the JSON that commands wrote; `make tables` runs this.

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function
below. A test fails when a table is not what its JSON makes it.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DOCUMENTS", "TABLES", "with_tables"]

_JSON = Path(__file__).resolve().parent
_ROOT = _JSON.parent.parent
DOCUMENTS = ("README.md", "docs/benchmarks.md")
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The same document, with its tables made anew."""
    return _PLACE.sub(lambda place: place[1] + TABLES[place[2]]() + place[3], text)


def prepare_table(file: str) -> str:
    """`recsys bench prepare`: throughput and peak memory by provider."""
    record = json.loads((_JSON / file).read_text())
    rows = {(row["provider"], row["metric"]): row for row in record["rows"]}
    case = dict(pair.split("=") for pair in record["rows"][0]["case"].split(","))
    lines = []
    for provider in ("recsys", "pandas"):
        rate, peak = rows[provider, "throughput"], rows[provider, "peak_memory"]
        lines.append(
            [
                provider,
                f"{rate['median']:.0f}"
                + (f" ({rate['p20']:.0f}-{rate['p80']:.0f})" if rate["num_runs"] > 1 else ""),
                f"{peak['median'] / 2**30:.2f}",
            ]
        )
    num_runs = rows["recsys", "throughput"]["num_runs"]
    spread = f"median of {num_runs} runs (20th to 80th percentile)" if num_runs > 1 else "one run"
    caption = (
        f"Raw Criteo text to numbered arrays: {int(case['bytes']) / 1e9:.2f} GB, "
        f"{int(case['lines']):,} lines, {int(case['ids']):,} distinct ids; "
        f"{spread}; {_machine(record['environment'])}."
    )
    return _table(caption, ["", "MB/s", "peak memory, GiB"], lines)


def reference_table() -> str:
    """The reference recipes on the real sample: quality and speed by provider."""
    runs: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for file in sorted((_JSON / "reference").glob("*.json")):
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
        "of the last of seven parts; the standard error of one AUC is about 0.004); "
        f"{_machine(sample['environment'])}."
    )
    header = ["recipe", "embeddings", "mean test AUC", "by seed", "logloss", "samples/s"]
    return _table(caption, header, lines)


def synthetic_table() -> str:
    """The default run: what `make train` does."""
    run = json.loads((_JSON / "synthetic.json").read_text())
    sizes = run["data"]["table_sizes"].values()
    seconds = {stage.removesuffix("_seconds"): spent for stage, spent in run["stalls"].items()}
    train_seconds = run["throughput"]["train_seconds"]
    caption = (
        f"{run['throughput']['num_samples']:,} training samples, {len(sizes)} tables, "
        f"{sum(sizes):,} rows of {run['config']['model']['embedding_dim']}, embeddings "
        f"{run['config']['embeddings']}; {_machine(run['environment'])}."
    )
    line = [
        f"{run['metrics']['test']['auc']:.4f}",
        f"{run['data']['planted_auc']:.2f}",
        f"{run['throughput']['samples_per_second']:,.0f}",
        f"{seconds['load'] / train_seconds:.0%}",
        f"{run['peak_memory_bytes'] / 2**30:.2f}",
    ]
    header = ["test AUC", "best AUC planted", "samples/s", "waiting for data", "peak memory, GiB"]
    return _table(caption, header, [line])


def step_table() -> str:
    """`recsys bench step`: milliseconds by case and provider."""
    record = json.loads((_JSON / "step.json").read_text())
    cells = {(row["case"], row["provider"], row["metric"]): row for row in record["rows"]}
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    providers = ["torch", "fbgemm", "dense", "dense_eager", "gemm_torch", "gemm_onednn"]
    lines = []
    for case in cases:
        keys = dict(pair.split("=") for pair in case.split(","))
        speed = cells[case, "dense", "speed_over_dense_eager"]
        lines.append(
            [
                keys["B"],
                keys["precision"],
                *(f"{cells[case, provider, 'time']['median']:.2f}" for provider in providers),
                f"**{speed['median']:.2f}** ({speed['low']:.2f}-{speed['high']:.2f})",
            ]
        )
    caption = (
        f"Milliseconds of a step, median of {record['rows'][0]['num_runs']} rounds in which all "
        f"took turns; SGD, Kaggle's 26 tables, D=16; {_machine(record['environment'])}."
    )
    header = ["B", "precision", *providers, "dense over dense_eager (95 %)"]
    return _table(caption, header, lines)


def ablate_table(file: str) -> str:
    """`recsys ablate`: mean and spread over seeds, a line per variation."""
    record = json.loads((_JSON / file).read_text())
    config, run = record["config"], record["cells"][0]["run"]
    rows = {(row["variation"], row["metric"]): row for row in record["rows"]}
    titles = {"auc": "test AUC", "logloss": "logloss", "throughput": "samples/s"}
    if config["target_auc"] is not None:
        target = f"{config['target_split']} AUC {config['target_auc']:g}"
        titles["time_to_target_auc"] = f"seconds to {target}"
    lines = []
    for variation in config["variations"]:
        line = [variation]
        for metric in titles:
            row = rows[variation, metric]
            low, mid, high, std = (
                _measure(metric, row[key]) for key in ("min", "mean", "max", "std")
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
        f"deviation of a sample); {_machine(record['environment'])}."
    )
    return _table(caption, ["variation", *titles.values()], lines)


TABLES: dict[str, Callable[[], str]] = {
    "ablate_baselines": partial(ablate_table, "ablate_baselines.json"),
    "prepare": partial(prepare_table, "prepare.json"),
    "prepare_kaggle_size": partial(prepare_table, "prepare_kaggle_size.json"),
    "reference": reference_table,
    "step": step_table,
    "synthetic": synthetic_table,
}


def _table(caption: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return caption + "\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _measure(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    if metric == "time_to_target_auc":
        return f"{value / 1e3:.2f}"
    return f"{value:,.0f}" if metric == "throughput" else f"{value:.4f}"


def _machine(environment: dict[str, Any]) -> str:
    threads = environment["num_threads"]
    return f"{environment['cpu']}, {threads} threads, torch {environment['torch']}"


if __name__ == "__main__":
    for name in DOCUMENTS:
        document = _ROOT / name
        document.write_text(with_tables(document.read_text()))
