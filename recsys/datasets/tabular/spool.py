"""Columns of encoded rows, kept in files between the two passes of a preparation.

The first pass appends blocks of rows in file order; the second reads them back, block by block.
Each array has a file of its own in a temporary folder:

    COLUMN.bin                        one value for each row
    COLUMN.lengths.bin, COLUMN.bin    a bag for each row: its length, and the values of all bags
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from recsys.datasets.tabular.encode import Bags

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from io import BufferedReader, BufferedWriter

    from numpy.typing import NDArray

    from recsys.datasets.tabular.encode import Columns

__all__ = ["BLOCK_ROWS", "Block", "Spool"]

BLOCK_ROWS = 1 << 16


class Block(NamedTuple):
    """Some rows of some columns.

    Attributes:
        rows: Their row numbers, ascending, (n,).
        columns: An array, or `Bags`, for each column.
    """

    rows: NDArray[np.int64]
    columns: Columns


class Spool:
    """Writes and reads such files; use it as a context manager, which removes them at the end.

    Args:
        parent: An existing folder, which holds the temporary one.
        dtypes: The dtype of each column's values.
        bags: The names of the columns that hold bags.

    Attributes:
        names: The columns.
        num_rows: Rows appended so far.
    """

    def __init__(
        self, parent: Path, dtypes: Mapping[str, np.dtype[Any]], bags: Sequence[str] = ()
    ) -> None:
        self.names = list(dtypes)
        self.num_rows = 0
        self._dtypes = dict(dtypes)
        self._bags = frozenset(bags)
        self._folder = Path(mkdtemp(prefix="spool-", dir=parent))
        self._numbers = {name: number for number, name in enumerate(self._dtypes)}
        self._files: dict[Path, BufferedWriter] = {}
        try:
            for name in self._dtypes:
                for path in self._paths_of(name):
                    self._files[path] = path.open("wb")
        except BaseException:
            self.remove()
            raise

    def append(self, num_rows: int, columns: Columns) -> None:
        """Add rows at the end.

        Args:
            num_rows: How many.
            columns: Every column's values or bags.
        """
        for name, dtype in self._dtypes.items():
            column = columns[name]
            values_file, *lengths_file = map(self._files.__getitem__, self._paths_of(name))
            if isinstance(column, Bags):
                _write(lengths_file[0], column.lengths, np.dtype(np.int32))
                column = column.values
            _write(values_file, column, dtype)
        self.num_rows += num_rows

    def flush(self) -> None:
        """Write all appended rows to the files and close them, before they are read.

        Reading opens the files again: with both, a wide table would need twice the handles.
        """
        for file in self._files.values():
            file.close()

    def column(self, name: str) -> NDArray[Any]:
        """All values of a column without bags, in memory, (num_rows,)."""
        (path,) = self._paths_of(name)
        return np.fromfile(path, self._dtypes[name])

    def blocks(self, names: Sequence[str], wanted: NDArray[np.bool_]) -> Iterator[Block]:
        """Some columns of the wanted rows, block by block, in file order.

        Args:
            names: The columns.
            wanted: Whether each row is wanted, (num_rows,).

        Yields:
            Blocks of 1 to `BLOCK_ROWS` rows.
        """
        with ExitStack() as stack:
            files = {
                name: [stack.enter_context(path.open("rb")) for path in self._paths_of(name)]
                for name in names
            }
            for start in range(0, self.num_rows, BLOCK_ROWS):
                num_rows = min(BLOCK_ROWS, self.num_rows - start)
                rows = np.flatnonzero(wanted[start : start + num_rows])
                columns: Columns = {}
                for name, (values_file, *lengths_file) in files.items():
                    dtype = self._dtypes[name]
                    if lengths_file:
                        lengths = np.fromfile(lengths_file[0], np.int32, num_rows)
                        num_values = int(lengths.sum(dtype=np.int64))
                        values = _read(values_file, dtype, num_values, skip=not len(rows))
                        if len(rows):
                            bags = Bags(values, lengths)
                            columns[name] = bags if len(rows) == num_rows else bags.take(rows)
                    else:
                        values = _read(values_file, dtype, num_rows, skip=not len(rows))
                        if len(rows):
                            columns[name] = values if len(rows) == num_rows else values[rows]
                if len(rows):
                    yield Block(rows + start, columns)

    def remove(self) -> None:
        """Remove the files, which are not read any more."""
        for file in self._files.values():
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _paths_of(self, name: str) -> list[Path]:
        """The file of a column's values and, for bags, the file of their lengths."""
        number = self._numbers[name]
        lengths = [self._folder / f"{number}.lengths.bin"] if name in self._bags else []
        return [self._folder / f"{number}.bin", *lengths]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _write(file: BufferedWriter, values: NDArray[Any], dtype: np.dtype[Any]) -> None:
    file.write(np.ascontiguousarray(values, dtype).data)


def _read(file: BufferedReader, dtype: np.dtype[Any], count: int, *, skip: bool) -> NDArray[Any]:
    """The next values, or none of them if they are skipped."""
    if skip:
        file.seek(count * dtype.itemsize, os.SEEK_CUR)
        return np.empty(0, dtype)
    return np.fromfile(file, dtype, count)
