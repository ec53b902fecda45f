"""Pictures: loss and AUC over a run, and the AUC of an ablation's variations."""

from __future__ import annotations

from contextlib import contextmanager
from io import BytesIO
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.files import appearing_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from recsys.train.run_files.run_folder import RunFolder

__all__ = [
    "COLORS",
    "as_png",
    "count_samples",
    "draw_run",
    "draw_variations",
    "line_styles",
    "picture_style",
    "plot_curves",
]

# Okabe and Ito's colors without yellow: colour-blind readers tell them apart, also on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")
_HIDDEN = 10  # a tenth of the losses may lie above the picture
_SMOOTHED = 5  # reports before and after one, whose mean is drawn


def plot_curves(folder: RunFolder) -> None:
    """Draw `curves.png` from the history; an empty history gives no file."""
    _write(draw_run(folder.read_history(), folder.read_config().eval.split), folder.curves_file)


def _write(picture: bytes | None, file: Path) -> None:
    if picture is not None:
        with appearing_whole(file) as partial:  # its error names the file
            partial.write_bytes(picture)


def draw_run(history: Sequence[Mapping[str, Any]], split: str) -> bytes | None:
    """PNG of loss and AUC over samples, in training and in evaluation; None if empty.

    A mean over neighbouring reports lies over those of training, which vary from one to the next.
    """
    training = [entry for entry in history if "train_loss" in entry]
    if not training:
        return None
    from matplotlib.figure import Figure

    evaluated = [entry for entry in history if entry.get(split)]
    with picture_style():
        figure = Figure(figsize=(9, 3.5), layout="constrained")
        for axis, key, name in zip(
            figure.subplots(1, 2), ("logloss", "auc"), ("loss", "AUC"), strict=True
        ):
            train_key = "train_loss" if key == "logloss" else "train_auc"
            samples = [entry["num_samples"] for entry in training]
            reports = [entry[train_key] for entry in training]
            axis.plot(samples, reports, color=COLORS[0], linewidth=0.7, alpha=0.35)
            axis.plot(
                samples,
                _smoothed(reports),
                color=COLORS[0],
                label="training (before each update), smoothed",
                marker="o" if len(reports) == 1 else "",  # no line leads to a single report
                markersize=3,
            )
            axis.plot(
                [entry["num_samples"] for entry in evaluated],
                [entry[split][key] for entry in evaluated],
                color=COLORS[1],
                label=split,
                marker="o",
                markersize=3,
            )
            if key == "logloss":
                _hide_first_losses(axis, reports, [entry[split][key] for entry in evaluated])
            count_samples(axis)
            axis.set_ylabel(name)
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
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    styles = line_styles(means)
    with picture_style():
        figure = Figure(figsize=(9, 4 + 0.2 * len(means)), layout="constrained")
        axis = figure.subplots()
        for variation, points in means.items():
            if points:
                axis.plot(*zip(*points, strict=True), **styles[variation], marker="o", markersize=3)
        count_samples(axis)
        axis.set_ylabel("AUC")
        # With explicit labels: matplotlib skips artists whose labels begin with _.
        handles = [Line2D([], [], **style) for style in styles.values()]
        figure.legend(handles, list(styles), loc="outside lower left")
        return as_png(figure)


def count_samples(axis: Axes) -> None:
    """Label the horizontal axis with numbers of samples such as 20 M."""
    from matplotlib.ticker import EngFormatter

    axis.xaxis.set_major_formatter(EngFormatter())
    axis.set_xlabel("samples")


def _hide_first_losses(
    axis: Axes, reports: Sequence[float | None], evaluations: Sequence[float | None]
) -> None:
    """End the vertical axis above all losses but those of the first tenth of the reports.

    A run may begin with a loss so large that the others have no height beside it. The title then
    says what is above the picture.
    """
    rest = [*reports[len(reports) // _HIDDEN :], *evaluations]
    low, high = axis.dataLim.ymin, axis.dataLim.ymax
    most = max([each for each in rest if each is not None], default=high)
    if low < most < (low + high) / 2:
        axis.set_ylim(low - 0.05 * (most - low), most + 0.1 * (most - low))
        axis.set_title(
            f"first losses, up to {high:.3g}, are cut off",
            fontsize="small",
            loc="left",
        )


def _smoothed(reports: Sequence[float | None]) -> list[float]:
    """For each report, the mean of itself and as many before as after it; nan where none has one.

    Near the start there are fewer of them, so that a curve that rises or falls there is not bent.
    The last ones lie on the line that fits the end best: the curve does not end in a single report.
    """
    values = np.array([np.nan if each is None else each for each in reports])
    places: NDArray[np.int64] = np.arange(len(values))
    is_known = np.isfinite(values)
    found = np.full(len(values), np.nan)
    for place in range(len(values)):
        width = min(_SMOOTHED, place, len(values) - 1 - place)
        near = slice(place - width, place + width + 1)
        if is_known[near].any():
            found[place] = values[near][is_known[near]].mean()
    end = slice(max(0, len(values) - 2 * _SMOOTHED - 1), None)
    is_last = is_known & (places >= len(values) - _SMOOTHED)
    x, y = places[end][is_known[end]], values[end][is_known[end]]
    if is_last.any() and len(x) > _SMOOTHED:
        slope, start = np.polyfit(x, y, 1)
        found[is_last] = start + slope * places[is_last]
    return [float(each) for each in found]


def line_styles(variations: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A color and a dash per variation; the pairs are distinct for up to 28 variations."""
    names = list(dict.fromkeys(variations))
    return {
        name: {
            "color": COLORS[number % len(COLORS)],
            "linestyle": _DASHES[number // len(COLORS) % len(_DASHES)],
        }
        for number, name in enumerate(names)
    }


@contextmanager
def picture_style() -> Iterator[None]:
    """How all pictures look. A text with dollar signs, as a name may have, is not mathematics."""
    import matplotlib as mpl

    with mpl.rc_context(
        {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "text.parse_math": False}
    ):
        yield


def as_png(figure: Figure) -> bytes:
    """The picture of a figure."""
    out = BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()
