"""Pictures of runs: loss and AUC as they were measured on the way."""

from __future__ import annotations

from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from matplotlib.figure import Figure

    from recsys.run_folder import RunFolder

__all__ = ["draw_run", "draw_variations", "plot_curves"]


def plot_curves(folder: RunFolder) -> None:
    """Draw `curves.png` from the history; no file where there is none."""
    picture = draw_run(folder.read_history(), folder.read_config().eval.split)
    if picture is not None:
        folder.curves_file.write_bytes(picture)


def draw_run(history: Sequence[Mapping[str, Any]], split: str) -> bytes | None:
    """Loss and AUC over samples, in training and on the part evaluated; PNG, None if empty."""
    training = [entry for entry in history if "train_loss" in entry]
    if not training:
        return None
    from matplotlib.figure import Figure

    evaluated = [entry for entry in history if entry.get(split)]
    with _style():
        figure = Figure(figsize=(9, 3.5), layout="constrained")
        for axis, key, name in zip(
            figure.subplots(1, 2), ("logloss", "auc"), ("loss", "AUC"), strict=True
        ):
            train_key = "train_loss" if key == "logloss" else "train_auc"
            axis.plot(
                [entry["num_samples"] for entry in training],
                [entry[train_key] for entry in training],
                label="training (before each update)",
                linewidth=1,
                alpha=0.7,
            )
            axis.plot(
                [entry["num_samples"] for entry in evaluated],
                [entry[split][key] for entry in evaluated],
                label=split,
                marker="o",
                markersize=3,
            )
            axis.set_xlabel("samples")
            axis.set_ylabel(name)
            axis.legend()
        return _as_png(figure)


def draw_variations(
    runs: Iterable[tuple[str, Sequence[Mapping[str, Any]]]], split: str
) -> bytes | None:
    """AUC of a part over samples and over training time, a colour a variation; PNG.

    Args:
        runs: The variation and the history of each run.
        split: "test" or "validation".

    Returns:
        None if nothing was evaluated.
    """
    curves = [
        (variation, [entry for entry in history if entry.get(split)]) for variation, history in runs
    ]
    if not any(entries for _, entries in curves):
        return None
    from matplotlib.figure import Figure

    colors: dict[str, str] = {}
    with _style():
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for variation, entries in curves:
            is_first = variation not in colors
            color = colors.setdefault(variation, f"C{len(colors)}")
            for axis, key in zip(axes, ("num_samples", "train_seconds"), strict=True):
                axis.plot(
                    [entry[key] for entry in entries],
                    [entry[split]["auc"] for entry in entries],
                    color=color,
                    label=variation if is_first else None,
                    linewidth=1,
                    alpha=0.8,
                    marker="o",
                    markersize=2,
                )
        for axis, name in zip(axes, ("samples", "seconds of training"), strict=True):
            axis.set_xlabel(name)
        axes[0].set_ylabel(f"{split} AUC")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        return _as_png(figure)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        yield


def _as_png(figure: Figure) -> bytes:
    out = BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()
