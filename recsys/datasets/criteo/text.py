"""Read raw files as blocks of complete lines, decompressed and hashed; and report bad lines."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from recsys._support.files import as_argument
from recsys.datasets.criteo.parse import MOST_BAD_LINES, explain
from recsys.errors import DatasetFormatError, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from recsys.datasets.criteo.parse import ParsedLines

__all__ = ["BadLines", "RawFile", "not_criteo"]

# A block takes 50 ms to process, much longer than handing it from thread to thread. A few blocks
# are small compared with the hash tables of ids. Longer lines are refused.
BLOCK_BYTES = 16 * 2**20

_GZIP, _ZST = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ZST_SKIPPED = b"\x2a\x4d\x18"  # after any first byte: a frame without text, as pzstd writes it
# Other formats, by their first bytes; one of Criteo begins with a label.
_OTHERS = {b"PK\x03\x04": "a zip archive", b"BZh": "a bzip2 file", b"\xfd7zX": "an xz file"}
_TAR, _TAR_PLACE = b"ustar", 257
_ZST_READ_BYTES = 128 * 2**10  # of compressed data per read
# zstandard returns all text of the bytes that it is given. Four bytes can be 128 KiB of one letter,
# so these are 64 MiB at most.
_ZST_PIECE_BYTES = 2 * 2**10


def not_criteo(file: Path) -> str:
    """The sentence of an error that tells where a file of another format goes."""
    name = as_argument(file)
    return (
        "Raw Criteo text has 40 fields separated by tabs and no header. For another table, such as "
        f"a CSV file, take `recsys inspect {name} > schema.toml` and "
        f"`recsys prepare table {name} --schema schema.toml --out STORE`"
    )


class RawFile:
    """One raw file, read once from begin to end; its first bytes tell plain text, gzip and zst.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes_read = 0
        self._kind = "text"
        self._hash = hashlib.sha256()
        self._file: IO[bytes]

    def blocks(self) -> Iterator[NDArray[np.uint8]]:
        """The text in blocks that end in a newline, which is added to the last line if missing.

        Raises:
            DatasetFormatError: the file is a broken gzip or zst file, an archive, or not text.
            MissingDependency: it is a zst file, and zstandard is not installed.
        """
        with self.path.open("rb") as self._file:
            begin = self._file.read(4)
            self._file.seek(0)
            text = cast("IO[bytes]", self)
            if begin.startswith(_GZIP):
                self._kind, text = "gzip", cast("IO[bytes]", gzip.GzipFile(fileobj=text))
            elif begin == _ZST or begin[1:] == _ZST_SKIPPED:
                self._kind, text = "zst", cast("IO[bytes]", _ZstText(self))
            rest, block = b"", self._read_text(text)
            self._refuse_other_formats(begin, block)
            while block:
                cut = block.rfind(b"\n") + 1
                if cut:
                    yield np.frombuffer(rest + block[:cut], np.uint8)
                    rest = block[cut:]
                else:
                    rest += block
                if len(rest) > BLOCK_BYTES:
                    raise DatasetFormatError(
                        f"{self.path}: a line of more than {BLOCK_BYTES} bytes; is this text?"
                    )
                block = self._read_text(text)
            if rest:
                yield np.frombuffer(rest + b"\n", np.uint8)

    def read(self, size: int = -1) -> bytes:
        """Read raw bytes; count and hash them. `gzip` reads through this method too."""
        raw = self._file.read(size)
        self.num_bytes_read += len(raw)
        self._hash.update(raw)
        return raw

    def describe(self) -> dict[str, Any]:
        """The entry for this file in meta.json, after it was read."""
        return {
            "name": self.path.name,
            "num_bytes": self.num_bytes_read,
            "sha256": self._hash.hexdigest(),
        }

    def _refuse_other_formats(self, begin: bytes, text: bytes) -> None:
        kinds = [kind for magic, kind in _OTHERS.items() if begin.startswith(magic)]
        if text.startswith(_TAR, _TAR_PLACE):
            kinds.append("a tar archive")
        if kinds:
            raise DatasetFormatError(
                f"{self.path}: raw files must be text, plain, gzip or zst, got {kinds[0]}; unpack "
                "it, and name the file with the samples"
            )

    def _read_text(self, text: IO[bytes]) -> bytes:
        try:
            return text.read(BLOCK_BYTES)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DatasetFormatError(
                f"{self.path}: broken {self._kind} file after byte {self.num_bytes_read} "
                f"({error}); fetch it again"
            ) from error


class _ZstText:
    """The text of a zst file, frame after frame.

    Unlike zstandard's own reader, it detects a truncated file.
    """

    def __init__(self, raw: RawFile) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingDependency(
                f"{raw.path} is a zst file, which needs zstandard; pip install zstandard, or "
                "decompress the file"
            ) from error
        self._raw = raw
        self._zstandard = zstandard
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new_frame()
        self._is_inside = False
        self._left = memoryview(b"")  # read, but not decompressed yet

    def read(self, size: int) -> bytes:
        """Read about `size` bytes of text; none at the end of the file."""
        parts, num_bytes = [], 0
        while num_bytes < size:
            if not self._left:
                self._left = memoryview(self._raw.read(_ZST_READ_BYTES))
            if not self._left:
                break
            piece, self._left = self._left[:_ZST_PIECE_BYTES], self._left[_ZST_PIECE_BYTES:]
            while piece:
                try:
                    parts.append(self._frame.decompress(piece))
                except self._zstandard.ZstdError as error:
                    raise EOFError(str(error)) from error
                num_bytes += len(parts[-1])
                self._is_inside = not self._frame.eof
                piece = memoryview(b"" if self._is_inside else self._frame.unused_data)
                if self._frame.eof:
                    self._frame = self._new_frame()
        if not num_bytes and self._is_inside:
            raise EOFError("it ends inside a frame")
        return b"".join(parts)


class BadLines:
    """Counts lines, and raises at the first bad one or lists all bad ones.

    Args:
        folder: Receives `bad_lines.jsonl`, with one JSON object per bad line; the file is created
            when the first bad line is found.
        skip: List bad lines instead of raising.
        num_bad: Bad lines that the file lists already.
    """

    FILE_NAME = "bad_lines.jsonl"

    def __init__(self, folder: Path, *, skip: bool, num_bad: int = 0) -> None:
        self.skip = skip
        self.num_bad = num_bad
        self._list_file = folder / self.FILE_NAME
        self._path: Path
        self._num_lines = 0

    def begin_file(self, path: Path) -> None:
        """Count the lines that follow as those of `path`."""
        self._path, self._num_lines = path, 0

    def add(self, text: NDArray[np.uint8], parsed: ParsedLines) -> None:
        """Count the lines of the next part of the file, and list its bad lines.

        Raises:
            DatasetFormatError: it has a bad line, and bad lines are not skipped; or there are more
                than `MOST_BAD_LINES`.
        """
        found = []
        if self.num_bad + len(parsed.bad_lines) > MOST_BAD_LINES:
            raise DatasetFormatError(
                f"{self._path}: at most {MOST_BAD_LINES:,} bad lines can be skipped, got more. "
                f"{not_criteo(self._path)}"
            )
        for number, begin, end in parsed.bad_lines.tolist():
            reason = explain(text[begin:end].tobytes())
            assert reason is not None, "the kernel and explain() disagree on what a good line is"
            rule, value = reason
            line = self._num_lines + number + 1
            if not self.skip:
                way_out = "repair the line, or skip bad lines with --skip-bad-lines"
                if line == 1:
                    way_out += f". {not_criteo(self._path)}"
                raise DatasetFormatError(
                    f"{self._path} line {line}: {rule}, got {value}; {way_out}"
                )
            entry = {"file": str(self._path), "line": line, "rule": rule, "value": value}
            found.append(json.dumps(entry) + "\n")
        if found:
            with self._list_file.open("a") as file:
                file.writelines(found)
        self.num_bad += len(found)
        self._num_lines += parsed.num_lines
