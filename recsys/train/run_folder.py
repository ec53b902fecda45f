"""The folder of a training run.

    DIR/config.toml        the whole configuration, written first
        history.jsonl      one JSON object per report and per evaluation, appended as training goes
        run.json           configuration, environment, data, metrics, throughput, stages, memory
        model.safetensors  the final state_dict, readable without this library; missing if
                           `save_model` is false
        best-N.safetensors while early stopping may keep the weights of step N
        checkpoints/       the newest checkpoint and the one before, from which the run continues

All but `history.jsonl` and the checkpoints are written atomically. PyTorch is imported when a model
is saved or loaded, so that commands can check a folder before.
"""

from __future__ import annotations

import json
import os
import warnings
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from recsys._support.files import (
    appearing_whole,
    as_argument,
    make_folders,
    require_place,
)
from recsys._support.untrusted import parse_json
from recsys.config import SYNTHETIC_PREFIX, TrainConfig, to_toml
from recsys.errors import AlreadyExists, ConfigError, StoreError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["RunFolder", "read_json", "tied_names", "write_json"]

_SAME_DATA = "evaluate on the data the run was trained on, or data prepared with the same ids"


class RunFolder:
    """Reads and writes the files of one run.

    Args:
        path: The folder; `open` checks that it is one of a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.history_file = path / "history.jsonl"
        self.record_file = path / "run.json"
        self.model_file = path / "model.safetensors"
        self.checkpoints_folder = path / "checkpoints"

    @staticmethod
    def is_new(path: Path) -> bool:
        """Whether a folder is missing, or has nothing but a `config.toml` begun before a kill."""
        return not path.exists() or (
            path.is_dir() and {*path.iterdir()} <= {path / "config.toml.partial"}
        )

    @staticmethod
    def require_place(path: Path) -> None:
        """Check that a run can start in a folder, before the work that its files are about.

        Raises:
            AlreadyExists: the folder is not empty.
            ConfigError: it cannot be made, or not be written to.
        """
        if path.is_dir() and not RunFolder.is_new(path):
            raise AlreadyExists(
                f"run folder {path} is not empty; remove it or choose another with --run, "
                "or continue its run with --resume"
            )
        require_place(path / "config.toml")

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of an earlier run.

        Raises:
            ConfigError: `path` is not the folder of a run.
        """
        folder = cls(Path(path))
        if not folder.config_file.is_file():
            raise ConfigError(
                f"{folder.path} is not a run: it has no config.toml; make one with "
                f"`recsys train DATA --run {as_argument(folder.path)}`"
            )
        return folder

    @classmethod
    def open_model(cls, path: str | Path) -> RunFolder:
        """Open the folder of a run that saved its model; warns if the run has not finished.

        Raises:
            ConfigError: `path` is not the folder of a run, or has no model.
        """
        folder = cls.open(path)
        folder.require_model()
        status = folder.read_record()["status"] if folder.record_file.is_file() else "unfinished"
        if status != "finished":
            warnings.warn(
                f"{path} is {status}, and this is the model that it saved when it last stopped; "
                f"continue it by `recsys train --run {as_argument(path)} --resume`",
                stacklevel=3,
            )
        return folder

    def require_data(self, data: str) -> None:
        """Check that the data of the run is still where the run found it.

        Args:
            data: The key of its configuration.

        Raises:
            StoreError: there is nothing.
        """
        if not data.startswith(SYNTHETIC_PREFIX) and not Path(data).exists():
            raise StoreError(
                f"{self.path} was trained on the store {data}, which does not exist"
                f"{'' if Path(data).is_absolute() else ' in the current folder'}; go to the folder "
                "in which it was trained, or name the store: recsys evaluate with --data STORE, "
                "recsys predict FILES with --store STORE, recsys train STORE with --resume"
            )

    def continue_run(self, config: TrainConfig, history_bytes: int) -> None:
        """Begin to continue a run: drop what it wrote after its checkpoint.

        The record is removed, because the run is no longer finished. An earlier model stays until
        the new one replaces it.

        Args:
            config: The configuration to continue with.
            history_bytes: The length of the history at the checkpoint; 0 drops every line.
        """
        self.record_file.unlink(missing_ok=True)
        self.write_config(config)
        if self.history_file.is_file():
            # A power failure may have cut it inside a line.
            kept = self.history_file.read_bytes()[:history_bytes]
            os.truncate(self.history_file, kept.rfind(b"\n") + 1)

    def write_config(self, config: TrainConfig) -> None:
        """Write `config.toml`."""
        with appearing_whole(self.config_file) as partial:
            partial.write_text(to_toml(config), encoding="utf-8")

    def history_bytes(self) -> int:
        """The length of the history in bytes; 0 if it has no line."""
        return self.history_file.stat().st_size if self.history_file.is_file() else 0

    def append_history(self, entry: dict[str, Any]) -> None:
        """Add one line to the history.

        Raises:
            OSError: the disk is full, or the folder no longer exists.
        """
        try:
            with self.history_file.open("a") as file:
                file.write(json.dumps(_without_nan(entry)) + "\n")
        except OSError as error:  # one of `write` does not name the file
            raise OSError(error.errno, error.strerror, str(self.history_file)) from error

    def read_history(self) -> list[dict[str, Any]]:
        """All lines of the history, oldest first.

        An incomplete last line, which a killed run leaves, is dropped.

        Raises:
            ConfigError: another line is damaged.
        """
        if not self.history_file.is_file():
            return []
        lines = self.history_file.read_text(encoding="utf-8", errors="replace").split("\n")
        return [
            _parse_object(line, f"{self.history_file} line {number}", "remove the line")
            for number, line in enumerate(lines[:-1], 1)
        ]

    def read_record(self) -> dict[str, Any]:
        """Read `run.json`.

        Raises:
            ConfigError: the run did not end, or the file is damaged or lacks a key.
        """
        if not self.record_file.is_file():
            raise ConfigError(f"{self.path} has no {self.record_file.name}: the run did not end")
        record = read_json(self.record_file)
        if "status" not in record:
            raise ConfigError(
                f"{self.record_file} is damaged: it has no status; remove {self.path} and train "
                "again"
            )
        return record

    def best_file(self, step: int) -> Path:
        """The model after a step, while the run knows of no better one."""
        return self.path / f"best-{step}.safetensors"

    def drop_best(self, but: int = 0) -> None:
        """Delete best models, but for that of one step; steps are numbered from 1."""
        for file in {*self.path.glob("best-*.safetensors")} - {self.best_file(but)}:
            file.unlink()

    def save_model(self, model: nn.Module, file: Path | None = None) -> None:
        """Write the state_dict of a model without copying its tables in memory.

        A tensor with several names is written under the first; the file's metadata has the others,
        as `safetensors.torch.load_model` reads them.

        Args:
            model: The model.
            file: A file in the folder; None for `model_file`.

        Raises:
            OSError: the disk is full, or the folder no longer exists.
        """
        from safetensors.torch import save_file

        tied, found = tied_names(model), model.state_dict()
        state = {key: value.contiguous() for key, value in found.items() if key not in tied}
        file = file or self.model_file
        with appearing_whole(file) as partial:
            try:
                save_file(state, partial, tied)
            except SafetensorError as error:
                raise OSError(
                    f"{file} cannot be written: {error}; make room on the disk, and "
                    "continue a run that has checkpoints with --resume"
                ) from error
            # safetensors creates private files; give the model the mode of its configuration.
            partial.chmod(self.config_file.stat().st_mode)

    def require_model(self) -> None:
        """Check that the run saved its model.

        Raises:
            ConfigError: there is no saved model.
        """
        if not self.model_file.is_file():
            has_ended = self.record_file.is_file() or not self.config_file.is_file()
            fault = "saved no model" if has_ended else "has not ended"
            raise ConfigError(
                f"{self.path} has no {self.model_file.name}: its run {fault}; continue it by "
                f"`recsys train --run {as_argument(self.path)} --resume --set save_model=true`, or "
                "train again"
            )

    def load_model(
        self, model: nn.Module, hint: str = _SAME_DATA, file: Path | None = None
    ) -> None:
        """Read the saved state_dict into a model of the same shape, one tensor at a time.

        A tensor on device "meta" is replaced by a tensor mapped from the file. Its pages are read
        on demand and the system may drop them again, so it may be larger than memory. Other tensors
        are copied.

        Args:
            model: A model built from the run's configuration. Mapped tensors are read-only.
            hint: What to do if it does not fit.
            file: As for `save_model`.

        Raises:
            ConfigError: there is no saved model, it is damaged, or its names, shapes or dtypes are
                not those of the model.
        """
        import torch

        from recsys._support.safetensors_dtypes import DTYPE_NAMES

        if file is None:
            self.require_model()
            file = self.model_file
        try:
            saved: Any = safe_open(file, "pt")
        except SafetensorError as error:
            raise ConfigError(
                f"{file} is damaged ({error}); remove {self.path} and train again"
            ) from error
        state, tied = model.state_dict(), tied_names(model)
        with saved:
            slices = {key: saved.get_slice(key) for key in saved.keys()}  # noqa: SIM118  # no mapping
            found = {key: f"{part.get_dtype()} {part.get_shape()}" for key, part in slices.items()}
            names = {key: key if key in found else tied.get(key, key) for key in state}
            expected = {
                names[key]: f"{DTYPE_NAMES.get(value.dtype)} {list(value.shape)}"
                for key, value in state.items()
            }
            if found != expected:
                key = min(key for key in found | expected if found.get(key) != expected.get(key))
                raise ConfigError(
                    f"{file} does not fit the model: {key} is {found.get(key)} in the "
                    f"file and {expected.get(key)} in the model; {hint}"
                )
            mapped = {
                key: saved.get_tensor(names[key]) for key, value in state.items() if value.is_meta
            }
            model.load_state_dict(mapped, strict=False, assign=True)
            with torch.no_grad():
                for key in state.keys() - mapped.keys():
                    state[key].copy_(saved.get_tensor(names[key]))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of the parameters and buffers that a model holds under several names.

    Returns:
        For each name but the first of such a tensor, the first. All are keys of the state dict.
    """
    keys = model.state_dict().keys()
    first: dict[int, str] = {}
    named = chain(
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    found = {name: first.setdefault(id(tensor), name) for name, tensor in named if name in keys}
    return {name: other for name, other in found.items() if other != name}


def read_json(file: Path) -> dict[str, Any]:
    """Read a file that `write_json` wrote.

    Raises:
        ConfigError: the file is damaged.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    return _parse_object(text, str(file), "remove it and run the command that made it again")


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file atomically, with null for NaN and infinities; creates missing folders."""
    make_folders(file.parent)
    with appearing_whole(file) as partial:
        partial.write_text(json.dumps(_without_nan(value), indent=2) + "\n")


def _parse_object(text: str, location: str, remedy: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{location} is damaged, it is not JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{location} is damaged, it is not a JSON object but {text[:200]!r}; {remedy}"
        )
    return value


def _without_nan(value: Any) -> Any:
    """The same JSON value with null for NaN and infinities."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
