"""Text files of tables: CSV and TSV, plain, .gz or .zst, read as record batches."""

from __future__ import annotations

import csv
import io
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from recsys.datasets.tabular.columns import import_pyarrow
from recsys.datasets.tabular.schema_parts import DenseColumn, ValueColumn
from recsys.errors import DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa

    from recsys.datasets.tabular.hashing_file import HashingFile
    from recsys.datasets.tabular.schema import Schema

__all__ = ["TEXT_SUFFIXES", "TextFile"]

TEXT_SUFFIXES = (".csv", ".tsv", ".txt")
_BLOCK_BYTES = 8 << 20
_ROW = re.compile(r"Row #(\d+): ?(.*)", re.DOTALL)
_CONVERSION = re.compile(r"In CSV column #(\d+): (.*)", re.DOTALL)
_VALUE = re.compile(r"conversion error to (double|int64): invalid value '(.*)'", re.DOTALL)


class TextFile:
    """One CSV or TSV file, whose first line names the columns.

    Fields may be quoted by ", and hold delimiters and line breaks then. The text is UTF-8.

    Args:
        path: The file; its suffix says how it is compressed, and its delimiter.
        delimiter: Another delimiter; empty for that of the suffix.

    Raises:
        DatasetFormatError: the file is empty, or its first line does not name columns.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path, delimiter: str = "") -> None:
        self.path = path
        self.delimiter = delimiter or ("\t" if ".tsv" in path.suffixes[-2:] else ",")
        with self._reading_faults(), self._records() as records:
            header = next(records, None)
        if not header:
            raise DatasetFormatError(f"{path} must begin with a line of column names, is empty")
        try:
            "".join(header).encode()
        except UnicodeEncodeError:
            raise DatasetFormatError(
                f"{path}, line 1: column names must be UTF-8; convert the file to UTF-8"
            ) from None
        repeated = sorted({name for name in header if header.count(name) > 1})
        if repeated:
            raise DatasetFormatError(
                f"{path}, line 1: column names must differ, got {repeated[0]!r} "
                f"{header.count(repeated[0])} times; rename them"
            )
        self.column_names = tuple(header)

    def place(self, row: int) -> str:
        """Words for a row of data, by its number from 0: the file and the line it begins on."""
        line, num_records = 1, 0
        with self._records() as records:
            for record in records:
                num_records += bool(record)  # an empty line is no record
                if num_records == row + 2:  # the header is the first one
                    break
                line = records.line_num + 1
        return f"{self.path}, line {line}"

    def batches(
        self, columns: Sequence[str], schema: Schema, hashing: HashingFile
    ) -> Iterator[pa.RecordBatch]:
        """Read columns as numbers where the schema says so, and as text elsewhere.

        Args:
            columns: Their names.
            schema: What they mean.
            hashing: The open file; all of its bytes are read.

        Raises:
            DatasetFormatError: a line does not fit the header, a value is no number, the text is
                not UTF-8, or the compressed data is damaged. The message names the line.
        """
        types = {name: _arrow_type(name, schema) for name in columns}
        yield from self._explained(types, schema.missing_values, hashing)

    def sample(self, num_rows: int) -> pa.Table:
        """The first rows, or all there are; every column is text, with nulls for empty fields.

        Raises:
            DatasetFormatError: a line does not fit the header, or the text is not UTF-8.
        """
        arrow = import_pyarrow()
        types = dict.fromkeys(self.column_names, arrow.string())
        found, num_found = [], 0
        with self.path.open("rb") as raw:
            for batch in self._explained(types, (), raw):
                found.append(batch)
                num_found += batch.num_rows
                if num_found >= num_rows:
                    break
        schema = arrow.schema(list(types.items()))
        return arrow.Table.from_batches(found, schema=schema).slice(0, num_rows)

    def _explained(
        self, types: dict[str, Any], missing_values: Sequence[str], raw: Any
    ) -> Iterator[pa.RecordBatch]:
        arrow = import_pyarrow()
        try:
            yield from self._parse(types, missing_values, raw, use_threads=True)
        except (arrow.ArrowInvalid, arrow.ArrowKeyError, OSError) as error:
            if getattr(error, "errno", None):  # of the disk, not of the data
                raise
            raise self._explain(error, types, missing_values) from None

    def _parse(
        self,
        types: dict[str, Any],
        missing_values: Sequence[str],
        raw: Any,
        *,
        use_threads: bool,
    ) -> Iterator[pa.RecordBatch]:
        arrow = import_pyarrow()
        from pyarrow import csv as arrow_csv

        # The last column shows a quote that is never closed: it takes in the rest of the file.
        last = self.column_names[-1]
        tail = _Tail(self._decompressed(raw))
        try:
            reader = arrow_csv.open_csv(
                arrow.PythonFile(tail, mode="r"),
                read_options=arrow_csv.ReadOptions(
                    block_size=_BLOCK_BYTES,
                    use_threads=use_threads,
                ),
                parse_options=arrow_csv.ParseOptions(
                    delimiter=self.delimiter, newlines_in_values=True
                ),
                convert_options=arrow_csv.ConvertOptions(
                    column_types={last: arrow.binary(), **types},
                    include_columns=list(dict.fromkeys([*types, last])),
                    null_values=["", *missing_values],
                    strings_can_be_null=True,
                ),
            )
        except arrow.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                return
            raise
        end = None
        for batch in reader:
            if batch.num_rows:
                end = batch.column(last)[-1].as_py()
            yield batch.select(list(types))
        if isinstance(end, str | bytes):
            text = end.encode() if isinstance(end, str) else end
            if b"\n" in text and not tail.last.rstrip(b"\r\n").endswith(b'"'):
                raise DatasetFormatError(
                    f"{self.path}, column {last!r}: a quote in one of the last lines is never "
                    "closed; close it, or double each quote that belongs to a value"
                )

    def _explain(
        self, error: Exception, types: dict[str, Any], missing_values: Sequence[str]
    ) -> DatasetFormatError:
        """Find the line of a fault: one thread reads the file again and counts rows."""
        arrow = import_pyarrow()
        if isinstance(error, arrow.ArrowInvalid):
            try:
                with self.path.open("rb") as raw:
                    for _ in self._parse(types, missing_values, raw, use_threads=False):
                        pass
            except (arrow.ArrowInvalid, OSError) as again:
                error = again
        text = str(error)
        if "straddl" in text:
            return DatasetFormatError(
                f"{self.path}: a row must be shorter than {_BLOCK_BYTES >> 20} MiB; a quote is "
                "probably never closed; close it, or double each quote that belongs to a value"
            )
        place, column = str(self.path), ""
        conversion = _CONVERSION.search(text)
        if conversion:
            index, text = int(conversion[1]), conversion[2]
            column = f", column {self.column_names[index]!r}"
        counted = _ROW.search(text)
        if counted:
            place, text = self.place(int(counted[1]) - 2), counted[2]
        value = _VALUE.search(text)
        if value:
            rule = "a number" if value[1] == "double" else "an integer of 64 bits"
            way_out = "correct it, name it in missing_values, or change the schema"
            text = f"must be {rule}, got {value[2][:60]!r}; {way_out}"
        else:
            text = text.removeprefix("CSV parse error: ").removeprefix("CSV conversion error ")
            text = f"{text[:200]}; correct the line"
        return DatasetFormatError(f"{place}{column}: {text}")

    def _decompressed(self, raw: Any) -> Any:
        compression = {".gz": "gzip", ".zst": "zstd"}.get(self.path.suffix)
        if compression is None:
            return raw
        arrow = import_pyarrow()
        return arrow.CompressedInputStream(arrow.PythonFile(raw, mode="r"), compression)

    @contextmanager
    def _records(self) -> Iterator[Any]:
        """Records of the file as lists of text, by the slow reader that counts lines."""
        with self.path.open("rb") as raw:
            text = io.TextIOWrapper(
                self._decompressed(raw), encoding="utf-8-sig", errors="surrogateescape", newline=""
            )
            yield csv.reader(text, delimiter=self.delimiter)

    @contextmanager
    def _reading_faults(self) -> Iterator[None]:
        """Name the file in faults of reading its first line."""
        try:
            yield
        except csv.Error as error:
            raise DatasetFormatError(f"{self.path} cannot be read: {error}") from error
        except OSError as error:
            if error.strerror:
                raise
            raise DatasetFormatError(f"{self.path} cannot be read: {error}") from error


class _Tail:
    """A stream that remembers the end of what was read last."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(size)
        if data:
            self.last = (self.last + data[-8:])[-8:]
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()


def _arrow_type(name: str, schema: Schema) -> Any:
    """The type that the CSV reader gives a column; `conform` does the rest."""
    arrow = import_pyarrow()
    column: Any = schema.dense.get(name) or schema.categorical.get(name)
    if isinstance(column, DenseColumn) or name == schema.weight:
        return arrow.float64()
    if isinstance(column, ValueColumn) and column.values == "integer":
        return arrow.int64()
    if name == schema.label and schema.positive:
        return arrow.float64()
    return arrow.string()
