"""Columns of encoded rows, kept in files between the two passes of a preparation.

The first pass appends blocks of rows in file order; the second reads them back, block by block.
Each array has a file of its own in a temporary folder:

    NUMBER.bin                        one value for each row
    NUMBER.lengths.bin, NUMBER.bin    a bag for each row: its length, and the values of all bags
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from recsys.datasets.tabular.encode import Bags

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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

    Attributes:
        num_rows: Rows appended so far.
        names: The columns, of the first block and all others.
    """

    def __init__(self, parent: Path) -> None:
        self.num_rows = 0
        self.names: list[str] = []
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._bags: set[str] = set()
        self._folder = Path(mkdtemp(prefix="spool-", dir=parent))

    def append(self, num_rows: int, columns: Columns) -> None:
        """Add rows at the end; columns have the names, kinds and dtypes of the first block."""
        self.names = list(columns)
        for name, column in columns.items():
            values = column
            if isinstance(column, Bags):
                values = column.values
                self._bags.add(name)
                self._write(name, column.lengths, ".lengths")
            self._dtypes[name] = np.asarray(values).dtype
            self._write(name, np.asarray(values))
        self.num_rows += num_rows

    def column(self, name: str) -> NDArray[Any]:
        """All values of a column without bags, in memory, (num_rows,)."""
        return np.fromfile(self._path(name), self._dtypes[name])

    def blocks(self, names: Sequence[str], wanted: NDArray[np.bool_]) -> Iterator[Block]:
        """Some columns of the wanted rows, block by block, in file order.

        Args:
            names: The columns.
            wanted: Whether each row is wanted, (num_rows,).

        Yields:
            Blocks of 1 to `BLOCK_ROWS` rows.
        """
        places = dict.fromkeys(names, 0)  # in the file of values
        for start in range(0, self.num_rows, BLOCK_ROWS):
            rows = np.flatnonzero(wanted[start : start + BLOCK_ROWS])
            size = min(BLOCK_ROWS, self.num_rows - start)
            columns: Columns = {}
            for name in names:
                lengths, num_values = None, size
                if name in self._bags:
                    lengths = self._read(name, np.dtype(np.int32), start, size, ".lengths")
                    num_values = int(lengths.sum(dtype=np.int64))
                if len(rows):
                    values = self._read(name, self._dtypes[name], places[name], num_values)
                    is_all = len(rows) == size
                    if lengths is None:
                        columns[name] = values if is_all else values[rows]
                    else:
                        bags = Bags(values, lengths)
                        columns[name] = bags if is_all else bags.take(rows)
                places[name] += num_values
            if len(rows):
                yield Block(rows + start, columns)

    def remove(self) -> None:
        """Remove the files, which are not read any more."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, name: str, kind: str = "") -> Path:
        return self._folder / f"{self.names.index(name)}{kind}.bin"

    def _write(self, name: str, values: NDArray[Any], kind: str = "") -> None:
        with self._path(name, kind).open("ab") as file:
            file.write(np.ascontiguousarray(values).data)

    def _read(
        self, name: str, dtype: np.dtype[Any], start: int, count: int, kind: str = ""
    ) -> NDArray[Any]:
        return np.fromfile(self._path(name, kind), dtype, count, offset=start * dtype.itemsize)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()
