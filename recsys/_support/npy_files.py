"""Arrays in numpy's format, in files that may be damaged, or come from a stranger.

Nothing is allocated before the size that a header states is found in the file: a plain file has
exactly these bytes, and a compressed one enough bytes to expand to them. No pickle is loaded. Every
fault of a file is a `ValueError`; callers add the file and the way out.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import contextmanager
from math import prod
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["ArrayFile", "NpzFile", "open_array", "read_array"]

_MAGIC = b"\x93NUMPY"
# Bytes of the header's length, by the version of the format.
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4}
_MOST_HEADER_BYTES = 10_000
# numpy parses a header as Python, which takes hours and all memory for some texts of a kilobyte.
_HEADER = re.compile(
    r"\{(?:(?:'descr':'(?P<descr>[^']{1,16})'|'fortran_order':(?P<is_fortran>True|False)"
    r"|'shape':\((?P<shape>(?:\d{1,20}L?,)*(?:\d{1,20}L?)?)\)),?){3}\}"
)
_MOST_DEFLATED = 1032  # deflate expands a byte to at most this many
_READ_BYTES = 2**20


class ArrayFile(NamedTuple):
    """An array whose header was read and checked; its data was not read.

    Attributes:
        stream: Positioned at the data.
        shape: Of the array.
        is_fortran: Whether the data is in Fortran order.
        dtype: A dtype of numbers.
    """

    stream: IO[bytes]
    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return prod(self.shape) * self.dtype.itemsize


@contextmanager
def _damage_as_value_error() -> Iterator[None]:
    """Raise a `ValueError` for every error of numpy or zipfile about the content of a file.

    For damaged files they raise many classes of errors, `NotImplementedError` and `TokenError`
    among them. Errors of the system, such as a full disk, are raised unchanged.
    """
    try:
        yield
    except ValueError:
        raise
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # what a seek to a damaged offset raises
            raise
        raise ValueError(str(error)) from error
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from error


def open_array(stream: IO[bytes], num_bytes: int) -> ArrayFile:
    """Read the header of an array, and compare it with the size of the file.

    Args:
        stream: Positioned at the header.
        num_bytes: Bytes from there to the end of the file or of the member of an archive.

    Raises:
        ValueError: the header is damaged, or the array has other items than numbers, or another
            size than its header says.
    """
    with _damage_as_value_error():
        begin = stream.read(8)
        if begin[:6] != _MAGIC or len(begin) < 8:
            raise ValueError(f"it does not begin with {_MAGIC!r}, but with {begin!r}")
        version = begin[6], begin[7]
        if version not in _LENGTH_BYTES:
            raise ValueError(
                f"the version of numpy's format must be 1.0 or 2.0, got {version[0]}.{version[1]}"
            )
        size_of_length = _LENGTH_BYTES[version]
        num_header = int.from_bytes(stream.read(size_of_length), "little")
        if num_header > _MOST_HEADER_BYTES:
            raise ValueError(f"its header has {num_header} bytes, more than {_MOST_HEADER_BYTES}")
        shape, is_fortran, dtype = _parse_header(stream.read(num_header))
    if dtype.kind not in "iuf":
        raise ValueError(f"must hold numbers, got dtype {dtype}")
    found = ArrayFile(stream, shape, is_fortran, dtype)
    left = num_bytes - len(begin) - size_of_length - num_header
    if left != found.num_bytes:
        raise ValueError(
            f"ends too {'early' if left < found.num_bytes else 'late'}: its header says {shape} of "
            f"{dtype}, which takes {found.num_bytes} bytes, and {max(left, 0)} follow"
        )
    return found


def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and dtype in the text of a header."""
    text = "".join(header.decode("latin-1").split()).replace('"', "'")
    found = _HEADER.fullmatch(text)
    if found is None or None in found.groups():
        raise ValueError(f"its header must be of descr, fortran_order and shape, got {text[:100]}")
    dims = [int(dim.rstrip("L")) for dim in found["shape"].split(",") if dim]
    return tuple(dims), found["is_fortran"] == "True", np.dtype(found["descr"])


def read_array(array: ArrayFile) -> NDArray[Any]:
    """Read the data of an array.

    Raises:
        ValueError: the data is damaged.
    """
    found = np.empty(prod(array.shape), array.dtype)
    memory = found.view(np.uint8)
    with _damage_as_value_error():
        for begin in range(0, len(memory), _READ_BYTES):
            block = array.stream.read(min(_READ_BYTES, len(memory) - begin))
            memory[begin : begin + len(block)] = np.frombuffer(block, np.uint8)
            if len(block) < min(_READ_BYTES, len(memory) - begin):
                raise ValueError(f"ends early, after {begin + len(block)} bytes of data")
        if array.stream.read(1):  # also checks the checksum of a member of an archive
            raise ValueError("ends late: more data follows the array")
    return found.reshape(array.shape, order="F" if array.is_fortran else "C")


class NpzFile:
    """An archive of arrays, as `numpy.savez` writes it, compressed or not. A context manager.

    Args:
        file: The archive.

    Attributes:
        names: Its arrays.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not a zip archive, or a damaged one.
    """

    def __init__(self, file: Path) -> None:
        if file.exists() and not file.is_file():
            raise ValueError("it is not a plain file")  # to open a pipe waits for a writer
        self._stream = file.open("rb")
        try:
            self._num_bytes = os.fstat(self._stream.fileno()).st_size
            with _damage_as_value_error():
                self._archive = ZipFile(self._stream)
        except BaseException:
            self._stream.close()
            raise
        self.names = [
            name.removesuffix(".npy") for name in self._archive.namelist() if name.endswith(".npy")
        ]
        self._opened: list[IO[bytes]] = []

    def open_array(self, name: str) -> ArrayFile:
        """Open one array; it stays open as long as the archive.

        Raises:
            ValueError: the array is damaged, encrypted, or compressed in another way than deflate.
        """
        with _damage_as_value_error():
            about = self._archive.getinfo(f"{name}.npy")
            if about.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                raise ValueError(
                    f"must be stored or deflated, got compression method {about.compress_type}"
                )
            most = about.compress_size
            if about.compress_type == ZIP_DEFLATED:
                most *= _MOST_DEFLATED
            if about.compress_size > self._num_bytes or about.file_size > most:
                raise ValueError(
                    f"{about.file_size} bytes cannot be in the {about.compress_size} compressed "
                    f"bytes that the archive of {self._num_bytes} bytes lists"
                )
            stream = self._archive.open(about)
        self._opened.append(stream)
        return open_array(stream, about.file_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._opened:
            each.close()
        self._archive.close()
        self._stream.close()
