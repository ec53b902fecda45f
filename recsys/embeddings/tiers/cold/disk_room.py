"""Whether a disk has room for the files of tables, and the error if it has not."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from recsys._support.files import existing
from recsys._support.sizes import format_bytes
from recsys.errors import ColdTierError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["no_room", "require_disk"]


def require_disk(folder: Path, num_bytes: int) -> None:
    """Check that a folder can be written to, and has room for the files of tables and their state.

    Args:
        folder: The folder; if it does not exist, its disk is that of the folder above it.
        num_bytes: Bytes of the files.

    Raises:
        ColdTierError: no permission to write, or no room on the disk.
    """
    place = existing(folder)
    if not os.access(place, os.W_OK | os.X_OK):
        raise ColdTierError(
            f"{folder}: must be a writable folder, and {place} may not be written to; choose "
            "another cold_path, or change its permissions"
        )
    disk = os.statvfs(place)
    # Some file systems do not report their size.
    if disk.f_blocks and num_bytes > disk.f_bavail * disk.f_frsize:
        raise no_room(folder, num_bytes, errno.ENOSPC)


def no_room(folder: Path, num_bytes: int, number: int) -> ColdTierError:
    """The error about files that cannot be allocated.

    Args:
        folder: Their folder.
        num_bytes: Their bytes.
        number: What the system said, an `errno`.
    """
    disk = os.statvfs(existing(folder))
    return ColdTierError(
        number,
        f"{folder}: new tables or their state take {format_bytes(num_bytes)} on disk, and "
        f"{format_bytes(disk.f_bavail * disk.f_frsize)} are free ({os.strerror(number)}); free "
        "some space, or choose another cold_path",
    )
