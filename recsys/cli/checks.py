"""Checks of paths that commands make before they import PyTorch, which takes seconds.

A command calls the check that the library makes again later, so that a mistake has the same message
there, and is told at once here.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from recsys._support.files import as_argument
from recsys.config import SYNTHETIC_PREFIX
from recsys.datasets.store_writer import read_meta
from recsys.errors import ConfigError
from recsys.train.run_files.run_folder import RunFolder

__all__ = ["require_data", "require_model"]


def require_data(data: str) -> None:
    """Check that data is synthetic, or a store.

    Raises:
        StoreError: it is neither.
    """
    if not data.startswith(SYNTHETIC_PREFIX):
        read_meta(Path(data))


def require_model(run: str) -> None:
    """Check that a folder is that of a run that saved its model; warn if the run did not finish.

    Raises:
        ConfigError: it is not.
    """
    folder = RunFolder.open(run)
    folder.require_model()
    status, may_continue = "", True
    if folder.record_file.is_file():
        try:
            record = folder.read_record()
        except ConfigError:  # a damaged record does not concern the model
            return
        status = record["status"]
        may_continue = record.get("checkpoints") is not None and status != "diverged"
    if status != "finished":
        command = f"recsys train --run {as_argument(run)} --resume"
        way_on = f"; continue it by `{command}`" if may_continue else ""
        warnings.warn(
            f"{run} {_ENDS.get(status, 'has not ended')}, and this is the model that it saved when "
            f"it last stopped{way_on}",
            stacklevel=2,
        )


_ENDS = {"interrupted": "was interrupted", "failed": "failed", "diverged": "diverged"}
