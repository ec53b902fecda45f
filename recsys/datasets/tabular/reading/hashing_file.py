"""A file whose SHA-256 is computed while it is read."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["HashingFile"]

_CHUNK_BYTES = 4 << 20


class HashingFile:
    """A file that is read once, from its start, by anything that takes a Python file.

    Args:
        path: The file.
        with_hash: Whether to compute the hash.

    Attributes:
        num_bytes: Bytes read so far; the size of the file after `finish`.
    """

    def __init__(self, path: Path, *, with_hash: bool = True) -> None:
        self._file = path.open("rb")
        self._hash = hashlib.sha256() if with_hash else None
        self.num_bytes = 0

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._file.closed

    def read(self, size: int = -1) -> bytes:
        """Read the next bytes; fewer than `size` only at the end of the file."""
        data = self._file.read(size)
        if self._hash is not None:
            self._hash.update(data)
        self.num_bytes += len(data)
        return data

    def readable(self) -> bool:
        """True: it is open for reading."""
        return True

    def close(self) -> None:
        """Do nothing, for readers that close what they were given: `finish` closes the file."""

    def finish(self) -> str:
        """Close the file; returns the hash of its whole content, in hex, or "" without a hash.

        With a hash, what is left of the file is read before.
        """
        if self._hash is None:
            self.num_bytes = os.fstat(self._file.fileno()).st_size
            self._file.close()
            return ""
        while self.read(_CHUNK_BYTES):
            pass
        self._file.close()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        """Close the file before its end."""
        self._file.close()
