"""Prepare Criteo 1TB day files as a store, day by day; an interrupted run can be resumed.

The data are treated as by facebookresearch/dlrm with `--data-set=terabyte`: the `classic`
convention of `kaggle`, with ids taken modulo `max_ind_range` (if given) before they are numbered.
All days but the last are for training. The first half of the last day (rounded up) is the test
part, the second half the validation part. A single day is split by `classic_splits`. One
difference: a line without a label is an error here.

While it grows, a store lies in a folder beside its final name:

    STORE.unfinished/made_by_recsys.txt   marks the folder as made by recsys
                     committed.json       the days that are completely written; see `GrowingFolder`
                     ids/cat_0.bin        the ids of the rows of column 0, in order; and so on
                     store/               is renamed to STORE at the end

A day is committed when its samples and its new ids are on the disk. An interrupted run loses only
the day that it was reading: the same command continues after the last committed day and ends with
the same bytes. The hash tables are built again from the ids.

References:
    facebookresearch/dlrm, data_utils.py: `getCriteoAdData`, `transformCriteoAdData`.
"""

from __future__ import annotations

import hashlib
import re
import sys
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from recsys._support.arguments import is_whole
from recsys._support.files import (
    alone_in,
    describe_taken,
    is_taken,
    listed_files,
    require_files,
)
from recsys._support.untrusted import is_count, is_text
from recsys.datasets.criteo.flow import (
    CATEGORY_NAMES,
    INTEGER_NAMES,
    CriteoFlow,
    PrepareReport,
    progress_bar,
)
from recsys.datasets.criteo.growing_folder import GrowingFolder
from recsys.datasets.criteo.row_numbers import RowNumbers
from recsys.datasets.criteo.text import not_criteo
from recsys.datasets.splits import day_splits
from recsys.datasets.store import StoreWriter
from recsys.errors import AlreadyExists, ConfigError, DatasetFormatError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["prepare_criteo_1tb"]

_VERSION = 1
_COMMAND = "recsys prepare criteo-1tb"
_SOURCE_KEYS = ("name", "num_bytes", "sha256", "num_samples")
_COUNT_KEYS = ("num_bytes", "num_samples", "num_bad_lines", "changed_ns")


def prepare_criteo_1tb(
    day_files: Sequence[str | Path],
    store: str | Path,
    *,
    max_ind_range: int | None = None,
    skip_bad_lines: bool = False,
    num_threads: int | None = None,
    show_progress: bool = True,
) -> PrepareReport:
    """Read day files, in the order given, and write a store. Resumes an interrupted run.

    To resume, the first day files must be the committed ones, unchanged, and `max_ind_range` must
    be the same. `skip_bad_lines` may be switched on; it may be switched off if no line was skipped
    before. A day counts as unchanged if its size and modification time are unchanged; if only the
    time differs, its sha256 is compared.

    Args:
        day_files: Tab-separated text, plain, gzip or zst, oldest day first.
        store: The store's folder, which must not exist.
        max_ind_range: Take ids modulo this, which limits the rows of each table.
        skip_bad_lines: Skip bad lines, and count and list them, instead of stopping at the first.
        num_threads: Threads that parse and number; one per core by default.
        show_progress: Draw a progress bar over the raw bytes. Also print where a run resumes, and
            which folder a failed run leaves.

    Returns:
        The store's path and counts.

    Raises:
        DatasetFormatError: there is a bad line (the message names file, line, rule and value), or a
            day without a good line.
        ConfigError: `max_ind_range` is not positive, days are out of order or given twice, an
            argument differs from the interrupted run's, or another process prepares this store.
        StoreError: a committed day was changed, or the unfinished store is damaged.
        AlreadyExists: `store` exists, or recsys did not make its unfinished folder.
        FileNotFoundError: a day file does not exist.
    """
    paths = listed_files("day_files", day_files)
    _check_arguments(paths, max_ind_range)
    with ExitStack() as stack:
        folder, committed = stack.enter_context(_unfinished(Path(store)))
        days = _check_resumable(
            folder, committed, paths, max_ind_range=max_ind_range, skip_bad_lines=skip_bad_lines
        )
        num_before = len(days)
        if show_progress:
            if num_before:
                _say(
                    f"{folder.path}: {num_before} of {len(paths)} days are prepared already; "
                    "continuing after them"
                )
            stack.push(partial(_say_what_is_kept, folder))
        writer = stack.enter_context(
            StoreWriter(store, folder=folder.path / "store", num_samples=_sum(days, "num_samples"))
        )
        progress = stack.enter_context(
            progress_bar(paths, num_bytes_before=_sum(days, "num_bytes"), show=show_progress)
        )
        flow = stack.enter_context(
            CriteoFlow(
                writer,
                progress,
                skip_bad_lines=skip_bad_lines,
                num_bad_lines=_sum(days, "num_bad_lines"),
                num_threads=num_threads,
                max_ind_range=max_ind_range,
            )
        )
        if num_before:
            _restore_ids(folder, flow)
        for path in paths[num_before:]:
            days.append(_read_day(path, flow, writer))
            writer.flush()
            _save_new_ids(folder, flow)
            folder.commit({"version": _VERSION, "max_ind_range": max_ind_range, "days": days})
        _finish(writer, folder, days, max_ind_range)
    return flow.report(num_before)


def _finish(
    writer: StoreWriter,
    folder: GrowingFolder,
    days: Sequence[dict[str, Any]],
    max_ind_range: int | None,
) -> None:
    """Complete the store after the last day."""
    bound = {} if max_ind_range is None else {"max_ind_range": max_ind_range}
    writer.finish(
        dense_names=INTEGER_NAMES,
        ids={name: _map_ids(folder, name) for name in CATEGORY_NAMES},
        splits=day_splits([day["num_samples"] for day in days], first_half="test"),
        about={
            "convention": "classic",
            **bound,
            "sources": [{key: day[key] for key in _SOURCE_KEYS} for day in days],
            "num_bad_lines": _sum(days, "num_bad_lines"),
        },
    )


def _say(message: str) -> None:
    tqdm.write(message, file=sys.stderr)


def _say_what_is_kept(folder: GrowingFolder, kind: type[BaseException] | None, *_: object) -> None:
    """If a run fails, print the folder with its committed days; some errors name it already."""
    is_named = kind is None or issubclass(kind, (StoreError, AlreadyExists))
    if not is_named and folder.has_commit:
        _say(f"{folder.path} keeps the days prepared so far")


def _sum(days: Sequence[dict[str, Any]], key: str) -> int:
    return sum(day[key] for day in days)


def _read_day(path: Path, flow: CriteoFlow, writer: StoreWriter) -> dict[str, Any]:
    """Append a day and return its entry for the record."""
    first_sample, first_bad = writer.num_samples, flow.num_bad_lines
    changed_ns = path.stat().st_mtime_ns
    source = flow.read(path)
    num_samples, num_bad = writer.num_samples - first_sample, flow.num_bad_lines - first_bad
    if not num_samples:
        raise DatasetFormatError(f"{path}: no good line among {num_bad}. {not_criteo(path)}")
    more = {"num_samples": num_samples, "num_bad_lines": num_bad, "changed_ns": changed_ns}
    return source | more


def _check_arguments(paths: Sequence[Path], max_ind_range: int | None) -> None:
    """Check the arguments, without the unfinished folder."""
    if max_ind_range is not None and not is_whole(max_ind_range, 1):
        raise ConfigError(f"max_ind_range must be an integer and at least 1, got {max_ind_range!r}")
    numbered = [
        (int(found[1]), path.name) for path in paths if (found := re.match(r"day_(\d+)", path.name))
    ]
    for (before, name), (after, next_name) in pairwise(numbered):
        if before > after:
            raise ConfigError(
                f"days must be given in order, oldest first, got {next_name} after {name}; in a "
                "shell use day_{0..23}, because day_* puts day_10 before day_2"
            )
        if _without_compression(name) == _without_compression(next_name):
            raise ConfigError(
                f"a day, or part of one, must be given once, got {name} and {next_name}; leave one "
                "out or rename it"
            )
    require_files("raw", paths)


def _without_compression(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".zst")


@contextmanager
def _unfinished(store: Path) -> Iterator[tuple[GrowingFolder, dict[str, Any] | None]]:
    """The unfinished folder, rolled back to its last commit, and the record of that commit.

    The folder is removed at the end, unless there is an error and it has a commit.
    """
    folder = GrowingFolder(store.parent / f"{store.name}.unfinished")
    if is_taken(store):
        _clear_left_over(folder)
        raise AlreadyExists(f"{describe_taken(store)}; choose another folder for the store")
    if folder.path.exists() and not folder.path.is_dir():
        raise AlreadyExists(
            f"{folder.path} must be a folder or not exist, but is a file; move it away or choose "
            "another name for the store"
        )
    folder.path.mkdir(parents=True, exist_ok=True)
    with alone_in(folder.path, _COMMAND):
        folder.claim()
        if _is_left_over(folder):
            folder.forget()
        try:
            committed = folder.roll_back()
            for name in ("store", "ids"):
                (folder.path / name).mkdir(exist_ok=True)
            yield folder, committed
        except BaseException:
            if not folder.has_commit:
                folder.remove()  # without a commit, nothing in it can be used
            raise
        folder.remove()


def _is_left_over(folder: GrowingFolder) -> bool:
    """Whether a run was killed before its first commit, or after it had renamed its store."""
    return folder.has_marker and not (folder.has_commit and (folder.path / "store").is_dir())


def _clear_left_over(folder: GrowingFolder) -> None:
    if folder.has_marker:
        with suppress(ConfigError), alone_in(folder.path, _COMMAND):
            if _is_left_over(folder):
                folder.remove()
    elif folder.path.is_dir():
        with suppress(OSError):
            folder.path.rmdir()  # empty if a run was killed before its last step


def _check_resumable(
    folder: GrowingFolder,
    committed: dict[str, Any] | None,
    paths: Sequence[Path],
    *,
    max_ind_range: int | None,
    skip_bad_lines: bool,
) -> list[dict[str, Any]]:
    """The committed days, after checking that this run may resume from them."""
    if committed is None:
        return []
    or_remove = f"or remove {folder.path} to start again"
    if committed.get("version") != _VERSION:
        raise StoreError(
            f"{folder.path}: version must be {_VERSION} for this version of recsys, got "
            f"{committed.get('version')!r}; resume with the version that began it, {or_remove}"
        )
    if not _are_days(committed.get("days")) or "max_ind_range" not in committed:
        raise folder.damaged(f"{folder.path}: the record of the days prepared so far lacks a key")
    days: list[dict[str, Any]] = committed["days"]
    if max_ind_range != committed["max_ind_range"]:
        raise ConfigError(
            f"{folder.path}: max_ind_range must be {committed['max_ind_range']}, as for the days "
            f"prepared so far, got {max_ind_range}; use that value, {or_remove}"
        )
    num_bad = _sum(days, "num_bad_lines")
    if num_bad and not skip_bad_lines:
        raise ConfigError(
            f"{folder.path}: bad lines must be skipped, as {num_bad} were in the days prepared so "
            f"far; add --skip-bad-lines, {or_remove}"
        )
    names = [day["name"] for day in days]
    if names != [path.name for path in paths[: len(days)]]:
        raise ConfigError(
            f"{folder.path}: the first days must be {', '.join(names)}, prepared so far, got "
            f"{', '.join(path.name for path in paths)}; name them, {or_remove}"
        )
    for day, path in zip(days, paths, strict=False):
        _check_unchanged(day, path, or_remove)
    return days


def _are_days(days: Any) -> bool:
    """Whether the entries of a record have the keys that `_read_day` writes."""
    return isinstance(days, list) and all(
        isinstance(day, dict)
        and all(is_count(day.get(key)) for key in _COUNT_KEYS)
        and all(is_text(day.get(key)) for key in ("name", "sha256"))
        for day in days
    )


def _check_unchanged(day: dict[str, Any], path: Path, or_remove: str) -> None:
    found = path.stat()
    suggestion = f"restore the file that was prepared, {or_remove}"
    if found.st_size != day["num_bytes"]:
        raise StoreError(
            f"{path} must have {day['num_bytes']} bytes, as when it was prepared, has "
            f"{found.st_size}; {suggestion}"
        )
    if found.st_mtime_ns != day["changed_ns"]:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != day["sha256"]:
            raise StoreError(
                f"{path} must have sha256 {day['sha256']}, as when it was prepared, has {digest}; "
                f"{suggestion}"
            )
        day["changed_ns"] = found.st_mtime_ns  # saves reading the file again next time


def _ids_file(folder: GrowingFolder, name: str) -> Path:
    return folder.path / "ids" / f"{name}.bin"


def _map_ids(folder: GrowingFolder, name: str) -> NDArray[np.uint32]:
    """The committed ids of a column's rows, never empty: each committed day has a sample."""
    return np.memmap(_ids_file(folder, name), "<u4", mode="r")


def _save_new_ids(folder: GrowingFolder, flow: CriteoFlow) -> None:
    """Append the ids of rows that are not saved yet."""

    def save(column: int) -> None:
        with _ids_file(folder, CATEGORY_NAMES[column]).open("ab") as file:
            new_ids = flow.columns[column].ids_by_row(file.tell() // 4)
            file.write(new_ids.astype("<u4", copy=False).data)

    flow.map_columns(save)


def _restore_ids(folder: GrowingFolder, flow: CriteoFlow) -> None:
    """Build the hash tables again from the committed ids."""

    def restore(column: int) -> None:
        name = CATEGORY_NAMES[column]
        try:
            flow.columns[column] = RowNumbers.from_ids(_map_ids(folder, name))
        except ValueError as error:
            raise folder.damaged(f"{_ids_file(folder, name)}: {error}") from error

    flow.map_columns(restore)
