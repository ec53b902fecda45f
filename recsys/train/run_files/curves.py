"""Pictures: loss and AUC over a run, and the AUC of an ablation's variations."""

from __future__ import annotations

from io import BytesIO
from math import nan
from statistics import fmean
from typing import TYPE_CHECKING, Any

from recsys._support.files import appearing_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from recsys.train.run_files.run_folder import RunFolder

__all__ = ["as_png", "draw_run", "draw_variations", "plot_curves"]

# Okabe and Ito's colors without yellow: colour-blind readers tell them apart, also on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")
_SMOOTHED = 5  # reports before and after one, whose mean is drawn
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "text.parse_math": False,
}


def plot_curves(folder: RunFolder) -> None:
    """Draw `curves.png` from the history; an empty history gives no file."""
    picture = draw_run(folder.read_history(), folder.read_config().eval.split)
    if picture is not None:
        with appearing_whole(folder.curves_file) as partial:  # its error names the file
            partial.write_bytes(picture)


def draw_run(history: Sequence[Mapping[str, Any]], split: str) -> bytes | None:
    """PNG of loss and AUC over samples, in training and in evaluation; None if empty.

    A mean over neighbouring reports lies over those of training, which vary from one to the next.
    """
    training = [entry for entry in history if "train_loss" in entry]
    if not training:
        return None
    import matplotlib as mpl
    from matplotlib.figure import Figure

    evaluated = [entry for entry in history if entry.get(split)]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.5, 6), layout="constrained")
        for axis, key, name in zip(
            figure.subplots(2, 1), ("logloss", "auc"), ("loss", "AUC"), strict=True
        ):
            train_key = "train_loss" if key == "logloss" else "train_auc"
            samples = [entry["num_samples"] for entry in training]
            reports = [entry[train_key] for entry in training]
            axis.plot(samples, reports, color=_COLORS[0], linewidth=0.7, alpha=0.35)
            axis.plot(
                samples,
                _smoothed(reports),
                color=_COLORS[0],
                label="training (before each update), smoothed",
                marker="o" if len(reports) == 1 else "",  # no line leads to a single report
                markersize=3,
            )
            axis.plot(
                [entry["num_samples"] for entry in evaluated],
                [entry[split][key] for entry in evaluated],
                color=_COLORS[1],
                label=split,
                marker="o",
                markersize=3,
            )
            _label(axis, name)
            axis.legend()
        return as_png(figure)


def draw_variations(cells: Sequence[tuple[str, Sequence[Mapping[str, float]]]]) -> bytes | None:
    """PNG of the AUC of an ablation over samples, a line for each variation; None if empty.

    A line is the mean over the cells of a variation, evaluation by evaluation, as far as all of
    them have one. It begins in a point, which is all that is seen of a single evaluation.

    Args:
        cells: The variation and the evaluations of each cell, with `num_samples` and `auc`.
    """
    by_variation: dict[str, list[Sequence[Mapping[str, float]]]] = {}
    for variation, evaluations in cells:
        by_variation.setdefault(variation, []).append(evaluations)
    means = {
        variation: [
            (fmean(each["num_samples"] for each in same), fmean(each["auc"] for each in same))
            for same in zip(*curves, strict=False)
        ]
        for variation, curves in by_variation.items()
    }
    if not any(means.values()):
        return None
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    styles: dict[str, dict[str, Any]] = {
        name: {
            "color": _COLORS[number % len(_COLORS)],
            "linestyle": _DASHES[number // len(_COLORS) % len(_DASHES)],
        }
        for number, name in enumerate(means)
    }
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.5, 4 + 0.2 * len(means)), layout="constrained")
        axis = figure.subplots()
        for variation, points in means.items():
            if points:
                axis.plot(*zip(*points, strict=True), **styles[variation], marker="o", markersize=3)
        _label(axis, "AUC")
        # With explicit labels: matplotlib skips artists whose labels begin with _.
        handles = [Line2D([], [], **style) for style in styles.values()]
        figure.legend(handles, list(styles), loc="outside lower left")
        return as_png(figure)


def _label(axis: Axes, name: str) -> None:
    """Label the horizontal axis with numbers of samples such as 20 M, the vertical one by name."""
    from matplotlib.ticker import EngFormatter

    axis.xaxis.set_major_formatter(EngFormatter())
    axis.set_xlabel("samples")
    axis.set_ylabel(name)


def _smoothed(reports: Sequence[float | None]) -> list[float]:
    """For each report, the mean of itself and as many before as after it; nan where none has one.

    Near both ends there are fewer of them, so that a curve that rises or falls there is not bent.
    """
    found = []
    for place in range(len(reports)):
        width = min(_SMOOTHED, place, len(reports) - 1 - place)
        near = [each for each in reports[place - width : place + width + 1] if each is not None]
        found.append(fmean(near) if near else nan)
    return found


def as_png(figure: Figure) -> bytes:
    """The picture of a figure."""
    out = BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()
