"""A folder whose files grow at their ends, and that falls back to its last commit.

    FOLDER/made_by_recsys.txt    says whose the folder is: without it, nothing is ever removed
           committed.json        how long every file was at the last commit, and what was said then
           ...                   files, in sub-folders or not

Long work that a killed process must not lose commits now and then; the next process calls
`roll_back` and goes on from there. A commit costs what is new: files are flushed, not copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from recsys.errors import AlreadyExists, StoreError
from recsys.files import appearing_whole, flush_to_disk

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["GrowingFolder"]

_MARKER = "made_by_recsys.txt"
_MARKER_TEXT = "recsys made this folder, keeps unfinished work in it and will remove it.\n"
_RECORD = "committed.json"


class GrowingFolder:
    """A folder with a record of what of it is committed.

    Files must only be added or made longer; what is behind their committed ends is nobody's.

    Args:
        path: The folder; it need not be there before `claim`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._marker = path / _MARKER
        self._record = path / _RECORD
        self._own_files = {self._marker, self._record}

    @property
    def is_ours(self) -> bool:
        """Whether `claim` made the folder, so that what is in it may be removed."""
        return self._marker.is_file()

    def claim(self) -> None:
        """Make the folder ours, which an empty one or one that is ours already can become.

        Raises:
            AlreadyExists: something else is in it.
        """
        if self.is_ours:
            return
        others = [path.name for path in self.path.iterdir()]
        if others:
            raise AlreadyExists(
                f"{self.path} must be empty or have the {_MARKER} of one that recsys made, but has "
                f"{min(others)!r}; move it away or choose another name"
            )
        self._marker.write_text(_MARKER_TEXT)
        for path in (self._marker, self.path):
            flush_to_disk(path)

    @property
    def has_commit(self) -> bool:
        """Whether anything was ever committed."""
        return self._record.is_file()

    def commit(self, about: Mapping[str, Any]) -> None:
        """Have the disk hold all files as they are now, then say so in one step.

        Args:
            about: What `roll_back` is to return; JSON types only.
        """
        paths = sorted(path for path in self.path.rglob("*") if path not in self._own_files)
        for path in (*paths, self.path):
            flush_to_disk(path)
        content = {
            "about": dict(about),
            "num_bytes": {
                path.relative_to(self.path).as_posix(): path.stat().st_size
                for path in paths
                if path.is_file()
            },
        }
        with appearing_whole(self._record) as partial:
            partial.write_text(json.dumps(content | {"sha256": _sum(content)}, indent=2) + "\n")

    def roll_back(self) -> dict[str, Any] | None:
        """Put every file back to what it was at the last commit; remove those made since.

        Returns:
            What was said at the commit; None where there was none, and nothing is kept then.

        Raises:
            StoreError: the record, or a file it names, is damaged.
        """
        content = self._read_record() if self.has_commit else {"about": None, "num_bytes": {}}
        num_bytes: dict[str, int] = content["num_bytes"]
        for name, committed in num_bytes.items():
            file = self.path / name
            found = file.stat().st_size if file.is_file() else 0
            if found < committed or not file.is_file():
                raise self.damaged(f"{file} must have {committed} bytes at least, has {found}")
        for path in sorted(self.path.rglob("*"), reverse=True):  # files before their folders
            name = path.relative_to(self.path).as_posix()
            if name in num_bytes:
                if path.stat().st_size > num_bytes[name]:
                    os.truncate(path, num_bytes[name])
            elif path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path not in self._own_files:
                path.unlink()
        about: dict[str, Any] | None = content["about"]
        return about

    def forget(self) -> None:
        """Have nothing committed any more; files stay until the next `roll_back`."""
        self._record.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder; killed half-way, it leaves one of ours without a commit, or empty."""
        self.forget()
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != self._marker:
                path.unlink()
        self._marker.unlink(missing_ok=True)
        self.path.rmdir()

    def damaged(self, what: str) -> StoreError:
        """The error for something in the folder that cannot be gone on with."""
        return StoreError(
            f"{what}: what was prepared so far is damaged; remove {self.path} to begin anew"
        )

    def _read_record(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = dict(json.loads(self._record.read_text()))
            claimed = content.pop("sha256")
        except (ValueError, TypeError, KeyError) as error:
            raise self.damaged(f"{self._record} is no record of a commit ({error!r})") from error
        if claimed != _sum(content):
            raise self.damaged(f"{self._record} is not what was written: its sha256 differs")
        return content


def _sum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
