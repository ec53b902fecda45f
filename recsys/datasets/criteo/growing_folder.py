"""A folder of files that only grow, with commits to roll back to.

    FOLDER/made_by_recsys.txt    marks the folder; without it, recsys never removes a file
           committed.json        the length of every file at the last commit, and the caller's notes
           ...                   files, in sub-folders or not

A long job commits from time to time. If its process is killed, the next process calls `roll_back`
and continues from the last commit. A commit flushes the files and copies nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from recsys._support.files import appearing_whole, flush_to_disk
from recsys._support.untrusted import is_count, is_text, parse_json
from recsys.errors import AlreadyExists, StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["GrowingFolder"]

_MARKER = "made_by_recsys.txt"
_MARKER_TEXT = "recsys made this folder, keeps unfinished work in it and will remove it.\n"
_RECORD = "committed.json"


class GrowingFolder:
    """A folder with a record of the committed length of each file.

    Between commits, files may only be added or appended to. `roll_back` discards these changes.

    Args:
        path: The folder. It must exist when `claim` is called.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._marker = path / _MARKER
        self._record = path / _RECORD
        self._own_files = {self._marker, self._record}

    @property
    def has_marker(self) -> bool:
        """Whether `claim` marked the folder, so that recsys may remove its files."""
        return self._marker.is_file()

    def claim(self) -> None:
        """Mark an empty folder as made by recsys; does nothing if it is marked already.

        Raises:
            AlreadyExists: the folder is neither empty nor marked.
        """
        if self.has_marker:
            return
        others = [path.name for path in self.path.iterdir()]
        if others:
            raise AlreadyExists(
                f"{self.path} must be empty or made by recsys (with a {_MARKER}), but it has "
                f"{min(others)!r}; move it away or choose another name"
            )
        self._marker.write_text(_MARKER_TEXT)
        for path in (self._marker, self.path):
            flush_to_disk(path)

    @property
    def has_commit(self) -> bool:
        """Whether there is a commit."""
        return self._record.is_file()

    def commit(self, about: Mapping[str, Any]) -> None:
        """Flush all files to the disk, then record their lengths atomically.

        Args:
            about: Notes that `roll_back` returns; JSON types only.
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
        """Cut every file to its length at the last commit, and remove files made since.

        Returns:
            The notes of the commit. If there is no commit, None, and all files are removed.

        Raises:
            StoreError: the record, or a file it names, is damaged.
        """
        content = self._read_record() if self.has_commit else {"about": None, "num_bytes": {}}
        num_bytes: dict[str, int] = content["num_bytes"]
        for path in self.path.rglob("*"):
            # recsys makes no links. Appending to one would write to a file of another folder.
            if path.is_symlink():
                raise self.damaged(f"{path} must not be a symbolic link, is one")
        for name, committed in num_bytes.items():
            file = self.path / name
            found = file.stat().st_size if file.is_file() else 0
            if found < committed or not file.is_file():
                raise self.damaged(f"{file} must have at least {committed} bytes, has {found}")
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
        """Remove the commit; files stay until the next `roll_back`."""
        self._record.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder. If killed half-way, it leaves a marked folder without a commit."""
        self.forget()
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != self._marker:
                path.unlink()
        self._marker.unlink(missing_ok=True)
        self.path.rmdir()

    def damaged(self, what: str) -> StoreError:
        """The error for a damaged file in the folder."""
        return StoreError(
            f"{what}: the unfinished data are damaged; remove {self.path} to start again"
        )

    def _read_record(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = dict(parse_json(self._record.read_bytes()))
            expected = content.pop("sha256")
        except (ValueError, TypeError, KeyError) as error:
            raise self.damaged(f"{self._record} is not a commit record ({error!r})") from error
        if expected != _sum(content):
            raise self.damaged(f"{self._record} was changed: its sha256 differs")
        num_bytes = content.get("num_bytes")
        if (
            not isinstance(content.get("about"), dict)
            or not isinstance(num_bytes, dict)
            or not all(map(is_text, num_bytes))
            or not all(map(is_count, num_bytes.values()))
        ):
            raise self.damaged(f"{self._record} lacks the notes or the length of a file")
        return content


def _sum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
