"""Tables and curves in the docs, made from the JSON that commands wrote; `make tables` runs this.

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

from recsys.ablate_table import column_title, format_number
from recsys.bench.tiers_curve import write_curve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["CURVES", "DOCUMENTS", "TABLES", "with_tables"]

_JSON = Path(__file__).resolve().parent
_ROOT = _JSON.parent.parent
DOCUMENTS = (
    "README.md",
    "docs/benchmarks.md",
    "docs/popularity.md",
    "docs/schedules.md",
    "docs/synthetic.md",
)
CURVES = ("tiers.json",)
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The same document, with its tables made anew."""
    return _PLACE.sub(lambda place: place[1] + TABLES[place[2]]() + place[3], text)


def prepare_table(file: str) -> str:
    """`recsys bench prepare`: throughput and peak memory by provider, and how they compare."""
    record = _read(file)
    rows = {(row["provider"], row["metric"]): row for row in record["rows"]}
    case = _case(record["rows"][0]["case"])
    header, lines = ["", "MB/s", "peak memory, GiB"], []
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
    speed = rows.get(("recsys", "speed_over_pandas"))
    if speed:  # older records have none
        header.append("over pandas" if speed["low"] is None else "over pandas (95 %)")
        lines[0].append(_ratio(speed))
        lines[1].append("")
    num_runs = rows["recsys", "throughput"]["num_runs"]
    spread = f"median of {num_runs} runs (20th to 80th percentile)" if num_runs > 1 else "one run"
    caption = (
        f"Raw Criteo text to numbered arrays: {int(case['bytes']) / 1e9:.2f} GB, "
        f"{int(case['lines']):,} lines, {int(case['ids']):,} distinct ids; "
        f"{spread}; {_machine(record['environment'])}."
    )
    return _table(caption, header, lines)


def reference_table(folder: str) -> str:
    """The reference recipes on the real sample: quality and speed by provider."""
    runs: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for file in sorted((_JSON / folder).glob("*.json")):
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
        f"of the last of seven parts{_standard_error(runs)}); {_machine(sample['environment'])}."
    )
    header = ["recipe", "embeddings", "mean test AUC", "by seed", "logloss", "samples/s"]
    return _table(caption, header, lines)


def synthetic_table(file: str) -> str:
    """The default run: what `make train` does."""
    run = _read(file)
    sizes = run["data"]["table_sizes"].values()
    train_seconds = run["throughput"]["train_seconds"]
    caption = (
        f"{run['throughput']['num_samples']:,} training samples, {len(sizes)} tables, "
        f"{sum(sizes):,} rows of {run['config']['model']['embedding_dim']}, embeddings "
        f"{run['config']['embeddings']}; {_machine(run['environment'])}."
    )
    line = [
        f"{run['metrics']['test']['auc']:.4f}",
        f"{run['data']['best_auc']:.4f}",
        f"{run['throughput']['samples_per_second']:,.0f}",
        f"{run['stalls']['load_seconds'] / train_seconds:.0%}",
        f"{run['peak_memory_bytes'] / 2**30:.2f}",
    ]
    header = ["test AUC", "best AUC possible", "samples/s", "waiting for data", "peak memory, GiB"]
    return _table(caption, header, [line])


def step_table(file: str) -> str:
    """`recsys bench step`: milliseconds by case and provider."""
    record = _read(file)
    cells = {(row["case"], row["provider"], row["metric"]): row for row in record["rows"]}
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    # In a record from before ours was measured, it has no column.
    titles = {
        ("recsys", "speed_over_torch"): "recsys over torch (95 %)",
        ("recsys", "speed_over_fbgemm"): "over fbgemm (95 %)",
        ("recsys", "time_over_dense"): "recsys, times dense (95 %)",
        ("kernels", "time_over_dense"): "kernels, times dense (95 %)",
        ("dense", "speed_over_dense_eager"): "dense over dense_eager (95 %)",
        ("dense", "speed_over_fp32"): "over fp32 (95 %)",
    }
    found = {(provider, metric) for _, provider, metric in cells}
    titles = {key: title for key, title in titles.items() if key in found}
    names = ["recsys", "kernels", "torch", "fbgemm", "dense", "dense_eager"]
    names += ["gemm_torch", "gemm_onednn"]
    providers = [name for name in names if (name, "time") in found]
    lines = []
    for case in cases:
        keys = _case(case)
        ratios = [cells.get((case, *key)) for key in titles]
        lines.append(
            [
                keys["B"],
                keys["precision"],
                *(f"{cells[case, provider, 'time']['median']:.2f}" for provider in providers),
                *(_ratio(row, mark="**") if row else "" for row in ratios),
            ]
        )
    dim = _case(cases[0])["D"]
    caption = (
        f"Milliseconds of a step, median of {record['rows'][0]['num_runs']} rounds in which all "
        f"took turns; SGD, Kaggle's 26 tables, D={dim}; {_machine(record['environment'])}."
    )
    return _table(caption, ["B", "precision", *providers, *titles.values()], lines)


def lookup_summary_table(file: str) -> str:
    """`recsys bench lookup`: how many times faster ours is, by mini-batch size."""
    record = _read(file)
    cells = {(row["case"], row["metric"]): row for row in record["rows"]}
    sizes = [case for case, metric in cells if "," not in case and metric == "speed_over_fbgemm"]
    others = ("fbgemm", "torch")
    lines = []
    for case in sizes:
        rows = [cells[case, f"speed_over_{other}"] for other in others]
        lines.append([_case(case)["B"], *(_ratio(row, mark="**") for row in rows)])
    counts = [str(cells[sizes[0], f"speed_over_{other}"]["num_runs"]) for other in others]
    caption = (
        f"Median over {counts[0]} cases beside fbgemm and {counts[1]} beside torch (dimensions "
        f"and optimizers), each the ratio of the medians of its rounds; "
        f"{_machine(record['environment'])}."
    )
    header = ["B", *(f"recsys over {other} (95 %)" for other in others)]
    return _table(caption, header, lines)


def lookup_table(file: str) -> str:
    """`recsys bench lookup`: milliseconds by case and provider, and how they compare."""
    record = _read(file)
    cells = {(row["case"], row["provider"], row["metric"]): row for row in record["rows"]}
    timed = [case for case, name, metric in cells if (name, metric) == ("recsys", "time")]
    lines = []
    for case in timed:
        times = [cells.get((case, name, "time")) for name in ("recsys", "fbgemm", "torch")]
        speeds = [cells.get((case, "recsys", f"speed_over_{name}")) for name in ("fbgemm", "torch")]
        keys = _case(case)
        lines.append(
            [
                keys["D"],
                keys["optimizer"],
                keys["B"],
                *(f"{row['median']:.2f}" if row else "" for row in times),
                *(_ratio(row) if row else "" for row in speeds),
                f"{cells[case, 'recsys', 'bandwidth_share']['median']:.0%}",
            ]
        )
    bandwidth = [row["median"] for row in record["rows"] if row["metric"] == "bandwidth"]
    caption = (
        f"Milliseconds of a step of the embeddings alone, median of "
        f"{cells[timed[0], 'recsys', 'time']['num_runs']} rounds in which all took turns; the "
        f"memory streams {min(bandwidth):.0f} to {max(bandwidth):.0f} GB/s (its medians in the "
        f"same rounds); {_machine(record['environment'])}."
    )
    header = ["D", "optimizer", "B", "recsys", "fbgemm", "torch"]
    header += ["over fbgemm (95 %)", "over torch (95 %)", "of the bandwidth"]
    return _table(caption, header, lines)


def ablate_table(file: str) -> str:
    """`recsys ablate`: mean and spread over seeds, a line per variation."""
    record = _read(file)
    config, run = record["config"], record["cells"][0]["run"]
    rows = {(row["variation"], row["metric"]): row for row in record["rows"]}
    titles = {row["metric"]: column_title(row["metric"], config) for row in record["rows"]}
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
        f"deviation of a sample); {_machine(record['environment'])}."
    )
    return _table(caption, ["variation", *titles.values()], lines)


def schedules_table(file: str) -> str:
    """`recsys ablate examples/ablate_schedules.toml`: quality, and how far from the first."""
    record = _read(file)
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
            mean = sum(found) / len(found)
            line.append(f"{mean:.{places}f} ({min(found):.{places}f}-{max(found):.{places}f})")
        is_same = all(test == first[seed]["metrics"]["test"] for seed, test in tests.items())
        apart = [
            test["auc"] - first[seed]["metrics"]["test"]["auc"] for seed, test in tests.items()
        ]
        line.append("none" if is_same else f"{min(apart):+.4f} to {max(apart):+.4f}")
        told = next(iter(by_seed.values()))["schedule"]
        share = told.get("hot_sample_share", told.get("popular_sample_share"))
        line.append("" if share is None else f"{share:.0%}")
        lines.append(line)
    run, seeds = next(iter(first.values())), ", ".join(map(str, record["config"]["seeds"]))
    caption = (
        f"One epoch of {run['throughput']['num_samples']:,} training samples of Criteo Kaggle, "
        f"tested on {run['metrics']['test']['num_samples']:,}; B={run['config']['batch_size']}, "
        f"budget={run['config']['budget']}, seeds {seeds}: mean (least-most); "
        f"{_machine(record['environment'])}."
    )
    header = ["schedule", "test AUC", "logloss", "calibration"]
    header += [f"AUC less that of {next(iter(runs))}, by seed", "hot or popular samples"]
    return _table(caption, header, lines)


def generator_table(file: str) -> str:
    """`recsys bench synthetic`: samples per second by provider."""
    record = _read(file)
    cells = {(row["provider"], row["metric"]): row for row in record["rows"]}
    case = _case(record["rows"][0]["case"])
    lines = []
    for provider in dict.fromkeys(row["provider"] for row in record["rows"]):
        rate = cells[provider, "throughput"]
        speed = cells.get((provider, "speed_over_store"))
        lines.append(
            [
                provider.replace("_", " "),
                f"{rate['median']:,.0f} ({rate['p20']:,.0f}-{rate['p80']:,.0f})",
                _ratio(speed) if speed else "",
            ]
        )
    caption = (
        f"Shuffled mini-batches of {int(case['B']):,} through the loader's one thread, "
        f"{int(case['samples']):,} samples, {case['tables']} tables; median of "
        f"{record['rows'][0]['num_runs']} rounds in which all took turns (20th to 80th "
        f"percentile); {_machine(record['environment'])}."
    )
    return _table(caption, ["", "samples/s", "over store (95 %)"], lines)


def count_table(file: str) -> str:
    """`recsys bench count`: lookups per second by case and provider."""
    record = _read(file)
    cells = {(row["case"], row["provider"], row["metric"]): row for row in record["rows"]}
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    sources = {"criteo": "a store, lookups as in Criteo", "even": "a store, lookups drawn evenly"}
    lines = []
    for case in cases:
        keys = _case(case)
        what = sources[keys["lookups"]] if "lookups" in keys else f"mini-batches of {keys['B']}"
        rates = [cells[case, name, "throughput"] for name in ("recsys", "numpy", "torch")]
        speeds = [cells[case, "recsys", f"speed_over_{name}"] for name in ("numpy", "torch")]
        lines.append(
            [what, *(f"{rate['median'] / 1e6:,.0f}" for rate in rates), *map(_ratio, speeds)]
        )
    keys = _case(cases[0])
    caption = (
        f"Million lookups per second, {int(keys['samples']):,} samples, {keys['tables']} tables; "
        f"median of {record['rows'][0]['num_runs']} rounds in which all took turns; "
        f"{_machine(record['environment'])}."
    )
    header = ["", "recsys", "numpy", "torch", "over numpy (95 %)", "over torch (95 %)"]
    return _table(caption, header, lines)


def tiers_table(file: str) -> str:
    """`recsys bench tiers`: share of the resident speed at each budget, under each schedule."""
    record = _read(file)
    cells = {(row["case"], row["provider"], row["metric"]): row for row in record["rows"]}
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    # Of older records none has a schedule: their steps were a plain loop's.
    has_schedules = any("schedule" in _case(case) for case in cases)
    lines = []
    for case in cases:
        ours = {name: row for (of, by, name), row in cells.items() if of == case and by == "recsys"}
        keys = _case(case)
        line = [
            keys["share"].replace("floor", "the floor"),
            *([keys["schedule"]] if has_schedules else []),
            _percent(ours["budget_share"]),
            _mib(ours["budget"]),
            _mib(ours["hot_memory"]),
            _mib(ours.get("peak_over_resident")),
            _percent(ours.get("lookup_hit_rate")),
            _percent(ours.get("unique_hit_rate")),
        ]
        if has_schedules:
            exposed = ours.get("exposed_fetch")
            line.append(f"{exposed['median']:.1f}" if exposed else "")
        line += [
            f"{ours['time']['median']:.1f}",
            f"{cells[case, 'resident', 'time']['median']:.1f}",
            _ratio(ours["share_of_resident_speed"], mark="**"),
        ]
        lines.append(line)
    keys = _case(cases[0])
    caption = (
        f"Milliseconds of a training step, B={keys['B']}, D={keys['D']}, {keys['optimizer']}, "
        f"cold tier {keys['cold_tier']}; median of {record['rows'][0]['num_runs']} rounds in which "
        f"both took turns; {_machine(record['environment'])}."
    )
    header = ["budget", *(["schedule"] if has_schedules else []), "of all bytes", "MiB"]
    header += ["slots and map, MiB", "peak over resident, MiB", "lookups hit", "distinct rows hit"]
    header += [*(["waits for rows"] if has_schedules else []), "recsys", "resident"]
    return _table(caption, [*header, "share of resident speed (95 %)"], lines)


def tiers_file_table(file: str) -> str:
    """`recsys bench tiers --cold-tier file`: schedules beside mapped files, and their limits."""
    record = _read(file)
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    of_schedules = [case for case in cases if "schedule" in _case(case)]
    if not of_schedules:
        return _tiers_file_table_of_plain_loop(record)
    cells = {(row["case"], row["provider"], row["metric"]): row for row in record["rows"]}
    whole = of_schedules[0].rpartition(",schedule=")[0]
    lines = []
    for case in of_schedules:
        ours = {name: row for (of, by, name), row in cells.items() if of == case and by == "recsys"}
        speedup = ours.get("speedup_over_sequential")
        of_reads = ours.get("share_of_limit_of_reads")
        lines.append(
            [
                _case(case)["schedule"],
                f"{ours['speed']['median']:,.0f}",
                f"{ours['speed']['p20']:,.0f}-{ours['speed']['p80']:,.0f}",
                f"{ours['time']['median']:.1f}",
                f"{ours['exposed_fetch']['median']:.1f}",
                f"{ours['disk_floor']['median']:.1f}",
                _ratio(ours["share_of_limit"], mark="**"),
                _ratio(of_reads) if of_reads else "",
                _ratio(speedup, mark="**") if speedup else "",
                _ratio(ours["speed_over_mmap"], mark="**"),
            ]
        )
    mapped = cells[whole, "mmap", "speed"]
    spread = f"{mapped['p20']:,.0f}-{mapped['p80']:,.0f}"
    time = f"{1e3 * int(_case(whole)['B']) / mapped['median']:.1f}"
    lines.append(["mmap", f"{mapped['median']:,.0f}", spread, time, *[""] * 6])
    ours = {name: row for (of, by, name), row in cells.items() if of == whole and by == "recsys"}
    direct = {
        _case(case)["threads"]: row["median"]
        for (case, _, metric), row in cells.items()
        if metric == "direct_reads_of_empty_cache"
    }
    best = max(direct, key=lambda threads: direct[threads])
    ordinary = next(
        row["median"]
        for (_, _, metric), row in cells.items()
        if metric == "ordinary_reads_of_empty_cache"
    )
    peaks = {
        provider: cells[whole, provider, "peak_anonymous_memory"]["median"]
        - cells[whole, provider, "anonymous_memory_at_start"]["median"]
        for provider in ("recsys", "mmap")
    }
    num_bytes = cells[whole, "disk", "num_bytes"]["median"]
    first = {name: row for (of, _, name), row in cells.items() if of == of_schedules[0]}
    keys = _case(whole)
    caption = (
        f"Training steps with {num_bytes / 2**30:.1f} GiB of tables, "
        f"{num_bytes / record['environment']['memory_bytes']:.2f} times memory; B={keys['B']}, "
        f"D={keys['D']}, SGD, budget {keys['budget']}; median of {mapped['num_runs']} rounds in "
        f"which all took turns; {_machine(record['environment'])}. Ours fetched "
        f"{first['fetched_rows_per_sample']['median']:.2f} rows a sample "
        f"({_percent(first['lookup_hit_rate'])} of lookups hit); a step that fetches none takes "
        f"{ours['compute_floor']['median']:.1f} ms. The disk gave "
        f"{cells[whole, 'disk', 'random_reads_of_4096']['median']:,.0f} random reads of 4 KiB a "
        "second in the same rounds; of an empty cache, with as many reads at once, "
        + ", ".join(f"{reads:,.0f} ({threads})" for threads, reads in direct.items())
        + f", at best {direct[best]:,.0f}, and {ordinary:,.0f} by way of it. Memory of its own "
        f"since the start: {peaks['recsys'] / 2**20:,.0f} MiB for ours, "
        f"{peaks['mmap'] / 2**20:,.0f} MiB for mmap."
    )
    header = ["", "samples/s", "20th to 80th percentile", "ms", "of it waits for rows"]
    header += ["the disk's floor, ms", "of the limit (95 %)", "of that by pages read (95 %)"]
    return _table(caption, [*header, "over sequential (95 %)", "over mmap (95 %)"], lines)


def _tiers_file_table_of_plain_loop(record: dict[str, Any]) -> str:
    """Of a record from before schedules were measured."""
    cells = {(row["provider"], row["metric"]): row for row in record["rows"]}
    memory = record["environment"]["memory_bytes"]
    lines = []
    for provider in ("recsys", "mmap"):
        start = cells[provider, "anonymous_memory_at_start"]["median"]
        peak = cells[provider, "peak_anonymous_memory"]["median"]
        speed = cells[provider, "speed"]
        lines.append(
            [
                provider,
                f"{speed['median']:,.0f}",
                f"{speed['p20']:,.0f}-{speed['p80']:,.0f}",
                _ratio(cells["recsys", "speed_over_mmap"], mark="**")
                if provider == "recsys"
                else "",
                f"{peak / 2**20:,.0f}",
                f"{(peak - start) / 2**20:,.0f}",
            ]
        )
    keys = _case(record["rows"][0]["case"])
    num_bytes = cells["disk", "num_bytes"]["median"]
    reads = {
        name: cells["disk", name]["median"]
        for name in (
            "direct_reads_of_empty_cache",
            "ordinary_reads_of_empty_cache",
            "random_reads_of_4096",
        )
    }
    bound = cells["disk", "speed_if_every_fetched_row_were_a_read"]["median"]
    caption = (
        f"Training steps with {num_bytes / 2**30:.1f} GiB of tables, "
        f"{num_bytes / memory:.2f} times memory; B={keys['B']}, D={keys['D']}, "
        f"SGD, budget {keys['budget']}; median of "
        f"{cells['recsys', 'speed']['num_runs']} rounds in which all took turns; "
        f"{_machine(record['environment'])}. Ours fetched "
        f"{cells['recsys', 'fetched_rows_per_sample']['median']:.2f} rows a sample "
        f"({100 * cells['recsys', 'lookup_hit_rate']['median']:.1f} % of lookups hit). The disk "
        f"gave {reads['random_reads_of_4096']:,.0f} random reads of 4 KiB a second in the same "
        "rounds, "
        f"enough for {bound:,.0f} samples/s if every fetched row were one; of an empty cache "
        f"{reads['direct_reads_of_empty_cache']:,.0f} directly and "
        f"{reads['ordinary_reads_of_empty_cache']:,.0f} by way of it."
    )
    header = ["", "samples/s", "20th to 80th percentile", "over mmap (95 %)"]
    header += ["peak of its own memory, MiB", "of that since the start, MiB"]
    return _table(caption, header, lines)


def rand_em_table(file: str) -> str:
    """`recsys bench rand-em`: how often the truth lies inside of an interval."""
    record = _read(file)
    cells = {(row["case"], row["provider"], row["metric"]): row for row in record["rows"]}
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    lines = []
    for case in cases:
        keys = _case(case)
        line = [keys["order"].replace("_", " "), keys["min_count"], f"{int(keys['hot_rows']):,}"]
        for method in ("chunks", "rows"):
            inside = cells[case, method, "inside"]
            error = cells.get((case, method, "relative_error"))
            line.append(
                f"**{100 * inside['median']:.1f} %** "
                f"({100 * inside['low']:.1f}-{100 * inside['high']:.1f})"
            )
            line.append(f"{100 * error['median']:.1f} %" if error else "")
        lines.append(line)
    keys = _case(cases[0])
    caption = (
        f"A table of {int(keys['rows']):,} rows, {int(keys['lookups']):,} lookups counted, "
        f"{record['rows'][0]['num_runs']} trials in each line; inside: trials whose 99.9 % "
        "interval holds the truth (with that share's own 95 % interval); error: median over trials."
    )
    header = ["rows are in order of", "hot from count", "hot rows"]
    header += ["chunks: inside", "error", "single rows: inside", "error"]
    return _table(caption, header, lines)


def coverage_table(file: str) -> str:
    """What synthetic samples look up, beside the real sample."""
    record = _read(file)
    real, synthetic = record["real"], record["synthetic"]
    first, second = real["popularity"][0], synthetic["popularity"][0]
    lines = [["distinct rows", f"{first['num_rows']:,}", f"{second['num_rows']:,}"]]
    for top, *shares in zip(record["tops"], first["top_shares"], second["top_shares"], strict=True):
        label = f"lookups in the top {100 * top:g} % of the rows met"
        lines.append([label, *(f"{100 * share:.1f} %" for share in shares)])
    for size, *found in zip(
        record["batch_sizes"], real["distinct_rows"], synthetic["distinct_rows"], strict=True
    ):
        label = f"distinct rows per lookup, mini-batches of {size:,}"
        lines.append([label, *(f"{rows:.3f}" for rows in found)])
    caption = f"The first {first['num_samples']:,} samples; rows of all columns ranked together."
    return _table(caption, ["", "real sample", "synthetic"], lines)


def continuation_table(file: str) -> str:
    """What more and more synthetic samples look up."""
    record = _read(file)
    lines = [
        [
            f"{found['num_samples']:,}",
            f"{found['num_rows']:,}",
            *(f"{100 * share:.1f} %" for share in found["top_shares"]),
        ]
        for found in record["synthetic"]["popularity"]
    ]
    tops = [f"top {100 * top:g} %" for top in record["tops"]]
    caption = "Synthetic samples from the first on; shares of lookups by rank among the rows met."
    return _table(caption, ["samples", "rows met", *tops], lines)


def planted_table(file: str) -> str:
    """How much of the planted labels is in what."""
    planted = _read(file)["synthetic"]["planted"]
    labels = {
        "everything": "everything",
        "no_interactions": "every row's effect and the dense features, no interactions",
        "no_tables": "the dense features alone, no tables",
    }
    lines = [[label, f"{planted[name]:.3f}"] for name, label in labels.items()]
    return _table("The best that can be expected.", ["what a model knows", "AUC"], lines)


def reached_table(file: str) -> str:
    """How near training comes to the best AUC."""
    run = _read(file)
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
    return _table(caption, ["recipe", "test AUC", "best AUC possible", "left over"], [line])


TABLES: dict[str, Callable[[], str]] = {
    "ablate_embeddings": partial(ablate_table, "ablate_embeddings.json"),
    "count": partial(count_table, "count.json"),
    "rand_em": partial(rand_em_table, "rand_em.json"),
    "ablate_precision": partial(ablate_table, "ablate_precision.json"),
    "ablate_schedules": partial(schedules_table, "ablate_schedules.json"),
    "generator": partial(generator_table, "generator.json"),
    "lookup": partial(lookup_table, "lookup.json"),
    "lookup_summary": partial(lookup_summary_table, "lookup.json"),
    "prepare": partial(prepare_table, "prepare.json"),
    "prepare_kaggle_size": partial(prepare_table, "prepare_kaggle_size.json"),
    "reference": partial(reference_table, "reference"),
    "step": partial(step_table, "step.json"),
    "step_kernels": partial(step_table, "step_kernels.json"),
    "synthetic": partial(synthetic_table, "synthetic.json"),
    "tiers": partial(tiers_table, "tiers.json"),
    "tiers_file": partial(tiers_file_table, "tiers_file.json"),
    "tiers_file_faster_disk": partial(tiers_file_table, "tiers_file_faster_disk.json"),
    "coverage": partial(coverage_table, "synthetic_coverage.json"),
    "continuation": partial(continuation_table, "synthetic_coverage.json"),
    "planted": partial(planted_table, "synthetic_coverage.json"),
    "reached": partial(reached_table, "synthetic_reached.json"),
}


def _read(file: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((_JSON / file).read_text())
    return record


def _table(caption: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return caption + "\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _standard_error(runs: Mapping[Any, Sequence[Mapping[str, Any]]]) -> str:
    """Of one test AUC; nothing where a record is older than that."""
    tests = [run["metrics"]["test"] for group in runs.values() for run in group]
    errors = [metrics.get("auc_standard_error") for metrics in tests]
    if None in errors:
        return ""
    return f"; the standard error of one AUC is {min(errors):.4f} to {max(errors):.4f}"


def _percent(row: Mapping[str, Any] | None) -> str:
    return f"{100 * row['median']:.1f} %" if row else ""


def _mib(row: Mapping[str, Any] | None) -> str:
    return f"{row['median'] / 2**20:,.0f}" if row else ""


def _ratio(row: Mapping[str, Any], *, mark: str = "") -> str:
    """A ratio, with its 95 % interval where it has one."""
    interval = "" if row["low"] is None else f" ({row['low']:.2f}-{row['high']:.2f})"
    return f"{mark}{row['median']:.2f}{mark}{interval}"


def _case(case: str) -> dict[str, str]:
    """What a case says, by key."""
    return dict(pair.split("=") for pair in case.split(","))


def _machine(environment: dict[str, Any]) -> str:
    threads = environment["num_threads"]
    return f"{environment['cpu']}, {threads} threads, torch {environment['torch']}"


if __name__ == "__main__":
    for name in DOCUMENTS:
        document = _ROOT / name
        document.write_text(with_tables(document.read_text()))
    for name in CURVES:
        write_curve(_JSON / name)
