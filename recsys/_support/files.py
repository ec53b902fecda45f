"""Atomic writes, checks of paths before long work, and locks on folders."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from recsys.errors import AlreadyExists, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "TOO_MUCH",
    "alone_in",
    "alone_with",
    "appearing_whole",
    "as_argument",
    "existing",
    "flush_to_disk",
    "listed_files",
    "lock_if_free",
    "make_folders",
    "read_together",
    "require_files",
    "require_free",
    "require_new",
    "require_place",
]

# A file grew over what the disk, a quota, or the process's limit allows.
TOO_MUCH = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def appearing_whole(file: Path) -> Iterator[Path]:
    """Write a file atomically: it gets its name only after the disk holds its whole content.

    After a power failure, the path holds either the whole old file or the whole new one. If the
    `with` block raises, the new file is removed.

    Args:
        file: The final path. An existing file is replaced.

    Yields:
        A temporary path in the same folder, to write to. Close the file before the block ends.

    Raises:
        BlockingIOError: another process, or another `with` block, is writing the file.
        OSError: the file cannot be written; on a full disk, or over a quota or a limit, the error
            names the final path.
    """
    partial = file.with_name(f"{file.name}.partial")
    lock = None
    try:
        lock = _locked_at(partial, file)
        os.ftruncate(lock, 0)  # a killed process may have left it
        try:
            yield partial
            flush_to_disk(partial)
            partial.replace(file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        with suppress(PermissionError):  # a folder that may be written to, and not read
            flush_to_disk(file.parent)
    except OSError as error:
        if error.errno in TOO_MUCH:  # has no name, or that of a file that was read
            error.filename = str(file)
            del error.filename2  # None would be printed as a second name
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _locked_at(path: Path, name: Path) -> int:
    """Open a file, which is made if it is missing, and lock it against other processes.

    Args:
        path: The file.
        name: What the error names.

    Returns:
        The descriptor that holds the lock. On a file system without such locks it holds none.

    Raises:
        BlockingIOError: another process, or another descriptor, holds the lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        is_locked = _lock(descriptor)
        with suppress(FileNotFoundError):  # another process has renamed or removed it
            if is_locked and os.path.samestat(os.fstat(descriptor), path.lstat()):
                return descriptor
        os.close(descriptor)
        if not is_locked:
            raise BlockingIOError(errno.EAGAIN, "another process is writing it", str(name))


def _lock(descriptor: int, *, is_shared: bool = False) -> bool:
    """Lock a file or a folder against other processes, if its file system can.

    Args:
        descriptor: The open file or folder.
        is_shared: Lock it against exclusive locks alone, and wait until there is none.

    Returns:
        False if another process, or another descriptor, holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # file systems of networks may have no locks of whole files
    return True


def require_files(kind: str, files: Iterable[Path]) -> None:
    """Check that input files exist and that none is named twice.

    Args:
        kind: Kind of input, for the message.
        files: Their paths.

    Raises:
        FileNotFoundError: a file does not exist.
        ConfigError: two paths lead to the same file.
    """
    seen: dict[Path, Path] = {}
    for file in files:
        if not file.is_file():
            found = "a folder" if file.is_dir() else "no plain file"
            found = found if file.exists() else "nothing there"
            raise FileNotFoundError(
                f"{kind} input {file} must be a file, found {found}; create it, or name another"
            )
        path = file.resolve()
        if path in seen:
            raise ConfigError(
                f"{kind} input {file} must be named once, is the same file as {seen[path]}; leave "
                "one out"
            )
        seen[path] = file


def listed_files(name: str, files: Sequence[str | Path]) -> list[Path]:
    """The paths of an argument that is a list of at least one file.

    Args:
        name: Of the argument.
        files: Its value.

    Raises:
        ConfigError: it is empty, or a single path.
    """
    if isinstance(files, str | os.PathLike) or not files:
        raise ConfigError(f"{name} must be a list of at least one file, got {files!r}")
    return [Path(file) for file in files]


def as_argument(path: Path | str) -> str:
    """A path in a command that a message names, in quotes where a shell needs them."""
    return shlex.quote(str(path))


def require_free(store: Path) -> None:
    """Check that a new store can have this name; a link to nothing takes it, too.

    Raises:
        AlreadyExists: it cannot.
    """
    if os.path.lexists(store):
        found = "is a file" if store.is_file() else "exists already"
        raise AlreadyExists(f"{store} {found}; choose another folder for the store")


def require_new(*files: Path) -> None:
    """Check that no file would be overwritten, and create the folders above them.

    Raises:
        AlreadyExists: a file exists.
    """
    for file in files:
        if file.exists():
            raise AlreadyExists(f"{file} exists already; choose another name")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)


def require_place(file: Path) -> None:
    """Check that a file can be created or replaced, before the work that produces its content.

    Folders above the file may be missing, as long as they can be created.

    Raises:
        ConfigError: the file cannot be written.
    """
    if file.exists() and not file.is_file():
        kind = "a folder" if file.is_dir() else "not a plain file"
        raise ConfigError(f"{file} is {kind}; name a file to be written")
    folder = existing(file.absolute().parent)
    if not folder.is_dir():
        raise ConfigError(
            f"{file} cannot be written: {folder} is not a folder; choose another name"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{file} cannot be written: no permission to write to {folder}; choose another folder"
        )


def existing(path: Path) -> Path:
    """A path, or if it does not exist, the nearest one above it that does."""
    return next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())


def make_folders(folder: Path) -> None:
    """Make a folder and those above it that are missing, and flush their names to the disk.

    Flushing a file in a new folder need not flush the folder's own name.
    """
    missing = [directory for directory in (folder, *folder.parents) if not directory.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        with suppress(PermissionError):  # a folder that may be written to, and not read
            flush_to_disk(directory.parent)


def flush_to_disk(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def alone_in(folder: Path, command: str) -> Iterator[None]:
    """Hold an exclusive lock on a folder for the duration of the `with` block.

    The lock is on the folder itself, so it adds no file to it. The system releases the lock when
    the process ends, even if it is killed.

    Args:
        folder: An existing folder.
        command: The command that uses it, for the message.

    Raises:
        ConfigError: another process, or another `with` block, holds the lock.
    """
    with lock_if_free(folder) as is_locked:
        if not is_locked:
            raise ConfigError(f"another `{command}` is at work in {folder}; wait for it to end")
        yield


@contextmanager
def alone_with(file: Path, refusal: str) -> Iterator[None]:
    """Hold an exclusive lock on a file that is made for it, and removed at the end.

    Nothing is locked on a file system without such locks.

    Args:
        file: Its path.
        refusal: The message of the error.

    Raises:
        ConfigError: another process, or another `with` block, holds the lock.
    """
    try:
        descriptor = _locked_at(file, file)
    except BlockingIOError:
        raise ConfigError(refusal) from None
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:  # not a forked process, which ends earlier
            file.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def read_together(folder: Path) -> Iterator[None]:
    """Hold a shared lock on a folder while its files are read; see `lock_if_free`.

    A folder that does not exist is not locked, nor is one on a file system without such locks.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        yield
        return
    try:
        _lock(descriptor, is_shared=True)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def lock_if_free(folder: Path) -> Iterator[bool]:
    """Hold an exclusive lock on a folder, unless another holds a lock on it, as `read_together`.

    Yields:
        Whether the folder is locked. Always true on a file system without such locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)
