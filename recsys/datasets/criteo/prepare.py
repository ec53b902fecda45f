"""Prepare raw Criteo files, of the Kaggle challenge or of days of the 1TB set, as a store.

The convention is that of facebookresearch/dlrm, called `classic` in meta.json:

- missing values and negative integers become 0; dense features become log(x + 1);
- the ids of each column are numbered by first appearance over all files, for the 1TB days modulo
  `max_ind_range` if it is given;
- samples of the Kaggle challenge, and those of a single day, are split by `classic_splits`. Of
  several days, all but the last are for training. The first half of the last day (rounded up) is
  the test part, the second half the validation part.

One difference: a line without a label is an error here.

References:
    facebookresearch/dlrm, data_utils.py: `getCriteoAdData`, `transformCriteoAdData`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from recsys._support.files import listed_files, require_files
from recsys._support.untrusted import is_whole
from recsys.datasets.criteo.parse import NUM_CATEGORIES, NUM_INTEGERS
from recsys.datasets.criteo.read import CriteoReader, not_criteo
from recsys.datasets.splits import classic_splits, day_splits
from recsys.datasets.store_writer import StoreWriter
from recsys.errors import ConfigError, DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = [
    "CATEGORY_NAMES",
    "INTEGER_NAMES",
    "PrepareReport",
    "prepare_criteo_1tb",
    "prepare_criteo_kaggle",
]

INTEGER_NAMES = tuple(f"int_{column}" for column in range(NUM_INTEGERS))
CATEGORY_NAMES = tuple(f"cat_{column}" for column in range(NUM_CATEGORIES))


@dataclass(frozen=True)
class PrepareReport:
    """Result of preparing raw files.

    Attributes:
        path: The store.
        num_samples: Samples in it.
        num_rows: Distinct ids of all columns together.
    """

    path: Path
    num_samples: int
    num_rows: int


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
        splits = classic_splits(writer.num_samples)
        return _finish(writer, reader, splits, {"num_reserved_rows": 0, "sources": sources})


def prepare_criteo_1tb(
    day_files: Sequence[str | Path],
    store: str | Path,
    *,
    max_ind_range: int | None = None,
    num_threads: int | None = None,
    show_progress: bool = True,
) -> PrepareReport:
    """Read day files, in the order given, and write a store.

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
        ConfigError: `max_ind_range` is not positive, or days are out of order or given twice.
        AlreadyExists: `store` exists.
        FileNotFoundError: a day file does not exist.
    """
    paths = listed_files("day_files", day_files)
    _check_arguments(paths, max_ind_range)
    with (
        StoreWriter(store) as writer,
        _progress_bar(paths, show=show_progress) as progress,
        CriteoReader(writer, progress, num_threads, max_ind_range) as reader,
    ):
        sources = []
        for path in paths:
            first_sample, source = writer.num_samples, reader.read(path)
            num_samples = writer.num_samples - first_sample
            if not num_samples:
                raise DatasetFormatError(f"{path}: no line in it. {not_criteo(path)}")
            sources.append(source | {"num_samples": num_samples})
        bound = {} if max_ind_range is None else {"max_ind_range": max_ind_range}
        splits = day_splits([source["num_samples"] for source in sources])
        return _finish(writer, reader, splits, bound | {"sources": sources})


def _finish(
    writer: StoreWriter, reader: CriteoReader, splits: dict[str, range], about: dict[str, Any]
) -> PrepareReport:
    ids = [column.ids_by_row() for column in reader.columns]
    writer.finish(
        dense_names=INTEGER_NAMES,
        ids=dict(zip(CATEGORY_NAMES, ids, strict=True)),
        splits=splits,
        about={"convention": "classic", **about, "num_bad_lines": 0},
    )
    return PrepareReport(writer.path, writer.num_samples, sum(map(len, ids)))


def _progress_bar(paths: Sequence[Path], *, show: bool) -> tqdm[None]:
    return tqdm(
        total=sum(path.stat().st_size for path in paths),
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
