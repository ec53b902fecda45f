"""Tables and plots of skipping: policies compared with none, and with random dropping.

They are made from the files of results of `recsys ablate --results`, for the configurations
`examples/ablation/slipstream_*.toml`. A variation is named by its policy and the share that it aims
at, such as "drop_input-0.2"; the baseline is "none".
"""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING, Any

from table_cells import cells_of, keys_of_case, machine, markdown, read_record
from tables_of_pairs import caption_of, difference, means_of, measured_in, paired_with

from recsys.bench.parts.tiers_curve import curve_file
from recsys.report.ablation_metrics import column_title, format_number
from recsys.train.run_files.curves import as_png, line_styles, picture_style

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = [
    "bytes_table",
    "draw_policies",
    "following_table",
    "late_table",
    "popular_table",
    "random_table",
    "seeds_table",
    "skipping_table",
    "write_policies",
]

_RANDOM = "random_drop"
# The goal: a difference of the AUC within this, and so many times faster.
_AUC_BAND, _SPEEDUP = 0.0005, 1.2
_QUALITY = ("auc", "logloss", "normalized_entropy", "calibration")
_POPULAR = ("popular_auc", "popular_logloss", "popular_calibration")
_LATE = ("late_auc", "late_logloss")


def following_table(file: str) -> str:
    """`recsys bench skipping`: what following rows costs a step, by batch size."""
    record = read_record(file)
    cells = cells_of(record)
    lines = []
    for case in dict.fromkeys(row["case"] for row in record["rows"]):
        keys, plain = keys_of_case(case), cells[case, "plain", "time"]
        milliseconds = 1e3 * plain["median"] / int(keys["window"])
        names = ("plain_again", "observe", "drop_input")
        costs = [cells.get((case, name, "time_over_plain")) for name in names]
        lines.append([keys["B"], keys["window"], f"{milliseconds:.2f} ms", *map(_more_time, costs)])
    caption = (
        f"Time beyond plain training, {plain['num_runs']} rounds in turns (95 %); Kaggle's tables, "
        f"D={keys['D']}, {keys['optimizer'].capitalize()}; {machine(record['environment'])}."
    )
    header = [
        "B",
        "steps per window",
        "a plain step",
        "a second plain process",
        "`Observe`",
        "`DropInput(share=0)`",
    ]
    return markdown(caption, header, lines)


def _more_time(row: Mapping[str, Any] | None) -> str:
    """A ratio of times as percent beyond 1, with its interval if it has one."""
    if row is None:  # a record made before the bench had this provider
        return ""
    found = f"{100 * (row['median'] - 1):.1f} %"
    if row["low"] is None:
        return found
    return f"{found} ({100 * (row['low'] - 1):.1f} to {100 * (row['high'] - 1):.1f})"


def skipping_table(file: str, *, has_times: bool = True) -> str:
    """Every policy and share: what it skips and what it costs, compared with none.

    Args:
        file: Of results.
        has_times: Whether nothing ran beside the cells, so that their times can be compared.
    """
    record = read_record(file)
    means, paired = means_of(record), paired_with(record, record["config"]["baseline"])
    lines = []
    for variation in measured_in(record):
        policy, share = _policy_and_share(variation)
        line = [
            policy,
            share,
            _left_out(record, variation),
            format_number("num_trained", means[variation, "num_trained"]),
        ]
        if has_times:
            line.append(format_number("train_time", means[variation, "train_time"]))
            line.append(_speedup(paired.get((variation, "train_time", "ratio"))))
        for metric in _QUALITY:
            entry = paired.get((variation, metric, "difference"))
            line.append(
                format_number(metric, means[variation, metric])
                if entry is None
                else difference(entry)
            )
        lines.append(line)
    header = ["policy", "share", "left out", "samples trained on"]
    header += ["seconds of training", "times faster (95 %)"] if has_times else []
    header += ["test AUC", "logloss", "normalized entropy", "calibration"]
    caption = caption_of(record) + (
        " The line of none has its values, the other lines the differences from them in pairs of "
        "equal seeds: mean (95 % interval by Student's t)."
    )
    return markdown(caption, header, lines)


def _left_out(record: Mapping[str, Any], variation: str) -> str:
    """The share of samples, or of updates, that a policy left out."""
    found = [cell["run"]["skipped"] for cell in record["cells"] if cell["variation"] == variation]
    if None in found:
        return ""
    samples, updates = (
        100 * mean(each[key] for each in found)
        for key in ("share_skipped", "share_lookups_left_out")
    )
    return f"{updates:.1f} % of updates" if updates else f"{samples:.1f} %"


def popular_table(file: str) -> str:
    """Samples of the kind that is skipped: those whose lookups are all of popular rows."""
    record = read_record(file)
    share = record["cells"][0]["run"]["config"]["eval"]["popular_share"]
    parts = [cell["run"]["metrics"].get("test_popular") for cell in record["cells"]]
    sizes = {f"{part['num_samples']:,}" for part in parts if part is not None}
    caption = (
        f"Test samples whose rows are all as popular as those of {100 * share:g} % of the training "
        f"samples ({' or '.join(sorted(sizes))} samples), whatever the policy; otherwise as above."
    )
    return markdown(
        caption, ["policy", "share", *_titles(record, _POPULAR)], _lines(record, _POPULAR)
    )


def bytes_table(file: str) -> str:
    """Bytes that each policy moves between the tiers, and what it leaves out."""
    record = read_record(file)
    lines = []
    for cell in record["cells"]:
        policy, share = _policy_and_share(cell["variation"])
        tiers = cell["run"]["tiers"]
        moved = [f"{tiers[key] / 2**20:,.1f}" for key in ("fetched_bytes", "written_back_bytes")]
        lines.append([policy, share, _left_out(record, cell["variation"]), *moved])
    config = record["cells"][0]["run"]["config"]
    caption = caption_of(record) + f" Rows in files, with a budget of {config['budget']}."
    header = ["policy", "share", "left out", "MiB fetched", "MiB written back"]
    return markdown(caption, header, lines)


def late_table(file: str) -> str:
    """Quality over the last part of the training, compared with none."""
    record = read_record(file)
    changes = record["cells"][0]["run"]["config"]["synthetic"]["preference_changes"]
    late = next(cell["late"] for cell in record["cells"] if cell.get("late") is not None)
    caption = caption_of(record) + (
        f" Preferences change after {' and '.join(f'{each:,}' for each in changes)} samples; "
        f"{late['num_evaluations']} evaluations on the {late['split']} part in the last "
        f"{100 * record['config']['late_share']:g} % of the training. The line of none has its "
        "values, the other lines the differences from them in pairs of equal seeds: mean (95 % "
        "interval by Student's t)."
    )
    metrics = (*_LATE, *_QUALITY)
    return markdown(
        caption, ["policy", "share", *_titles(record, metrics)], _lines(record, metrics)
    )


def random_table(file: str, *, has_times: bool = True) -> str:
    """Every policy compared with dropping random samples at the same share.

    Args:
        file: Of results.
        has_times: As for `skipping_table`.
    """
    record = read_record(file)
    measured = measured_in(record)
    lines = []
    for variation in measured:
        policy, share = _policy_and_share(variation)
        control = f"{_RANDOM}-{share}"
        if variation == control or control not in measured:
            continue
        paired = paired_with(record, control)
        line = [policy, share]
        if has_times:
            line.append(_speedup(paired.get((variation, "train_time", "ratio"))))
        line += [difference(paired[variation, metric, "difference"]) for metric in _QUALITY]
        lines.append(line)
    caption = (
        "Each policy less random dropping at the same share, in pairs of equal seeds: mean (95 % "
        "interval by Student's t)."
    )
    header = ["policy", "share", *(["times faster (95 %)"] if has_times else [])]
    header += ["test AUC", "logloss", "normalized entropy", "calibration"]
    return markdown(caption, header, lines)


def seeds_table(file: str, without: Sequence[int]) -> str:
    """Differences between variations of one share, over all seeds but some."""
    record = read_record(file)
    cells = [cell for cell in record["cells"] if cell["seed"] not in without]
    seeds = [seed for seed in record["config"]["seeds"] if seed not in without]
    record = {**record, "cells": cells, "config": {**record["config"], "seeds": seeds}}
    lines = []
    for baseline in record["config"]["variations"]:
        paired = paired_with(record, baseline)
        for variation in record["config"]["variations"]:
            if baseline.startswith(_RANDOM) or variation == baseline or variation == "none":
                continue
            entries = [paired[variation, metric, "difference"] for metric in _QUALITY]
            lines.append([_name(variation), _name(baseline), *map(difference, entries)])
    left_out = ", ".join(map(str, without))
    caption = (
        f"The {len(seeds)} seeds without {left_out}: the first policy less the second, in pairs of "
        "equal seeds: mean (95 % interval by Student's t)."
    )
    header = ["policy", "less", "test AUC", "logloss", "normalized entropy", "calibration"]
    return markdown(caption, header, lines)


def _name(variation: str) -> str:
    return " ".join(_policy_and_share(variation)).strip()


def write_policies(file: Path) -> None:
    """Draw the plot of a file of results: what each policy gains and what it costs.

    The picture is in the folder of the file, under the same name.
    """
    record = read_record(str(file))
    paired = paired_with(record, record["config"]["baseline"])
    points: dict[str, list[dict[str, Any]]] = {}
    for variation in measured_in(record):
        ratio = paired.get((variation, "train_time", "ratio"))
        if ratio is None or ratio["mean"] is None:
            continue
        policy, share = _policy_and_share(variation)
        point: dict[str, Any] = {"label": share, "speedup": _ends(_turned(ratio))}
        for metric in ("auc", "calibration"):
            point[metric] = _ends(paired[variation, metric, "difference"])
        points.setdefault(policy, []).append(point)
    picture = draw_policies(points, auc_band=_AUC_BAND, calibration_band=0.01, speedup=_SPEEDUP)
    curve_file(file).write_bytes(picture)


def _policy_and_share(variation: str) -> tuple[str, str]:
    """The policy and the share that a variation is named by; the share may be followed by more."""
    policy, _, share = variation.partition("-")
    return policy, share


def _titles(record: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    return [column_title(metric, record["config"]) for metric in metrics]


def _lines(record: Mapping[str, Any], metrics: Sequence[str]) -> list[list[str]]:
    """A line per variation: values of the baseline, and differences of the others."""
    baseline = record["config"]["baseline"]
    means, paired = means_of(record), paired_with(record, baseline)
    lines = []
    for variation in measured_in(record):
        line = list(_policy_and_share(variation))
        for metric in metrics:
            entry = paired.get((variation, metric, "difference"))
            if entry is None:
                line.append(format_number(metric, means.get((variation, metric))))
            else:
                line.append(difference(entry))
        lines.append(line)
    return lines


def _turned(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A ratio turned over: from times to speeds."""
    ends = {"mean": entry["mean"], "low": entry["high"], "high": entry["low"]}
    return {**entry, **{key: None if end is None else 1 / end for key, end in ends.items()}}


def _speedup(entry: Mapping[str, Any] | None) -> str:
    return "" if entry is None or entry["mean"] is None else f"**{difference(_turned(entry))}**"


def _ends(entry: Mapping[str, Any]) -> tuple[float | None, float | None, float | None]:
    """The mean of an entry and its interval, which is empty where there is only one pair."""
    low, high = (entry["mean"] if entry[key] is None else entry[key] for key in ("low", "high"))
    return entry["mean"], low, high


def draw_policies(
    policies: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    auc_band: float,
    calibration_band: float,
    speedup: float,
) -> bytes:
    """PNG of what policies of skipping gain and cost: differences in quality over the speed-up.

    Args:
        policies: By policy, its points. A point has a `label`; `speedup`, `auc` and `calibration`
            hold the mean and the two ends of its interval.
        auc_band: Differences of the AUC up to this are shaded.
        calibration_band: The same for calibration.
        speedup: A speed-up that is marked.
    """
    from matplotlib.figure import Figure

    styles = line_styles(policies)
    with picture_style():
        figure = Figure(figsize=(10, 4.5), layout="constrained")
        handles = {}
        for axis, metric, name, band in zip(
            figure.subplots(1, 2),
            ("auc", "calibration"),
            ("test AUC", "calibration"),
            (auc_band, calibration_band),
            strict=True,
        ):
            axis.axhspan(-band, band, color="black", alpha=0.07)
            axis.axvline(speedup, color="black", linewidth=0.8, linestyle=":")
            for policy, points in policies.items():
                color = styles[policy]["color"]
                for point in points:
                    (x, *x_ends), (y, *y_ends) = point["speedup"], point[metric]
                    axis.plot(x_ends, [y, y], color=color, linewidth=1)
                    axis.plot([x, x], y_ends, color=color, linewidth=1)
                    axis.annotate(
                        point["label"], (x, y), (4, 4), textcoords="offset points", fontsize=7
                    )
                means = [(point["speedup"][0], point[metric][0]) for point in points]
                (handles[policy],) = axis.plot(
                    *zip(*means, strict=True), **styles[policy], marker="o", markersize=4, alpha=0.8
                )
            axis.set_xlabel("times faster than without skipping")
            axis.set_ylabel(f"{name}, less that without skipping")
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=6)
        return as_png(figure)
