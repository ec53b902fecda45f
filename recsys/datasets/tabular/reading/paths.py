"""Which files hold tables, and of which kind: by their names alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys._support.files import listed_files, require_files
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["find_files", "kind_of"]

_TEXT_SUFFIXES = (".csv", ".tsv", ".txt")
_PARQUET_SUFFIXES = (".parquet", ".pq")
_COMPRESSED_SUFFIXES = (".gz", ".zst")


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


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)
