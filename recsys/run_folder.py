"""The folder of a training run.

    DIR/config.toml         the whole configuration, written first
        history.jsonl       one JSON object per report interval, appended as training goes
        run.json            what was measured: configuration, environment, data, metrics,
        throughput, stages, memory curves.png          loss and AUC over samples
        model.safetensors   the final state_dict, readable without this library

`run.json` and the model appear under their names only when whole.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from recsys.config import TrainConfig, load_config, to_toml
from recsys.errors import AlreadyExists, ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["RunFolder"]


class RunFolder:
    """Reads and writes the files of one run.

    Args:
        path: The folder; see `create` and `open`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.history_file = path / "history.jsonl"
        self.record_file = path / "run.json"
        self.curves_file = path / "curves.png"
        self.model_file = path / "model.safetensors"

    @classmethod
    def create(cls, path: str | Path, config: TrainConfig) -> RunFolder:
        """Start a run in a new or empty folder.

        Raises:
            AlreadyExists: the folder has something in it.
        """
        folder = cls(Path(path))
        if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
            raise AlreadyExists(
                f"run folder {folder.path} is not empty; remove it or choose another with --run"
            )
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.config_file.write_text(to_toml(config))
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """A run that was made before.

        Raises:
            ConfigError: `path` is no run's folder.
        """
        folder = cls(Path(path))
        if not folder.config_file.is_file():
            raise ConfigError(
                f"{folder.path} is not a run: it has no config.toml; make one with "
                f"`recsys train DATA --run {folder.path}`"
            )
        return folder

    def read_config(self) -> TrainConfig:
        """The run's configuration."""
        return load_config(self.config_file)

    def append_history(self, entry: dict[str, Any]) -> None:
        """Add one line to the history."""
        with self.history_file.open("a") as file:
            file.write(json.dumps(_without_nan(entry)) + "\n")

    def read_history(self) -> list[dict[str, Any]]:
        """All lines of the history, oldest first."""
        if not self.history_file.is_file():
            return []
        return [json.loads(line) for line in self.history_file.read_text().splitlines()]

    def write_record(self, record: dict[str, Any]) -> None:
        """Write `run.json`."""
        partial = self.record_file.with_suffix(".partial")
        partial.write_text(json.dumps(_without_nan(record), indent=2) + "\n")
        partial.rename(self.record_file)

    def save_model(self, model: nn.Module) -> None:
        """Write a model's state_dict."""
        partial = self.model_file.with_suffix(".partial")
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, partial)
        partial.rename(self.model_file)

    def load_model(self, model: nn.Module) -> None:
        """Read the state_dict into a model of the same shape.

        Raises:
            ConfigError: there is no saved model, or its shapes are others.
        """
        if not self.model_file.is_file():
            raise ConfigError(f"{self.path} has no {self.model_file.name}: the run did not end")
        state: dict[str, Tensor] = load_file(self.model_file)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(
                f"{self.model_file} does not fit the model: {error}; evaluate on the data the run "
                "was trained on, or data prepared with the same ids"
            ) from error


def _without_nan(value: Any) -> Any:
    """The same JSON value with null for what JSON cannot say."""
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
