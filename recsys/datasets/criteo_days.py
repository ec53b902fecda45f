"""Criteo 1TB day files to a prepared store, day by day, so that an interrupted run is gone on with.

Text and convention are those of the Kaggle challenge (`criteo`, `classic`): missing values are 0,
negative integers 0, dense features log(x + 1), ids numbered column by column in order of first
appearance over all days. Before that they are taken modulo `max_ind_range`, where it is given. All
days but the last train; the last one is halved: first half (the larger one where it is odd) test,
second half validation. A single day is cut as the Kaggle file is: see `classic_splits`. All this is
what facebookresearch/dlrm does for `--data-set=terabyte`, but for lines without a label, which are
an error here.

While it grows, a store lies in a folder beside its name:

    STORE.unfinished/made_by_recsys.txt   a folder without it is somebody else's
                     committed.json       the days that are wholly written; see `GrowingFolder`
                     ids/cat_0.bin        the ids of the rows of column 0, in order; and so on
                     store/               what is given the name STORE at the end

A day is committed when the disk holds its samples and the ids it brought. An interrupted run,
whatever ended it, costs the day it was at: the same command goes on behind the last committed one
and ends with the same bytes. The hash tables are built again from the ids.

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

from recsys.datasets.criteo_flow import (
    CATEGORY_NAMES,
    INTEGER_NAMES,
    CriteoFlow,
    PrepareReport,
    progress_bar,
)
from recsys.datasets.growing_folder import GrowingFolder
from recsys.datasets.row_numbers import RowNumbers
from recsys.datasets.source import day_splits
from recsys.datasets.store import StoreWriter
from recsys.errors import AlreadyExists, ConfigError, DatasetFormatError, StoreError
from recsys.files import alone_in, require_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["prepare_criteo_1tb"]

_VERSION = 1
_COMMAND = "recsys prepare criteo-1tb"
_SOURCE_KEYS = ("name", "num_bytes", "sha256", "num_samples")


def prepare_criteo_1tb(
    day_files: Sequence[str | Path],
    store: str | Path,
    *,
    max_ind_range: int | None = None,
    skip_bad_lines: bool = False,
    num_threads: int | None = None,
    show_progress: bool = True,
) -> PrepareReport:
    """Read day files, in the order given; write a store. Goes on where an earlier run was stopped.

    Going on asks for the days committed before (any may follow), unchanged, and for the same
    `max_ind_range`; `skip_bad_lines` may come in where there was no bad line before. A day counts
    as unchanged when its size and its time of change are what they were; where the time differs,
    its sha256 decides.

    Args:
        day_files: Tab-separated text, plain, gzip or zst, oldest day first.
        store: The store's folder, which must not exist.
        max_ind_range: Take ids modulo this, so that no table has more rows.
        skip_bad_lines: Leave bad lines out, count and list them, instead of stopping at the first.
        num_threads: Threads that parse and number; one per core by default.
        show_progress: Draw a progress bar over the raw bytes; say where a run goes on, and what
            one that fails leaves.

    Raises:
        DatasetFormatError: a bad line (the message names file, line, rule and value), or a day
            without a good one.
        ConfigError: `max_ind_range` is not positive, days are out of order or given twice, an
            argument differs from that of the run to be gone on with, or another process is at it.
        StoreError: a committed day was changed, or what was written before is damaged.
        AlreadyExists: `store` exists, or its unfinished folder is something else.
        FileNotFoundError: a day file does not exist.
    """
    paths = [Path(file) for file in day_files]
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
                    f"{folder.path}: {num_before} of {len(paths)} days are prepared already; going "
                    "on behind them"
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
            _take_back_ids(folder, flow)
        for path in paths[num_before:]:
            days.append(_read_day(path, flow, writer))
            writer.flush()
            _save_new_ids(folder, flow)
            folder.commit({"version": _VERSION, "max_ind_range": max_ind_range, "days": days})
        bound = {} if max_ind_range is None else {"max_ind_range": max_ind_range}
        writer.finish(
            dense_names=INTEGER_NAMES,
            ids={name: _map_ids(folder, name) for name in CATEGORY_NAMES},
            splits=day_splits([day["num_samples"] for day in days], first_half="test"),
            about={
                "convention": "classic",
                **bound,
                "sources": [{key: day[key] for key in _SOURCE_KEYS} for day in days],
                "num_bad_lines": flow.num_bad_lines,
            },
        )
    return flow.report(num_before)


def _say(message: str) -> None:
    tqdm.write(message, file=sys.stderr)


def _say_what_is_kept(folder: GrowingFolder, kind: type[BaseException] | None, *_: object) -> None:
    """Where a run ends in an error, unless that is about what is kept, or the store's name."""
    is_said = kind is None or issubclass(kind, (StoreError, AlreadyExists))
    if not is_said and folder.has_commit:
        _say(f"{folder.path} keeps the days prepared so far")


def _sum(days: Sequence[dict[str, Any]], key: str) -> int:
    return sum(day[key] for day in days)


def _read_day(path: Path, flow: CriteoFlow, writer: StoreWriter) -> dict[str, Any]:
    """Append a day; what the record says of it."""
    first_sample, first_bad = writer.num_samples, flow.num_bad_lines
    changed_ns = path.stat().st_mtime_ns
    source = flow.read(path)
    num_samples, num_bad = writer.num_samples - first_sample, flow.num_bad_lines - first_bad
    if not num_samples:
        raise DatasetFormatError(
            f"{path}: no good line among {num_bad}; is this the raw Criteo format?"
        )
    more = {"num_samples": num_samples, "num_bad_lines": num_bad, "changed_ns": changed_ns}
    return source | more


def _check_arguments(paths: Sequence[Path], max_ind_range: int | None) -> None:
    """What can be said of the arguments alone."""
    if not paths:
        raise ConfigError("day_files must name a day at least, got none")
    if max_ind_range is not None and max_ind_range < 1:
        raise ConfigError(f"max_ind_range must be 1 or more, got {max_ind_range}")
    numbered = [
        (int(found[1]), path.name) for path in paths if (found := re.match(r"day_(\d+)", path.name))
    ]
    for (before, name), (after, next_name) in pairwise(numbered):
        if before > after:
            raise ConfigError(
                f"days must be given in order, oldest first, got {next_name} behind {name}; a "
                "shell's day_* puts day_10 before day_2, its day_{0..23} does not"
            )
        if name == next_name:
            raise ConfigError(
                f"a day, or part of one, must be given once, got two files {name}; leave one out, "
                "or give it another name"
            )
    require_files("raw", paths)


@contextmanager
def _unfinished(store: Path) -> Iterator[tuple[GrowingFolder, dict[str, Any] | None]]:
    """The folder beside a store's name, as last committed, and what was said then.

    It is removed at the end, unless that is an error and something is committed.
    """
    folder = GrowingFolder(store.parent / f"{store.name}.unfinished")
    if store.exists():
        _clear_left_over(folder)
        raise AlreadyExists(f"store {store} exists already; remove it or choose another folder")
    if folder.path.exists() and not folder.path.is_dir():
        raise AlreadyExists(
            f"{folder.path} must be a folder, or not be there, is a file; move it away or choose "
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
                folder.remove()  # nothing in it is worth anything
            raise
        folder.remove()


def _is_left_over(folder: GrowingFolder) -> bool:
    """Whether a run was killed that had committed nothing, or that was through with its store."""
    return folder.is_ours and not (folder.has_commit and (folder.path / "store").is_dir())


def _clear_left_over(folder: GrowingFolder) -> None:
    if folder.is_ours:
        with suppress(ConfigError), alone_in(folder.path, _COMMAND):
            if _is_left_over(folder):
                folder.remove()
    elif folder.path.is_dir():
        with suppress(OSError):
            folder.path.rmdir()  # empty: killed with its last step to go


def _check_resumable(
    folder: GrowingFolder,
    committed: dict[str, Any] | None,
    paths: Sequence[Path],
    *,
    max_ind_range: int | None,
    skip_bad_lines: bool,
) -> list[dict[str, Any]]:
    """The days committed, once it is sure that going on ends as if never interrupted."""
    if committed is None:
        return []
    anew = f"or remove {folder.path} to begin anew"
    if committed.get("version") != _VERSION:
        raise StoreError(
            f"{folder.path}: version must be {_VERSION} for this version of recsys, got "
            f"{committed.get('version')!r}; go on with the version that began it, {anew}"
        )
    days: list[dict[str, Any]] = committed["days"]
    if max_ind_range != committed["max_ind_range"]:
        raise ConfigError(
            f"{folder.path}: max_ind_range must be {committed['max_ind_range']}, as for the days "
            f"prepared so far, got {max_ind_range}; go on with that, {anew}"
        )
    num_bad = _sum(days, "num_bad_lines")
    if num_bad and not skip_bad_lines:
        raise ConfigError(
            f"{folder.path}: bad lines must be skipped, as {num_bad} were in the days prepared so "
            f"far; go on with --skip-bad-lines, {anew}"
        )
    names = [day["name"] for day in days]
    if names != [path.name for path in paths[: len(days)]]:
        raise ConfigError(
            f"{folder.path}: the first days must be {', '.join(names)}, which are prepared, got "
            f"{', '.join(path.name for path in paths)}; name them, {anew}"
        )
    for day, path in zip(days, paths, strict=False):
        _check_unchanged(day, path, anew)
    return days


def _check_unchanged(day: dict[str, Any], path: Path, anew: str) -> None:
    found = path.stat()
    way_out = f"put back the file that was prepared, {anew}"
    if found.st_size != day["num_bytes"]:
        raise StoreError(
            f"{path} must have {day['num_bytes']} bytes, as when it was prepared, has "
            f"{found.st_size}; {way_out}"
        )
    if found.st_mtime_ns != day["changed_ns"]:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != day["sha256"]:
            raise StoreError(
                f"{path} must have sha256 {day['sha256']}, as when it was prepared, has {digest}; "
                f"{way_out}"
            )
        day["changed_ns"] = found.st_mtime_ns  # need not be read again next time


def _ids_file(folder: GrowingFolder, name: str) -> Path:
    return folder.path / "ids" / f"{name}.bin"


def _map_ids(folder: GrowingFolder, name: str) -> NDArray[np.uint32]:
    """The ids of a column's rows, as committed: there is one at least, since there is a sample."""
    return np.memmap(_ids_file(folder, name), "<u4", mode="r")


def _save_new_ids(folder: GrowingFolder, flow: CriteoFlow) -> None:
    """Add those of rows that are not saved yet."""

    def save(column: int) -> None:
        with _ids_file(folder, CATEGORY_NAMES[column]).open("ab") as file:
            new_ids = flow.columns[column].ids_by_row(file.tell() // 4)
            file.write(new_ids.astype("<u4", copy=False).data)

    flow.map_columns(save)


def _take_back_ids(folder: GrowingFolder, flow: CriteoFlow) -> None:
    """Build the hash tables again."""

    def take_back(column: int) -> None:
        name = CATEGORY_NAMES[column]
        try:
            flow.columns[column] = RowNumbers.from_ids(_map_ids(folder, name))
        except ValueError as error:
            raise folder.damaged(f"{_ids_file(folder, name)}: {error}") from error

    flow.map_columns(take_back)
