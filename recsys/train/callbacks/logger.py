"""What the callbacks that log to other packages have in common."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from recsys.errors import MissingDependency
from recsys.train.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AbstractLogger", "required"]


class AbstractLogger(Callback):
    """Logs measurements over the samples seen.

    They are `train/loss`, `train/auc` and `samples_per_second` of reports, and each metric of an
    evaluation under its split, such as `validation/auc`. At the end of a finished run it logs those
    of both splits as a whole. Counts, and metrics that are null, are left out.
    """

    @abstractmethod
    def log(self, values: dict[str, float], num_samples: int) -> None:
        """Log measurements.

        Args:
            values: By name.
            num_samples: Samples seen so far.
        """

    @abstractmethod
    def close(self, status: str) -> None:
        """End.

        Args:
            status: Of the run, as in its record.
        """

    def on_report(self, report: Mapping[str, Any]) -> None:
        """Log a report."""
        self.log(_scalars(report), report["num_samples"])

    def on_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Log an evaluation."""
        self.log(_scalars(evaluation), evaluation["num_samples"])

    def on_end(self, record: Mapping[str, Any]) -> None:
        """Log the metrics of a finished run, and end."""
        if record["status"] == "finished":
            self.log(_scalars(record["metrics"]), record["throughput"]["num_samples"])
        self.close(record["status"])


def required(module: str, package: str, callback: str) -> Any:
    """A module of an optional package.

    Args:
        module: Its name.
        package: The package to install.
        callback: What needs it.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(
            f"callback {callback} needs {package}, which is not installed ({error}); install it "
            f"(pip install {package}), or leave the callback out"
        ) from error


def _scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """The measurements in a line of the history, or in the metrics of a record, by name."""
    found = {"samples_per_second": entry.get("samples_per_second")}
    found |= {f"train/{key}": entry.get(f"train_{key}") for key in ("loss", "auc")}
    for split in ("validation", "test"):
        found |= {f"{split}/{key}": value for key, value in (entry.get(split) or {}).items()}
    return {key: value for key, value in found.items() if isinstance(value, float)}
