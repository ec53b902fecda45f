"""Prepare raw Criteo files, of the Kaggle challenge or of days of the 1TB set, as a store.

The convention is that of facebookresearch/dlrm, called `classic` in meta.json:

- missing values and negative integers become 0; dense features become log(x + 1);
- the ids of each column are numbered by first appearance over all files, for the 1TB days modulo
  `max_ind_range` if it is given;
- samples of the Kaggle challenge, and those of a single day, are split by `classic_splits`. Of
  several days, all but the last are for training. The first half of the last day (rounded up) is
  the test part, the second half the validation part.

One difference: a line without a label is an error here.

A store of days grows in a folder beside its final name:

    STORE.unfinished/committed.json   the days that are completely written
                     ids/cat_0.bin    the ids of the rows of column 0, in order; and so on
                     store/           is renamed to STORE at the end

A day is committed when its samples and its new ids are on the disk. An interrupted run loses only
the day that it was reading: the same command continues after the last committed day and ends with
the same bytes. The hash tables are built again from the ids.

References:
    facebookresearch/dlrm, data_utils.py: `getCriteoAdData`, `transformCriteoAdData`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from recsys._support.arguments import is_whole
from recsys._support.files import (
    alone_in,
    appearing_whole,
    describe_taken,
    flush_to_disk,
    is_taken,
    listed_files,
    require_files,
)
from recsys._support.untrusted import is_count, is_text, parse_json
from recsys.datasets.criteo.parse import NUM_CATEGORIES, NUM_INTEGERS
from recsys.datasets.criteo.read import CriteoReader, not_criteo
from recsys.datasets.criteo.row_numbers import RowNumbers
from recsys.datasets.splits import classic_splits, day_splits
from recsys.datasets.store import StoreWriter
from recsys.errors import AlreadyExists, ConfigError, DatasetFormatError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "CATEGORY_NAMES",
    "INTEGER_NAMES",
    "PrepareReport",
    "prepare_criteo_1tb",
    "prepare_criteo_kaggle",
]

INTEGER_NAMES = tuple(f"int_{column}" for column in range(NUM_INTEGERS))
CATEGORY_NAMES = tuple(f"cat_{column}" for column in range(NUM_CATEGORIES))

_COMMAND = "recsys prepare criteo-1tb"
_RECORD = "committed.json"
_SOURCE_KEYS = ("name", "num_bytes", "sha256", "num_samples")


@dataclass(frozen=True)
class PrepareReport:
    """Result of preparing raw files.

    Attributes:
        path: The store.
        num_samples: Samples in it.
        num_rows: Distinct ids of all columns together.
        num_files_before: Files that an earlier, interrupted run had read already.
    """

    path: Path
    num_samples: int
    num_rows: int
    num_files_before: int = 0


def prepare_criteo_kaggle(
    raw_files: Sequence[str | Path],
    store: str | Path,
    *,
    num_threads: int | None = None,
    show_progress: bool = True,
) -> PrepareReport:
    """Read raw files, in the order given, as one data set, and write a store.

    Args:
        raw_files: Tab-separated text, plain or gzip.
        store: The store's folder, which must not exist.
        num_threads: Threads that parse and number; one per core by default.
        show_progress: Draw a progress bar over the raw bytes.

    Returns:
        The store's path and counts.

    Raises:
        DatasetFormatError: there is a bad line (the message names file, line, rule and value), or
            no line at all.
        AlreadyExists: `store` exists.
        ConfigError: no file is named, or one twice.
        FileNotFoundError: a raw file does not exist.
    """
    paths = listed_files("raw_files", raw_files)
    require_files("raw", paths)
    with (
        StoreWriter(store) as writer,
        _progress_bar(paths, show=show_progress) as progress,
        CriteoReader(writer, progress, num_threads) as reader,
    ):
        sources = [reader.read(path) for path in paths]
        if not writer.num_samples:
            raise DatasetFormatError(f"{paths[0]}: no line in it. {not_criteo(paths[0])}")
        _finish(
            writer,
            [column.ids_by_row() for column in reader.columns],
            classic_splits(writer.num_samples),
            {"num_reserved_rows": 0, "sources": sources},
        )
    return _report(writer, reader)


def prepare_criteo_1tb(
    day_files: Sequence[str | Path],
    store: str | Path,
    *,
    max_ind_range: int | None = None,
    num_threads: int | None = None,
    show_progress: bool = True,
) -> PrepareReport:
    """Read day files, in the order given, and write a store. Resumes an interrupted run.

    To resume, the first day files must be the committed ones, unchanged, and `max_ind_range` must
    be the same. A day counts as unchanged if its size and modification time are.

    Args:
        day_files: Tab-separated text, plain or gzip, oldest day first.
        store: The store's folder, which must not exist.
        max_ind_range: Take ids modulo this, which limits the rows of each table.
        num_threads: Threads that parse and number; one per core by default.
        show_progress: Draw a progress bar over the raw bytes.

    Returns:
        The store's path and counts.

    Raises:
        DatasetFormatError: there is a bad line (the message names file, line, rule and value), or a
            day without a line.
        ConfigError: `max_ind_range` is not positive, days are out of order or given twice, days or
            `max_ind_range` differ from the interrupted run's, or another process prepares this
            store.
        StoreError: the unfinished store is damaged.
        AlreadyExists: `store` exists, or recsys did not make its unfinished folder.
        FileNotFoundError: a day file does not exist.
    """
    paths, store = listed_files("day_files", day_files), Path(store)
    _check_arguments(paths, max_ind_range)
    if is_taken(store):
        raise AlreadyExists(f"{describe_taken(store)}; choose another folder for the store")
    folder = store.parent / f"{store.name}.unfinished"
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder, _COMMAND):
        days = _roll_back(folder, paths, max_ind_range)
        num_before = len(days)
        try:
            with (
                StoreWriter(
                    store,
                    folder=folder / "store",
                    num_samples=sum(day["num_samples"] for day in days),
                ) as writer,
                _progress_bar(paths, paths[:num_before], show=show_progress) as progress,
                CriteoReader(writer, progress, num_threads, max_ind_range) as reader,
            ):
                if days:
                    _restore_ids(folder, reader)
                for path in paths[num_before:]:
                    days.append(_read_day(path, folder, reader, writer))
                    _commit(folder, days, max_ind_range)
                _finish(
                    writer,
                    [_map_ids(folder, name) for name in CATEGORY_NAMES],
                    day_splits([day["num_samples"] for day in days]),
                    ({} if max_ind_range is None else {"max_ind_range": max_ind_range})
                    | {"sources": [{key: day[key] for key in _SOURCE_KEYS} for day in days]},
                )
        finally:
            if not days or store.exists():
                _remove(folder)
    return _report(writer, reader, num_before)


def _finish(
    writer: StoreWriter,
    ids: Sequence[NDArray[np.uint32]],
    splits: dict[str, range],
    about: dict[str, Any],
) -> None:
    writer.finish(
        dense_names=INTEGER_NAMES,
        ids=dict(zip(CATEGORY_NAMES, ids, strict=True)),
        splits=splits,
        about={"convention": "classic", **about, "num_bad_lines": 0},
    )


def _report(writer: StoreWriter, reader: CriteoReader, num_files_before: int = 0) -> PrepareReport:
    num_rows = sum(column.num_rows for column in reader.columns)
    return PrepareReport(writer.path, writer.num_samples, num_rows, num_files_before)


def _progress_bar(paths: Sequence[Path], done: Sequence[Path] = (), *, show: bool) -> tqdm[None]:
    """A progress bar over the raw bytes of all files, some of which were read before."""
    return tqdm(
        total=sum(path.stat().st_size for path in paths),
        initial=sum(path.stat().st_size for path in done),
        desc="prepare",
        unit="B",
        unit_scale=True,
        disable=not show,
        mininterval=0.1 if sys.stderr.isatty() else 10,  # few lines if stderr is a log file
    )


def _check_arguments(paths: Sequence[Path], max_ind_range: int | None) -> None:
    if max_ind_range is not None and not is_whole(max_ind_range, 1):
        raise ConfigError(f"max_ind_range must be an integer and at least 1, got {max_ind_range!r}")
    numbers = [int(found[1]) for path in paths if (found := re.match(r"day_(\d+)", path.name))]
    if numbers != sorted(numbers):
        raise ConfigError(
            f"day_files must be in order, oldest first, got {', '.join(map(str, paths))}; in a "
            "shell use day_{0..23}, because day_* puts day_10 before day_2"
        )
    require_files("raw", paths)


def _read_day(
    path: Path, folder: Path, reader: CriteoReader, writer: StoreWriter
) -> dict[str, Any]:
    """Append the samples and the new ids of a day, and return its entry for the record."""
    first_sample, changed_ns = writer.num_samples, path.stat().st_mtime_ns
    source = reader.read(path)
    if writer.num_samples == first_sample:
        raise DatasetFormatError(f"{path}: no line in it. {not_criteo(path)}")
    writer.flush()

    def save_ids(column: int) -> int:
        with (folder / "ids" / f"{CATEGORY_NAMES[column]}.bin").open("ab") as file:
            new_ids = reader.columns[column].ids_by_row(file.tell() // 4)
            file.write(new_ids.astype("<u4", copy=False).data)
        return reader.columns[column].num_rows

    return source | {
        "num_samples": writer.num_samples - first_sample,
        "changed_ns": changed_ns,
        "num_ids": reader.map_columns(save_ids),
    }


def _commit(folder: Path, days: Sequence[dict[str, Any]], max_ind_range: int | None) -> None:
    """Flush all files to the disk, then record the days atomically."""
    for path in (*folder.rglob("*"), folder):
        flush_to_disk(path)
    with appearing_whole(folder / _RECORD) as partial:
        partial.write_text(json.dumps({"max_ind_range": max_ind_range, "days": days}, indent=2))


def _roll_back(
    folder: Path, paths: Sequence[Path], max_ind_range: int | None
) -> list[dict[str, Any]]:
    """The committed days; cuts every file to what it had at the last commit."""
    if not (folder / _RECORD).exists():
        others = sorted(path.name for path in folder.iterdir())
        if others:
            raise AlreadyExists(
                f"{folder} must be empty or made by recsys (with a {_RECORD}), but it has "
                f"{others[0]!r}; move it away or choose another name for the store"
            )
        _commit(folder, [], max_ind_range)
    days, bound = _read_record(folder)
    found = [(day["name"], day["num_bytes"], day["changed_ns"]) for day in days]
    given = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    if days and (found != given[: len(days)] or bound != max_ind_range):
        raise ConfigError(
            f"{folder}: the first days must be {', '.join(day['name'] for day in days)}, unchanged "
            f"since they were prepared, and max_ind_range {bound}, got "
            f"{', '.join(path.name for path in paths)} and {max_ind_range}; name these, or remove "
            "the folder to start again"
        )
    # recsys makes no links. Appending to one would write to a file of another folder.
    if any(path.is_symlink() for path in folder.rglob("*")):
        raise _damaged(folder, "it must not have symbolic links")
    for name in ("store", "ids"):
        if not days:
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(exist_ok=True)
    for name, num_bytes in _committed_bytes(days).items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else 0
        if size < num_bytes:
            raise _damaged(folder, f"{name} must have at least {num_bytes} bytes, has {size}")
        if size > num_bytes:
            os.truncate(file, num_bytes)
    return days


def _committed_bytes(days: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The length of each file that a day appends to, by its name in the folder."""
    if not days:
        return {}
    num_samples = sum(day["num_samples"] for day in days)
    sizes = {"labels": 1, "dense": 4 * NUM_INTEGERS, "sparse": 4 * NUM_CATEGORIES}
    num_ids = dict(zip(CATEGORY_NAMES, days[-1]["num_ids"], strict=True))
    return {f"store/{name}.bin": size * num_samples for name, size in sizes.items()} | {
        f"ids/{name}.bin": 4 * number for name, number in num_ids.items()
    }


def _read_record(folder: Path) -> tuple[list[dict[str, Any]], int | None]:
    try:
        record = parse_json((folder / _RECORD).read_bytes())
        days, bound = list(record["days"]), record["max_ind_range"]
        is_valid = all(
            is_text(day["name"])
            and is_text(day["sha256"])
            and len(day["num_ids"]) == NUM_CATEGORIES
            and all(map(is_count, (day["num_bytes"], day["num_samples"], day["changed_ns"])))
            and all(map(is_count, day["num_ids"]))
            for day in days
        )
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(folder, f"{_RECORD} is not a record of days ({error!r})") from error
    if not is_valid:
        raise _damaged(folder, f"{_RECORD} is not a record of days")
    return days, bound


def _damaged(folder: Path, what: str) -> StoreError:
    return StoreError(f"{folder} is damaged: {what}; remove the folder to start again")


def _map_ids(folder: Path, name: str) -> NDArray[np.uint32]:
    """The committed ids of a column's rows, never empty: each committed day has a sample."""
    return np.memmap(folder / "ids" / f"{name}.bin", "<u4", mode="r")


def _restore_ids(folder: Path, reader: CriteoReader) -> None:
    """Build the hash tables again from the committed ids."""

    def restore(column: int) -> None:
        name = CATEGORY_NAMES[column]
        try:
            reader.columns[column] = RowNumbers.from_ids(_map_ids(folder, name))
        except ValueError as error:
            raise _damaged(folder, f"ids/{name}.bin: {error}") from error

    reader.map_columns(restore)


def _remove(folder: Path) -> None:
    for name in ("store", "ids"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / _RECORD).unlink(missing_ok=True)
    with suppress(OSError):  # someone else's file may be in it
        folder.rmdir()
