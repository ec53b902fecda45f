"""Which files hold tables, by their names alone; and what reading one needs: pyarrow, a hash."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

from recsys._support.files import listed_files, require_files
from recsys.errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["HashingFile", "find_files", "import_pyarrow", "kind_of"]

_TEXT_SUFFIXES = (".csv", ".tsv", ".txt")
_PARQUET_SUFFIXES = (".parquet", ".pq")
_COMPRESSED_SUFFIXES = (".gz", ".zst")
_CHUNK_BYTES = 4 << 20


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files that paths name; a folder stands for all tables in it, in order of their paths.

    Files and folders in it whose names begin with a dot or an underscore are left out: programs
    keep copies and unfinished files under such names.

    Raises:
        FileNotFoundError: a path does not exist, or a folder has no table in it.
        ConfigError: `paths` is no list, or empty, or two paths lead to the same file, or to one and
            its compressed copy.
    """
    files: list[Path] = []
    for path in listed_files("files", paths):
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and kind_of(file) and not _is_hidden(file.relative_to(path))
        )
        if not inside:
            raise FileNotFoundError(
                f"folder {path} must hold CSV, TSV or Parquet files, found none; name another"
            )
        files += inside
    require_files("table", files)
    seen: dict[Path, Path] = {}
    for file in files:
        plain = file.with_suffix("") if file.suffix.lower() in _COMPRESSED_SUFFIXES else file
        plain = plain.absolute()
        if seen.setdefault(plain, file) is not file:
            raise ConfigError(
                f"{file} and {seen[plain]} must be two tables, but one is named like a compressed "
                "copy of the other; leave one out, or rename it"
            )
    return files


def kind_of(path: Path) -> str:
    """The kind of a table's file: "parquet", "text", or empty for a name that says none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PARQUET_SUFFIXES:
        return "parquet"
    if suffixes and suffixes[-1] in _COMPRESSED_SUFFIXES:
        suffixes.pop()
    return "text" if suffixes and suffixes[-1] in _TEXT_SUFFIXES else ""


def import_pyarrow() -> Any:
    """The package pyarrow.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependency(
            "tables need pyarrow, which is not installed; pip install pyarrow"
        ) from error
    return pyarrow


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


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)
