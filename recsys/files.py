"""Files that appear under their names only when whole, and folders that one process writes to."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from recsys.errors import AlreadyExists, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = [
    "alone_in",
    "appearing_whole",
    "flush_to_disk",
    "require_files",
    "require_new",
    "require_place",
]


@contextmanager
def appearing_whole(file: Path) -> Iterator[Path]:
    """Write a file that gets its name only after the disk holds all of its content.

    A power failure leaves the file that had the name before, or the new one, whole. If the `with`
    block raises, the new file is removed and never gets the name.

    Args:
        file: The name to give. A file that has it already is replaced.

    Yields:
        The path to write to, in the same folder. Close the file before the block ends.
    """
    partial = file.with_name(f"{file.name}.partial")
    try:
        yield partial
        flush_to_disk(partial)
        partial.replace(file)
        flush_to_disk(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def require_files(kind: str, files: Iterable[Path]) -> None:
    """Check that files are there, and each of them once.

    Args:
        kind: What they are, for the message.
        files: Their paths.

    Raises:
        FileNotFoundError: one is not.
        ConfigError: one is named twice, by whatever path.
    """
    seen: dict[Path, Path] = {}
    for file in files:
        if not file.is_file():
            found = "a folder" if file.is_dir() else "nothing there"
            raise FileNotFoundError(
                f"{kind} input {file} must be a file, found {found}; put it there, or name another"
            )
        place = file.resolve()
        if place in seen:
            raise ConfigError(
                f"{kind} input {file} must be named once, is the same file as {seen[place]}, named "
                "before; leave one out"
            )
        seen[place] = file


def require_new(*files: Path) -> None:
    """Check that none of some files would be overwritten, and make their folders.

    Raises:
        AlreadyExists: one is there.
    """
    for file in files:
        if file.exists():
            raise AlreadyExists(f"{file} exists already; remove it or choose another name")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)


def require_place(file: Path) -> None:
    """Check that a file can be written, or written anew, before the work that is to fill it.

    Folders above it that are not there yet can be made.

    Raises:
        ConfigError: it cannot.
    """
    if file.exists() and not file.is_file():
        kind = "a folder" if file.is_dir() else "no plain file"
        raise ConfigError(f"{file} is {kind}; name a file to be written")
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise ConfigError(f"{file} cannot be written: {folder} is no folder; choose another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{file} cannot be written: {folder} may not be written to; choose another folder"
        )


def flush_to_disk(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's names."""
    if sys.platform == "win32":  # it opens no folder, and flushes no file that is open for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def alone_in(folder: Path, command: str) -> Iterator[None]:
    """While it lasts, no other process that asks for the same works in the folder.

    Args:
        folder: Is there. The system takes the lock back when the process ends, however it does.
        command: What works there, for the message.

    Raises:
        ConfigError: another one does.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another `{command}` is at work in {folder}; wait for it to end"
            ) from None
        yield
    finally:
        os.close(handle)
