"""Arrays in numpy's format, written and read block by block, as plain files or inside an archive.

Arrays of other programs are checked here: their shape, their range, and that numbers are integers
where they must be. No array is ever held in memory as a whole. An array in Fortran order, whose
samples are not contiguous, is copied to an unnamed temporary file first.
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
    """Divide a range of samples into blocks of `BLOCK_SAMPLES`."""
    for start in range(samples.start, samples.stop, BLOCK_SAMPLES):
        yield range(start, min(start + BLOCK_SAMPLES, samples.stop))


def write_header(file: IO[bytes], shape: tuple[int, ...], dtype: str) -> None:
    """Write the header of an array in C order; the caller writes the data after it."""
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


class NpyReader:
    """One array of another program, read once from begin to end.

    Args:
        name: Its name in messages: the file and, in an archive, the array.
        stream: Positioned at the array's header. The caller closes it.
        scratch: A folder for temporary files.

    Attributes:
        name: As above.
        shape: The array's shape.

    Raises:
        DatasetFormatError: it is not an array of numbers in numpy's format.
    """

    def __init__(self, name: str, stream: IO[bytes], scratch: Path) -> None:
        self.name = name
        self._stream = stream
        self._scratch = scratch
        with self._reporting_damage():
            version = np.lib.format.read_magic(stream)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }.get(version)
            if read_header is None:
                raise DatasetFormatError(
                    f"{name}: the version of numpy's format must be 1.0 or 2.0, got {version}; "
                    "save it again with numpy"
                )
            self.shape, self._is_fortran, self._dtype = read_header(stream)
        if self._dtype.kind not in "iuf":
            raise DatasetFormatError(f"{name}: must hold numbers, got dtype {self._dtype}")

    def blocks(self) -> Iterator[NDArray[Any]]:
        """The array in blocks of `BLOCK_SAMPLES`; the last one may be smaller.

        Raises:
            DatasetFormatError: it is damaged, or shorter or longer than its header says.
        """
        blocks = list(in_blocks(range(self.shape[0])))
        if self._is_fortran and len(self.shape) > 1:
            with TemporaryFile(dir=self._scratch) as file:
                with self._reporting_damage():
                    shutil.copyfileobj(self._stream, file, 2**20)
                self._require_bytes(file.tell(), self.shape[0])
                file.flush()
                whole = np.memmap(file, self._dtype, mode="r", shape=self.shape, order="F")
                for block in blocks:
                    yield np.ascontiguousarray(whole[block.start : block.stop])
            return
        for block in blocks:
            shape = (len(block), *self.shape[1:])
            with self._reporting_damage():
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
    def _reporting_damage(self) -> Iterator[None]:
        try:
            yield
        except DatasetFormatError:
            raise
        except (ValueError, EOFError, BadZipFile, zlib.error) as error:
            raise DatasetFormatError(
                f"{self.name}: is not a complete array in numpy's format ({error}); fetch it again"
            ) from error


def require(name: str, holds: bool, rule: str, found: object) -> None:
    """Check a rule of a format.

    Raises:
        DatasetFormatError: the rule does not hold.
    """
    if not holds:
        raise DatasetFormatError(f"{name}: {rule}, got {found}")


def whole_numbers(
    name: str,
    block: NDArray[Any],
    first_sample: int,
    limits: ArrayLike,
    suggestion: str,
) -> NDArray[np.int64]:
    """The numbers of a block as int64, checked to be integers in [0, limits).

    Args:
        name: Of the array, for messages.
        block: The numbers; floats are allowed if they are whole.
        first_sample: Number of the block's first sample, for messages.
        limits: One number, or one per column.
        suggestion: Ends the message: how to repair a number out of range.

    Raises:
        DatasetFormatError: a number is not; the message names the first one.
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
            f"[0, {limit}), got {block[bad]}; {suggestion}"
        )
    return block.astype(np.int64)


def describe_source(path: Path) -> dict[str, Any]:
    """The entry for a source file in meta.json."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "num_bytes": path.stat().st_size, "sha256": digest}
