"""Export of a run's model to the formats of other programs.

format        content of FILE
safetensors   the state dict of any model, without pickle; `dlrm` and `dcn_v2` have the keys of
              TorchRec's `DLRM` and `DLRM_DCN` (tables `t_<table>`)
torch-export  a program for `torch.export.load`, which runs without recsys (`program`)

Checkpoints of a run, also of one that goes on, are exported as safetensors: whole, or only the rows
that changed (`deltas`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from recsys._support.files import appearing_whole, require_new
from recsys.errors import ConfigError
from recsys.train.exports import FORMATS
from recsys.train.exports.deltas import export_checkpoint, export_delta
from recsys.train.run_folder import RunFolder

__all__ = ["FORMATS", "export_run", "export_run_checkpoint", "export_run_delta"]


def export_run(run_dir: str | Path, to: str, file: str | Path, quantize: str | None = None) -> Path:
    """Write the model of a run in another program's format.

    Args:
        run_dir: A run that saved its model.
        to: One of `FORMATS`.
        file: A new file.
        quantize: For a program: "int8" to round rows to int8, with a scale for each row.

    Returns:
        The file.

    Raises:
        ConfigError: the format is unknown or does not fit the name of the file, `run_dir` is not a
            run, the run saved no model, or its data, which a program is traced with, is gone.
        AlreadyExists: `file` exists.
    """
    if to not in FORMATS:
        raise ConfigError(f"export: the format must be one of {FORMATS}, got {to!r}")
    if to == "torch-export":
        from recsys.train.exports.program import export_program  # imports all of training

        return export_program(run_dir, file, quantize)
    folder, file = RunFolder.open(run_dir), Path(file)
    folder.require_model()
    require_new(file)
    with appearing_whole(file) as partial:
        shutil.copyfile(folder.model_file, partial)
    return file


def export_run_checkpoint(run_dir: str | Path, file: str | Path, number: int | None = None) -> Path:
    """Write the whole model of a run's checkpoint, as safetensors; the run may go on meanwhile.

    Args:
        run_dir: A run with checkpoints.
        file: A new file.
        number: Number of the checkpoint; None for the newest complete one.

    Returns:
        The file.

    Raises:
        AlreadyExists: `file` exists.
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError: `run_dir` is not a run.
        OSError: the disk is full, or cannot be written.
    """
    return export_checkpoint(RunFolder.open(run_dir).checkpoints_folder, file, number)


def export_run_delta(run_dir: str | Path, file: str | Path, since: int) -> Path:
    """Write the rows that changed after a checkpoint of a run; see `export_delta`.

    Args:
        run_dir: A run with checkpoints.
        file: A new file.
        since: Number of the older checkpoint.

    Raises:
        AlreadyExists, CheckpointError, ConfigError: as for `export_run_checkpoint`.
    """
    return export_delta(RunFolder.open(run_dir).checkpoints_folder, file, since)
