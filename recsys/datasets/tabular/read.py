"""Tables, read as checked record batches: CSV, TSV (plain, .gz, .zst), Parquet, and data frames.

`TableFiles` reads a list of files, `Frames` frames of pandas or pyarrow. A path with `://` is a
URL, which fsspec opens. Arrow parses what is read; its errors are raised again with the file, the
line or the row group, and the column.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import os
import re
from collections import deque
from collections.abc import Iterable
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from recsys._support.files import listed_files, require_files
from recsys.datasets.tabular.convert import conform, plain
from recsys.errors import ConfigError, DatasetFormatError, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import pandas as pd
    from numpy.typing import NDArray

    from recsys.datasets.tabular.schema import Schema

__all__ = [
    "Frames",
    "ParquetFile",
    "TableFiles",
    "TextFile",
    "find_files",
    "open_table",
]

_COMPRESSIONS = {"gz": "gzip", "zst": "zstd"}
_BLOCK_BYTES = 8 << 20
_CHUNK_BYTES = 4 << 20
_BATCH_ROWS = 65_536
_SAMPLE_BYTES = 32 << 20  # of text; a larger file is sampled in blocks
_SAMPLE_BLOCKS = 32
_SAMPLE_ROWS = 8192  # of Parquet; rows of each such block are in a sample
_LARGE_GROUP_BYTES = 256 << 20
_UTF8_HINT = "convert the file to UTF-8, as by `iconv -f latin1 (or utf-16) -t utf-8 OLD > NEW`"
_NO_COLUMN = "add it, or correct the schema, or its keys delimiter and names"
_QUOTES_HINT = (
    'double each quote that belongs to a value; or, if quotes enclose no field, set quote = "" in '
    'the schema (recsys inspect: --quote "")'
)
_HINTS = (  # for what Arrow says of a text file
    ("UTF8|utf-8", _UTF8_HINT),
    (
        r"int64: invalid value '[+-]?[0-9]+\.0'",
        "pandas writes integers of a column with missing values so; convert the column by "
        '.astype("Int64") before to_csv',
    ),
    ("invalid value", "correct it, name it in missing_values, or change the schema"),
    ("Expected .* columns", "correct the line"),
    ("", "fetch or compress the file again, or rename it, if its suffix is wrong"),
)


def find_files(paths: Sequence[str | Path]) -> list[str]:
    """The files that paths, patterns (such as `day=*/*.parquet`) and URLs name.

    A folder stands for all tables in it, in order of their paths. Files and folders in it whose
    names begin with a dot or an underscore are left out: programs keep copies and unfinished files
    under such names.

    Raises:
        FileNotFoundError: a path does not exist, or a folder or pattern leads to no table.
        ConfigError: `paths` is no list, or empty, or two paths lead to the same file.
        MissingDependency: a URL needs fsspec, or a package for its kind of URL.
    """
    listed_files("files", paths)
    files: list[str] = []
    for path in map(str, paths):
        if "://" in path:
            found = [path]
            if "*" in path or not _kind_of(path):
                system, name = _system_of(path)
                names = sorted(system.glob(name) if "*" in name else system.find(name))
                found = [system.unstrip_protocol(file) for file in names if _kind_of(file)]
        elif Path(path).is_dir():
            found = [
                str(file)
                for file in sorted(Path(path).rglob("*"))
                if _kind_of(str(file))
                and file.is_file()
                and not any(part[0] in "._" for part in file.relative_to(path).parts)
            ]
        else:
            is_pattern = re.search(r"[*?[]", path) and not os.path.lexists(path)
            found = sorted(glob(path, recursive=True)) if is_pattern else [path]  # noqa: PTH207
        if not found:
            raise FileNotFoundError(
                f"{path} must lead to CSV, TSV or Parquet files, found none; name another"
            )
        files += found
    require_files("table", [Path(file) for file in files if "://" not in file])
    return files


class TableFiles:
    """Files with one table: their rows, in order of the files, as batches of a schema's columns.

    Attributes:
        columns: The columns that are read, in the schema's order.
        sources: The files that `batches` has read to their ends so far, as a store's meta.json has
            them: name, num_bytes, num_rows and sha256, which is empty if it is not computed.

    Args:
        paths: As for `find_files`.
        schema: What the columns mean.
        optional: Roles of the schema that the files may lack, such as the label of rows to predict.
            They are read if the first file has them; then all must. Their values may be missing.
        with_hash: Whether to compute the hash of each file in `sources`.

    Raises:
        FileNotFoundError: a file does not exist, or a folder has no table in it.
        ConfigError: a file is named twice, or its name does not say what kind of file it is.
        DatasetFormatError: a file has no column that the schema names.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        schema: Schema,
        *,
        optional: Collection[str] = (),
        with_hash: bool = True,
    ) -> None:
        self.schema = schema
        self.sources: list[dict[str, Any]] = []
        self._optional = frozenset(optional)
        self._with_hash = with_hash
        self._files = [
            open_table(path, schema.delimiter, schema.quote, schema.names)
            for path in find_files(paths)
        ]
        first = self._files[0].column_names
        self.columns = tuple(
            name
            for name in schema.columns
            if name in first or name not in optional or name in schema.categorical
        )
        for file in self._files:
            for name in (name for name in self.columns if name not in file.column_names):
                close = difflib.get_close_matches(name, file.column_names, n=1, cutoff=0.8)
                hint = f"did you mean {close[0]!r}?" if close else _NO_COLUMN
                shown = ", ".join(map(repr, file.column_names[:30]))
                raise DatasetFormatError(
                    f"{file.path} must have column {name!r}, has {shown}; {hint}"
                )

    def place(self, row: int) -> str:
        """Words for a row that was read, by its number from 0 among the rows of all files."""
        sources = tuple(self.sources)  # a thread that reads ahead appends to it
        for file, source in zip(self._files, sources, strict=False):
            if row < source["num_rows"]:
                return file.place(row)
            row -= source["num_rows"]
        return self._files[len(sources)].place(row)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Read all files once, as `recsys.datasets.tabular.convert.conform` describes.

        Raises:
            DatasetFormatError: a file breaks its format, or the schema. The message names file and
                line or row group, column, rule, value and hint.
        """
        self.sources, self._num_read = [], 0
        for file in self._files:
            digest, before = hashlib.sha256() if self._with_hash else None, self._num_read
            with closing(_open(file.path)) as raw:
                stream = raw if digest is None else _Tap(raw, digest.update)
                for batch in file.batches(self.columns, self.schema, stream):
                    yield conform(
                        batch,
                        self.schema,
                        lambda row: self.place(self._num_read + row),
                        optional=self._optional,
                    )
                    self._num_read += batch.num_rows
                while digest is not None and stream.read(_CHUNK_BYTES):
                    pass  # Parquet is read by another way, so all of it is hashed here
                self.sources.append(
                    {
                        "name": Path(file.path).name,
                        "num_bytes": raw.seek(0, os.SEEK_END),
                        "num_rows": self._num_read - before,
                        "sha256": "" if digest is None else digest.hexdigest(),
                    }
                )


class Frames:
    """Data frames with one table: their rows, in order, as batches of a schema's columns.

    Args:
        frames: A frame of pandas or a table of pyarrow, or any number of them, whose rows follow
            each other.
        schema: What the columns mean.
        without: Columns of the schema that are not read, such as the label of rows to predict.
    """

    def __init__(
        self,
        frames: pd.DataFrame | pa.Table | Iterable[pd.DataFrame | pa.Table],
        schema: Schema,
        *,
        without: Collection[str] = (),
    ) -> None:
        is_one = hasattr(frames, "columns") or not isinstance(frames, Iterable)
        self._frames: Iterable[Any] = [frames] if is_one else frames
        self._schema = schema
        self._columns = [name for name in schema.columns if name not in without]
        self._digest, self._num_rows = hashlib.sha256(), 0

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The entry `sources` of meta.json."""
        return [
            {
                "name": "frames",
                "num_rows": self._num_rows,
                "sha256": self._digest.hexdigest(),
            }
        ]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Read all frames once, as `recsys.datasets.tabular.convert.conform` describes.

        Raises:
            DatasetFormatError: a frame breaks the schema. The message names frame and row, column,
                rule, value and hint.
            TypeError: a frame is none.
        """
        for number, frame in enumerate(self._frames):
            if not (isinstance(frame, pa.Table) or hasattr(frame, "iloc")):
                raise TypeError(
                    f"frame {number} must be a pandas.DataFrame or a pyarrow.Table, got "
                    f"{type(frame).__name__}; pandas.DataFrame(rows) makes one"
                )
            found = list(getattr(frame, "column_names", frame.columns))
            for name in (name for name in self._columns if found.count(name) != 1):
                raise DatasetFormatError(
                    f"frame {number}: must have column {name!r} once, has columns {found[:30]}; "
                    "correct the schema or the frame"
                )
            for start in range(0, len(frame), _BATCH_ROWS):
                location = partial(_place_in_frame, number, start)
                batch = conform(self._block(frame, start, location(0)), self._schema, location)
                values = [plain(column) for column in batch.columns]  # without dictionaries
                self._digest.update(pa.record_batch(values, batch.schema.names).serialize())
                self._num_rows += batch.num_rows
                yield batch

    def _block(self, frame: Any, start: int, location: str) -> pa.RecordBatch:
        arrays = {}
        is_table = isinstance(frame, pa.Table)
        rows = (frame if is_table else frame.iloc)[start : start + _BATCH_ROWS]
        for name in self._columns:
            try:
                array = rows[name] if is_table else pa.array(rows[name], from_pandas=True)
            except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
                raise DatasetFormatError(
                    f"{location}, column {name!r}: from here on, must have values of one type that "
                    f"Arrow has: {str(error)[:200]}; convert the column"
                ) from error
            arrays[name] = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        return pa.RecordBatch.from_pydict(arrays)


def _place_in_frame(number: int, start: int, row: int) -> str:
    return f"frame {number}, row {start + row} (from 0)"


class TextFile:
    """One CSV or TSV file. Quoted fields may hold delimiters and line breaks. The text is UTF-8.

    Args:
        path: The file or URL; its suffix says how it is compressed, and its delimiter.
        delimiter: Another delimiter; empty for that of the suffix.
        quote: The character around quoted fields; empty: quotes are text.
        names: The names of the columns, if the first line does not hold them.

    Raises:
        DatasetFormatError: the file is empty, or its first line does not name columns.
        OSError: the file cannot be read.
    """

    def __init__(
        self, path: str, delimiter: str = "", quote: str = '"', names: Sequence[str] = ()
    ) -> None:
        self.path, self.quote, self._names = path, quote, tuple(names)
        self.delimiter = delimiter or ("\t" if _kind_of(path).startswith("tsv") else ",")
        try:
            with self._records() as records:
                first = next(filter(None, records), ())  # empty lines are left out
                "".join(first).encode()
        except (csv.Error, OSError, UnicodeEncodeError) as error:
            raise self._error(error) from None
        if not first:
            raise DatasetFormatError(f"{path} must begin with a line of column names, is empty")
        if names and len(first) != len(names):
            raise DatasetFormatError(
                f"{path}, line 1: must have a field for each of {len(names)} names, has "
                f"{len(first)}; correct the names"
            )
        self.column_names = self._names or tuple(first)

    def place(self, row: int) -> str:
        """Words for a row of data, by its number from 0: the file and the line it begins on.

        The row's number takes the place of the line if Python's reader of CSV cannot count so far.
        """
        line, num_before = 1, row + (not self._names)
        try:
            with self._records() as records:
                for record in records:
                    num_before -= bool(record)  # an empty line is no record
                    if num_before < 0:
                        break
                    line = records.line_num + 1
        except (csv.Error, OSError):
            return f"{self.path}, row {row} (from 0)"
        return f"{self.path}, line {line}"

    def batches(self, columns: Sequence[str], schema: Schema, raw: Any) -> Iterator[pa.RecordBatch]:
        """Read columns as numbers where the schema says so, and as text elsewhere.

        Args:
            columns: Their names.
            schema: What they mean.
            raw: The open file.

        Raises:
            DatasetFormatError: a line does not fit the header, a value is no number, a quote is
                misplaced, the text is not UTF-8, or the compressed data is damaged. The message
                names the line.
        """
        kinds = {name: _arrow_type(name, schema) for name in columns}
        parse = partial(self._parse, kinds=kinds, missing_values=schema.missing_values)
        try:
            try:
                yield from parse(self._decompressed(raw))
            except pa.ArrowInvalid:  # one thread counts the rows that it reads
                with closing(_open(self.path)) as again:
                    deque(parse(self._decompressed(again), use_threads=False), 0)
                raise
        except (pa.ArrowInvalid, OSError) as error:
            raise self._error(error) from None

    def sample(self) -> pa.Table:
        """Rows of the whole file, in blocks of lines; each column is text, nulls for empty fields.

        A file of at most 32 MiB is read whole.

        Raises:
            DatasetFormatError: the first rows break the format.
        """
        kinds = dict.fromkeys(self.column_names, pa.string())
        tables: list[pa.Table] = []
        fault = None
        try:
            blocks, is_whole = self._blocks()
            for number, block in enumerate(blocks):
                names = self.column_names if number else self._names
                try:
                    batches = self._parse(io.BytesIO(block), kinds, names=names, is_strict=is_whole)
                    tables += (pa.Table.from_batches(batches, pa.schema([*kinds.items()])),)
                except pa.ArrowInvalid as error:  # blocks may begin within quotes
                    fault = error
        except OSError as error:
            raise self._error(error) from None
        if fault is not None and not tables:
            raise self._error(fault)
        return pa.concat_tables(tables)

    def _blocks(self) -> tuple[list[bytes], bool]:
        """Blocks of lines from all over the file, and whether it is one block, the whole file."""
        size = _SAMPLE_BYTES // _SAMPLE_BLOCKS
        with closing(_open(self.path)) as raw:
            text, found, step = self._decompressed(raw), [], 1
            length = 0 if text is not raw else raw.seek(0, os.SEEK_END)
            if length > _SAMPLE_BYTES:
                for start in range(0, length, (length - size) // (_SAMPLE_BLOCKS - 1)):
                    raw.seek(start)
                    found.append(raw.read(size))
            else:  # all is read; when there are too many blocks, every second one is dropped
                raw.seek(0)
                for number, block in enumerate(iter(partial(text.read, size), b"")):
                    if number % step == 0:
                        found.append(block)
                    if len(found) > 2 * _SAMPLE_BLOCKS:
                        found, step = found[::2], 2 * step
        if length <= _SAMPLE_BYTES and step == 1:
            return [b"".join(found)], True
        end = b"\n" if b"\n" in found[0] else b"\r"
        return [
            block[block.find(end) + 1 if number else 0 : block.rfind(end) + 1]
            for number, block in enumerate(found)
        ], False

    def _parse(
        self,
        text: Any,
        kinds: dict[str, Any],
        missing_values: Sequence[str] = (),
        *,
        names: Sequence[str] | None = None,
        use_threads: bool = True,
        is_strict: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        if self.quote and is_strict:
            text = _Tap(text, _quote_check(self))
        yield from arrow_csv.open_csv(
            pa.PythonFile(text, mode="r"),
            read_options=arrow_csv.ReadOptions(
                block_size=_BLOCK_BYTES,
                use_threads=use_threads,
                column_names=self._names if names is None else names,
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char=self.quote or False,
                newlines_in_values=bool(self.quote),
                invalid_row_handler=None if is_strict else lambda row: "skip",
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=kinds,
                include_columns=list(kinds),
                null_values=["", *missing_values],
                strings_can_be_null=True,
            ),
        )

    def _error(self, error: Exception) -> Exception:
        """What Arrow says, with the line and the column, and what to do; an error of the disk."""
        if getattr(error, "errno", None):
            return error
        text, location = str(error), self.path
        if "straddl" in text:
            return self.misplaced_quote()
        if isinstance(error, UnicodeEncodeError):  # of the names
            location += ", line 1"
        if row := re.search(r"Row #(\d+): ?", text):
            location = self.place(int(row[1]) - 1 - (not self._names))
        if column := re.search(r"In CSV column #(\d+): ", text):
            location += f", column {self.column_names[int(column[1])]!r}"
        text = re.sub(r"In CSV column #\d+: |Row #\d+: ?", "", text)
        hint = next(hint for words, hint in _HINTS if re.search(words, text, re.DOTALL))
        return DatasetFormatError(f"{location}: {text[:200]}; {hint}")

    def misplaced_quote(self) -> DatasetFormatError:
        """The error of a quoted field that does not end as it must, with its line."""
        location = self.path
        with suppress(csv.Error), self._records(strict=True) as records:
            for _ in records:
                location = f"{self.path}, line {records.line_num + 1}"
        return DatasetFormatError(
            f"{location}: a field that begins with a quote must end with one, and a row must be "
            f"shorter than {_BLOCK_BYTES >> 20} MiB; {_QUOTES_HINT}"
        )

    def _decompressed(self, raw: Any) -> Any:
        compression = _kind_of(self.path).partition(".")[2]
        if not compression:
            return raw
        raw = pa.PythonFile(raw, mode="r")
        return pa.CompressedInputStream(raw, _COMPRESSIONS[compression])

    @contextmanager
    def _records(self, *, strict: bool = False) -> Iterator[Any]:
        """Records of the file as lists of text, by the slow reader that counts lines."""
        with closing(_open(self.path)) as raw:
            text = io.TextIOWrapper(
                self._decompressed(raw), encoding="utf-8-sig", errors="surrogateescape", newline=""
            )
            yield csv.reader(
                text,
                delimiter=self.delimiter,
                quotechar=self.quote or None,
                quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
                strict=strict,
            )


class ParquetFile:
    """One Parquet file.

    Args:
        path: The file or URL.

    Raises:
        DatasetFormatError: it is not a Parquet file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with self._open() as file:
            self.schema = file.schema_arrow
            self.column_names = tuple(self.schema.names)
            self._groups = [file.metadata.row_group(n) for n in range(file.num_row_groups)]

    def place(self, row: int) -> str:
        """Words for a row, by its number from 0: file, row group, and row in the group, from 0."""
        starts = np.cumsum([0, *(group.num_rows for group in self._groups)])
        group = np.searchsorted(starts, row, side="right") - 1
        return f"{self.path}, row group {group}, row {row - starts[group]}"

    def batches(self, columns: Sequence[str], schema: Schema, raw: Any) -> Iterator[pa.RecordBatch]:
        """Read columns with the types that they have in the file.

        Args:
            columns: Their names.
            schema: Not used: the file has types.
            raw: Not used: Parquet is read out of order.

        Raises:
            DatasetFormatError: a row group is damaged.
        """
        texts = [name for name in columns if str(self.schema.field(name).type) == "string"]
        with self._open() as file:
            first = next(file.iter_batches(_BATCH_ROWS, columns=texts), None) if texts else None
        # Texts that repeat are read as dictionaries, which are numbered fastest.
        texts = [
            name for name in texts if first and 8 * len(first[name].unique()) < len(first[name])
        ]
        with self._open(read_dictionary=texts) as file:
            for group in range(file.num_row_groups):
                yield from file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=list(columns))

    def sample(self) -> pa.Table:
        """Up to about 100,000 rows, from 16 row groups, with the types that they have in the file.

        Raises:
            DatasetFormatError: a row group is damaged.
        """
        groups = range(0, len(self._groups), max(1, len(self._groups) // 16))
        num_rows = sum(self._groups[group].num_rows for group in groups)
        share = min(1.0, 100_000 / max(num_rows, 1))
        with self._open() as file:
            found = [
                batch.slice(0, int(batch.num_rows * share) + 1)
                for batch in file.iter_batches(_SAMPLE_ROWS, row_groups=list(groups))
            ]
        return pa.Table.from_batches(found, schema=self.schema)

    @contextmanager
    def _open(self, **options: Any) -> Iterator[Any]:
        """The open file; large row groups are read in small pieces, others whole, which is faster.

        Old Parquet has times of 96 bits. Those after the year 2262 would overflow as nanoseconds.
        """
        is_large = any(g.total_byte_size > _LARGE_GROUP_BYTES for g in getattr(self, "_groups", ()))
        options |= {"buffer_size": 1 << 20 if is_large else 0, "pre_buffer": not is_large}
        opened = _open(self.path) if "://" in self.path else nullcontext(self.path)
        try:
            with (
                opened as source,
                parquet.ParquetFile(source, coerce_int96_timestamp_unit="us", **options) as file,
            ):
                yield file
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if getattr(error, "errno", None):
                raise
            raise DatasetFormatError(
                f"{self.path} cannot be read: {str(error)[:200]}; write the file anew"
            ) from error


def open_table(
    path: str,
    delimiter: str = "",
    quote: str = '"',
    names: Sequence[str] = (),
    *,
    check_names: bool = True,
) -> TextFile | ParquetFile:
    """Open a file by the kind that its name says.

    Args:
        path: The file.
        delimiter: Of a text file; see `TextFile`.
        quote: Of a text file; see `TextFile`.
        names: Of a text file; see `TextFile`.
        check_names: Whether to check that column names differ.

    Raises:
        ConfigError: its name does not say what kind of file it is.
        DatasetFormatError: it is empty, not what its name says, or two columns have one name.
    """
    kind = _kind_of(path)
    if not kind:
        raise ConfigError(
            f"{path}: the name of a table must end in .csv, .tsv or .txt (.gz or .zst may follow), "
            ".parquet or .pq; rename or convert it; what pandas reads, such as JSON and "
            "spreadsheets, recsys.datasets.write_store takes as frames"
        )
    file = (
        ParquetFile(path) if kind in ("parquet", "pq") else TextFile(path, delimiter, quote, names)
    )
    for name in file.column_names if check_names else ():
        if file.column_names.count(name) > 1:
            raise DatasetFormatError(
                f"{path}: column names must differ, got {name!r} {file.column_names.count(name)} "
                "times; rename one, or, if line 1 is data, name the columns in the key names "
                "(recsys inspect: --no-header)"
            )
    return file


class _Tap:
    """A stream that shows each block to a function before it hands it out.

    A carriage return that would end a block waits for the next one, unless it is alone: Arrow drops
    a line feed that begins a block after one, also from a value in quotes.
    """

    closed = False

    def __init__(self, stream: Any, see: Callable[[bytes], None]) -> None:
        self._stream, self._see, self._held = stream, see, b""

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._held + self._stream.read(max(size - len(self._held), -1))
        self._held = b"\r" if data.endswith(b"\r") and len(data) > 1 else b""
        data = data[: len(data) - len(self._held)]
        self._see(data)
        return data

    def close(self) -> None:
        """Do nothing: the code that opened the stream closes it."""


def _quote_check(file: TextFile) -> Callable[[bytes], None]:
    """A function of each block, which refuses misplaced quotes; an empty block ends the text.

    Arrow would read on in silence after a closing quote that text follows, or one that is never
    closed, and take several rows for one.
    """
    # Not at the top: a command checks its paths before numba and PyTorch are imported.
    from recsys._support.jit import kernel

    follow, state = kernel(_follow), _START
    quote, delimiter = file.quote.encode(), file.delimiter.encode()

    def check(text: bytes) -> None:
        nonlocal state
        if quote in text or state == _CLOSED:
            codes = np.frombuffer(text, np.uint8)
            state = follow(codes, state, ord(delimiter), ord(quote))
        elif text and state != _QUOTED:
            state = _START if text[-1:] in (delimiter, b"\n", b"\r") else _PLAIN
        if state == _MISPLACED or (not text and state == _QUOTED):
            raise file.misplaced_quote()

    return check


# The position in the text after a byte. After a closing quote, the next byte may double it.
_START, _PLAIN, _QUOTED, _CLOSED, _MISPLACED = range(5)


def _follow(text: NDArray[np.uint8], state: int, delimiter: int, quote: int) -> int:
    """Follow quotes through a block of text; returns the state after it."""
    for byte in text:
        if byte == quote and state != _PLAIN:
            state = _CLOSED if state == _QUOTED else _QUOTED
        elif state == _QUOTED:
            continue
        elif byte == delimiter or byte == 10 or byte == 13:
            state = _START
        elif state == _CLOSED:
            return _MISPLACED
        else:
            state = _PLAIN
    return state


def _kind_of(path: str) -> str:
    """The suffixes that say the kind of a file, such as "tsv.gz", in small letters; or nothing."""
    name = path.partition("?")[0] if "://" in path else path
    found = re.search(r"\.(parquet|pq|(csv|tsv|txt)(\.(gz|zst))?)$", name.lower())
    return found[1] if found else ""


def _open(path: str) -> BinaryIO:
    if "://" not in path:
        return Path(path).open("rb")
    system, name = _system_of(path)
    return cast("BinaryIO", system.open(name))


def _system_of(url: str) -> tuple[Any, str]:
    try:
        import fsspec

        system, name = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise MissingDependency(
            f"{url}: URLs are read by the package fsspec and the package of their kind, such as "
            f"s3fs or aiohttp: {error}; install it, or fetch the file"
        ) from error
    return system, name


def _arrow_type(name: str, schema: Schema) -> Any:
    """The type that the CSV reader gives a column; `conform` does the rest."""
    rule, column = schema.positive_rule, schema.categorical.get(name)
    is_label = name in schema.label_columns and rule is not None and isinstance(rule.value, float)
    if name in schema.dense or name == schema.weight or is_label:
        return pa.float64()
    is_integer = column is not None and column.values == "integer"
    return pa.int64() if is_integer else pa.string()
