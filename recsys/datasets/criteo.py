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

How the work flows, and who owns what:

    reader (1 thread)   file -> decompressed blocks that end at a line's end; hashes the raw bytes
    pool (all cores)    parses a block's parts side by side, then numbers its columns side by side
    writer (1 thread)   samples -> store, in order; at a file's end, its logarithms

At most four blocks are alive at a time, so memory is bounded by the hash tables of ids.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tqdm import tqdm

from recsys.datasets.criteo_parse import NUM_CATEGORIES, NUM_INTEGERS, ParsedLines, parse_lines
from recsys.datasets.criteo_text import BadLines, RawFile
from recsys.datasets.row_numbers import RowNumbers
from recsys.datasets.source import classic_splits, day_splits
from recsys.datasets.store import StoreWriter
from recsys.errors import ConfigError, DatasetFormatError
from recsys.machine import num_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = [
    "CATEGORY_NAMES",
    "CONVENTIONS",
    "INTEGER_NAMES",
    "PrepareReport",
    "prepare_criteo_kaggle",
]

INTEGER_NAMES = tuple(f"int_{column}" for column in range(NUM_INTEGERS))
CATEGORY_NAMES = tuple(f"cat_{column}" for column in range(NUM_CATEGORIES))

CONVENTIONS = ("classic", "torchrec")
# TorchRec's rows for nothing and for rare ids.
_TORCHREC_RESERVED_ROWS = 2
_NEWLINE = ord("\n")
_T = TypeVar("_T")


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare_criteo_kaggle` did.

    Attributes:
        path: The store.
        num_samples: Samples in it.
        num_rows: Distinct ids of all columns together.
        bad_lines: The list of lines left out, or None where there were none.
        num_bad_lines: How many it lists.
    """

    path: Path
    num_samples: int
    num_rows: int
    bad_lines: Path | None
    num_bad_lines: int


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
        ConfigError: the convention is unknown.
        FileNotFoundError: a raw file does not exist.
    """
    if convention not in CONVENTIONS:
        raise ConfigError(f"convention must be one of {CONVENTIONS}, got {convention!r}")
    is_torchrec = convention == "torchrec"
    num_reserved_rows = _TORCHREC_RESERVED_ROWS if is_torchrec else 0
    paths = [Path(file) for file in raw_files]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"raw {path} is no file")
    num_threads = num_threads or num_cores()
    columns = [RowNumbers() for _ in CATEGORY_NAMES]
    sources: list[dict[str, Any]] = []
    day_sizes: list[int] = []
    with (
        StoreWriter(store, dense_transform="none" if is_torchrec else "log(x+1)") as writer,
        ThreadPoolExecutor(num_threads, "recsys-parse") as pool,
        ThreadPoolExecutor(1, "recsys-read") as reader,
        ThreadPoolExecutor(1, "recsys-write") as write_queue,
        tqdm(
            total=sum(path.stat().st_size for path in paths),
            desc="prepare",
            unit="B",
            unit_scale=True,
            disable=not show_progress,
            mininterval=0.1 if sys.stderr.isatty() else 10,  # a log is not a screen
        ) as progress,
    ):
        bad_lines = BadLines(writer.folder / "bad_lines.jsonl", skip=skip_bad_lines)
        written: Future[None] = write_queue.submit(lambda: None)
        for path in paths:
            raw = RawFile(path)
            bad_lines.begin_file(path)
            num_bytes_before, num_samples_before = progress.n, sum(day_sizes)
            smallest: list[int] = []
            for text in _one_ahead(reader, raw.blocks()):
                parts = _parse_in_parts(
                    pool,
                    text,
                    num_threads,
                    stop_at_bad_line=not skip_bad_lines,
                    keep_negatives=is_torchrec,
                )
                for part in parts:
                    bad_lines.add(text, part)
                if is_torchrec:
                    smallest += [int(part.integers.min()) for part in parts if part.integers.size]
                _number_columns(pool, columns, parts, num_reserved_rows)
                written.result()  # one block is written while the next is parsed, not more
                written = write_queue.submit(_write, writer, parts)
                progress.update(num_bytes_before + raw.num_bytes_read - progress.n)
            written.result()
            sources.append(raw.describe())
            day_sizes.append(writer.num_samples - num_samples_before)
            if smallest:
                sources[-1]["smallest_integer"] = min(smallest)
                written = write_queue.submit(
                    _take_torchrec_logarithms, writer, num_samples_before, min(smallest)
                )
        written.result()
        if not writer.num_samples:
            raise DatasetFormatError(
                f"{', '.join(map(str, paths))}: no good line among {bad_lines.num_bad}; "
                "is this the raw Criteo format?"
            )
        writer.finish(
            dense_names=INTEGER_NAMES,
            ids={
                name: np.concatenate([np.zeros(num_reserved_rows, np.uint32), column.ids_by_row()])
                for name, column in zip(CATEGORY_NAMES, columns, strict=True)
            },
            splits=day_splits(day_sizes) if is_torchrec else classic_splits(writer.num_samples),
            about={
                "convention": convention,
                "num_reserved_rows": num_reserved_rows,
                "sources": sources,
                "num_bad_lines": bad_lines.num_bad,
            },
        )
    return PrepareReport(
        path=writer.path,
        num_samples=writer.num_samples,
        num_rows=sum(column.num_rows for column in columns),
        bad_lines=writer.path / "bad_lines.jsonl" if bad_lines.num_bad else None,
        num_bad_lines=bad_lines.num_bad,
    )


def _one_ahead(reader: ThreadPoolExecutor, items: Iterator[_T]) -> Iterator[_T]:
    """The same items, the next one being made while the caller uses this one."""
    upcoming = reader.submit(next, items, None)
    while (item := upcoming.result()) is not None:
        upcoming = reader.submit(next, items, None)
        yield item


def _parse_in_parts(
    pool: ThreadPoolExecutor,
    text: NDArray[np.uint8],
    num_parts: int,
    *,
    stop_at_bad_line: bool,
    keep_negatives: bool,
) -> list[ParsedLines]:
    """Parse a block side by side; the parts come back in the order of the text."""
    cuts = [0]
    for part in range(1, num_parts + 1):
        cut = max(cuts[-1], len(text) * part // num_parts - 1)
        while text[cut] != _NEWLINE:
            cut += 1
        cuts.append(cut + 1)
        if cut + 1 == len(text):
            break
    parsing = [
        pool.submit(
            parse_lines,
            text,
            begin,
            end,
            stop_at_bad_line=stop_at_bad_line,
            keep_negatives=keep_negatives,
        )
        for begin, end in pairwise(cuts)
    ]
    return [part.result() for part in parsing]


def _number_columns(
    pool: ThreadPoolExecutor,
    columns: list[RowNumbers],
    parts: list[ParsedLines],
    num_reserved_rows: int,
) -> None:
    """Replace ids by rows, in place; columns side by side, a column's parts in order."""

    def number(column: int) -> None:
        for part in parts:
            rows = columns[column].number(part.categories[column])
            if num_reserved_rows:
                rows += num_reserved_rows

    list(pool.map(number, range(len(columns))))


def _write(writer: StoreWriter, parts: list[ParsedLines]) -> None:
    is_float = writer.dense_dtype == np.float32
    for part in parts:
        # Floats are computed at the file's end; until then the integers' bits take their place.
        dense = part.integers.view(np.float32) if is_float else part.integers
        writer.append(part.labels, dense, part.categories.view(np.int32).T)


def _take_torchrec_logarithms(writer: StoreWriter, first_sample: int, smallest: int) -> None:
    """Of one file's integers, which lie in the store as they are."""

    def transform(bits: NDArray[np.float32]) -> NDArray[np.float32]:
        shifted = bits.view(np.int32).astype(np.int64) - (smallest - 2)
        logarithms: NDArray[np.float32] = np.log(shifted.astype(np.float32))
        return logarithms

    writer.rewrite_dense(first_sample, transform)
