"""Pictures of an ablation: quality over time, speed over fast memory, and where the time went.

Each function reads `ablate.json`; the numbers of a picture are made apart from its drawing.
"""

from __future__ import annotations

import json
from statistics import fmean
from typing import TYPE_CHECKING, Any

from recsys.pipeline.stalls import stage_seconds, stage_title
from recsys.report.ablation_metrics import METRICS, table_bytes, value_of
from recsys.train.run_files import curves

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "STAGE_COLORS",
    "draw_memory",
    "draw_quality",
    "draw_stages",
    "memory_points",
    "stage_shares",
]

# Work is blue and green, waiting is orange and red; colour-blind readers tell neighbours apart.
STAGE_COLORS = {
    "load": "#E69F00",
    "skip": "#882255",
    "prefetch_wait": "#D55E00",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "update": "#009E73",
    "write_back_wait": "#CC79A7",
    "evaluate": "#000000",
    "checkpoint": "#F0E442",
    "other": "#BBBBBB",
}
_DARK = ("backward", "update", "prefetch_wait", "skip")  # their labels are white
_LEAST_LABELLED = 0.06  # of the bar; a label does not fit in less
_LEGEND_COLUMNS = 3
# Letters in a line of a variation's name: in one of these columns, and beside the bars of stages.
_LETTERS_OF_LEGEND, _LETTERS_OF_BARS = 32, 40
_LINE_INCHES = 0.17  # height of a line of letters
# Keys in which variations may differ that are compared by speed and memory.
_TIER_KEYS = ("budget", "plan", "cold_tier", "cold_path", "schedule", "seed")
_SIZE_KEYS = ("budget", "plan")


def draw_quality(
    runs: Sequence[tuple[str, Sequence[Mapping[str, Any]], bool]], split: str
) -> bytes | None:
    """PNG of the AUC over samples and over training time, a line for each variation.

    The line is the mean over finished runs, evaluation by evaluation, as far as all of them have
    one. Those at the end of training, which may cover more of the split, are a point of their own,
    unless some runs stopped before the others. Where a variation has several runs, or one that is
    not finished, each is a thin line behind it.

    Args:
        runs: The variation and the history of each run, and whether it finished.
        split: "test" or "validation".

    Returns:
        None if no run was evaluated.
    """
    by_variation: dict[str, list[tuple[list[Mapping[str, Any]], bool]]] = {}
    for variation, history, is_finished in runs:
        entries = [entry for entry in history if entry.get(split) and entry[split]["auc"]]
        if entries:
            by_variation.setdefault(variation, []).append((entries, is_finished))
    if not by_variation:
        return None
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    styles = curves.line_styles(by_variation)
    with curves.picture_style():
        names = [curves.in_lines(name, _LETTERS_OF_LEGEND) for name in styles]
        num_legend_lines = -(-len(names) // _LEGEND_COLUMNS) * max(map(_num_lines, names))
        figure = Figure(figsize=(9, 4 + 0.2 * num_legend_lines), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, key in zip(axes, ("num_samples", "train_seconds"), strict=True):
            for variation, histories in by_variation.items():
                style = styles[variation]
                finished = [entries for entries, is_finished in histories if is_finished]
                for entries, _ in histories if len(histories) > 1 or not finished else ():
                    line = [(entry[key], entry[split]["auc"]) for entry in entries]
                    axis.plot(*zip(*line, strict=True), **style, linewidth=0.6, alpha=0.35)
                means = [
                    (fmean(each[key] for each in same), fmean(each[split]["auc"] for each in same))
                    for same in _same_evaluations(finished)
                ]
                if means:
                    axis.plot(
                        *zip(*means, strict=True),
                        **style,
                        linewidth=1.5,
                        marker="o",
                        markersize=2.5,
                    )
        curves.count_samples(axes[0])
        axes[1].set_xlabel("seconds of training")
        axes[0].set_ylabel(f"{split} AUC")
        # With explicit labels: matplotlib skips artists whose labels begin with _.
        handles = [Line2D([], [], **style) for style in styles.values()]
        figure.legend(handles, names, loc="outside lower center", ncols=_LEGEND_COLUMNS)
        return curves.as_png(figure)


def _same_evaluations(
    runs: Sequence[Sequence[Mapping[str, Any]]],
) -> list[list[Mapping[str, Any]]]:
    """The first evaluations of all runs, their second ones, ..., and those at the end.

    Policies of skipping see a few samples more with one seed than with another. Evaluations that
    are further apart than half of the samples between two evaluations are of runs that were
    evaluated at other times, and are left out.
    """
    if not runs:
        return []
    # The line of the history about the end has both splits.
    ends = [[entry for entry in run if "test" in entry and "validation" in entry] for run in runs]
    during = [
        [entry for entry in run if not ("test" in entry and "validation" in entry)] for run in runs
    ]
    same = list(zip(*during, strict=False))
    if len({len(each) for each in during}) == 1:
        same += zip(*ends, strict=False)
    between = min((run[-1]["num_samples"] / len(run) for run in during if run), default=0.0)
    return [
        list(found)
        for found in same
        if max(each["num_samples"] for each in found) - min(each["num_samples"] for each in found)
        <= between / 2
    ]


def memory_points(
    record: Mapping[str, Any],
) -> dict[str, list[tuple[float, float, float, float]]]:
    """Share of speed and share of memory of every variation with tiers.

    A variation is compared with the one whose rows are all resident and whose configuration is
    the same apart from budget, plan, cold tier and schedule; without one it is left out. The two
    are compared in pairs of equal seeds.

    Returns:
        By name of a line, its points: fast memory as a share of all rows and their state; samples/s
        as a share, mean, least and most over the seeds. Variations that differ only in budget or
        plan are in one line.
    """
    by_variation: dict[str, dict[int, Mapping[str, Any]]] = {}
    for cell in record["cells"]:
        if cell["run"]["status"] == "finished" and cell["run"]["config"]["embeddings"] == "recsys":
            by_variation.setdefault(cell["variation"], {})[cell["seed"]] = cell
    resident: dict[str, dict[int, Mapping[str, Any]]] = {}
    for by_seed in by_variation.values():
        first = next(iter(by_seed.values()))
        if first["run"].get("tiers") is None:
            resident.setdefault(_without(first, _TIER_KEYS), by_seed)
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    keys: dict[str, Mapping[str, Any]] = {}  # of the first variation of each line
    for variation, by_seed in by_variation.items():
        first = next(iter(by_seed.values()))
        reference = resident.get(_without(first, _TIER_KEYS), {})
        all_bytes = table_bytes(first["run"])
        ratios = [
            _speed(cell) / _speed(reference[seed])
            for seed, cell in by_seed.items()
            if seed in reference and _speed(reference[seed])
        ]
        if first["run"].get("tiers") is None or not ratios or not all_bytes:
            continue
        line = _without(first, (*_SIZE_KEYS, "seed"))
        keys.setdefault(line, record["config"]["variations"][variation])
        memory = first["run"]["tiers"]["hot_bytes"] / all_bytes
        lines.setdefault(line, []).append((memory, fmean(ratios), min(ratios), max(ratios)))
    labels = [_label(each) for each in keys.values()]
    names = [
        label if labels.count(label) == 1 else _label(each, is_whole=True)
        for label, each in zip(labels, keys.values(), strict=True)
    ]
    return dict(zip(names, lines.values(), strict=True))


def draw_memory(record: Mapping[str, Any]) -> bytes | None:
    """PNG of `memory_points`; None without a point."""
    points = memory_points(record)
    return curves.draw_shares(points) if points else None


def stage_shares(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The share of every stage in the training time of each variation, over its seeds.

    Evaluation, which is not training time, is left out, and so is a variation without a step.
    """
    found: dict[str, dict[str, float]] = {}
    for cell in record["cells"]:
        if cell["run"]["status"] == "finished":
            total = found.setdefault(cell["variation"], {})
            for stage, seconds in stage_seconds(cell["run"].get("stalls") or {}).items():
                if stage != "evaluate":
                    total[stage] = total.get(stage, 0.0) + seconds
    return {
        variation: {stage: seconds / sum(total.values()) for stage, seconds in total.items()}
        for variation, total in found.items()
        if sum(total.values())
    }


def draw_stages(record: Mapping[str, Any]) -> bytes | None:
    """PNG of `stage_shares`, a stacked bar for each variation; None without one."""
    shares = stage_shares(record)
    if not shares:
        return None
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import PercentFormatter

    stages = [
        stage
        for stage in dict.fromkeys(stage for found in shares.values() for stage in found)
        if any(found.get(stage) for found in shares.values())
    ]
    with curves.picture_style():
        names = [curves.in_lines(name, _LETTERS_OF_BARS) for name in shares]
        bar_inches = max(0.32, _LINE_INCHES * max(map(_num_lines, names)))
        figure = Figure(figsize=(9, 1.2 + bar_inches * len(names)), layout="constrained")
        axis = figure.subplots()
        for row, found in enumerate(shares.values()):
            begin = 0.0
            for stage in stages:
                share = found.get(stage, 0.0)
                color = STAGE_COLORS.get(stage, "#BBBBBB")
                axis.barh(row, share, left=begin, color=color, edgecolor="white", linewidth=0.8)
                if share >= _LEAST_LABELLED:
                    axis.text(
                        begin + share / 2,
                        row,
                        f"{share:.0%}",
                        color="white" if stage in _DARK else "black",
                        ha="center",
                        va="center",
                        fontsize=7,
                    )
                begin += share
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_xlim(0, 1)
        axis.xaxis.set_major_formatter(PercentFormatter(1))
        axis.set_xlabel("share of the training time")
        axis.grid(visible=False)
        handles = [Patch(color=STAGE_COLORS.get(stage, "#BBBBBB")) for stage in stages]
        titles = [stage_title(stage) for stage in stages]
        figure.legend(handles, titles, loc="outside lower center", ncols=8)
        return curves.as_png(figure)


def _num_lines(text: str) -> int:
    return 1 + text.count("\n")


def _without(cell: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The configuration of a cell without some keys, as a text that can be compared."""
    config = {key: value for key, value in cell["run"]["config"].items() if key not in keys}
    return json.dumps(config, sort_keys=True)


def _speed(cell: Mapping[str, Any]) -> float:
    return value_of(METRICS["throughput"], cell) or 0.0


def _label(keys: Mapping[str, Any], *, is_whole: bool = False) -> str:
    """The name of a line: what its variations set apart from the size of fast memory.

    Args:
        keys: The keys of a variation.
        is_whole: Name keys in full, rather than by their last part or by their value alone.
    """
    parts = []
    for key, value in keys.items():
        last = key if is_whole else key.rpartition(".")[2]
        if key not in _SIZE_KEYS:
            parts.append(str(value) if last in ("name", "policy") else f"{last} {value}")
    return ", ".join(parts) or "as the base configuration"
