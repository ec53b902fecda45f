"""The vocabulary of a table: which value has which row.

Row 0 is for values that are rare or unknown and, by default, for missing ones. Row 1 is for missing
values if a column of the table asks for it. All other rows belong to values of the training part,
by first appearance there.

A store keeps each vocabulary in `vocabulary/<table number>.arrow`, an Arrow IPC file with one
column, `value`: the value of each row, null for the rows that have none. A hashed table has no
vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys._support.jit import kernel
from recsys.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys.datasets.tabular.encoding.numbering import Numbers

__all__ = [
    "ValueCounts",
    "choose_values",
    "read_vocabulary",
    "vocabulary_file",
    "write_vocabulary",
]

_BLOCK_VALUES = 1 << 20


class ValueCounts:
    """How often each value of a table appears in the training part.

    Args:
        num_values: Values are numbered from 0 to num_values - 1.

    Attributes:
        counts: Appearances of each value, (num_values,) int64.
    """

    def __init__(self, num_values: int) -> None:
        self.counts = np.zeros(num_values, np.int64)
        self._order = np.empty(num_values, np.int32)
        self._num_seen = 0

    def add(self, numbers: NDArray[np.int32]) -> None:
        """Count values, in the order of their appearance; negative numbers are left out."""
        self._num_seen = _count_kernel(numbers, self.counts, self._order, self._num_seen)

    @property
    def by_first_appearance(self) -> NDArray[np.int32]:
        """The numbers that appeared, in the order of their first appearance, (num_seen,)."""
        return self._order[: self._num_seen]


def choose_values(
    seen: ValueCounts, *, min_count: int, max_rows: int, first_row: int
) -> NDArray[np.int32]:
    """The values that get rows of their own, in the order of their rows, from `first_row` on.

    Args:
        seen: The values of the training part.
        min_count: Rarer values get no row.
        max_rows: The most rows that the table has, the first rows included; 0: no limit. The most
            frequent values are kept; of equally frequent ones, those that were seen first.
        first_row: Rows before it are for no single value.
    """
    order = seen.by_first_appearance
    order = order[seen.counts[order] >= min_count]
    limit = max(max_rows - first_row, 0) if max_rows else len(order)
    if limit < len(order):
        most_frequent = np.argsort(-seen.counts[order], kind="stable")[:limit]
        order = order[np.sort(most_frequent)]
    return order


def vocabulary_file(store: Path, number: int) -> Path:
    """The file of the vocabulary of a table, by its number among the tables."""
    return store / "vocabulary" / f"{number}.arrow"


def write_vocabulary(
    file: Path, values: pa.Array, chosen: NDArray[np.int32], first_row: int
) -> None:
    """Write the vocabulary of a table, a block of rows at a time.

    Args:
        file: The new file.
        values: All values, by number.
        chosen: The numbers of those that have rows of their own, in the order of their rows.
        first_row: The row of the first of them.
    """
    import pyarrow as pa

    schema = pa.schema([("value", values.type)])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.nulls(first_row, values.type)], schema=schema))
        for start in range(0, len(chosen), _BLOCK_VALUES):
            block = values.take(pa.array(chosen[start : start + _BLOCK_VALUES]))
            writer.write_batch(pa.record_batch([block], schema=schema))


def read_vocabulary(file: Path, numbers: Numbers, first_row: int) -> int:
    """Number the values of a vocabulary: the value of row r gets number r - first_row.

    Args:
        file: A file that `write_vocabulary` made.
        numbers: An empty numbering.
        first_row: The first row that belongs to a value.

    Returns:
        The rows of the table.

    Raises:
        StoreError: the file cannot be read, is of another kind of values, or is damaged.
    """
    import pyarrow as pa

    again, kind = "prepare the store again", numbers.values().type
    num_rows = 0
    if not file.is_file():  # a pipe would block
        raise StoreError(f"{file} must be a file, found none; {again}")
    try:
        with pa.OSFile(str(file), "rb") as source, pa.ipc.open_file(source) as reader:
            for index in range(reader.num_record_batches):
                values = reader.get_batch(index).column(0)
                if values.type != kind:
                    raise StoreError(f"{file}: values must be {kind}, got {values.type}; {again}")
                # The kernels trust offsets. Parquet may hold text that is not UTF-8: bytes are
                # bytes.
                is_text = values.type == pa.large_string()
                (values.view(pa.large_binary()) if is_text else values).validate(full=True)
                numbers.number(values.slice(max(first_row - num_rows, 0)))
                num_rows += len(values)
    except (pa.ArrowException, OSError, IndexError, UnicodeDecodeError) as error:
        raise StoreError(f"{file} cannot be read ({error}); {again}") from error
    if numbers.num_values != num_rows - first_row:
        raise StoreError(
            f"{file}: rows from {first_row} on must have distinct values, got {num_rows} rows with "
            f"{numbers.num_values} values; {again}"
        )
    return num_rows


@kernel
def _count_kernel(
    numbers: NDArray[np.int32],
    counts: NDArray[np.int64],
    order: NDArray[np.int32],
    num_seen: int,
) -> int:
    for number in numbers:
        if number >= 0:
            if counts[number] == 0:
                order[num_seen] = number
                num_seen += 1
            counts[number] += 1
    return num_seen
