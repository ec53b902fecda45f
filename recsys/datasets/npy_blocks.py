"""Arrays in numpy's format, written and read block by block, as plain files or inside an archive.

What other programs wrote is checked here: its shape, that its numbers are whole where they must be,
and their range. An array in Fortran order, whose samples lie apart, goes through an unnamed
temporary file; nothing is ever held in memory as a whole.
"""

from __future__ import annotations

import hashlib
import shutil
import zlib
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from recsys.errors import DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "NpyReader",
    "describe_source",
    "in_blocks",
    "require",
    "whole_numbers",
    "write_header",
]

# Samples per block: some megabytes of any array.
BLOCK_SAMPLES = 65_536


def in_blocks(samples: range) -> Iterator[range]:
    """The same sample numbers, `BLOCK_SAMPLES` at a time."""
    for start in range(samples.start, samples.stop, BLOCK_SAMPLES):
        yield range(start, min(start + BLOCK_SAMPLES, samples.stop))


def write_header(file: IO[bytes], shape: tuple[int, ...], dtype: str) -> None:
    """Begin an array in C order; its bytes are to follow."""
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


class NpyReader:
    """One array of somebody else's, read once from begin to end.

    Args:
        name: What messages call it: the file and, in an archive, the array.
        stream: Where it lies, from its header on. The caller closes it.
        scratch: A folder for temporary files.

    Attributes:
        shape: Of the array.

    Raises:
        DatasetFormatError: it is no array of numbers in numpy's format.
    """

    def __init__(self, name: str, stream: IO[bytes], scratch: Path) -> None:
        self.name = name
        self._stream = stream
        self._scratch = scratch
        with self._telling_damage():
            version = np.lib.format.read_magic(stream)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }.get(version)
            if read_header is None:
                raise DatasetFormatError(f"{name}: version {version} of numpy's format is unknown")
            self.shape, self._is_fortran, self._dtype = read_header(stream)
        if self._dtype.kind not in "iuf":
            raise DatasetFormatError(f"{name}: must hold numbers, got dtype {self._dtype}")

    def blocks(self) -> Iterator[NDArray[Any]]:
        """The array in blocks of `BLOCK_SAMPLES`, the last one smaller.

        Raises:
            DatasetFormatError: it ends too early or is damaged.
        """
        blocks = list(in_blocks(range(self.shape[0])))
        if self._is_fortran and len(self.shape) > 1:
            with TemporaryFile(dir=self._scratch) as file:
                with self._telling_damage():
                    shutil.copyfileobj(self._stream, file, 2**20)
                self._require_bytes(file.tell(), self.shape[0])
                file.flush()
                whole = np.memmap(file, self._dtype, mode="r", shape=self.shape, order="F")
                for block in blocks:
                    yield np.ascontiguousarray(whole[block.start : block.stop])
            return
        for block in blocks:
            shape = (len(block), *self.shape[1:])
            with self._telling_damage():
                data = self._stream.read(int(np.prod(shape)) * self._dtype.itemsize)
                if block is blocks[-1]:
                    data += self._stream.read(1)  # nothing may follow
            self._require_bytes(len(data), shape[0])
            yield np.frombuffer(data, self._dtype).reshape(shape)

    def _require_bytes(self, found: int, num_samples: int) -> None:
        expected = num_samples * int(np.prod(self.shape[1:])) * self._dtype.itemsize
        if found != expected:
            raise DatasetFormatError(
                f"{self.name}: ends too {'early' if found < expected else 'late'}: its header says "
                f"{self.shape} of {self._dtype}; fetch it again"
            )

    @contextmanager
    def _telling_damage(self) -> Iterator[None]:
        try:
            yield
        except DatasetFormatError:
            raise
        except (ValueError, EOFError, BadZipFile, zlib.error) as error:
            raise DatasetFormatError(
                f"{self.name}: is no whole array in numpy's format ({error}); fetch it again"
            ) from error


def require(name: str, holds: bool, rule: str, found: object) -> None:
    """Check a rule of a format.

    Raises:
        DatasetFormatError: it does not hold.
    """
    if not holds:
        raise DatasetFormatError(f"{name}: {rule}, got {found}")


def whole_numbers(
    name: str,
    block: NDArray[Any],
    first_sample: int,
    limits: ArrayLike,
    way_out: str,
) -> NDArray[np.int64]:
    """The numbers of a block, checked to be whole and in [0, limits).

    Args:
        name: Of the array, for messages.
        block: The numbers; floats are fine where they are whole.
        first_sample: Number of the block's first sample, for messages.
        limits: One number, or one per column.
        way_out: Ends the message: what to do about a number out of range.

    Raises:
        DatasetFormatError: the first number that is not.
    """
    is_good = (block >= 0) & (block < limits)  # NaN is neither
    if block.dtype.kind == "f":
        is_good &= np.floor(block) == block
    if not is_good.all():
        bad = tuple(int(place[0]) for place in np.nonzero(~is_good))
        limit = int(np.broadcast_to(np.asarray(limits), block.shape)[bad])
        column = f", column {bad[1]}" if len(bad) > 1 else ""
        raise DatasetFormatError(
            f"{name}, sample {first_sample + bad[0]}{column}: must be a whole number in "
            f"[0, {limit}), got {block[bad]}; {way_out}"
        )
    return block.astype(np.int64)


def describe_source(path: Path) -> dict[str, Any]:
    """What meta.json says of a source file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "num_bytes": path.stat().st_size, "sha256": digest}
