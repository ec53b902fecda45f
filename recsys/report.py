"""Results of runs and of ablations as a person reads them: text, tables, and one HTML page each.

    format_run          what `recsys train` prints at its end, and a run's page shows
    format_ablation     what `recsys ablate` prints at its end, and `table.md` holds
    write_report        `report.html` of a run or an ablation, from the template `page.html`

Two cells of an ablation with the same seed begin with the same values and see the samples in the
same order. So their difference varies less than their results do. `make_differences` compares
variations with a baseline in pairs of cells with equal seeds. The n differences, one for each seed,
give a mean and its 95 % interval:

    difference     mean of (variation - baseline) +- t * s / sqrt(n)
    ratio          the same of log(variation / baseline), as a factor: a geometric mean

The interval holds the true mean in 95 % of cases if the differences are independent draws from one
normal distribution. s is the standard deviation of the sample (n - 1), and t the 97.5 % quantile of
Student's t with n - 1 degrees of freedom.

Imports no PyTorch, so that the command line can refuse a folder at once.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter
from functools import cache
from io import BytesIO
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from recsys._support.files import appearing_whole, as_argument
from recsys._support.sizes import format_bytes
from recsys.config import RANKING_METRICS, EvalConfig, TrainConfig, describe_config, flat
from recsys.errors import ConfigError, RecsysError, refuse
from recsys.train.run_folder import RunFolder, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "METRICS",
    "column_title",
    "draw_curves",
    "format_ablation",
    "format_metrics",
    "format_number",
    "format_run",
    "format_unknown",
    "make_differences",
    "make_rows",
    "write_report",
]

_METRICS_OF_RUNS = (
    "recall_at_k",
    "recall_standard_error",
    "ndcg_at_k",
    "ndcg_standard_error",
    "item_knn_recall_at_k",
    "item_knn_ndcg_at_k",
    "popularity_recall_at_k",
    "popularity_ndcg_at_k",
    "num_rankings",
    "num_unknown_items",
    "auc",
    "auc_standard_error",
    "logloss",
    "normalized_entropy",
    "calibration",
    "accuracy",
    "num_samples",
    "num_positives",
    "gauc",
    "num_groups",
    "num_groups_left_out",
)
_OF_BOTH_LABELS = ("logloss", "num_groups", "num_groups_left_out")  # rankings ask positives alone
_BASELINES = ("item_knn", "popularity")
_FEW = 30  # points of a curve that are marked
_Curves = dict[str, dict[str, Any]]  # (samples, values), by title and name
_LEARNED_LITTLE = 0.99  # the normalized entropy of the mean label is 1


# Runs


def format_metrics(metrics: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Table with a line per metric that has a value and a column per part of the data."""
    measured = {split: values for split, values in metrics.items() if values is not None}
    if not measured:
        return "no evaluation was made, or the run diverged"
    parts = list(measured.values())
    k = next((part["ranking_k"] for part in parts if "ranking_k" in part), "k")
    names = [name for name in _METRICS_OF_RUNS if k == "k" or name not in _OF_BOTH_LABELS]
    found = {name: [part.get(name) for part in parts] for name in names}
    rows = {"": list(measured)} | {
        name.replace("at_k", f"at {k}").replace("_", " "): list(map(_metric, values))
        for name, values in found.items()
        if set(values) != {None}
    }
    width = max(20, *(len(title) + 2 for title in rows))
    lines = [
        f"{title:<{width}}" + "".join(f"{value:>14}" for value in values)
        for title, values in rows.items()
    ]
    return "\n".join(lines)


def _metric(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def format_unknown(unknown: Mapping[str, Mapping[str, int]]) -> list[str]:
    """A line for each part with values that have no row of their own; empty if there are none.

    Args:
        unknown: How many, by part of the data and column.
    """
    found = {
        part: [f"{column} {count:,}" for column, count in columns.items() if count]
        for part, columns in unknown.items()
    }
    return [
        f"{part}: values without a row of their own, which share row 0: {', '.join(columns)}"
        for part, columns in found.items()
        if columns
    ]


def format_run(record: Mapping[str, Any], run_dir: Path) -> str:
    """The text that `recsys train` prints at its end.

    Args:
        record: `run.json`.
        run_dir: The folder of the run.
    """
    from recsys.pipeline.stalls import format_stalls

    config, throughput, data = record["config"], record["throughput"], record["data"]
    model, optimizer, sizes = config["model"], config["optimizer"], data["table_sizes"]
    dims = {table: model["table_dims"].get(table, model["embedding_dim"]) for table in sizes}
    num_bytes = sum(4 * size * dims[table] for table, size in sizes.items())
    rate, peak = throughput["samples_per_second"], record["peak_memory_bytes"]
    processes, environment = record.get("processes"), record["environment"]
    lines = [*_outcome(record, run_dir), format_metrics(record["metrics"])]
    if ((record["metrics"]["test"] or {}).get("normalized_entropy") or 0) > _LEARNED_LITTLE:
        lines.append(
            "Predictions are hardly better, or worse, than the mean label for all. Try --set "
            "optimizer.name=adagrad --set optimizer.lr=0.03, or more epochs; if only the loss in "
            "training falls, fewer."
        )
    lines += [f"note: {finding}" for finding in data.get("findings", ())]
    if data.get("best_auc") is not None:
        lines.append(f"{'best AUC possible':<20}{_metric(data['best_auc']):>14}")
    facts = {
        "data": f"{data['name']}, {data['num_samples']:,} samples",
        "model": model["name"],
        "tables": f"{len(sizes)}, {sum(sizes.values()):,} rows of "
        f"{', '.join(map(str, sorted(set(dims.values()))))}: {format_bytes(num_bytes)}, "
        f"embeddings {config['embeddings']}",
        "recipe": f"{optimizer['name']} {optimizer['lr']:g}, B={config['batch_size']}, "
        f"{config['epochs']} epoch{'s' if config['epochs'] > 1 else ''}, seed {config['seed']}",
        "samples/s": "-" if rate is None else f"{rate:,.0f}",
        "training": f"{throughput['num_samples']:,} samples in {throughput['train_seconds']:.1f} "
        f"s; evaluation took {record['stalls']['evaluate_seconds']:.1f} s more",
        "stages": format_stalls(record["stalls"]),
        **_tiers(record["tiers"], config["budget"]),
        **_skipping(record.get("skipped")),
        "peak memory": "-" if peak is None else format_bytes(peak),
        "machine": f"{record['started']}; {environment['gpu'] or environment['cpu']}, "
        f"{environment['num_cores']} cores, torch {environment['torch']}",
        "saved": f"{run_dir}/: {', '.join(sorted(file.name for file in run_dir.iterdir()))}",
        "processes": None
        if processes is None
        else f"{processes['num_ranks']}; tiers, stages and memory are those of the first process",
    }
    lines += ["", *(f"{name:<20}{text}" for name, text in facts.items() if text is not None)]
    return "\n".join(lines)


def _outcome(record: Mapping[str, Any], run_dir: Path) -> Iterator[str]:
    """Why a run ended before its last step, and how to go on from there; nothing if it did not."""
    folder, stopped = as_argument(run_dir), record.get("stopped_early")
    if record["status"] != "finished":
        yield (
            f"{record['status']} at step {record['throughput']['num_steps']:,}; metrics, if there "
            "are any, are those of the last evaluation"
        )
    if record["status"] == "interrupted" and record["checkpoints"] is not None:
        yield f"continue it by: recsys train --run {folder} --resume"
    if stopped is not None:
        reason = f"{stopped.get('callback') or 'a callback'} asked for it"
        if stopped.get("metric") is not None:
            reason = (
                f"the best {stopped['metric']} on the {stopped['split']} split was "
                f"{stopped['best']:.4f} at step {stopped['best_step']:,}"
            )
        yield f"stopped early at step {stopped['step']:,}: {reason}"
    if record["model_step"] not in (None, record["throughput"]["num_steps"]):
        yield f"the model is that of the best evaluation, at step {record['model_step']:,}"


def _tiers(tiers: Mapping[str, Any] | None, budget: str) -> dict[str, str]:
    """Fast memory, hit rates and bytes moved; empty if all rows were resident."""
    if tiers is None:
        return {}
    cold = tiers["cold_row_share"]
    return {
        "tiers": f"{format_bytes(tiers['hot_bytes'])} hot"
        f"{f' of budget {budget}' if budget else ''}, "
        f"{tiers['num_slots']:,} of {tiers['num_rows']:,} rows; the rest: {tiers['cold_tier']}",
        "hits": f"{tiers['lookup_hit_rate']:.1%} of lookups, {tiers['unique_hit_rate']:.1%} of "
        "distinct rows"
        f"{f'; {cold:.1%} of rows used in the cold tier' if cold else ''}",
        "moved": f"{format_bytes(tiers['fetched_bytes'])} fetched, "
        f"{format_bytes(tiers['written_back_bytes'])} written back; "
        f"{tiers['exposed_fetch_seconds']:.1f} s of waiting",
    }


def _skipping(skipped: Mapping[str, Any] | None) -> dict[str, str | None]:
    """What a policy of skipping left out; empty without one. `run.json` says more."""
    if skipped is None:
        return {}
    num_seen, guard = skipped["num_seen"], skipped["guard"]
    return {
        "skipped": f"{skipped['share_skipped']:.1%} of {num_seen:,} samples and "
        f"{skipped['share_lookups_left_out']:.1%} of the updates by {skipped['policy']['name']}; "
        f"{num_seen - skipped['num_skipped']:,} samples trained on",
        "guard": None
        if guard is None
        else f"windows: {guard['num_windows']:,}, decisions: {len(guard['decisions']):,}",
    }


# Ablations

# By metric: its name for readers, and the format of its values.
METRICS = {
    "auc": ("test AUC", "{:.4f}"),
    "logloss": ("test logloss", "{:.4f}"),
    "validation_auc": ("validation AUC", "{:.4f}"),
    "normalized_entropy": ("test normalized entropy", "{:.4f}"),
    "calibration": ("test calibration", "{:.4f}"),
    "gauc": ("test GAUC", "{:.4f}"),
    "recall_at_k": ("test recall at {ranking_k}", "{:.4f}"),
    "ndcg_at_k": ("test NDCG at {ranking_k}", "{:.4f}"),
    "train_seconds": ("seconds of training", "{:.1f}"),
    "throughput": ("samples/s", "{:,.0f}"),
    "num_trained": ("samples trained on", "{:,.0f}"),
    "skipped_share": ("share skipped", "{:.4f}"),
    "updates_left_out_share": ("share of updates left out", "{:.4f}"),
    "fast_memory_mib": ("MiB of fast memory", "{:,.1f}"),
    "lookup_hit_rate": ("lookup hit rate", "{:.4f}"),
    "unique_hit_rate": ("unique hit rate", "{:.4f}"),
    "moved_mib": ("MiB moved", "{:,.0f}"),
    "seconds_to_target_auc": ("seconds to {target_split} AUC {target_auc}", "{:.2f}"),
}
_ALWAYS = ("auc", "logloss", "throughput")
_TIMES = ("train_seconds", "throughput", "seconds_to_target_auc")
_WITH_RATIOS = ("train_seconds", "throughput", "num_trained", "seconds_to_target_auc")


def _values(cell: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics of a cell of `ablate.json`; None where it has no value, or diverged."""
    run = cell["run"]
    if run["status"] != "finished":
        return dict.fromkeys(METRICS)
    throughput, tiers, skipped = run["throughput"], run.get("tiers"), run.get("skipped") or {}
    test, validation = (run["metrics"].get(part) or {} for part in ("test", "validation"))
    found = {metric: test.get(metric) for metric in METRICS}
    if tiers is not None:
        moved = tiers["fetched_bytes"] + tiers["written_back_bytes"]
        found |= {name: tiers[name] for name in ("lookup_hit_rate", "unique_hit_rate")}
        found |= {"fast_memory_mib": tiers["hot_bytes"] / 2**20, "moved_mib": moved / 2**20}
    return found | {
        "validation_auc": validation.get("auc"),
        "train_seconds": throughput["train_seconds"],
        "throughput": throughput["samples_per_second"],
        "num_trained": throughput.get("num_trained_samples") or throughput["num_samples"],
        "skipped_share": skipped.get("share_skipped"),
        "updates_left_out_share": skipped.get("share_lookups_left_out") or None,
        "seconds_to_target_auc": cell["seconds_to_target_auc"],
    }


def column_title(metric: str, config: Mapping[str, Any]) -> str:
    """The name of a metric for readers.

    Args:
        metric: The metric.
        config: As in `ablate.json`.
    """
    return METRICS[metric][0].format(
        target_split=config["target_split"],
        target_auc=config["target_auc"],
        ranking_k=config["base"].get("eval", {}).get("ranking_k", EvalConfig().ranking_k),
    )


def format_number(metric: str, value: float | None, kind: str = "") -> str:
    """Value of a metric for readers.

    Args:
        metric: The metric.
        value: The value.
        kind: "difference" or "ratio" for a comparison of two values.
    """
    if value is None:
        return "-"
    if kind == "difference":
        return METRICS[metric][1].replace("{:", "{:+").replace(".4f", ".5f").format(value)
    return f"{value:.3f}" if kind == "ratio" else METRICS[metric][1].format(value)


def make_rows(
    cells: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row for every variation and metric that some cell has a value of.

    Args:
        cells: As in `ablate.json`.
        config: As in `ablate.json`.

    Returns:
        Rows with `variation`, `metric`, `mean`, `std` (sample standard deviation; None for a single
        value), `min`, `max`, `num_runs` with a value, `num_cells`, and `values`, one per cell in
        the order of `cells`. Cells have no value that diverged or never reached the target.
    """
    found = [(cell["variation"], _values(cell)) for cell in cells]
    rows = []
    for variation in config["variations"]:
        own = [values for name, values in found if name == variation]
        for metric in METRICS if own else ():
            values = [values[metric] for values in own]
            known = [value for value in values if value is not None]
            if metric in _ALWAYS or any(values[metric] is not None for _, values in found):
                rows.append(
                    {
                        "variation": variation,
                        "metric": metric,
                        "mean": fmean(known) if known else None,
                        "std": stdev(known) if len(known) > 1 else None,
                        "min": min(known, default=None),
                        "max": max(known, default=None),
                        "num_runs": len(known),
                        "num_cells": len(own),
                        "values": values,
                    }
                )
    return rows


def make_differences(
    cells: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Every other variation compared with the baseline, metric by metric.

    Args:
        cells: As in `ablate.json`.
        config: As in `ablate.json`, with a `baseline`.

    Returns:
        One entry per variation and metric with a pair of values: its `kind` ("ratio" for times,
        rates and samples trained on, else "difference"); `seeds` with a cell of both variations;
        `values` of the pairs by seed, None where one of the two has no value; `num_pairs` with a
        value; their `mean` and its 95 % interval, `low` to `high`, None for a single pair.
    """
    found = {(cell["variation"], cell["seed"]): _values(cell) for cell in cells}
    baseline = config["baseline"]
    entries = []
    for variation in config["variations"]:
        seeds = [seed for name, seed in found if name == variation and (baseline, seed) in found]
        for metric in METRICS if variation != baseline else ():
            pairs = [
                (found[variation, seed][metric], found[baseline, seed][metric]) for seed in seeds
            ]
            entry = _compare("ratio" if metric in _WITH_RATIOS else "difference", pairs)
            if entry["num_pairs"]:
                head = {"variation": variation, "baseline": baseline, "metric": metric}
                entries.append(head | {"seeds": seeds} | entry)
    return entries


def _compare(kind: str, pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, Any]:
    """The values of pairs of cells, their mean and its interval."""
    is_ratio = kind == "ratio"
    values = [
        None
        if one is None or other is None or (is_ratio and min(one, other) <= 0)
        else (one / other if is_ratio else one - other)
        for one, other in pairs
    ]
    known = [np.log(value) if is_ratio else value for value in values if value is not None]
    ends = [np.mean(known)] if known else []
    if len(known) > 1:
        half = _t_quantile(len(known) - 1) * np.std(known, ddof=1) / np.sqrt(len(known))
        ends += [ends[0] - half, ends[0] + half]
    mean, low, high = [*map(float, np.exp(ends) if is_ratio else ends), None, None, None][:3]
    return {
        "kind": kind,
        "values": values,
        "num_pairs": len(known),
        "mean": mean,
        "low": low,
        "high": high,
    }


@cache
def _t_quantile(num_free: int) -> float:
    """The t for which Student's t lies in [-t, t] with a probability of 95 %.

    With t = sqrt(n) * tan(angle), the density of the angle is proportional to cos(angle)^(n - 1).
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    mass = np.cumsum(np.cos((angles[1:] + angles[:-1]) / 2) ** (num_free - 1))
    angle = np.interp(0.95, mass / mass[-1], angles[1:])
    return float(np.sqrt(num_free) * np.tan(angle))


def _tables(record: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """The table of an ablation, and with a baseline the comparison with it, as texts.

    Each has a note, and its lines, of which the first is the header.
    """
    config = record["config"]
    num_means = Counter(
        metric for metric, _ in {(row["metric"], row["mean"]) for row in record["rows"]}
    )
    baselines = _baselines(record["cells"])
    titles = {
        metric: column_title(metric, config)
        for metric in METRICS
        if metric in _ALWAYS or num_means[metric] > 1 or metric in {of for _, of in baselines}
    }
    note = (
        f"{record['status']}: {len(record['cells'])} of {record['num_cells']} cells, seeds "
        f"{', '.join(map(str, config['seeds']))}; mean \N{PLUS-MINUS SIGN} sample standard "
        "deviation over the seeds. Columns whose means are equal in all variations are left out; "
        "table.csv has them."
    )
    cells = {(row["variation"], row["metric"]): _cell(row) for row in record["rows"]}
    tables = [(note, _lines(titles, cells | baselines))]
    cells = {
        (entry["variation"], entry["metric"]): _difference(entry)
        for entry in record.get("differences", ())
    }
    if cells:
        note = (
            f"Against {config['baseline']}, in pairs of equal seeds: mean of the differences (for "
            "ratios: geometric mean) and its 95 % interval by Student's t. The interval is for "
            "other seeds on the same data, not for other data."
        )
        titles |= {
            metric: f"{titles[metric]}, ratio" for metric in _WITH_RATIOS if metric in titles
        }
        tables.append((note, _lines(titles, cells)))
    return tables


def _baselines(cells: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """Recall and NDCG of what needs no training, once for each data set; by line and metric."""
    runs = [cell["run"] for cell in cells if cell["run"]["metrics"]["test"]]
    by_data = {run["data"]["name"]: run["metrics"]["test"] for run in runs}
    return {
        (f"{name} on {data}", metric): format_number(metric, test[f"{name}_{metric}"])
        for data, test in by_data.items()
        for name, metric in product(_BASELINES, RANKING_METRICS)
        if f"{name}_{metric}" in test
    }


def _lines(titles: Mapping[str, str], cells: Mapping[tuple[str, str], str]) -> list[list[str]]:
    variations = dict.fromkeys(variation for variation, _ in cells)
    lines = [[name, *(cells.get((name, metric), "-") for metric in titles)] for name in variations]
    return [["variation", *titles.values()], *lines]


def _cell(row: Mapping[str, Any]) -> str:
    text = format_number(row["metric"], row["mean"])
    if row["std"]:
        text += f" \N{PLUS-MINUS SIGN} {format_number(row['metric'], row['std'])}"
    if 0 < row["num_runs"] < row["num_cells"]:
        text += f" ({row['num_runs']} of {row['num_cells']} cells)"
    return text


def _verdict(record: Mapping[str, Any]) -> str:
    """Which variation won, by the interval of its difference from the baseline; "" without one."""
    differences = record.get("differences", ())
    found = [entry for entry in differences if entry["metric"] in ("auc", "recall_at_k")]
    if not found:
        return ""
    best = max(
        found, key=lambda entry: (entry["metric"] == "auc", (entry["low"] or 0) > 0, entry["mean"])
    )
    title, baseline = column_title(best["metric"], record["config"]), best["baseline"]
    if best["low"] is None:
        return f"No variation won: with one seed each, nothing tells {title} from chance."
    if best["low"] > 0:
        return f"{best['variation']} won: its {title} is above {baseline}'s by {_difference(best)}."
    if all((entry["high"] or 0) < 0 for entry in found if entry["metric"] == best["metric"]):
        return f"{baseline} won: its {title} is above that of every other variation."
    return f"No variation won: none has a {title} whose interval lies above {baseline}'s."


def _difference(entry: Mapping[str, Any]) -> str:
    mean, low, high = (
        format_number(entry["metric"], entry[key], entry["kind"]) for key in ("mean", "low", "high")
    )
    # Two times say nothing of others: the machine, too, changes between them.
    has_interval = entry["low"] is not None and not (
        entry["metric"] in _TIMES and entry["num_pairs"] < 3
    )
    return f"{mean} ({low} to {high})" if has_interval else mean


def _notes(record: Mapping[str, Any]) -> Iterator[str]:
    """What is said below the tables of an ablation."""
    cells = record["cells"]
    for key, values in record["environment"].items():
        if isinstance(values, list):
            found = ", ".join(dict.fromkeys(map(_text, values)))
            yield f"Cells were run with different {key}: {found}."
    diverged = [cell["name"] for cell in cells if cell["run"]["status"] == "diverged"]
    if diverged:
        yield f"{len(diverged)} of {len(cells)} cells diverged: {', '.join(diverged)}."


def format_ablation(record: Mapping[str, Any]) -> str:
    """The tables of an ablation in Markdown.

    Args:
        record: `ablate.json`.
    """
    parts = []
    for note, (header, *lines) in _tables(record):
        rows = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
        # A name may hold what Markdown reads as its own.
        texts = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
        parts += [note, "\n".join(f"| {' | '.join(row)} |" for row in texts)]
    return "\n\n".join(filter(None, [_verdict(record), *parts, *_notes(record)]))


# Pages


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a run or an ablation; returns its path.

    The folder of an ablation also gets its table as `table.md` and `table.csv`.

    Raises:
        ConfigError: the folder is neither, has no record yet, or has a damaged record.
    """
    files = [folder / name for name in ("ablate.json", "run.json") if (folder / name).is_file()]
    refuse(
        (
            not files,
            f"{folder} has neither a run.json nor an ablate.json; name the folder of a run or of "
            "an ablation, after it has ended",
        )
    )
    try:
        texts = _run_files(folder) if files[0].name == "run.json" else _ablation_files(folder)
    except (RecsysError, OSError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{files[0]} is damaged: no page can be made of it ({type(error).__name__}: {error}); "
            "run the command that made it again"
        ) from error
    for name, text in texts.items():
        with appearing_whole(folder / name) as partial:
            # A record may hold half of a surrogate pair, which UTF-8 cannot.
            partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    return folder / "report.html"


def _run_files(folder: Path) -> dict[str, str]:
    run = RunFolder.open(folder)
    record = run.read_record()
    curves = _curves_of_run(run.read_history(), record["config"]["eval"]["split"])
    text = format_run(record, folder)
    return {"report.html": _page("Run", folder, record, record["config"], curves, summary=text)}


def _ablation_files(folder: Path) -> dict[str, str]:
    record = read_json(folder / "ablate.json")
    config = record["config"]
    page = _page(
        "Ablation",
        folder,
        record,
        config["base"],
        _curves_of_variations(record["cells"]),
        summary=_verdict(record),
        tables=_tables(record),
        notes=list(_notes(record)),
        variations=[
            (name, ", ".join(f"{key} = {_text(value)}" for key, value in keys.items()) or "nothing")
            for name, keys in config["variations"].items()
        ],
    )
    table = pd.DataFrame(record["rows"]).drop(columns="values", errors="ignore")
    return {
        "report.html": page,
        "table.md": f"{format_ablation(record)}\n",
        "table.csv": table.to_csv(index=False),
    }


def _page(
    what: str,
    folder: Path,
    record: Mapping[str, Any],
    config: Mapping[str, Any],
    curves: _Curves,
    **values: Any,
) -> str:
    """The page of a record, with the keys of a configuration that do not have their defaults."""
    from jinja2 import Environment, StrictUndefined

    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    defaults = flat(describe_config(TrainConfig()))
    sections = {
        "Keys that do not have their defaults": {
            key: value
            for key, value in flat(config).items()
            if _text(value) != _text(defaults.get(key))
        },
        "Environment": record["environment"],
        "Data": record.get("data", {}),
    }
    return template.render(
        {"summary": "", "tables": [], "notes": [], "variations": []} | values,
        title=f"{what} {folder.resolve().name}",
        picture=b64encode(draw_curves(curves)).decode(),
        sections={
            name: [(key, _text(value)) for key, value in flat(section).items()]
            for name, section in sections.items()
        },
    )


def _curves_of_run(history: Sequence[Mapping[str, Any]], split: str) -> _Curves:
    """Loss and AUC of a run, those of training as the mean of nine neighbouring reports.

    Where items were ranked: recall and NDCG, too, beside those of the baselines. What has no value
    has no picture.
    """
    training = pd.DataFrame(
        [entry for entry in history if "train_loss" in entry],
        columns=["num_samples", "train_loss", "train_auc"],
        dtype=float,
    )
    means = training.rolling(9, center=True, min_periods=1).mean()
    evaluated = pd.DataFrame(
        [entry[split] | {"at": entry["num_samples"]} for entry in history if entry.get(split)],
        columns=["at", *_METRICS_OF_RUNS],
        dtype=float,
    )
    judged = evaluated.dropna(subset="auc")  # the loss of positives alone says little
    curves: _Curves = {
        title: {
            "training (before each update), smoothed": (training["num_samples"], means[train_key]),
            split: (judged["at"], judged[key]),
        }
        for title, key, train_key in (
            ("loss", "logloss", "train_loss"),
            ("AUC", "auc", "train_auc"),
        )
    }
    ranked = evaluated.dropna(subset="recall_at_k")
    for metric in RANKING_METRICS if len(ranked) else ():
        names = {split: metric} | {name: f"{name}_{metric}" for name in _BASELINES}
        curves[metric.replace("_", " ").replace("ndcg", "NDCG")] = {
            name: (ranked["at"], ranked[key]) for name, key in names.items()
        }
    return {
        title: named
        for title, named in curves.items()
        if any(values.notna().any() for _, values in named.values())
    }


def _curves_of_variations(cells: Sequence[Mapping[str, Any]]) -> _Curves:
    """AUC of each variation, or recall at k where items were ranked.

    The mean over its cells, as far as all of them have evaluations.
    """
    is_ranked = any(point.get("recall_at_k") for cell in cells for point in cell["curve"])
    metric, title = ("recall_at_k", "recall at k") if is_ranked else ("auc", "AUC")
    curves = {}
    for name in dict.fromkeys(cell["variation"] for cell in cells):
        of_cells = [
            pd.DataFrame(cell["curve"], columns=["num_samples", metric], dtype=float)
            for cell in cells
            if cell["variation"] == name
        ]
        means = sum(of_cells[1:], of_cells[0]) / len(of_cells)  # nan where one has no evaluation
        points = means.dropna(subset="num_samples")
        curves[name] = (points["num_samples"], points[metric])
    return {title: curves}


def draw_curves(curves: _Curves) -> bytes:
    """PNG of curves over samples, one picture above the other; empty if none has a point.

    Args:
        curves: Samples and values of each curve, by the title of its picture and its name.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    if not any(len(samples) for named in curves.values() for samples, _ in named.values()):
        return b""
    height = 2.5 * len(curves) + 0.2 * sum(map(len, curves.values()))
    figure = Figure((6.5, height), layout="constrained")
    axes = figure.subplots(len(curves), squeeze=False).flat
    names = list(dict.fromkeys(name for named in curves.values() for name in named))
    handles = {}
    for axis, (title, named) in zip(axes, curves.items(), strict=True):
        for name, (samples, values) in named.items():
            marker = "o" if len(samples) < _FEW else ""  # no line leads to a single point
            color = f"C{names.index(name)}"  # the same in all pictures, which have one legend
            (handles[name],) = axis.plot(samples, values, color=color, marker=marker, markersize=3)
        axis.set(xlabel="samples", ylabel=title)
        axis.xaxis.set_major_formatter(EngFormatter())
        axis.grid(alpha=0.3)
    figure.legend(handles.values(), handles, loc="outside lower left")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _text(value: Any) -> str:
    """A value of a record for readers."""
    return value if isinstance(value, str) else json.dumps(value)
