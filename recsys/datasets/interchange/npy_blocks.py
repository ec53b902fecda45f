"""Arrays in numpy's format, written and read block by block, as plain files or inside an archive.

Arrays of other programs are checked here: their shape, their range, and that numbers are integers
where they must be. No array is ever held in memory as a whole. An array in Fortran order, whose
samples are not contiguous, is copied to an unnamed temporary file first.
"""

from __future__ import annotations

import hashlib
import shutil
from contextlib import contextmanager
from math import prod
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from recsys._support.npy_files import UnfitArray, damage_as_value_error
from recsys.errors import DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    from recsys._support.npy_files import ArrayFile

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
_BLOCK_BYTES = 64 * 2**20


def in_blocks(samples: range, num_samples: int | None = None) -> Iterator[range]:
    """Divide a range of samples into blocks of `num_samples`, by default `BLOCK_SAMPLES`."""
    size = num_samples or BLOCK_SAMPLES
    for start in range(samples.start, samples.stop, size):
        yield range(start, min(start + size, samples.stop))


def write_header(file: IO[bytes], shape: tuple[int, ...], dtype: str) -> None:
    """Write the header of an array in C order; the caller writes the data after it."""
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


class NpyReader:
    """One array of another program, read once from begin to end.

    Args:
        name: Its name in messages: the file and, in an archive, the array.
        open_array: Opens the array; see `recsys._support.npy_files`. The caller closes it.
        scratch: A folder for temporary files.

    Attributes:
        name: As above.
        shape: The array's shape.

    Raises:
        DatasetFormatError: it is not an array of numbers in numpy's format, or is shorter or longer
            than its header says.
    """

    def __init__(self, name: str, open_array: Callable[[], ArrayFile], scratch: Path) -> None:
        self.name = name
        self._scratch = scratch
        with self._reporting_damage():
            self._array = open_array()
        self.shape = self._array.shape

    @property
    def samples_per_block(self) -> int:
        """Samples that are read at once: `BLOCK_SAMPLES`, or fewer if a sample is large.

        Raises:
            DatasetFormatError: one sample is larger than a block may be.
        """
        sample_bytes = prod(self.shape[1:]) * self._array.dtype.itemsize
        if sample_bytes > _BLOCK_BYTES:
            raise DatasetFormatError(
                f"{self.name}: a sample must have at most {_BLOCK_BYTES} bytes, got {sample_bytes} "
                f"with shape {self.shape}; is this an array of samples?"
            )
        return min(BLOCK_SAMPLES, _BLOCK_BYTES // max(sample_bytes, 1))

    def blocks(self, num_samples: int | None = None) -> Iterator[NDArray[Any]]:
        """The array in blocks; the last one may be smaller.

        Args:
            num_samples: Samples per block; by default `samples_per_block`.

        Raises:
            DatasetFormatError: it is damaged.
        """
        array = self._array
        blocks = in_blocks(range(self.shape[0]), num_samples or self.samples_per_block)
        if array.is_fortran and len(self.shape) > 1 and array.num_bytes:
            with TemporaryFile(dir=self._scratch) as file:
                with self._reporting_damage():
                    shutil.copyfileobj(array.stream, file, 2**20)
                self._require_bytes(file.tell(), array.num_bytes)
                file.flush()
                whole = np.memmap(file, array.dtype, mode="r", shape=self.shape, order="F")
                for block in blocks:
                    yield np.ascontiguousarray(whole[block.start : block.stop])
            return
        for block in blocks:
            shape = (len(block), *self.shape[1:])
            num_bytes = prod(shape) * array.dtype.itemsize
            with self._reporting_damage():
                data = array.stream.read(num_bytes)
                if block.stop == self.shape[0]:
                    data += array.stream.read(1)  # nothing may follow; also checks the checksum
            self._require_bytes(len(data), num_bytes)
            yield np.frombuffer(data, array.dtype).reshape(shape)

    def _require_bytes(self, found: int, expected: int) -> None:
        """Check that a file did not change after it was opened."""
        if found != expected:
            raise DatasetFormatError(
                f"{self.name}: ends too {'early' if found < expected else 'late'}: its header says "
                f"{self.shape} of {self._array.dtype}; fetch it again"
            )

    @contextmanager
    def _reporting_damage(self) -> Iterator[None]:
        try:
            with damage_as_value_error():
                yield
        except UnfitArray as error:
            raise DatasetFormatError(f"{self.name}: {error}; fetch it again") from error
        except ValueError as error:
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
    *,
    lowest: int = 0,
) -> NDArray[np.int64]:
    """The numbers of a block as int64, checked to be integers in [lowest, limits).

    Args:
        name: Of the array, for messages.
        block: The numbers; floats are allowed if they are whole.
        first_sample: Number of the block's first sample, for messages.
        limits: One number, or one per column.
        suggestion: Ends the message: how to repair a number out of range.
        lowest: The least number.

    Raises:
        DatasetFormatError: a number is not; the message names the first one.
    """
    with np.errstate(over="ignore"):  # a limit beyond a 16-bit float is infinite there
        is_good = (block >= lowest) & (block < limits)  # NaN is neither
    if block.dtype.kind == "f":
        is_good &= np.floor(block) == block
    if not is_good.all():
        bad = tuple(int(place[0]) for place in np.nonzero(~is_good))
        limit = int(np.broadcast_to(np.asarray(limits), block.shape)[bad])
        column = f", column {bad[1]}" if len(bad) > 1 else ""
        raise DatasetFormatError(
            f"{name}, sample {first_sample + bad[0]}{column}: must be a whole number in "
            f"[{lowest}, {limit}), got {block[bad]}; {suggestion}"
        )
    return block.astype(np.int64)


def describe_source(path: Path) -> dict[str, Any]:
    """The entry for a source file in meta.json."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "num_bytes": path.stat().st_size, "sha256": digest}
