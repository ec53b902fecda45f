"""Raw Criteo files to samples in a store: how the work flows, and who owns what.

    reader (1 thread)   file -> decompressed blocks that end at a line's end; hashes the raw bytes
    pool (all cores)    parses a block's parts side by side, then numbers its columns side by side
    writer (1 thread)   samples -> store, in order

At most four blocks are alive at a time, so memory is bounded by the hash tables of ids. What the
numbers mean and how they are split is for the callers to say: `criteo`, `criteo_days`.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from tqdm import tqdm

from recsys.datasets.criteo_parse import NUM_CATEGORIES, NUM_INTEGERS, ParsedLines, parse_lines
from recsys.datasets.criteo_text import BadLines, RawFile
from recsys.datasets.row_numbers import RowNumbers
from recsys.machine import num_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
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
    """What preparing raw files did.

    Attributes:
        path: The store.
        num_samples: Samples in it.
        num_rows: Distinct ids of all columns together.
        bad_lines: The list of lines left out, or None where there were none.
        num_bad_lines: How many it lists.
        num_files_before: Files that an earlier, interrupted run had read already.
    """

    path: Path
    num_samples: int
    num_rows: int
    bad_lines: Path | None
    num_bad_lines: int
    num_files_before: int = 0


class CriteoFlow:
    """Reads raw files one after another into a store; use as a context manager.

    Args:
        writer: Takes the samples.
        progress: Counts raw bytes.
        skip_bad_lines: Leave bad lines out and list them in the writer's folder.
        num_bad_lines: How many are listed there already.
        num_threads: Threads that parse and number; one per core by default.
        keep_negatives: Keep negative integers; by default they become 0.
        num_reserved_rows: The first id of a column is given this row.
        max_ind_range: Take ids modulo this before they are numbered.

    Attributes:
        columns: The rows of the ids of each column, from 0 on.
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
        self.columns = [RowNumbers() for _ in CATEGORY_NAMES]
        self._writer = writer
        self._bad_lines = BadLines(writer.folder, skip=skip_bad_lines, num_bad=num_bad_lines)
        self._progress = progress
        self._num_threads = num_threads or num_cores()
        self._keep_negatives = keep_negatives
        self._num_reserved_rows = num_reserved_rows
        # Ids have 32 bits: a larger number changes none of them.
        self._modulus = (
            np.uint32(max_ind_range) if max_ind_range and max_ind_range < 2**32 else None
        )

    @property
    def num_bad_lines(self) -> int:
        """Bad lines left out so far."""
        return self._bad_lines.num_bad

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._pool = stack.enter_context(ThreadPoolExecutor(self._num_threads, "recsys-parse"))
            self._reader = stack.enter_context(ThreadPoolExecutor(1, "recsys-read"))
            self._write_queue = stack.enter_context(ThreadPoolExecutor(1, "recsys-write"))
            self._threads = stack.pop_all()
        self._written: Future[None] = self._write_queue.submit(lambda: None)
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.close()

    def read(self, path: Path) -> dict[str, Any]:
        """Append the samples of a file; returns when they are with the writer.

        Returns:
            What meta.json says of the file as a source; with `keep_negatives`, its smallest integer
            too, unless it has no sample.

        Raises:
            DatasetFormatError: a bad line, where those are not skipped, or a broken file.
        """
        raw = RawFile(path)
        self._bad_lines.begin_file(path)
        num_bytes_before = self._progress.n
        smallest: list[int] = []
        for text in self._one_ahead(raw.blocks()):
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
        """Have the writer's thread call a function, once it is done with all it was given before.

        One call runs while the caller goes on, not more.
        """
        self.wait()
        self._written = self._write_queue.submit(function, *arguments)

    def wait(self) -> None:
        """Until the writer's thread has done all it was given."""
        self._written.result()

    def map_columns(self, function: Callable[[int], _T]) -> list[_T]:
        """What a function says of each column, called by its number; columns side by side."""
        return list(self._pool.map(function, range(NUM_CATEGORIES)))

    def report(self, num_files_before: int = 0) -> PrepareReport:
        """What was done, once the writer has finished."""
        store = self._writer.path
        return PrepareReport(
            path=store,
            num_samples=self._writer.num_samples,
            num_rows=sum(column.num_rows for column in self.columns),
            bad_lines=store / BadLines.FILE_NAME if self.num_bad_lines else None,
            num_bad_lines=self.num_bad_lines,
            num_files_before=num_files_before,
        )

    def _one_ahead(self, items: Iterator[_T]) -> Iterator[_T]:
        """The same items, the next one being made while the caller uses this one."""
        upcoming = self._reader.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = self._reader.submit(next, items, None)
            yield item

    def _parse_in_parts(self, text: NDArray[np.uint8]) -> list[ParsedLines]:
        """Parse a block side by side; the parts come back in the order of the text."""
        cuts = [0]
        for part in range(1, self._num_threads + 1):
            cut = max(cuts[-1], len(text) * part // self._num_threads - 1)
            while text[cut] != _NEWLINE:
                cut += 1
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
        """Replace ids by rows, in place; columns side by side, a column's parts in order."""

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
            # Floats are computed at the file's end; until then the integers' bits take their place.
            dense = part.integers.view(np.float32) if is_float else part.integers
            self._writer.append(part.labels, dense, part.categories.view(np.int32).T)


def progress_bar(paths: Sequence[Path], *, num_bytes_before: int = 0, show: bool) -> tqdm[None]:
    """A bar over the raw bytes of some files, of which the first few may have been read before."""
    return tqdm(
        total=sum(path.stat().st_size for path in paths),
        initial=num_bytes_before,
        desc="prepare",
        unit="B",
        unit_scale=True,
        disable=not show,
        mininterval=0.1 if sys.stderr.isatty() else 10,  # a log is not a screen
    )
