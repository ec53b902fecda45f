"""Locks a folder of arrays on disk for one module of one process."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from recsys._support.files import is_at, make_folders
from recsys.errors import ColdTierError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["lock_folder"]


def lock_folder(folder: Path) -> int:
    """Lock a folder; it is created if it does not exist.

    Args:
        folder: The folder. Its lock is on the file "lock" in it.

    Returns:
        The descriptor that holds the lock until it is closed.

    Raises:
        ColdTierError: the folder cannot be written, or another module or process has locked it.
    """
    import fcntl  # does not exist on Windows, where the rest of this package works

    while True:
        try:
            make_folders(folder)
            if not os.access(folder, os.W_OK | os.X_OK):  # "lock" alone may be writable
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise ColdTierError(
                f"{folder}: must be a writable folder ({error.strerror}); choose another "
                "cold_path, or change its permissions"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise ColdTierError(
                f"{folder}: another module or process has these tables open; end that process, or "
                "delete every reference to that module before you make the next one (del model), "
                "or choose another cold_path"
            ) from error
        if is_at(descriptor, folder / "lock"):
            return descriptor
        os.close(descriptor)  # another process has just deleted the file, and its lock ended
