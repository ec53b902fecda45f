"""The cold tier on disk: tables and state that may be larger than memory, mapped from files.

The system's page cache has the pages in use: cached rows are read at the speed of memory, and a
write returns before the disk has the data. The files are scratch space. They have no name in their
folder, so no other module or process can open them, and the system frees them when this process
ends, in whatever way. Rows last in checkpoints.

Files are allocated at full length when they are made, so a disk that is too small is an error then.
A disk that cannot read or write a page later ends the process, as it does for every mapped file.
"""

from __future__ import annotations

import errno
import os
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch

from recsys._support.files import TOO_MUCH, existing
from recsys._support.memory import advise_random
from recsys._support.sizes import format_bytes
from recsys.errors import ColdTierError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["ColdFiles", "require_disk"]


class ColdFiles:
    """Arrays of tables in files of one folder, mapped into memory.

    Args:
        folder: Created if it does not exist.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).absolute()  # the process may change its working directory
        self._process = os.getpid()
        self._arrays: dict[str, tuple[Tensor, int]] = {}  # with the descriptors of their files

    def make(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make an array of zeros; an earlier one of the name lasts as long as something uses it.

        Args:
            name: Of a table, or of one of its state arrays.
            shape: Its shape.
            dtype: Its dtype.

        Raises:
            ColdTierError: the folder cannot be written, or the disk has no room.
        """
        num_bytes = prod(shape) * dtype.itemsize
        require_disk(self.folder, num_bytes)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.folder) as file:
                flat = torch.empty(0, dtype=dtype, device="cpu")
                if num_bytes:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                    path = f"/proc/self/fd/{file.fileno()}"
                    flat = torch.from_file(path, shared=True, size=prod(shape), dtype=dtype)
                    advise_random(flat)
                descriptor = os.dup(file.fileno())
        except OSError as error:
            if error.errno in TOO_MUCH:
                raise _no_room(self.folder, num_bytes, error.errno or errno.ENOSPC) from error
            raise ColdTierError(
                error.errno,
                f"{self.folder}: must be a writable folder ({error.strerror}); choose another "
                "cold_path, or change its permissions",
            ) from error
        array = flat.view(tuple(shape))
        finalize(array, os.close, descriptor)
        self._arrays[name] = array, descriptor
        return array

    def keep(self, name: str, values: Tensor) -> Tensor:
        """Store values in the array of a name, which is made if there is none of their shape.

        Raises:
            ColdTierError: the disk has no room.
        """
        known, _ = self._arrays.get(name, (None, 0))
        if known is not None and known.data_ptr() == values.data_ptr():
            return values
        if known is None or (known.shape, known.dtype) != (values.shape, values.dtype):
            known = self.make(name, values.shape, values.dtype)
        return known.copy_(values)

    def move_range(self, array: Tensor, begin: int, rows: Tensor, *, is_read: bool) -> bool:
        """Copy consecutive rows between memory and a file, without its map.

        Pages that are reached through the map count as memory of the process.

        Args:
            array: Of a table.
            begin: The first row there.
            rows: In memory, of the same row size and dtype, contiguous.
            is_read: Whether rows are read from the file, or written to it.

        Returns:
            Whether the array is in a file; else nothing is copied.

        Raises:
            ColdTierError: the disk cannot read or write the file.
        """
        address = array.data_ptr()
        found = [
            number for known, number in list(self._arrays.values()) if known.data_ptr() == address
        ]
        left: Any = rows.view(-1).view(torch.uint8).numpy()
        offset = begin * array.itemsize * array.shape[1:].numel()
        while found and left.size:
            try:
                moved = (os.preadv if is_read else os.pwritev)(found[0], [left], offset)
            except OSError as error:
                raise ColdTierError(
                    error.errno,
                    f"{self.folder}: rows cannot be {'read' if is_read else 'written'} "
                    f"({error.strerror}); load a checkpoint into new tables",
                ) from error
            if not moved:
                raise ColdTierError(f"{self.folder}: a file was cut off; load a checkpoint again")
            left, offset = left[moved:], offset + moved
        return bool(found)

    def require_owner(self) -> None:
        """Check that this process made the files: two that write rows would mix them.

        Raises:
            ColdTierError: it was forked from the process that did.
        """
        if os.getpid() != self._process:
            raise ColdTierError(
                f"{self.folder}: this process was forked from the one that opened the files, which "
                "alone may train on them and write them; evaluate under torch.no_grad() here, or "
                "build the model in this process"
            )


def require_disk(folder: Path, num_bytes: int) -> None:
    """Check that a folder can be written to, and has room for files.

    Args:
        folder: The folder; if it does not exist, its disk is that of the folder above it.
        num_bytes: Bytes of the files.

    Raises:
        ColdTierError: no permission to write, or no room on the disk.
    """
    path = existing(folder)
    if not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
        raise ColdTierError(
            f"{folder}: must be a writable folder, and {path} may not be written to; choose "
            "another cold_path, or change its permissions"
        )
    disk = os.statvfs(path)
    # Some file systems do not report their size.
    if disk.f_blocks and num_bytes > disk.f_bavail * disk.f_frsize:
        raise _no_room(folder, num_bytes, errno.ENOSPC)


def _no_room(folder: Path, num_bytes: int, number: int) -> ColdTierError:
    disk = os.statvfs(existing(folder))
    return ColdTierError(
        number,
        f"{folder}: new tables or their state take {format_bytes(num_bytes)} on disk, and "
        f"{format_bytes(disk.f_bavail * disk.f_frsize)} are free ({os.strerror(number)}); free "
        "some space, or choose another cold_path",
    )
