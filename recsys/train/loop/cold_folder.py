"""The folder in which a run keeps the rows of its cold tier "file"."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from recsys._support.files import alone_in
from recsys.embeddings.tiers.cold.left_files import remove_cold_files
from recsys.errors import AlreadyExists

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from recsys.config import TrainConfig

__all__ = ["cold_folder", "cold_path", "own_folder", "remove_left_rows", "remove_own_folder"]

_COMMAND = "recsys train"


@contextmanager
def cold_folder(config: TrainConfig, run_dir: Path) -> Iterator[str]:
    """The folder for rows in files: `cold_path`, or one that is deleted after the run.

    The latter is made and locked, so that no other run with the same `run_dir` removes it.

    Raises:
        AlreadyExists: the folder exists.
        ConfigError: another run is at work in it.
    """
    path = cold_path(config, run_dir)
    if not path or config.cold_path:
        yield path
        return
    own = Path(path)
    try:
        own.mkdir(parents=True)
    except FileExistsError:  # just now
        _refuse(own)
    with alone_in(own, _COMMAND):
        try:
            yield path
        finally:
            shutil.rmtree(own, ignore_errors=True)  # the run folder holds the model


def cold_path(config: TrainConfig, run_dir: Path) -> str:
    """The path of `cold_folder`; "" if rows are in memory. Nothing is made.

    Raises:
        AlreadyExists: the folder exists.
        ConfigError: another run is at work in it.
    """
    if config.cold_tier == "host" or config.cold_path:
        if config.cold_path and Path(config.cold_path).exists():
            raise AlreadyExists(
                f"cold_path {config.cold_path} exists, but training starts with new rows; choose "
                "another, or delete it"
            )
        return config.cold_path
    own = own_folder(run_dir)
    if own.exists():
        _refuse(own)
    return str(own)


def _refuse(own: Path) -> NoReturn:
    """Refuse a folder that exists; one that a run is at work in must not be deleted."""
    if own.is_dir():
        with alone_in(own, _COMMAND):
            pass
    raise AlreadyExists(f"{own}, the folder for rows in files, exists; delete it, or set cold_path")


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
    """Remove the folder for rows in files that a run makes if it is given no `cold_path`.

    Raises:
        ConfigError: a run is at work in it, which may not have made `run_dir` yet.
    """
    own = own_folder(run_dir)
    if own.is_dir():
        with alone_in(own, _COMMAND):
            shutil.rmtree(own, ignore_errors=True)


def own_folder(run_dir: Path) -> Path:
    """The folder for rows in files beside that of a run, which may be the current one."""
    has_no_name = run_dir.name in ("", "..")
    return Path(f"{run_dir.resolve() if has_no_name else run_dir}.cold")
