"""The folder in which a run keeps the rows of its cold tier "file"."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from recsys.embeddings.tiers.cold.left_files import remove_cold_files
from recsys.errors import AlreadyExists

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from recsys.config import TrainConfig

__all__ = ["cold_folder", "remove_left_rows", "remove_own_folder"]


@contextmanager
def cold_folder(config: TrainConfig, run_dir: Path) -> Iterator[str]:
    """The folder for rows in files: `cold_path`, or one that is deleted after the run.

    Raises:
        AlreadyExists: the folder exists.
    """
    if config.cold_tier == "host" or config.cold_path:
        if config.cold_path and Path(config.cold_path).exists():
            raise AlreadyExists(
                f"cold_path {config.cold_path} exists, but training starts with new rows; choose "
                "another, or delete it"
            )
        yield config.cold_path
        return
    own = _own_folder(run_dir)
    if own.exists():
        raise AlreadyExists(
            f"{own}, the folder for rows in files, exists; delete it, or set cold_path"
        )
    try:
        yield str(own)
    finally:
        shutil.rmtree(own, ignore_errors=True)  # the run folder holds the model


def remove_left_rows(
    config: TrainConfig, before: TrainConfig, run_dir: Path, tables: Collection[str]
) -> None:
    """Remove the row files that an interrupted run left: its checkpoint has the rows.

    The folder `cold_path` is removed if it was the run's before, and holds nothing else. Several
    processes have a folder each in it.

    Args:
        config: The configuration to continue with.
        before: The configuration that the run had.
        run_dir: The folder of the run.
        tables: The names of its tables.

    Raises:
        ColdTierError: `cold_path` holds something else, or is in use.
    """
    remove_own_folder(run_dir)
    path = Path(config.cold_path)
    if config.cold_path and config.cold_path == before.cold_path and path.exists():
        of_ranks = list(path.glob("*.rank-*-of-*"))
        for folder in of_ranks:
            remove_cold_files(folder, tables)
        if of_ranks and not any(path.iterdir()):
            path.rmdir()
        else:
            remove_cold_files(path, tables)


def remove_own_folder(run_dir: Path) -> None:
    """Remove the folder for rows in files that a run makes if it is given no `cold_path`."""
    shutil.rmtree(_own_folder(run_dir), ignore_errors=True)


def _own_folder(run_dir: Path) -> Path:
    return Path(f"{run_dir}.cold")
