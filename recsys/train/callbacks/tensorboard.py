"""`TensorBoard`: the curves of a run as event files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys.train.callbacks.logger import AbstractLogger, required

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TensorBoard"]


class TensorBoard(AbstractLogger):
    """Writes `train/loss`, `validation/auc` and the like over the samples seen.

    A run that continues from a checkpoint hides what was written after it.

    Args:
        folder: Where event files go; None for `tensorboard` in the folder of the run.

    Raises:
        MissingDependency: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._make = required(
            "torch.utils.tensorboard", "tensorboard", type(self).__name__
        ).SummaryWriter
        self._writer: Any = None

    def on_start(self, run_dir: Path, record: Mapping[str, Any]) -> None:
        """Open a file of events."""
        folder = run_dir / "tensorboard" if self._folder is None else Path(self._folder)
        # TensorBoard shows no event from this step on that was written before.
        self._writer = self._make(folder, purge_step=record["throughput"]["num_samples"] + 1)

    def log(self, values: dict[str, float], num_samples: int) -> None:
        """Write the values."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, num_samples)
        self._writer.flush()

    def close(self, status: str) -> None:
        """Close the file."""
        self._writer.close()
