"""The folder with the checkpoints of a run on several processes.

    DIR/shards/
        after-00000012/        made by processes that began after checkpoint 12, or with 0
            layout.json        which rows each process has
            rank-0-of-2/       a folder of checkpoints, as that of a run on one process
            rank-1-of-2/

A checkpoint is complete if every process has it. Its number is higher than that of all before it,
of whatever number of processes, so the newest is the one with the highest number.
"""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, NamedTuple

from recsys._support.untrusted import is_int, parse_json
from recsys.errors import CheckpointError
from recsys.train.checkpoint.manifest import manifest_numbers, newest
from recsys.train.run_files.run_folder import write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["Layout", "Saved", "Shards", "find_saved", "newest_saved", "remove_older"]

# For each table, by its key in the model's `state_dict`: the first row of each process, and the row
# after its last one. Both are 0 for a process without rows of the table.
Layout = dict[str, list[tuple[int, int]]]
_NAME = re.compile(r"after-\d{8}")


class Shards(NamedTuple):
    """The folders of processes that train together.

    Attributes:
        folders: Their folders of checkpoints, by rank.
        layout: Which rows each has.
    """

    folders: list[Path]
    layout: Layout

    @classmethod
    def after(cls, root: Path, number: int, layout: Layout) -> Shards:
        """The folders of processes that begin now.

        Args:
            root: The folder `DIR/shards`.
            number: The highest number of a checkpoint so far; 0 if there is none.
            layout: Which rows each process has.
        """
        return cls.of(root / f"after-{number:08}", layout)

    @classmethod
    def of(cls, folder: Path, layout: Layout) -> Shards:
        """The folders of processes with this layout."""
        num_ranks = len(next(iter(layout.values())))
        return cls([folder / f"rank-{rank}-of-{num_ranks}" for rank in range(num_ranks)], layout)

    @classmethod
    def open(cls, folder: Path) -> Shards:
        """The folders of processes that have saved.

        Raises:
            CheckpointError: the layout is damaged.
        """
        return cls.of(folder, _parse(folder / "layout.json"))

    @property
    def folder(self) -> Path:
        """The folder that has those of all processes."""
        return self.folders[0].parent

    def clear(self) -> None:
        """Remove what processes left that ended before all had saved.

        Raises:
            CheckpointError: all have saved, but the layout is missing.
            OSError: it cannot be removed.
        """
        if not self.folder.exists():
            return
        by_world: dict[str, list[set[int]]] = {}
        for path in self.folder.glob("rank-*-of-*"):
            numbers = set(manifest_numbers(path))
            by_world.setdefault(path.name.rpartition("-")[2], []).append(numbers)
        for world, found in by_world.items():
            if str(len(found)) == world and set.intersection(*found):
                raise CheckpointError(
                    f"{self.folder} has a checkpoint of {world} processes, and its layout.json is "
                    "missing; copy it back, or move the folder elsewhere to train without it"
                )
        shutil.rmtree(self.folder)

    def write_layout(self) -> None:
        """Write the layout, if it is not there; the first process does, before all save.

        Raises:
            OSError: it cannot be written.
        """
        if not (self.folder / "layout.json").is_file():
            write_json(self.folder / "layout.json", self.layout)

    def numbers(self) -> list[int]:
        """Numbers of the checkpoints that every process has, ascending."""
        found = [set(manifest_numbers(folder)) for folder in self.folders]
        return sorted(set.intersection(*found))


class Saved(NamedTuple):
    """A complete checkpoint of a run.

    Attributes:
        number: Its number.
        shards: Where it is; None for the folder `DIR/checkpoints` of one process.
    """

    number: int
    shards: Shards | None


def newest_saved(checkpoints: Path, root: Path) -> Saved | None:
    """The newest complete checkpoint of a run; None if there is none.

    Args:
        checkpoints: The folder `DIR/checkpoints`.
        root: The folder `DIR/shards`.

    Raises:
        CheckpointError: a layout, or the name of the newest checkpoint, is damaged.
    """
    of_one = newest(checkpoints)
    for shards in _newest_first(root):
        numbers = shards.numbers()
        if numbers and (of_one is None or of_one < numbers[-1]):
            return Saved(numbers[-1], shards)
        if numbers:
            break
    return None if of_one is None else Saved(of_one, None)


def find_saved(checkpoints: Path, root: Path, number: int) -> Saved:
    """The checkpoint with a number; arguments as for `newest_saved`.

    It may not exist: then it is said to be in the folder of one process, which reading it refuses.

    Raises:
        CheckpointError: as for `newest_saved`; or processes have saved, and none has the number.
    """
    for shards in _newest_first(root):
        if number in shards.numbers():
            return Saved(number, shards)
    last = newest_saved(checkpoints, root)
    if last is not None and last.shards is not None and number not in manifest_numbers(checkpoints):
        raise CheckpointError(
            f"{root}: there is no complete checkpoint {number}; load the newest one, {last.number} "
            f"(--checkpoint {last.number})"
        )
    return Saved(number, None)


def remove_older(checkpoints: Path, root: Path, kept: Shards | None) -> None:
    """Remove the checkpoints of other numbers of processes: there is a newer complete one.

    Args:
        checkpoints: The folder `DIR/checkpoints`.
        root: The folder `DIR/shards`.
        kept: The folders with the newer one; None if it is in `checkpoints`.
    """
    if kept is None:
        shutil.rmtree(root, ignore_errors=True)
        return
    shutil.rmtree(checkpoints, ignore_errors=True)
    for folder in _folders(root):
        if folder != kept.folder:
            shutil.rmtree(folder, ignore_errors=True)


def _folders(root: Path) -> Sequence[Path]:
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name))


def _newest_first(root: Path) -> Iterator[Shards]:
    """The folders of processes; the numbers of each are higher than those of the next."""
    for folder in reversed(_folders(root)):
        if (folder / "layout.json").is_file():  # else the processes ended before they saved
            yield Shards.open(folder)


def _parse(file: Path) -> Layout:
    """Read a layout.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        content = parse_json(file.read_text(encoding="utf-8", errors="replace"))
        layout = {key: [(begin, end) for begin, end in ranges] for key, ranges in content.items()}
        if (
            not any(layout.values())
            or len({len(ranges) for ranges in layout.values()}) > 1
            or not all(
                is_int(begin, 0) and is_int(end, begin)
                for ranges in layout.values()
                for begin, end in ranges
            )
        ):
            raise ValueError(  # noqa: TRY301
                "each table must have, for each process, the first row and the row after the last"
            )
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged: {error}; copy it from a backup, or train from the start in "
            "another folder"
        ) from error
    return layout
