"""Prepare raw Criteo files as a store, in one pass.

The `classic` convention is that of facebookresearch/dlrm for the Kaggle challenge:

- missing values and negative integers become 0; dense features become log(x + 1);
- the ids of each column are numbered by first appearance over all files;
- samples are split by `classic_splits`.

The `torchrec` convention is that of TorchRec's `BinaryCriteoUtils`:

- missing values become 0 and negative integers stay; the dense features of each file become
  log(x - smallest + 2), where smallest is the file's smallest integer in any column;
- the ids of each column are numbered by first appearance over all files, from row 2 on, as by
  `sparse_to_contiguous` with a frequency threshold of 0 or 1 (row 1 is for rare ids, which do not
  exist then, and row 0 is not used);
- each file is a day; days are split by `day_splits`.

A missing label is an error in both conventions; facebookresearch/dlrm would read it as 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.files import listed_files, require_files
from recsys.datasets.criteo import CONVENTIONS
from recsys.datasets.criteo.flow import (
    CATEGORY_NAMES,
    INTEGER_NAMES,
    CriteoFlow,
    PrepareReport,
    progress_bar,
)
from recsys.datasets.criteo.text import not_criteo
from recsys.datasets.splits import classic_splits, day_splits
from recsys.datasets.store import StoreWriter
from recsys.errors import ConfigError, DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["CONVENTIONS", "prepare_criteo_kaggle"]

# TorchRec does not use row 0, and keeps row 1 for rare ids.
_TORCHREC_RESERVED_ROWS = 2


def prepare_criteo_kaggle(
    raw_files: Sequence[str | Path],
    store: str | Path,
    *,
    convention: str = "classic",
    skip_bad_lines: bool = False,
    num_threads: int | None = None,
    show_progress: bool = True,
) -> PrepareReport:
    """Read raw files, in the order given, as one data set, and write a store.

    Args:
        raw_files: Tab-separated text, plain, gzip or zst.
        store: The store's folder, which must not exist.
        convention: "classic" or "torchrec"; see the module docstring.
        skip_bad_lines: Skip bad lines, and count and list them, instead of stopping at the first.
        num_threads: Threads that parse and number; one per core by default.
        show_progress: Draw a progress bar over the raw bytes.

    Returns:
        The store's path and counts.

    Raises:
        DatasetFormatError: there is a bad line (the message names file, line, rule and value), or
            no good line at all.
        AlreadyExists: `store` exists.
        ConfigError: the convention is unknown, or no file is named, or one twice.
        FileNotFoundError: a raw file does not exist.
    """
    if convention not in CONVENTIONS:
        raise ConfigError(f"convention must be one of {CONVENTIONS}, got {convention!r}")
    is_torchrec = convention == "torchrec"
    num_reserved_rows = _TORCHREC_RESERVED_ROWS if is_torchrec else 0
    paths = listed_files("raw_files", raw_files)
    require_files("raw", paths)
    sources: list[dict[str, Any]] = []
    day_sizes: list[int] = []
    with (
        StoreWriter(store, dense_transform="none" if is_torchrec else "log(x+1)") as writer,
        progress_bar(paths, show=show_progress) as progress,
        CriteoFlow(
            writer,
            progress,
            skip_bad_lines=skip_bad_lines,
            num_threads=num_threads,
            keep_negatives=is_torchrec,
            num_reserved_rows=num_reserved_rows,
        ) as flow,
    ):
        for path in paths:
            first_sample = writer.num_samples
            source = flow.read(path)
            sources.append(source)
            day_sizes.append(writer.num_samples - first_sample)
            if "smallest_integer" in source:
                smallest = source["smallest_integer"]
                flow.queue(_take_torchrec_logarithms, writer, first_sample, smallest)
        flow.wait()
        if not writer.num_samples:
            raise DatasetFormatError(
                f"{', '.join(map(str, paths))}: no good line among {flow.num_bad_lines}. "
                f"{not_criteo(paths[0])}"
            )
        writer.finish(
            dense_names=INTEGER_NAMES,
            ids={
                name: np.concatenate([np.zeros(num_reserved_rows, np.uint32), column.ids_by_row()])
                for name, column in zip(CATEGORY_NAMES, flow.columns, strict=True)
            },
            splits=day_splits(day_sizes) if is_torchrec else classic_splits(writer.num_samples),
            about={
                "convention": convention,
                "num_reserved_rows": num_reserved_rows,
                "sources": sources,
                "num_bad_lines": flow.num_bad_lines,
            },
        )
    return flow.report()


def _take_torchrec_logarithms(writer: StoreWriter, first_sample: int, smallest: int) -> None:
    """Replace the integers of one file, stored as int32 bits, by their logarithms."""

    def transform(bits: NDArray[np.float32]) -> NDArray[np.float32]:
        shifted = bits.view(np.int32).astype(np.int64) - (smallest - 2)
        logarithms: NDArray[np.float32] = np.log(shifted.astype(np.float32))
        return logarithms

    writer.rewrite_dense(first_sample, transform)
