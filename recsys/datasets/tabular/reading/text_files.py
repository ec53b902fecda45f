"""Text files of tables: CSV and TSV, plain, .gz or .zst, read as record batches."""

from __future__ import annotations

import csv
import io
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from recsys.datasets.tabular.reading.paths import import_pyarrow
from recsys.datasets.tabular.reading.quotes import QUOTES_WAY_OUT, QuoteCheck
from recsys.datasets.tabular.schemas.schema_parts import DenseColumn, ValueColumn
from recsys.errors import DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa

    from recsys.datasets.tabular.reading.paths import HashingFile
    from recsys.datasets.tabular.schemas.schema import Schema

__all__ = ["DELIMITERS", "TextFile"]

DELIMITERS = ("\t", ";", "|", ",")  # that files commonly have
_COMPRESSIONS = {  # and the bytes that such files begin with
    ".gz": ("gzip", b"\x1f\x8b"),
    ".zst": ("zstd", b"\x28\xb5\x2f\xfd"),
}
_BLOCK_BYTES = 8 << 20
_ROW = re.compile(r"Row #(\d+): ?(.*)", re.DOTALL)
_CONVERSION = re.compile(r"In CSV column #(\d+): (.*)", re.DOTALL)
_VALUE = re.compile(r"conversion error to (double|int64): invalid value '(.*)'", re.DOTALL)
_UTF8_WAY_OUT = (
    "convert the file, by `iconv -f latin1 -t utf-8 OLD > NEW` if it is Latin-1, from utf-16 if "
    "a spreadsheet wrote it so"
)


class TextFile:
    """One CSV or TSV file, whose first line names the columns.

    Quoted fields may hold delimiters and line breaks. The text is UTF-8.

    Args:
        path: The file; its suffix says how it is compressed, and its delimiter.
        delimiter: Another delimiter; empty for that of the suffix.
        quote: The character around quoted fields; empty: quotes are text.

    Raises:
        DatasetFormatError: the file is empty, or its first line does not name columns.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path, delimiter: str = "", quote: str = '"') -> None:
        self.path = path
        self.quote = quote
        suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
        self.delimiter = delimiter or ("\t" if ".tsv" in suffixes else ",")
        try:
            with self._records() as records:
                header = next(filter(None, records), None)  # empty lines are left out
        except csv.Error as error:
            raise DatasetFormatError(f"{path} cannot be read: {error}") from error
        except OSError as error:
            if error.strerror:
                raise
            way_out = self._compression_way_out()
            raise DatasetFormatError(f"{path} cannot be read: {error}{way_out}") from error
        if not header:
            raise DatasetFormatError(f"{path} must begin with a line of column names, is empty")
        try:
            "".join(header).encode()
        except UnicodeEncodeError:
            raise DatasetFormatError(
                f"{path}, line 1: column names must be UTF-8; {_UTF8_WAY_OUT}"
            ) from None
        repeated = sorted({name for name in header if header.count(name) > 1})
        if repeated:
            raise DatasetFormatError(
                f"{path}, line 1: column names must differ, got {repeated[0]!r} "
                f"{header.count(repeated[0])} times; rename them, or add a line of names above if "
                "this one is data"
            )
        self.column_names = tuple(header)

    def place(self, row: int) -> str:
        """Words for a row of data, by its number from 0: the file and the line it begins on.

        The row's number takes the place of the line if an earlier field is too long for Python's
        reader of CSV, or the file is damaged.
        """
        line, num_records = 1, 0
        try:
            with self._records() as records:
                for record in records:
                    num_records += bool(record)  # an empty line is no record
                    if num_records == row + 2:  # the header is the first one
                        break
                    line = records.line_num + 1
        except (csv.Error, OSError):
            return f"{self.path}, row {row} (from 0)"
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
            DatasetFormatError: a line does not fit the header, a value is no number, a quote is
                misplaced, the text is not UTF-8, or the compressed data is damaged. The message
                names the line.
        """
        types = {name: _arrow_type(name, schema) for name in columns}
        yield from self._explained(types, schema.missing_values, hashing)

    def sample(self, num_rows: int) -> pa.Table:
        """The first rows, or all there are; every column is text, with nulls for empty fields.

        Raises:
            DatasetFormatError: a line does not fit the header, a quote is misplaced, or the text is
                not UTF-8.
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
        text = self._text(raw)
        try:
            yield from self._parse(types, missing_values, text, use_threads=True)
        except (arrow.ArrowInvalid, arrow.ArrowKeyError, OSError) as error:
            if getattr(error, "errno", None):  # of the disk, not of the data
                raise
            raise self._explain(error, types, missing_values, text) from None

    def _text(self, raw: Any) -> Any:
        """The decompressed text, whose quotes are checked while it is read."""
        text = self._decompressed(raw)
        return QuoteCheck(text, self.path, self.delimiter, self.quote) if self.quote else text

    def _parse(
        self,
        types: dict[str, Any],
        missing_values: Sequence[str],
        text: Any,
        *,
        use_threads: bool,
    ) -> Iterator[pa.RecordBatch]:
        arrow = import_pyarrow()
        from pyarrow import csv as arrow_csv

        try:
            reader = arrow_csv.open_csv(
                arrow.PythonFile(text, mode="r"),
                read_options=arrow_csv.ReadOptions(
                    block_size=_BLOCK_BYTES,
                    use_threads=use_threads,
                ),
                parse_options=arrow_csv.ParseOptions(
                    delimiter=self.delimiter,
                    quote_char=self.quote or False,
                    newlines_in_values=bool(self.quote),
                ),
                convert_options=arrow_csv.ConvertOptions(
                    column_types=types,
                    include_columns=list(types),
                    null_values=["", *missing_values],
                    strings_can_be_null=True,
                ),
            )
        except arrow.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                return
            raise
        yield from reader

    def _explain(
        self,
        error: Exception,
        types: dict[str, Any],
        missing_values: Sequence[str],
        read: Any,
    ) -> DatasetFormatError:
        """Find the line of a fault: one thread reads the file again and counts rows."""
        arrow = import_pyarrow()
        if isinstance(error, arrow.ArrowInvalid):
            try:
                with self.path.open("rb") as raw:
                    again = self._text(raw)
                    for _ in self._parse(types, missing_values, again, use_threads=False):
                        pass
            except (arrow.ArrowInvalid, OSError) as found:
                error = found
        text = str(error)
        if "straddl" in text:
            is_open = isinstance(read, QuoteCheck) and read.is_open
            line = f", line {read.line}" if is_open else ""
            return DatasetFormatError(
                f"{self.path}{line}: a row must be shorter than {_BLOCK_BYTES >> 20} MiB; a quote "
                f"is probably never closed; {QUOTES_WAY_OUT}"
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
            rule = "a number" if value[1] == "double" else "a signed integer of 64 bits"
            way_out = "correct it, name it in missing_values, or change the schema"
            if value[1] != "double" and re.fullmatch(r"[+-]?[0-9]+\.0", value[2]):
                way_out = (
                    "pandas writes integers of a column with missing values so; convert the column "
                    'by .astype("Int64") before to_csv'
                )
            text = f"must be {rule}, got {value[2][:60]!r}; {way_out}"
        elif "invalid UTF8" in text:
            text = f"the text is not UTF-8; {_UTF8_WAY_OUT}"
        else:
            text = text.removeprefix("CSV parse error: ").removeprefix("CSV conversion error ")
            is_of_line = isinstance(error, arrow.ArrowInvalid)
            way_out = "" if is_of_line else self._compression_way_out()
            text = f"{text[:200]}{way_out or '; correct the line'}"
        return DatasetFormatError(f"{place}{column}: {text}")

    def _decompressed(self, raw: Any) -> Any:
        suffix = self.path.suffix.lower()
        if suffix not in _COMPRESSIONS:
            return raw
        arrow = import_pyarrow()
        compression, _ = _COMPRESSIONS[suffix]
        return arrow.CompressedInputStream(arrow.PythonFile(raw, mode="r"), compression)

    def _compression_way_out(self) -> str:
        """What to do about a compressed file that cannot be read; empty for others."""
        suffix = self.path.suffix.lower()
        if suffix not in _COMPRESSIONS:
            return ""
        compression, mark = _COMPRESSIONS[suffix]
        with self.path.open("rb") as raw:
            if not raw.read(len(mark)).startswith(mark):
                return f"; it is not {compression}, as its name says: rename it without {suffix}"
        return f"; the {compression} data is damaged or cut short: fetch or compress the file again"

    @contextmanager
    def _records(self) -> Iterator[Any]:
        """Records of the file as lists of text, by the slow reader that counts lines."""
        with self.path.open("rb") as raw:
            text = io.TextIOWrapper(
                self._decompressed(raw), encoding="utf-8-sig", errors="surrogateescape", newline=""
            )
            yield csv.reader(
                text,
                delimiter=self.delimiter,
                quotechar=self.quote or None,
                quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
            )


def _arrow_type(name: str, schema: Schema) -> Any:
    """The type that the CSV reader gives a column; `conform` does the rest."""
    arrow = import_pyarrow()
    column: Any = schema.dense.get(name) or schema.categorical.get(name)
    if isinstance(column, DenseColumn) or name == schema.weight:
        return arrow.float64()
    if isinstance(column, ValueColumn) and column.values == "integer":
        return arrow.int64()
    rule = schema.positive_rule
    if name == schema.label and rule is not None and not rule.text:
        return arrow.float64()
    return arrow.string()
