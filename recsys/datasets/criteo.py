r"""Prepare raw Criteo files, of the Kaggle challenge or of days of the 1TB set, as a store.

The convention is that of facebookresearch/dlrm, called `classic` in meta.json:

- missing values and negative integers become 0; dense features become log(x + 1);
- the ids of each column are numbered by first appearance over all files, for the 1TB days modulo
  `max_ind_range` if it is given;
- samples of the Kaggle challenge, and those of a single day, are split by `classic_splits`. Of
  several days, all but the last are for training. The first half of the last day (rounded up) is
  the test part, the second half the validation part.

One difference: a line without a label is an error here. A line is a sample:

    label \t int_0 ... int_12 \t cat_0 ... cat_25 \n

- 40 fields separated by single tabs; the line ends at "\n", "\r\n" or the end of the file;
- the label is 0 or 1;
- an integer is empty (missing) or matches -?[0-9]{1,10} and fits 32 bits;
- a category is empty (missing) or one to eight hexadecimal digits.

A kernel only finds the first bad line. Python code then looks at its fields.

    a thread            file -> decompressed blocks of complete lines; hashes the raw bytes
    pool (all cores)    parses parts of a block in parallel, then numbers its columns in parallel
    one of its threads  samples -> store, in order

At most four blocks are in memory at a time, so memory use is that of the hash tables of ids.

References:
    facebookresearch/dlrm, data_utils.py: `getCriteoAdData`, `transformCriteoAdData`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import sys
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from tqdm import tqdm

from recsys._support.files import as_argument, listed_files, require_files
from recsys._support.jit import inlined_part, kernel
from recsys._support.machine import num_cores
from recsys._support.untrusted import is_whole
from recsys.datasets.loader import one_ahead
from recsys.datasets.numbering import Numbers
from recsys.datasets.store_writer import StoreWriter, classic_splits
from recsys.errors import ConfigError, DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "CATEGORY_NAMES",
    "INTEGER_NAMES",
    "PrepareReport",
    "prepare_criteo_1tb",
    "prepare_criteo_kaggle",
]

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
NUM_FIELDS = 1 + NUM_INTEGERS + NUM_CATEGORIES

# A good line has at least this many bytes: a label, 39 tabs, an end.
MIN_LINE_BYTES = NUM_FIELDS + 1

_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO, _ONE = (ord(char) for char in "\t\n\r-01")
# What a label, an integer and a category match.
_PATTERNS = rb"[01]", rb"(-?[0-9]{1,10})?", rb"[0-9a-fA-F]{0,8}"
_DIGITS = np.full(256, 16, np.uint8)  # of characters
_DIGITS[[ord(char) for char in "0123456789abcdef"]] = range(16)
_DIGITS[[ord(char) for char in "ABCDEF"]] = range(10, 16)
INTEGER_NAMES = tuple(f"int_{column}" for column in range(NUM_INTEGERS))
CATEGORY_NAMES = tuple(f"cat_{column}" for column in range(NUM_CATEGORIES))
# A block takes 50 ms to process, much longer than handing it from thread to thread. A few blocks
# are small compared with the hash tables of ids. Longer lines are refused.
BLOCK_BYTES = 16 * 2**20


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
        DatasetFormatError: there is a bad line (the message names file, line, rule and value), a
            file without a line, or one that seems to be cut.
        AlreadyExists: `store` exists.
        ConfigError: no file is named, or one twice.
        FileNotFoundError: a raw file does not exist.
    """
    paths = listed_files("raw_files", raw_files)
    return _prepare(paths, store, num_threads, show_progress, by_day=False)


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
        DatasetFormatError: there is a bad line (the message names file, line, rule and value), a
            day without a line, or a file that seems to be cut.
        ConfigError: `max_ind_range` is not positive, or days are out of order or given twice.
        AlreadyExists: `store` exists.
        FileNotFoundError: a day file does not exist.
    """
    paths = listed_files("day_files", day_files)
    if max_ind_range is not None and not is_whole(max_ind_range, 1):
        raise ConfigError(f"max_ind_range must be an integer and at least 1, got {max_ind_range!r}")
    numbers = [int(found[1]) for path in paths if (found := re.match(r"day_(\d+)", path.name))]
    if numbers != sorted(numbers):
        raise ConfigError(
            f"day_files must be in order, oldest first, got {', '.join(map(str, paths))}; in a "
            "shell use day_{0..23}, because day_* puts day_10 before day_2"
        )
    return _prepare(paths, store, num_threads, show_progress, by_day=True, modulus=max_ind_range)


def _prepare(
    paths: Sequence[Path],
    store: str | Path,
    num_threads: int | None,
    show_progress: bool,
    *,
    by_day: bool,
    modulus: int | None = None,
) -> PrepareReport:
    require_files("raw", paths)
    num_threads = num_threads or num_cores()
    columns = [Numbers(name, np.uint32) for name in CATEGORY_NAMES]
    progress: tqdm[None] = tqdm(
        total=sum(path.stat().st_size for path in paths),
        desc="prepare",
        unit="B",
        unit_scale=True,
        disable=not show_progress,
        mininterval=0.1 if sys.stderr.isatty() else 10,  # few lines if stderr is a log file
    )
    with (
        StoreWriter(store) as writer,
        progress,
        ThreadPoolExecutor(num_threads + 1, "recsys-parse") as pool,
    ):
        reader = _Reader(writer, columns, modulus, progress, pool, num_threads)
        sources = [reader.read(path) for path in paths]
        ids = [column.known for column in columns]
        sizes = [source["num_samples"] for source in sources]
        writer.finish(
            dense_names=INTEGER_NAMES,
            ids=dict(zip(CATEGORY_NAMES, ids, strict=True)),
            splits=classic_splits(sum(sizes), sizes[-1] if by_day and len(sizes) > 1 else None),
            about={"convention": "classic", "sources": sources}
            | ({} if modulus is None else {"max_ind_range": modulus}),
        )
    return PrepareReport(writer.path, writer.num_samples, sum(map(len, ids)))


@dataclass(frozen=True)
class _Reader:
    """Reads raw files one after another into a store.

    Attributes:
        columns: The numbering of the ids of each column.
        modulus: Ids are taken modulo this before they are numbered.
    """

    writer: StoreWriter
    columns: Sequence[Numbers]
    modulus: int | None
    progress: tqdm[None]
    pool: ThreadPoolExecutor
    num_threads: int

    def read(self, path: Path) -> dict[str, Any]:
        """Append the samples of a file, and return its entry for meta.json."""
        num_bytes_before, num_lines = self.progress.n, 0
        written: Future[None] = self.pool.submit(lambda: None)
        with (
            _HashedFile(path) as raw,
            closing(one_ahead(_blocks(path, raw), "recsys-read")) as blocks,
        ):
            for block in blocks:
                parts = self._parse(block)
                for part in parts:
                    num_lines += len(part.labels)
                    if part.bad_line is not None:
                        raise _bad_line(path, num_lines + 1, part.bad_line)
                self._number(parts)
                written.result()
                written = self.pool.submit(self._write, parts)
                self.progress.update(num_bytes_before + raw.tell() - self.progress.n)
            written.result()
            if not num_lines:
                raise DatasetFormatError(f"{path}: no line in it. {_not_criteo(path)}")
            return {
                "name": path.name,
                "num_bytes": raw.tell(),
                "sha256": raw.sha256.hexdigest(),
                "num_samples": num_lines,
            }

    def _parse(self, block: bytes) -> list[ParsedLines]:
        """Parse parts of a block in parallel; returns them in the order of the text."""
        cuts = [0]
        while cuts[-1] < len(block):
            aim = len(block) * len(cuts) // self.num_threads - 1
            cuts.append(block.find(b"\n", max(cuts[-1], aim)) + 1)
        text = np.frombuffer(block, np.uint8)
        parsing = [self.pool.submit(parse_lines, text, *ends) for ends in pairwise(cuts)]
        return [part.result() for part in parsing]

    def _number(self, parts: Sequence[ParsedLines]) -> None:
        """Replace ids by rows, in place; columns in parallel, a column's parts in order."""

        def number(column: int) -> None:
            for part in parts:
                ids = part.categories[column]
                if self.modulus is not None and self.modulus < 2**32:  # ids have 32 bits
                    ids %= np.uint32(self.modulus)
                ids[:] = self.columns[column].number_array(ids).view(np.uint32)

        list(self.pool.map(number, range(NUM_CATEGORIES)))

    def _write(self, parts: Sequence[ParsedLines]) -> None:
        for part in parts:
            self.writer.append(part.labels, part.integers, part.categories.view(np.int32).T)


class _HashedFile(io.FileIO):
    """A raw file, with the hash of the bytes read so far. `gzip` reads by `read` too."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.sha256 = hashlib.sha256()

    def read(self, size: int | None = -1) -> bytes:
        raw = super().read(size) or b""
        self.sha256.update(raw)
        return raw


def _blocks(path: Path, raw: _HashedFile) -> Iterator[bytes]:
    """The text in blocks that end in a newline, which is added to the last line if missing."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    text = cast("io.RawIOBase", gzip.GzipFile(fileobj=raw) if is_gzip else raw)
    rest = b""
    try:
        while block := text.read(BLOCK_BYTES):
            lines, newline, tail = block.rpartition(b"\n")
            if newline:
                yield rest + lines + newline
                rest = b""
            rest += tail
            if len(rest) > BLOCK_BYTES:
                raise DatasetFormatError(
                    f"{path}: a line must have at most {BLOCK_BYTES} bytes, got more; is this "
                    f"text? {_not_criteo(path)}"
                )
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DatasetFormatError(
            f"{path}: broken gzip file after byte {raw.tell()} ({error}); fetch it again"
        ) from error
    value = rest.rpartition(b"\t")[2].removesuffix(b"\r")
    if rest.count(b"\t") == NUM_FIELDS - 1 and len(value) < 8:
        raise DatasetFormatError(
            f"{path}: the last line must end in a newline, or in a value of 8 digits, got "
            f"{str(value)[1:]}: the file seems to be cut; fetch it again, or add the newline if "
            "the value is whole"
        )
    if rest:
        yield rest + b"\n"


def _bad_line(path: Path, line: int, text: bytes) -> DatasetFormatError:
    """Name the first field that does not match its pattern, else the last one."""
    fields, number = text.removesuffix(b"\r").split(b"\t", NUM_FIELDS), 0
    for number, field in enumerate(fields, 1):
        if not re.fullmatch(_PATTERNS[(number > 1) + (number > 1 + NUM_INTEGERS)], field):
            break
    hint, num_fields = f". {_not_criteo(path)}" if line == 1 else "", text.count(b"\t") + 1
    return DatasetFormatError(
        f"{path} line {line}: must have {NUM_FIELDS} fields separated by tabs: a label of 0 or 1, "
        f"{NUM_INTEGERS} integers of 32 bits, and {NUM_CATEGORIES} categories of at most 8 "
        f"hexadecimal digits, of which any may be empty; got {num_fields} fields, and field "
        f"{number} is {str(fields[number - 1][:40])[1:]}; repair the line, or delete it{hint}"
    )


def _not_criteo(file: Path) -> str:
    """The sentence of an error that tells where a file of another format goes."""
    name = as_argument(file)
    return (
        "Raw Criteo text, plain or gzip, has 40 fields separated by tabs and no header. For "
        f"another table, such as a CSV file, take `recsys inspect {name} > schema.toml` and "
        f"`recsys prepare table {name} --schema schema.toml --out STORE`"
    )


class ParsedLines(NamedTuple):
    """The samples of one part of the text, up to its first bad line.

    Shape:
        labels (n,) int8; integers (n, 13) int32; categories (26, n) uint32, column by column, so
        that columns can be numbered in parallel; bad_line None if all lines are good.
    """

    labels: NDArray[np.int8]
    integers: NDArray[np.int32]
    categories: NDArray[np.uint32]
    bad_line: bytes | None


def parse_lines(text: NDArray[np.uint8], begin: int, end: int) -> ParsedLines:
    """Parse the lines in `text[begin:end]`; stops at the first bad one.

    Args:
        text: Bytes; `text[end - 1]` is a newline.
        begin: The first byte of the first line.
        end: The byte after the last line's newline.
    """
    assert begin == end or text[end - 1] == _NEWLINE, "the last line must end in a newline"
    max_good = (end - begin) // MIN_LINE_BYTES + 1
    labels = np.empty(max_good, np.int8)
    integers = np.empty((max_good, NUM_INTEGERS), np.int32)
    categories = np.empty((NUM_CATEGORIES, max_good), np.uint32)
    num_good, stop = _parse_kernel(text, begin, end, labels, integers, categories)
    return ParsedLines(
        labels[:num_good],
        integers[:num_good],
        categories[:, :num_good],
        None if stop == end else text[stop:end].tobytes().partition(b"\n")[0],
    )


@kernel
def _parse_kernel(
    text: NDArray[np.uint8],
    position: int,
    end: int,
    labels: NDArray[np.int8],
    integers: NDArray[np.int32],
    categories: NDArray[np.uint32],
) -> tuple[int, int]:
    """Parse to `end`, or to the begin of a bad line; a newline ends every inner loop."""
    num_good = 0
    while position < end:
        line_begin = position
        char = text[position]
        position += 1
        is_good = bool(char in (_ZERO, _ONE) and text[position] == _TAB)
        labels[num_good] = char - _ZERO
        if is_good:
            position, is_good = _parse_integers(text, position, integers, num_good)
        if is_good:
            position, is_good = _parse_categories(text, position, categories, num_good)
        if not is_good:
            return num_good, line_begin
        num_good += 1
        position += 1
    return num_good, position


@inlined_part
def _parse_integers(
    text: NDArray[np.uint8], position: int, integers: NDArray[np.int32], sample: int
) -> tuple[int, bool]:
    """Parse a line from the tab before its integers on; return the end, and if all are good."""
    is_good, column = True, 0
    while is_good and column < NUM_INTEGERS:
        is_negative = text[position + 1] == _MINUS
        begin = position + 1 + is_negative
        position, number = _parse_digits(text, begin, 10)
        is_good = bool(
            text[position] == _TAB
            and position - begin <= 10
            and number <= 2147483647 + is_negative
            and not (is_negative and position == begin)
        )
        integers[sample, column] = 0 if is_negative else number
        column += 1
    return position, is_good


@inlined_part
def _parse_categories(
    text: NDArray[np.uint8], position: int, categories: NDArray[np.uint32], sample: int
) -> tuple[int, bool]:
    """Parse a line from the tab before its categories on, as `_parse_integers` does."""
    is_good, column = True, 0
    while is_good and column < NUM_CATEGORIES:
        begin = position + 1
        position, category = _parse_digits(text, begin, 16)
        is_short, is_last = position - begin <= 8, column == NUM_CATEGORIES - 1
        position += is_last and text[position] == _RETURN
        is_good = is_short and text[position] == (_NEWLINE if is_last else _TAB)
        categories[column, sample] = category
        column += 1
    return position, is_good


@inlined_part
def _parse_digits(text: NDArray[np.uint8], position: int, base: int) -> tuple[int, np.int64]:
    """The position after the digits that begin there, and their number."""
    number = np.int64(0)
    while _DIGITS[text[position]] < base:
        number = number * base + np.int64(_DIGITS[text[position]])
        position += 1
    return position, number
