"""`WeightsAndBiases`: the configuration and the curves of a run, as a run of Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys.train.callbacks.logger import AbstractLogger, required

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["WeightsAndBiases"]


class WeightsAndBiases(AbstractLogger):
    """Logs the configuration, and `train/loss`, `validation/auc` and so on over the samples seen.

    Project, mode and key are as for every program that uses it: `WANDB_PROJECT`, `WANDB_MODE`,
    `WANDB_API_KEY`, or options. A run that continues from a checkpoint continues its run there.

    Args:
        options: Of `wandb.init`, such as `project`; `name` is by default that of the folder.

    Raises:
        MissingDependency: wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self._wandb = required("wandb", "wandb", type(self).__name__)
        self._options = options
        self._id: str | None = None
        self._run: Any = None

    def on_start(self, run_dir: Path, record: Mapping[str, Any]) -> None:
        """Start or continue the run."""
        # The id is set last: an object whose start failed may be given to another run.
        run_id, self._id = self._id, None
        options = {"name": run_dir.resolve().name, "config": record["config"], **self._options}
        if run_id is not None:
            options |= {"id": run_id, "resume": "allow"}
        self._run = self._wandb.init(**options)
        self._id = self._run.id

    def log(self, values: dict[str, float], num_samples: int) -> None:
        """Log the values."""
        self._run.log(values, step=num_samples)

    def close(self, status: str) -> None:
        """End the run, and forget it: the object may be given to another one."""
        self._id = None
        self._run.finish(exit_code=0 if status == "finished" else 1)

    def state_dict(self) -> dict[str, Any]:
        """The id of the run."""
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue that run."""
        self._id = state["id"]
