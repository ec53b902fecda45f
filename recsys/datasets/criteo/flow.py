"""The threads that read raw Criteo files and append their samples to a store.

    reader (1 thread)   file -> decompressed blocks of complete lines; hashes the raw bytes
    pool (all cores)    parses parts of a block in parallel, then numbers its columns in parallel
    writer (1 thread)   samples -> store, in order

At most four blocks are in memory at a time, so memory use is that of the hash tables of ids. The
callers, `kaggle` and `days`, choose the conventions for the numbers and the splits.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from tqdm import tqdm

from recsys._support.arguments import is_whole
from recsys._support.machine import num_cores
from recsys.datasets.criteo.parse import NUM_CATEGORIES, NUM_INTEGERS, ParsedLines, parse_lines
from recsys.datasets.criteo.row_numbers import RowNumbers
from recsys.datasets.criteo.text import BadLines, RawFile
from recsys.datasets.read_ahead import one_ahead
from recsys.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from recsys.datasets.store import StoreWriter

__all__ = [
    "CATEGORY_NAMES",
    "INTEGER_NAMES",
    "CriteoFlow",
    "PrepareReport",
    "progress_bar",
]

INTEGER_NAMES = tuple(f"int_{column}" for column in range(NUM_INTEGERS))
CATEGORY_NAMES = tuple(f"cat_{column}" for column in range(NUM_CATEGORIES))

_NEWLINE = ord("\n")
_T = TypeVar("_T")


@dataclass(frozen=True)
class PrepareReport:
    """Result of preparing raw files.

    Attributes:
        path: The store.
        num_samples: Samples in it.
        num_rows: Distinct ids of all columns together.
        bad_lines: The file that lists the skipped lines; None if there are none.
        num_bad_lines: How many lines it lists.
        num_files_before: Files that an earlier, interrupted run had read already.
    """

    path: Path
    num_samples: int
    num_rows: int
    bad_lines: Path | None
    num_bad_lines: int
    num_files_before: int = 0


class CriteoFlow:
    """Reads raw files one after another into a store; use it as a context manager.

    Args:
        writer: Receives the samples.
        progress: Counts raw bytes.
        skip_bad_lines: Skip bad lines and list them in the writer's folder.
        num_bad_lines: How many are listed there already.
        num_threads: Threads that parse and number; one per core by default.
        keep_negatives: Keep negative integers; by default they become 0.
        num_reserved_rows: The row of the first id of each column.
        max_ind_range: Take ids modulo this before they are numbered.

    Attributes:
        columns: The numbering of the ids of each column, from 0 on.

    Raises:
        ConfigError: `num_threads` is no integer of at least 0.
    """

    def __init__(
        self,
        writer: StoreWriter,
        progress: tqdm[None],
        *,
        skip_bad_lines: bool,
        num_bad_lines: int = 0,
        num_threads: int | None = None,
        keep_negatives: bool = False,
        num_reserved_rows: int = 0,
        max_ind_range: int | None = None,
    ) -> None:
        if num_threads is not None and not is_whole(num_threads, 0):
            raise ConfigError(
                "num_threads must be an integer and at least 0, for one per core, got "
                f"{num_threads!r}"
            )
        self.columns = [RowNumbers() for _ in CATEGORY_NAMES]
        self._writer = writer
        self._bad_lines = BadLines(writer.folder, skip=skip_bad_lines, num_bad=num_bad_lines)
        self._progress = progress
        self._num_threads = num_threads or num_cores()
        self._keep_negatives = keep_negatives
        self._num_reserved_rows = num_reserved_rows
        # Ids have 32 bits, so a larger modulus changes none of them.
        self._modulus = (
            np.uint32(max_ind_range) if max_ind_range and max_ind_range < 2**32 else None
        )

    @property
    def num_bad_lines(self) -> int:
        """Bad lines skipped so far."""
        return self._bad_lines.num_bad

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._pool = stack.enter_context(ThreadPoolExecutor(self._num_threads, "recsys-parse"))
            self._write_queue = stack.enter_context(ThreadPoolExecutor(1, "recsys-write"))
            self._threads = stack.pop_all()
        self._written: Future[None] = self._write_queue.submit(lambda: None)
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.close()

    def read(self, path: Path) -> dict[str, Any]:
        """Append the samples of a file; returns after the writer has them.

        Returns:
            The entry for the file in meta.json; with `keep_negatives` also its smallest integer,
            unless it has no sample.

        Raises:
            DatasetFormatError: the file is broken, or has a bad line and these are not skipped.
        """
        raw = RawFile(path)
        self._bad_lines.begin_file(path)
        num_bytes_before = self._progress.n
        smallest: list[int] = []
        with closing(one_ahead(raw.blocks(), "recsys-read")) as blocks:
            for text in blocks:
                parts = self._parse_in_parts(text)
                for part in parts:
                    self._bad_lines.add(text, part)
                if self._keep_negatives:
                    smallest += [int(part.integers.min()) for part in parts if part.integers.size]
                self._number_columns(parts)
                self.queue(self._write, parts)
                self._progress.update(num_bytes_before + raw.num_bytes_read - self._progress.n)
        self.wait()
        return raw.describe() | ({"smallest_integer": min(smallest)} if smallest else {})

    def queue(self, function: Callable[..., None], *arguments: object) -> None:
        """Wait for the writer thread's previous call, then start this one there."""
        self.wait()
        self._written = self._write_queue.submit(function, *arguments)

    def wait(self) -> None:
        """Wait until the writer thread is idle; raises the error of its last call."""
        self._written.result()

    def map_columns(self, function: Callable[[int], _T]) -> list[_T]:
        """Call a function with each column number, in parallel; returns the results in order."""
        return list(self._pool.map(function, range(NUM_CATEGORIES)))

    def report(self, num_files_before: int = 0) -> PrepareReport:
        """The result, after the writer has finished the store."""
        store = self._writer.path
        return PrepareReport(
            path=store,
            num_samples=self._writer.num_samples,
            num_rows=sum(column.num_rows for column in self.columns),
            bad_lines=store / BadLines.FILE_NAME if self.num_bad_lines else None,
            num_bad_lines=self.num_bad_lines,
            num_files_before=num_files_before,
        )

    def _parse_in_parts(self, text: NDArray[np.uint8]) -> list[ParsedLines]:
        """Parse parts of a block in parallel; returns them in the order of the text."""
        cuts = [0]
        for part in range(1, self._num_threads + 1):
            cut = max(cuts[-1], len(text) * part // self._num_threads - 1)
            cut = _next_newline(text, cut)
            cuts.append(cut + 1)
            if cut + 1 == len(text):
                break
        parsing = [
            self._pool.submit(
                parse_lines,
                text,
                begin,
                end,
                stop_at_bad_line=not self._bad_lines.skip,
                keep_negatives=self._keep_negatives,
            )
            for begin, end in pairwise(cuts)
        ]
        return [part.result() for part in parsing]

    def _number_columns(self, parts: list[ParsedLines]) -> None:
        """Replace ids by rows, in place; columns in parallel, a column's parts in order."""

        def number(column: int) -> None:
            for part in parts:
                ids = part.categories[column]
                if self._modulus is not None:
                    ids %= self._modulus
                rows = self.columns[column].number(ids)
                if self._num_reserved_rows:
                    rows += self._num_reserved_rows

        self.map_columns(number)

    def _write(self, parts: list[ParsedLines]) -> None:
        is_float = self._writer.dense_dtype == np.float32
        for part in parts:
            # Floats are computed at the file's end; until then the store holds the integers' bits.
            dense = part.integers.view(np.float32) if is_float else part.integers
            self._writer.append(part.labels, dense, part.categories.view(np.int32).T)


def _next_newline(text: NDArray[np.uint8], begin: int) -> int:
    """The place of the first newline from `begin` on; the text ends in one."""
    for size in (1024, len(text)):  # most lines are short
        places = np.flatnonzero(text[begin : begin + size] == _NEWLINE)
        if len(places):
            break
    return begin + int(places[0])


def progress_bar(paths: Sequence[Path], *, num_bytes_before: int = 0, show: bool) -> tqdm[None]:
    """A progress bar over the raw bytes of all files; the first files may have been read before."""
    return tqdm(
        total=sum(path.stat().st_size for path in paths),
        initial=num_bytes_before,
        desc="prepare",
        unit="B",
        unit_scale=True,
        disable=not show,
        mininterval=0.1 if sys.stderr.isatty() else 10,  # few lines if stderr is a log file
    )
