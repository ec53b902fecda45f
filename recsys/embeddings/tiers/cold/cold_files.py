"""The arrays of tables on disk: rows and state that may be larger than memory.

The files are scratch space. They have no name in their folder, so no other module or process can
open them, and the system frees them when this process ends, in whatever way. Rows last in
checkpoints.

Files are allocated at full length when they are made, so a disk that is too small is an error then.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING
from weakref import finalize

import torch

from recsys._support.files import TOO_MUCH, existing
from recsys._support.memory import advise_random
from recsys._support.sizes import format_bytes
from recsys.errors import ColdTierError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

__all__ = ["ColdFiles", "OpenArray", "require_disk"]


@dataclass(frozen=True, eq=False)
class OpenArray:
    """An array and its open file, which is closed with this object.

    Attributes:
        name: Its folder, table and name, for errors.
        descriptor: The descriptor of the file, open for reading and writing.
        tensor: The array, mapped into memory.
    """

    name: str
    descriptor: int
    tensor: Tensor


class ColdFiles:
    """The arrays of some tables in one folder.

    Args:
        folder: Created if it does not exist.
        tables: Shape and dtype of every table, by name. Their rows are zeros.
        state_bytes: Bytes of the state arrays that these tables will have; tables are not made on a
            disk that has no room for both.

    Attributes:
        folder: The folder.

    Raises:
        ColdTierError: the folder cannot be written, or the disk has no room for the tables.
    """

    def __init__(
        self,
        folder: Path | str,
        tables: Mapping[str, tuple[Sequence[int], torch.dtype]],
        state_bytes: int = 0,
    ) -> None:
        self.folder = Path(folder).absolute()  # the process may change its working directory
        self._open: dict[tuple[str, str], OpenArray] = {}
        self._by_address: dict[int, OpenArray] = {}
        self._expects_lookups = False
        self._process = os.getpid()
        row_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in tables.values())
        # Checked before allocating, so that the attempt does not fill the disk for other programs.
        require_disk(self.folder, row_bytes + state_bytes)
        for name, (shape, dtype) in tables.items():
            self.make(name, "weight", shape, dtype)

    def begin_with(self, table: str, values: Tensor | None) -> Tensor:
        """The rows of a table, initialized if values are given.

        Args:
            table: Name of the table.
            values: Initial values; None for zeros.
        """
        rows = self._open[table, "weight"].tensor
        return rows if values is None else rows.copy_(values)

    def make(self, table: str, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make an array of zeros, in the place of an earlier one that no transfer uses any more.

        Args:
            table: Name of the table.
            name: "weight", or the name of a state array.
            shape: Its shape.
            dtype: Its dtype.

        Raises:
            ColdTierError: the folder cannot be written, or the disk has no room.
        """
        before = self._open.pop((table, name), None)
        if before is not None:
            self._by_address.pop(before.tensor.data_ptr(), None)
            del before
        num_bytes = prod(shape) * dtype.itemsize
        require_disk(self.folder, num_bytes)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.folder) as file:
                if num_bytes:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                    path = f"/proc/self/fd/{file.fileno()}"
                    flat = torch.from_file(path, shared=True, size=prod(shape), dtype=dtype)
                else:
                    flat = torch.empty(0, dtype=dtype, device="cpu")
                descriptor = os.dup(file.fileno())
        except OSError as error:
            if error.errno in TOO_MUCH:
                raise _no_room(self.folder, num_bytes, error.errno or errno.ENOSPC) from error
            raise ColdTierError(
                error.errno,
                f"{self.folder}: must be a writable folder ({error.strerror}); choose another "
                "cold_path, or change its permissions",
            ) from error
        where = f"{self.folder}: {name!r} of table {table!r}"
        opened = OpenArray(where, descriptor, flat.view(tuple(shape)))
        finalize(opened, os.close, descriptor).atexit = False
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self._open[table, name] = opened
        if num_bytes:
            self._by_address[flat.data_ptr()] = opened
        return opened.tensor

    def keep(self, table: str, name: str, values: Tensor) -> Tensor:
        """Store values in an array, which is made if there is none of their shape and dtype.

        Raises:
            ColdTierError: the disk has no room.
        """
        opened = self._open.get((table, name))
        known = None if opened is None else opened.tensor
        if known is None or (known.shape, known.dtype) != (values.shape, values.dtype):
            known = self.make(table, name, values.shape, values.dtype)
        return known.copy_(values)

    def find(self, tensor: Tensor) -> OpenArray | None:
        """The array that a tensor maps; None if the tensor has other memory."""
        return self._by_address.get(tensor.data_ptr())

    def require_owner(self) -> None:
        """Check that this process opened the files: two that write rows would mix them.

        Raises:
            ColdTierError: it was forked from the process that did.
        """
        if os.getpid() != self._process:
            raise ColdTierError(
                f"{self.folder}: this process was forked from the one that opened the files, which "
                "alone may train on them and write them; evaluate under torch.no_grad() here, or "
                "build the model in this process"
            )

    def expect(self, *, lookups: bool) -> None:
        """Tell the system how the mapped tensors will be read.

        Args:
            lookups: True for reads of scattered rows, where read-ahead would load unneeded pages;
                False for reads from beginning to end.
        """
        if lookups != self._expects_lookups:
            self._expects_lookups = lookups
            for each in self._by_address.values():
                advise_random(each.tensor, is_random=lookups)


def require_disk(folder: Path, num_bytes: int) -> None:
    """Check that a folder can be written to, and has room for the files of tables and their state.

    Args:
        folder: The folder; if it does not exist, its disk is that of the folder above it.
        num_bytes: Bytes of the files.

    Raises:
        ColdTierError: no permission to write, or no room on the disk.
    """
    place = existing(folder)
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        raise ColdTierError(
            f"{folder}: must be a writable folder, and {place} may not be written to; choose "
            "another cold_path, or change its permissions"
        )
    disk = os.statvfs(place)
    # Some file systems do not report their size.
    if disk.f_blocks and num_bytes > disk.f_bavail * disk.f_frsize:
        raise _no_room(folder, num_bytes, errno.ENOSPC)


def _no_room(folder: Path, num_bytes: int, number: int) -> ColdTierError:
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
