"""Checks of paths that commands make before they import PyTorch, which takes seconds.

A command calls the check that the library makes again later, so that a mistake has the same message
there, and is told at once here.
"""

from __future__ import annotations

from pathlib import Path

from recsys.config import SYNTHETIC_PREFIX
from recsys.datasets.store_meta import read_meta
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
    """Check that a folder is that of a run that saved its model.

    Raises:
        ConfigError: it is not.
    """
    RunFolder.open(run).require_model()
