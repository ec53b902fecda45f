"""Read raw Criteo files into a store: plain text or gzip, once from begin to end.

    reader (1 thread)   file -> decompressed blocks of complete lines; hashes the raw bytes
    pool (all cores)    parses parts of a block in parallel, then numbers its columns in parallel
    writer (1 thread)   samples -> store, in order

At most four blocks are in memory at a time, so memory use is that of the hash tables of ids.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, Self, cast

import numpy as np

from recsys._support.files import as_argument
from recsys._support.machine import num_cores
from recsys._support.untrusted import is_whole
from recsys.datasets.criteo.parse import NUM_CATEGORIES, ParsedLines, explain, parse_lines
from recsys.datasets.criteo.row_numbers import RowNumbers
from recsys.datasets.read_ahead import one_ahead
from recsys.errors import ConfigError, DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tqdm import tqdm

    from recsys.datasets.store_writer import StoreWriter

__all__ = ["CriteoReader", "not_criteo"]

# A block takes 50 ms to process, much longer than handing it from thread to thread. A few blocks
# are small compared with the hash tables of ids. Longer lines are refused.
BLOCK_BYTES = 16 * 2**20
_GZIP = b"\x1f\x8b"


def not_criteo(file: Path) -> str:
    """The sentence of an error that tells where a file of another format goes."""
    name = as_argument(file)
    return (
        "Raw Criteo text, plain or gzip, has 40 fields separated by tabs and no header. For "
        f"another table, such as a CSV file, take `recsys inspect {name} > schema.toml` and "
        f"`recsys prepare table {name} --schema schema.toml --out STORE`"
    )


class CriteoReader:
    """Reads raw files one after another into a store; use it as a context manager.

    Args:
        writer: Receives the samples.
        progress: Counts raw bytes.
        num_threads: Threads that parse and number; one per core by default.
        max_ind_range: Take ids modulo this before they are numbered.

    Attributes:
        columns: The numbering of the ids of each column.

    Raises:
        ConfigError: `num_threads` is no integer of at least 0.
    """

    def __init__(
        self,
        writer: StoreWriter,
        progress: tqdm[None],
        num_threads: int | None,
        max_ind_range: int | None = None,
    ) -> None:
        if num_threads is not None and not is_whole(num_threads, 0):
            raise ConfigError(
                "num_threads must be an integer and at least 0, for one per core, got "
                f"{num_threads!r}"
            )
        self.columns = [RowNumbers() for _ in range(NUM_CATEGORIES)]
        self._writer = writer
        self._progress = progress
        self._num_threads = num_threads or num_cores()
        # Ids have 32 bits, so a larger modulus changes none of them.
        self._modulus = (
            np.uint32(max_ind_range) if max_ind_range and max_ind_range < 2**32 else None
        )

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
            The entry for the file in meta.json.

        Raises:
            DatasetFormatError: the file is broken, or has a bad line.
        """
        raw = _RawFile(path)
        num_bytes_before, num_lines = self._progress.n, 0
        with closing(one_ahead(raw.blocks(), "recsys-read")) as blocks:
            for block in blocks:
                parts = self._parse_in_parts(block)
                for part in parts:
                    num_lines += len(part.labels)
                    if part.bad_line is not None:
                        raise _bad_line(path, num_lines + 1, part.bad_line)
                self._number_columns(parts)
                self._written.result()
                self._written = self._write_queue.submit(self._write, parts)
                self._progress.update(num_bytes_before + raw.num_bytes - self._progress.n)
        self._written.result()
        return {"name": path.name, "num_bytes": raw.num_bytes, "sha256": raw.sha256.hexdigest()}

    def _parse_in_parts(self, block: bytes) -> list[ParsedLines]:
        """Parse parts of a block in parallel; returns them in the order of the text."""
        cuts = [0]
        for part in range(1, self._num_threads + 1):
            cut = max(cuts[-1], len(block) * part // self._num_threads - 1)
            cuts.append(block.find(b"\n", cut) + 1)
            if cuts[-1] == len(block):
                break
        text = np.frombuffer(block, np.uint8)
        parsing = [self._pool.submit(parse_lines, text, *ends) for ends in pairwise(cuts)]
        return [part.result() for part in parsing]

    def _number_columns(self, parts: list[ParsedLines]) -> None:
        """Replace ids by rows, in place; columns in parallel, a column's parts in order."""

        def number(column: int) -> None:
            for part in parts:
                ids = part.categories[column]
                if self._modulus is not None:
                    ids %= self._modulus
                self.columns[column].number(ids)

        list(self._pool.map(number, range(NUM_CATEGORIES)))

    def _write(self, parts: list[ParsedLines]) -> None:
        for part in parts:
            self._writer.append(part.labels, part.integers, part.categories.view(np.int32).T)


def _bad_line(path: Path, line: int, text: bytes) -> DatasetFormatError:
    reason = explain(text)
    assert reason is not None, "the kernel and explain() disagree on what a good line is"
    rule, value = reason
    hint = "repair the line, or delete it"
    if line == 1:
        hint += f". {not_criteo(path)}"
    return DatasetFormatError(f"{path} line {line}: {rule}, got {value}; {hint}")


class _RawFile:
    """One raw file; its first bytes tell gzip from plain text.

    Attributes:
        num_bytes: Raw bytes read so far.
        sha256: Their hash.
    """

    def __init__(self, path: Path) -> None:
        self.num_bytes = 0
        self.sha256 = hashlib.sha256()
        self._path = path
        self._file: IO[bytes]

    def blocks(self) -> Iterator[bytes]:
        """The text in blocks that end in a newline, which is added to the last line if missing.

        Raises:
            DatasetFormatError: the file is a broken gzip file, or not text.
        """
        with self._path.open("rb") as self._file:
            is_gzip = self._file.read(2) == _GZIP
            self._file.seek(0)
            raw = cast("IO[bytes]", self)
            text = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if is_gzip else raw
            rest = b""
            while block := self._read_text(text):
                cut = block.rfind(b"\n") + 1
                if cut:
                    yield rest + block[:cut]
                    rest = block[cut:]
                else:
                    rest += block
                if len(rest) > BLOCK_BYTES:
                    raise DatasetFormatError(
                        f"{self._path}: a line must have at most {BLOCK_BYTES} bytes, got more; is "
                        f"this text? {not_criteo(self._path)}"
                    )
            if rest:
                yield rest + b"\n"

    def read(self, size: int = -1) -> bytes:
        """Read raw bytes; count and hash them. `gzip` reads through this method too."""
        raw = self._file.read(size)
        self.num_bytes += len(raw)
        self.sha256.update(raw)
        return raw

    def _read_text(self, text: IO[bytes]) -> bytes:
        try:
            return text.read(BLOCK_BYTES)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DatasetFormatError(
                f"{self._path}: broken gzip file after byte {self.num_bytes} ({error}); fetch it "
                "again"
            ) from error
