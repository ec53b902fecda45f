"""Files that appear under their names only when whole."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from recsys.errors import AlreadyExists

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["appearing_whole", "require_new"]


@contextmanager
def appearing_whole(file: Path) -> Iterator[Path]:
    """A file to write to; it gets its name when it is written, or is removed where that fails."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        yield partial
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


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
