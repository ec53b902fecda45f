"""Variations of an ablation compared with its baseline, in pairs of cells with equal seeds.

Two cells with the same seed begin with the same values and see the samples in the same order. So
their difference varies less than their results do. The n differences, one for each seed, give a
mean and its 95 % interval, see `recsys._support.student`:

    difference     mean of (variation - baseline) +- t * s / sqrt(n)
    ratio          the same of log(variation / baseline), as a factor: a geometric mean
"""

from __future__ import annotations

from operator import sub
from typing import TYPE_CHECKING, Any

import pandas as pd

from recsys._support.student import interval_of_mean, interval_of_ratios
from recsys.report.ablation_columns import auc_errors, shown_metrics
from recsys.report.ablation_metrics import (
    column_title,
    format_number,
    tabulated_metrics,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from recsys.report.ablation_metrics import Metric

__all__ = [
    "format_difference",
    "format_paired",
    "make_differences",
    "paired_cells",
    "paired_note",
]


def make_differences(
    cells: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Every other variation compared with the baseline, metric by metric.

    Args:
        cells: As in `ablate.json`.
        config: As in `ablate.json`, with a `baseline`.

    Returns:
        One entry per variation, metric and `kind` ("difference", and "ratio" for times, rates and
        samples trained on): `seeds` with a cell of both variations; `values` of the pairs by seed,
        null where one of the two has no value; `num_pairs` with a value; their `mean` and its 95 %
        interval, `low` to `high`. `mean` is null without a pair, the interval with less than two.
    """
    by_variation: dict[str, dict[int, Mapping[str, Any]]] = {}
    for cell in cells:
        by_variation.setdefault(cell["variation"], {})[cell["seed"]] = cell
    baseline = config["baseline"]
    base = by_variation.get(baseline, {})
    found = []
    for variation in config["variations"]:
        own = by_variation.get(variation, {})
        seeds = [seed for seed in own if seed in base]
        if variation == baseline or not seeds:
            continue
        pairs = [(own[seed], base[seed]) for seed in seeds]
        for metric in tabulated_metrics(cells, config):
            of_pairs = [(value_of(metric, one), value_of(metric, other)) for one, other in pairs]
            found += [
                {"variation": variation, "baseline": baseline}
                | _compare(metric, kind, of_pairs)
                | {"seeds": seeds}
                for kind in (("difference", "ratio") if metric.has_ratio else ("difference",))
            ]
    return found


def _compare(
    metric: Metric, kind: str, pairs: Sequence[tuple[float | None, float | None]]
) -> dict[str, Any]:
    """An entry of `make_differences` without what it is about."""
    compare: Callable[[float, float], float | None] = _ratio if kind == "ratio" else sub
    values = [None if one is None or other is None else compare(one, other) for one, other in pairs]
    measured = [value for value in values if value is not None]
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    if measured:
        interval = interval_of_ratios if kind == "ratio" else interval_of_mean
        mean, low, high = interval(measured)
    return {
        "metric": metric.name,
        "unit": "1" if kind == "ratio" else metric.unit,
        "kind": kind,
        "mean": mean,
        "low": low,
        "high": high,
        "num_pairs": len(measured),
        "values": values,
    }


def _ratio(one: float, other: float) -> float | None:
    return one / other if one > 0 and other > 0 else None


def format_difference(entry: Mapping[str, Any], key: str) -> str:
    """The `mean`, `low` or `high` of an entry of `make_differences`, for readers."""
    value: float | None = entry[key]
    if entry["kind"] == "ratio":
        return "-" if value is None else f"{value:.3f}"
    return format_number(entry["metric"], value, sign=True)


def paired_note(record: Mapping[str, Any]) -> str:
    """What the comparison with the baseline means, for readers."""
    see_error = "; for that, see the standard error of one AUC" if auc_errors(record) else ""
    return (
        f"Against {record['config']['baseline']}, in pairs of equal seeds: mean of the differences "
        "(for ratios: geometric mean) and its 95 % interval by Student's t. The interval is for "
        f"other seeds on the same data, not for other data{see_error}."
    )


def format_paired(record: Mapping[str, Any]) -> list[str]:
    """The comparison as text, for the end of `recsys ablate`.

    Args:
        record: `ablate.json` of an ablation with a baseline.
    """
    table = pd.DataFrame(
        [
            [
                entry["variation"],
                column_title(entry["metric"], record["config"]),
                entry["kind"],
                *(format_difference(entry, key) for key in ("mean", "low", "high")),
                f"{entry['num_pairs']} of {len(entry['seeds'])}",
            ]
            for entry in _shown(record)
        ],
        columns=["variation", "metric", "kind", "mean", "low", "high", "pairs"],
    ).set_index(["variation", "metric", "kind"])
    note, pairs = paired_note(record), list(table["pairs"].unique())
    if len(pairs) == 1:
        table = table.drop(columns="pairs")
        note += f" Every line is of {pairs[0]} pairs."
    return [note, table.to_string()]


def paired_cells(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the comparison as a table with a column per metric, for the page.

    Metrics that have ratios are compared by them alone, where any pair has one.
    """
    shown = _shown(record)
    with_ratio = {each["metric"] for each in shown if each["kind"] == "ratio"}
    shown = [each for each in shown if each["kind"] == "ratio" or each["metric"] not in with_ratio]
    columns = list(dict.fromkeys((each["metric"], each["kind"]) for each in shown))
    entries = {(each["variation"], each["metric"], each["kind"]): each for each in shown}
    header = [
        column_title(metric, record["config"]) + (", ratio" if kind == "ratio" else "")
        for metric, kind in columns
    ]
    lines = [
        [variation, *(_cell(entries[variation, metric, kind]) for metric, kind in columns)]
        for variation in dict.fromkeys(each["variation"] for each in shown)
    ]
    return header, lines


def _shown(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries of the metrics that have a column, where a pair of some variation has a value."""
    metrics = shown_metrics(record)
    entries = [each for each in record["differences"] if each["metric"] in metrics]
    measured = {(each["metric"], each["kind"]) for each in entries if each["num_pairs"]}
    return [each for each in entries if (each["metric"], each["kind"]) in measured] or entries


def _cell(entry: Mapping[str, Any]) -> str:
    mean, low, high = (format_difference(entry, key) for key in ("mean", "low", "high"))
    is_one_value = entry["low"] is None or entry["low"] == entry["high"]
    lines = [mean] if is_one_value else [mean, f"{low} to {high}"]
    if entry["num_pairs"] < len(entry["seeds"]):
        lines.append(f"{entry['num_pairs']} of {len(entry['seeds'])} pairs")
    return "\n".join(lines)
