"""`MLflow`: the configuration and the curves of a run, as a run of MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recsys._support.config_fields import flat
from recsys.train.callbacks.logger import AbstractLogger, required

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["MLflow"]

_STATUSES = {"finished": "FINISHED", "interrupted": "KILLED"}


class MLflow(AbstractLogger):
    """Logs keys as parameters, and `train/loss`, `validation/auc` and the like as metrics.

    Where it logs to is as for every program that uses MLflow: `MLFLOW_TRACKING_URI`,
    `MLFLOW_EXPERIMENT_NAME`, or `mlflow.set_tracking_uri`. A run that continues from a checkpoint
    continues its run of MLflow.

    Args:
        options: Of `mlflow.start_run`, such as `tags`; `run_name` is by default that of the folder.

    Raises:
        MissingDependency: mlflow is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self._mlflow = required("mlflow", "mlflow", type(self).__name__)
        self._options = options
        self._run_id: str | None = None

    def on_start(self, run_dir: Path, record: Mapping[str, Any]) -> None:
        """Start or continue the run."""
        # The id is set last: an object whose start failed may be given to another run.
        run_id, self._run_id = self._run_id, None
        if run_id is None:
            options = {"run_name": run_dir.resolve().name, **self._options}
            run_id = self._mlflow.start_run(**options).info.run_id
            try:
                self._mlflow.log_params(flat(record["config"]))
            except BaseException:
                self.close("failed")  # MLflow starts no other run in this process before
                raise
        else:
            self._mlflow.start_run(run_id=run_id)
        self._run_id = run_id

    def log(self, values: dict[str, float], num_samples: int) -> None:
        """Log the values."""
        self._mlflow.log_metrics(values, step=num_samples)

    def close(self, status: str) -> None:
        """End the run, and forget it: the object may be given to another one."""
        self._run_id = None
        self._mlflow.end_run(_STATUSES.get(status, "FAILED"))

    def state_dict(self) -> dict[str, Any]:
        """The id of the run."""
        return {"run_id": self._run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue that run."""
        self._run_id = state["run_id"]
