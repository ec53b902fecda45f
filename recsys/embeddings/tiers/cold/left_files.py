"""Removes the row files of a process that ended before it deleted them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import unquote

from recsys.embeddings.tiers.cold.folder_lock import lock_folder
from recsys.embeddings.tiers.cold.last_sync import sync_deleted
from recsys.errors import ColdTierError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

__all__ = ["remove_cold_files"]

_FILES = ("arrays.json", "arrays.json.partial", "lock")


def remove_cold_files(folder: Path, tables: Collection[str]) -> None:
    """Delete the row files of some tables, file by file, and then their folder.

    Args:
        folder: An existing path.
        tables: The names of the tables.

    Raises:
        ColdTierError: a process has the folder open, or it holds a file that is not of these
            tables. Nothing was deleted then.
    """
    if folder.is_symlink() or not folder.is_dir():
        found = "a symbolic link" if folder.is_symlink() else "a file"
        raise ColdTierError(
            f"{folder}: must be a folder, is {found}, so nothing was deleted; delete it, or choose "
            "another cold_path"
        )
    for path in sorted(folder.iterdir()):
        table = unquote(path.name.removesuffix(".bin")).rpartition(".")[0]
        is_array = path.name.endswith(".bin") and table in tables
        if path.is_dir() or not (path.name in _FILES or is_array):
            raise ColdTierError(
                f"{folder}: {path.name} is not a file of the tables of this run, so nothing was "
                "deleted; move it elsewhere, or choose another cold_path"
            )
    sync_deleted()  # one of them may have this folder
    lock = lock_folder(folder)
    try:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    finally:
        os.close(lock)
