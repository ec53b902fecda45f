"""The picture of a run: loss and AUC over samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recsys.run_folder import RunFolder

__all__ = ["plot_curves"]


def plot_curves(folder: RunFolder) -> None:
    """Draw `curves.png` from the history: loss and AUC over samples, of training and validation."""
    history = folder.read_history()
    training = [entry for entry in history if "train_loss" in entry]
    if not training:
        return
    import matplotlib as mpl
    from matplotlib.figure import Figure

    validation = [entry for entry in history if entry.get("validation")]
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
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
                [entry["num_samples"] for entry in validation],
                [entry["validation"][key] for entry in validation],
                label="validation",
                marker="o",
                markersize=3,
            )
            axis.set_xlabel("samples")
            axis.set_ylabel(name)
            axis.legend()
        figure.savefig(folder.curves_file, dpi=120)
