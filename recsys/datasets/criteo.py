"""Raw Criteo files to a prepared store, in one pass.

The `classic` convention is that of facebookresearch/dlrm for the Kaggle challenge: missing values
are 0, negative integers 0, dense features log(x + 1), ids numbered column by column in order of
first appearance over the whole file, the file cut into seven parts of which the last is halved (see
`classic_splits`). One difference: a line whose label is missing is an error here, where that script
would take it for a 0.

The `torchrec` convention is that of TorchRec's `BinaryCriteoUtils`: missing values are 0, negative
integers stay; over each file, dense features become log(x - smallest + 2), smallest being the
file's smallest integer, in any column; ids are numbered column by column in order of first
appearance over all files, from row 2 on, as `sparse_to_contiguous` does with a frequency threshold
of 0 or 1 (row 1 is for rare ids, of which there are none then, and nobody uses row 0). Each file is
a day, split by `day_splits`. A missing label is an error here too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.datasets.criteo_flow import (
    CATEGORY_NAMES,
    INTEGER_NAMES,
    CriteoFlow,
    PrepareReport,
    progress_bar,
)
from recsys.datasets.source import classic_splits, day_splits
from recsys.datasets.store import StoreWriter
from recsys.errors import ConfigError, DatasetFormatError
from recsys.files import require_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["CONVENTIONS", "prepare_criteo_kaggle"]

CONVENTIONS = ("classic", "torchrec")
# TorchRec's rows for nothing and for rare ids.
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
    """Read raw files, in the order given, as one data set; write a store.

    Args:
        raw_files: Tab-separated text, plain, gzip or zst.
        store: The store's folder, which must not exist.
        convention: "classic" or "torchrec"; the module says what they are.
        skip_bad_lines: Leave bad lines out, count and list them, instead of stopping at the first.
        num_threads: Threads that parse and number; one per core by default.
        show_progress: Draw a progress bar over the raw bytes.

    Raises:
        DatasetFormatError: a bad line (the message names file, line, rule and value), or no good
            line at all.
        AlreadyExists: `store` exists.
        ConfigError: the convention is unknown, or a file is named twice.
        FileNotFoundError: a raw file does not exist.
    """
    if convention not in CONVENTIONS:
        raise ConfigError(f"convention must be one of {CONVENTIONS}, got {convention!r}")
    is_torchrec = convention == "torchrec"
    num_reserved_rows = _TORCHREC_RESERVED_ROWS if is_torchrec else 0
    paths = [Path(file) for file in raw_files]
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
                f"{', '.join(map(str, paths))}: no good line among {flow.num_bad_lines}; "
                "is this the raw Criteo format?"
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
    """Of one file's integers, which lie in the store as they are."""

    def transform(bits: NDArray[np.float32]) -> NDArray[np.float32]:
        shifted = bits.view(np.int32).astype(np.int64) - (smallest - 2)
        logarithms: NDArray[np.float32] = np.log(shifted.astype(np.float32))
        return logarithms

    writer.rewrite_dense(first_sample, transform)
