"""Tables of the benchmarks of single parts: reading, steps, lookups, counting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from table_cells import (
    cells_of,
    keys_of_case,
    machine,
    markdown,
    ratio,
    read_record,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "count_table",
    "facebook_table",
    "generator_table",
    "lookup_headline_table",
    "lookup_summary_table",
    "lookup_table",
    "models_table",
    "prepare_table",
    "step_table",
]


def prepare_table(file: str) -> str:
    """`recsys bench prepare`: throughput and peak memory by provider, and how they compare."""
    record = read_record(file)
    rows = {(row["provider"], row["metric"]): row for row in record["rows"]}
    case = keys_of_case(record["rows"][0]["case"])
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
    if speed:  # missing in older records
        header.append("over pandas" if speed["low"] is None else "over pandas (95 %)")
        lines[0].append(ratio(speed))
        lines[1].append("")
    num_runs = rows["recsys", "throughput"]["num_runs"]
    spread = f"median of {num_runs} runs (20th to 80th percentile)" if num_runs > 1 else "one run"
    caption = (
        f"Raw Criteo text to numbered arrays: {int(case['bytes']) / 1e9:.2f} GB, "
        f"{int(case['lines']):,} lines, {int(case['ids']):,} distinct ids; "
        f"{spread}; {machine(record['environment'])}."
    )
    return markdown(caption, header, lines)


def step_table(file: str) -> str:
    """`recsys bench step`: milliseconds by case and provider."""
    record = read_record(file)
    cells = cells_of(record)
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    titles = {  # columns that the record lacks are dropped
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
        keys = keys_of_case(case)
        ratios = [cells.get((case, *key)) for key in titles]
        lines.append(
            [
                keys["B"],
                keys["precision"],
                *(f"{cells[case, provider, 'time']['median']:.2f}" for provider in providers),
                *(ratio(row, mark="**") if row else "" for row in ratios),
            ]
        )
    dim = keys_of_case(cases[0])["D"]
    caption = (
        f"Milliseconds of a step, median of {record['rows'][0]['num_runs']} rounds in which all "
        f"took turns; SGD, Kaggle's 26 tables, D={dim}; {machine(record['environment'])}."
    )
    return markdown(caption, ["B", "precision", *providers, *titles.values()], lines)


def models_table(file: str) -> str:
    """`recsys bench models`: plain and accelerated models by case."""
    record = read_record(file)
    cells = cells_of(record)
    cases = dict.fromkeys(row["case"] for row in record["rows"] if row["metric"] == "time")
    has_budget = any(row["provider"] == "in_slots" for row in record["rows"])
    lines = []
    for case in cases:
        keys = keys_of_case(case)
        of_tables = cells.get((case, "recsys", "table_time_over_torch"))
        lines.append(
            [
                keys["model"],
                keys.get("T", "26"),
                keys.get("ids", "one-hot"),
                keys["optimizer"],
                keys["B"],
                *(f"{cells[case, name, 'time']['median']:.2f}" for name in ("torch", "recsys")),
                ratio(cells[case, "recsys", "speed_over_torch"], mark="**"),
                *(
                    [ratio(cells[case, "in_slots", "speed_over_torch"], mark="**")]
                    if has_budget
                    else [ratio(of_tables, mark="**") if of_tables else ""]
                ),
            ]
        )
    titles = ["model", "tables", "ids", "optimizer", "B", "torch, ms", "recsys, ms"]
    titles += ["recsys over torch (95 %)"]
    titles += [
        "with a budget, over torch (95 %)" if has_budget else "table time, times torch's (95 %)"
    ]
    is_evaluation = any("pass" in keys_of_case(case) for case in cases)
    what = "A forward without gradients" if is_evaluation else "A step"
    caption = (
        f"{what} of a model of plain PyTorch before and after `recsys.accelerate`, median of "
        f"{record['rows'][0]['num_runs']} rounds; D=16, tables of at most a million rows; "
        f"{_place_of_models(record)}."
    )
    return markdown(caption, titles, lines)


def _place_of_models(record: dict[str, Any]) -> str:
    """Where models were measured: on the GPU, if their cases name a device."""
    found = record["environment"]
    is_on_gpu = any("device=cuda" in row["case"] for row in record["rows"])
    return f"{found['gpu']}, torch {found['torch']}" if is_on_gpu else machine(found)


def facebook_table(file: str) -> str:
    """`facebook_dlrm.py`: the original script and the one with the added line, by optimizer."""
    record = read_record(file)
    cells = cells_of(record)
    cases = dict.fromkeys(row["case"] for row in record["rows"] if row["metric"] == "time")
    lines = []
    for case in cases:
        times = [cells[case, name, "time"] for name in ("torch", "recsys")]
        lines.append(
            [
                keys_of_case(case)["optimizer"],
                *(f"{each['median']:.2f}" for each in times),
                ratio(cells[case, "recsys", "speed_over_torch"], mark="**"),
            ]
        )
    caption = (
        f"Milliseconds of an iteration as the script prints them, median of {times[0]['num_runs']} "
        f"runs in turn; B=128, D=16, Kaggle's 26 tables of at most a million rows; "
        f"{machine(record['environment'])}."
    )
    titles = ["optimizer", "as it is, ms", "with the line, ms", "recsys over torch (95 %)"]
    return markdown(caption, titles, lines)


_SUMMARY_COLUMNS = {
    ("recsys", "fbgemm"): "recsys over fbgemm (95 %)",
    ("recsys", "torch"): "recsys over torch (95 %)",
    ("kernels", "fbgemm"): "kernels over fbgemm (95 %)",
    ("floor", "fbgemm"): "floor over fbgemm (95 %)",
}
_HEADLINE_COLUMNS = {
    ("recsys", "fbgemm"): "times as fast as FBGEMM (95 %)",
    ("recsys", "torch"): "times as fast as PyTorch (95 %)",
}


def lookup_summary_table(file: str) -> str:
    """`recsys bench lookup`: how many times faster recsys is, by mini-batch size."""
    return _ratios_by_size(file, _SUMMARY_COLUMNS)


def lookup_headline_table(file: str) -> str:
    """The first columns of `lookup_summary_table`, with titles that need no explanation."""
    return _ratios_by_size(file, _HEADLINE_COLUMNS)


def _ratios_by_size(file: str, columns: Mapping[tuple[str, str], str]) -> str:
    """Median speed ratios over all cases, by mini-batch size.

    Args:
        file: What `recsys bench lookup` wrote.
        columns: Titles by provider and baseline.
    """
    record = read_record(file)
    cells = {
        (row["case"], row["provider"], row["metric"]): row
        for row in record["rows"]
        if "," not in row["case"] and row["metric"].startswith("speed_over_")
    }
    sizes = list(dict.fromkeys(case for case, _, _ in cells))
    lines = []
    for case in sizes:
        rows = [cells[case, name, f"speed_over_{other}"] for name, other in columns]
        lines.append([keys_of_case(case)["B"], *(ratio(row, mark="**") for row in rows)])
    counts = [
        cells[sizes[0], "recsys", f"speed_over_{other}"]["num_runs"]
        for other in ("fbgemm", "torch")
    ]
    caption = (
        f"Median over {counts[0]} cases beside fbgemm and {counts[1]} beside torch (dimensions "
        f"and optimizers), each the ratio of the medians of its rounds; "
        f"{machine(record['environment'])}."
    )
    return markdown(caption, ["B", *columns.values()], lines)


def lookup_table(file: str) -> str:
    """`recsys bench lookup`: milliseconds by case and provider, and how they compare."""
    record = read_record(file)
    cells = cells_of(record)
    timed = [case for case, name, metric in cells if (name, metric) == ("recsys", "time")]
    names = ("recsys", "kernels", "floor", "fbgemm", "torch")
    lines = []
    for case in timed:
        times = [cells.get((case, name, "time")) for name in names]
        speeds = [cells.get((case, "recsys", f"speed_over_{name}")) for name in ("fbgemm", "torch")]
        keys = keys_of_case(case)
        lines.append(
            [
                keys["D"],
                keys["optimizer"],
                keys["B"],
                *(f"{row['median']:.2f}" if row else "" for row in times),
                *(ratio(row) if row else "" for row in speeds),
                f"{cells[case, 'recsys', 'bandwidth_share']['median']:.0%}",
            ]
        )
    bandwidth = [row["median"] for row in record["rows"] if row["metric"] == "bandwidth"]
    caption = (
        f"Milliseconds of a step of the embeddings alone, median of "
        f"{cells[timed[0], 'recsys', 'time']['num_runs']} rounds in which all took turns; the "
        f"memory streams {min(bandwidth):.0f} to {max(bandwidth):.0f} GB/s (its medians in the "
        f"same rounds); {machine(record['environment'])}."
    )
    header = ["D", "optimizer", "B", *names]
    header += ["over fbgemm (95 %)", "over torch (95 %)", "of the bandwidth"]
    return markdown(caption, header, lines)


def generator_table(file: str) -> str:
    """`recsys bench synthetic`: samples per second by provider."""
    record = read_record(file)
    cells = {(row["provider"], row["metric"]): row for row in record["rows"]}
    case = keys_of_case(record["rows"][0]["case"])
    lines = []
    for provider in dict.fromkeys(row["provider"] for row in record["rows"]):
        rate = cells[provider, "throughput"]
        speed = cells.get((provider, "speed_over_store"))
        lines.append(
            [
                provider.replace("_", " "),
                f"{rate['median']:,.0f} ({rate['p20']:,.0f}-{rate['p80']:,.0f})",
                ratio(speed) if speed else "",
            ]
        )
    caption = (
        f"Shuffled mini-batches of {int(case['B']):,} through the loader's one thread, "
        f"{int(case['samples']):,} samples, {case['tables']} tables; median of "
        f"{record['rows'][0]['num_runs']} rounds in which all took turns (20th to 80th "
        f"percentile); {machine(record['environment'])}."
    )
    return markdown(caption, ["", "samples/s", "over store (95 %)"], lines)


def count_table(file: str) -> str:
    """`recsys bench count`: lookups per second by case and provider."""
    record = read_record(file)
    cells = cells_of(record)
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    sources = {"criteo": "a store, lookups as in Criteo", "even": "a store, lookups drawn evenly"}
    lines = []
    for case in cases:
        keys = keys_of_case(case)
        source = sources[keys["lookups"]] if "lookups" in keys else f"mini-batches of {keys['B']}"
        rates = [cells[case, name, "throughput"] for name in ("recsys", "numpy", "torch")]
        speeds = [cells[case, "recsys", f"speed_over_{name}"] for name in ("numpy", "torch")]
        lines.append(
            [source, *(f"{rate['median'] / 1e6:,.0f}" for rate in rates), *map(ratio, speeds)]
        )
    keys = keys_of_case(cases[0])
    caption = (
        f"Million lookups per second, {int(keys['samples']):,} samples, {keys['tables']} tables; "
        f"median of {record['rows'][0]['num_runs']} rounds in which all took turns; "
        f"{machine(record['environment'])}."
    )
    header = ["", "recsys", "numpy", "torch", "over numpy (95 %)", "over torch (95 %)"]
    return markdown(caption, header, lines)
