"""Files of tables: CSV and TSV (plain, .gz, .zst) and Parquet, read as checked record batches."""

from __future__ import annotations

import difflib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys.datasets.tabular.reading.paths import HashingFile, find_files, import_pyarrow, kind_of
from recsys.datasets.tabular.reading.text_files import DELIMITERS, TextFile
from recsys.errors import ConfigError, DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import pyarrow as pa

    from recsys.datasets.tabular.schemas.schema import Schema

__all__ = ["ParquetFile", "TableFiles", "open_file"]

# What a file of another kind is, by its suffix, and what to do with it.
_OTHER_KINDS = {
    (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods"): "not a spreadsheet; save it as CSV",
    (".json", ".jsonl", ".ndjson"): "not JSON; read it by pandas.read_json(FILE, lines=True, "
    "chunksize=100_000, dtype=False) and give the frames to recsys.datasets.write_store",
    (".bz2", ".xz", ".zip", ".7z", ".tar", ".tgz"): "plain, .gz or .zst; unpack it",
}
_BATCH_ROWS = 65_536
_LARGE_GROUP_BYTES = 256 << 20
_BUFFER_BYTES = 1 << 20
# Old Parquet has times of 96 bits. Those after the year 2262 would overflow as nanoseconds.
_OPTIONS: dict[str, Any] = {"coerce_int96_timestamp_unit": "us"}


class TableFiles:
    """Files with one table: their rows, in order of the files, as batches of a schema's columns.

    Attributes:
        columns: The columns that are read, in the schema's order.
        sources: The files that `batches` has read to their ends so far, as a store's meta.json has
            them: name, num_bytes, num_rows and sha256, which is empty if it is not computed.

    Args:
        paths: Files and folders; a folder stands for all table files in it, in order of their
            paths.
        schema: What the columns mean.
        optional: Columns of the schema that the files may lack, such as the label of rows to
            predict. All files have such a column, or none. A label and the column of the split may
            have missing values then.
        with_hash: Whether to compute the hash of each file in `sources`.
        way_out: What to do about a column that a file lacks, for the message.

    Raises:
        FileNotFoundError: a file does not exist, or a folder has no table in it.
        ConfigError: a file is named twice, or its name does not say what kind of file it is.
        DatasetFormatError: a file has no column that the schema names.
        MissingDependency: pyarrow is not installed.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        schema: Schema,
        *,
        optional: Collection[str] = (),
        with_hash: bool = True,
        way_out: str = "correct the schema",
    ) -> None:
        import_pyarrow()
        self.schema = schema
        self.sources: list[dict[str, Any]] = []
        self._optional = frozenset(optional)
        self._with_hash = with_hash
        self._files = [
            open_file(path, schema.delimiter, schema.quote) for path in find_files(paths)
        ]
        first = self._files[0]
        self.columns = tuple(
            name for name in schema.columns if name not in optional or name in first.column_names
        )
        for file in self._files:
            _check_columns(file, self.columns, first, optional, way_out)

    def place(self, row: int) -> str:
        """Words for a row that was read, by its number from 0 among the rows of all files."""
        sources = tuple(self.sources)  # a thread that reads ahead appends to it
        for file, source in zip(self._files, sources, strict=False):
            if row < source["num_rows"]:
                return file.place(row)
            row -= source["num_rows"]
        return self._files[len(sources)].place(row)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Read all files once, as `recsys.datasets.tabular.reading.columns.conform` describes.

        Raises:
            DatasetFormatError: a file breaks its format, or the schema. The message names file and
                line or row group, column, rule, value and way out.
        """
        from recsys.datasets.tabular.reading.columns import conform

        self.sources = []
        for file in self._files:
            hashing = HashingFile(file.path, with_hash=self._with_hash)
            num_rows = 0
            try:
                for batch in file.batches(self.columns, self.schema, hashing):
                    first = num_rows
                    num_rows += batch.num_rows
                    place = partial(_place, file, first)
                    yield conform(batch, self.schema, place, optional=self._optional)
                sha256 = hashing.finish()
            finally:
                hashing.abandon()
            self.sources.append(
                {
                    "name": file.path.name,
                    "num_bytes": hashing.num_bytes,
                    "num_rows": num_rows,
                    "sha256": sha256,
                }
            )


class ParquetFile:
    """One Parquet file.

    Args:
        path: The file.

    Raises:
        DatasetFormatError: it is not a Parquet file, or two of its columns have the same name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        arrow = import_pyarrow()
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(path, **_OPTIONS) as file:
                self.schema = file.schema_arrow
                self.column_names = tuple(self.schema.names)
                self._groups = [
                    file.metadata.row_group(group) for group in range(file.num_row_groups)
                ]
        except (arrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            raise DatasetFormatError(
                f"{path} is not a Parquet file that can be read: {str(error)[:200]}; write it anew"
            ) from error
        for name in self.column_names:
            if self.column_names.count(name) > 1:
                raise DatasetFormatError(
                    f"{path}: column names must differ, got {name!r} twice; rename one"
                )

    def place(self, row: int) -> str:
        """Words for a row, by its number from 0: file, row group, and row in the group, from 0."""
        group = 0
        while row >= self._groups[group].num_rows:
            row -= self._groups[group].num_rows
            group += 1
        return f"{self.path}, row group {group}, row {row}"

    def batches(
        self, columns: Sequence[str], schema: Schema, hashing: HashingFile
    ) -> Iterator[pa.RecordBatch]:
        """Read columns with the types that they have in the file.

        Args:
            columns: Their names.
            schema: Not used: the file has types.
            hashing: Not read here: Parquet is read out of order, and hashed afterwards.

        Raises:
            DatasetFormatError: a row group is damaged.
        """
        arrow = import_pyarrow()
        from pyarrow import parquet

        short = self._short_columns(columns)
        options = _OPTIONS | self._buffering()
        with parquet.ParquetFile(self.path, read_dictionary=short, **options) as file:
            for group in range(file.num_row_groups):
                try:
                    yield from file.iter_batches(
                        _BATCH_ROWS, row_groups=[group], columns=list(columns)
                    )
                except (arrow.ArrowInvalid, OSError) as error:
                    raise DatasetFormatError(
                        f"{self.path}, row group {group}: cannot be read: {str(error)[:200]}; "
                        "write the file anew"
                    ) from error

    def _buffering(self) -> dict[str, Any]:
        """Options for reading: a large row group in small pieces, others whole, which is faster."""
        largest = max((group.total_byte_size for group in self._groups), default=0)
        if largest > _LARGE_GROUP_BYTES:
            return {"buffer_size": _BUFFER_BYTES, "pre_buffer": False}
        return {"pre_buffer": True}

    def _short_columns(self, columns: Sequence[str]) -> list[str]:
        """Columns that take less than 4 bytes a value: text in dictionaries, fastest read so."""
        num_bytes = dict.fromkeys(columns, 0)
        num_values = sum(group.num_rows for group in self._groups)
        for group in self._groups:
            for number in range(group.num_columns):
                chunk = group.column(number)
                if chunk.path_in_schema in num_bytes and chunk.physical_type == "BYTE_ARRAY":
                    num_bytes[chunk.path_in_schema] += chunk.total_uncompressed_size
        return [name for name in columns if 0 < num_bytes[name] < 4 * num_values]

    def sample(self, num_rows: int) -> pa.Table:
        """The first rows, or all there are, with the types that they have in the file.

        Raises:
            DatasetFormatError: a row group is damaged.
        """
        arrow = import_pyarrow()
        from pyarrow import parquet

        found, num_found = [], 0
        try:
            with parquet.ParquetFile(self.path, **_OPTIONS, **self._buffering()) as file:
                for batch in file.iter_batches(_BATCH_ROWS):
                    found.append(batch)
                    num_found += batch.num_rows
                    if num_found >= num_rows:
                        break
        except (arrow.ArrowInvalid, OSError) as error:
            raise DatasetFormatError(
                f"{self.path} cannot be read: {str(error)[:200]}; write the file anew"
            ) from error
        return arrow.Table.from_batches(found, schema=self.schema).slice(0, num_rows)


def open_file(path: Path, delimiter: str = "", quote: str = '"') -> TextFile | ParquetFile:
    """Open a file by the kind that its name says.

    Args:
        path: The file.
        delimiter: Of a text file; see `TextFile`.
        quote: Of a text file; see `TextFile`.

    Raises:
        ConfigError: its name does not say what kind of file it is.
        DatasetFormatError: it is empty, or not what its name says.
    """
    kind = kind_of(path)
    if kind == "parquet":
        return ParquetFile(path)
    if kind == "text":
        return TextFile(path, delimiter, quote)
    suffix = Path(path.stem if path.suffix.lower() in (".gz", ".zst") else path).suffix.lower()
    for suffixes, hint in _OTHER_KINDS.items():
        if suffix in suffixes:
            raise ConfigError(f"{path}: a table must be CSV, TSV or Parquet, {hint}")
    raise ConfigError(
        f"{path}: the name of a table must end in .csv, .tsv or .txt (.gz or .zst may follow), "
        ".parquet or .pq; rename it"
    )


def _place(file: TextFile | ParquetFile, first: int, row: int) -> str:
    return file.place(first + row)


def _hint_of_delimiter(file: TextFile | ParquetFile) -> str:
    """How to read a text file whose first line was not split; empty for other files."""
    if not isinstance(file, TextFile) or len(file.column_names) != 1:
        return ""
    header = file.column_names[0]
    best = max(DELIMITERS, key=header.count)
    if best not in header:
        return ""
    shown = "\\t" if best == "\t" else best
    return (
        f'its first line has no {file.delimiter!r} but has {best!r}: set delimiter = "{shown}" in '
        "the schema"
    )


def _check_columns(
    file: TextFile | ParquetFile,
    columns: Sequence[str],
    first: TextFile | ParquetFile,
    optional: Collection[str],
    way_out: str,
) -> None:
    for name in columns:
        if name not in file.column_names:
            hint = _hint_of_delimiter(file)
            if any(part.startswith(f"{name}=") for part in file.path.parts):
                hint = "names of folders are not read: write it into the files"
            if not hint and isinstance(file, TextFile) and not {*columns} & {*file.column_names}:
                hint = "if its first line is not the names of its columns, add one that is"
            if not hint:
                close = difflib.get_close_matches(name, file.column_names, n=1, cutoff=0.8)
                hint = f"did you mean {close[0]!r}?" if close else way_out
            shown = ", ".join(map(repr, file.column_names[:30]))
            raise DatasetFormatError(f"{file.path} must have column {name!r}, has {shown}; {hint}")
    for name in optional:
        if name in file.column_names and name not in first.column_names:
            raise DatasetFormatError(
                f"{file.path} has column {name!r}, which {first.path} lacks; leave one file out"
            )
