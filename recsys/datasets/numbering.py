"""Values become rows of a table: by first appearance and a vocabulary, or by a hash.

Values are first numbered 0, 1, 2, ... by first appearance in the file.
A numbering is a hash table with open addressing beside an array of the values, in order:

    slots    (S,) uint64   hash << 32 | number + 1          0: free
    values   (n,) integers; or the UTF-8 bytes of all texts, and where each of them begins

The slots double when they are 70 % full, so a value takes 11 to 23 bytes beside itself. Numbering
runs in compiled loops over Arrow's buffers and releases the GIL: columns are numbered in parallel.

Null and the empty text are missing values: they get `MISSING`.

A vocabulary says which value has which row. Row 0 is for values that are rare or unknown and, by
default, for missing ones. Row 1 is for missing values if a column of the table asks for it. All
other rows belong to values of the training part, by first appearance there.

A store keeps each vocabulary in `vocabulary/<table number>.arrow`, an Arrow IPC file with one
column, `value`: the value of each row, null for the rows that have none. A hashed table has no
vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from recsys._support.hashing import GOLDEN, mix64
from recsys._support.jit import kernel, kernel_part
from recsys.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

__all__ = [
    "MISSING",
    "UNKNOWN",
    "HashedRows",
    "Numbers",
    "ValueCounts",
    "read_vocabulary",
    "vocabulary_file",
    "write_vocabulary",
]

MISSING: Final = -1
UNKNOWN: Final = -2

_BLOCK_VALUES = 1 << 20  # of a vocabulary's file
_MAX_LOAD = 0.7
_MAX_VALUES = 2**31 - 2
_FNV_BASIS: Final = np.uint64(0xCBF29CE484222325)
_FNV_PRIME: Final = np.uint64(0x100000001B3)
_NO_NULLS = np.empty(0, np.bool_)


class Numbers:
    """The number of every distinct value seen so far. Not thread-safe.

    Args:
        name: Of the vocabulary, for messages.
        dtype: Of the values, int64 or uint32; uint8 for texts, which are told apart by their UTF-8
            bytes.

    Attributes:
        num_values: Distinct values so far; their numbers are 0 to num_values - 1.
        is_integer: Whether the values are integers.
    """

    def __init__(self, name: str, dtype: type[np.integer[Any]] = np.uint8) -> None:
        self.num_values = 0
        self.is_integer = dtype is not np.uint8
        self._name = name
        self._slots = np.zeros(1 << 12, np.uint64)
        self._known: NDArray[Any] = np.empty(1 << 14, dtype)
        # Of texts in their bytes.
        self._ends = None if self.is_integer else np.zeros(1 << 11, np.int64)

    def number(self, values: pa.Array, *, grow: bool = True) -> NDArray[np.int32]:
        """The number of each value; `MISSING` for null.

        Args:
            values: int64 values, or texts.
            grow: New values get the next numbers, in order. Otherwise they get `UNKNOWN`.

        Shape:
            result (len(values),).

        Raises:
            ConfigError: there are more than 2**31 - 2 distinct values.
        """
        offsets, data = (
            (None, values.fill_null(0).to_numpy()) if self.is_integer else _texts_of(values)
        )
        return self.number_array(data, offsets, _nulls_of(values), grow=grow)

    def number_array(
        self,
        data: NDArray[Any],
        offsets: NDArray[Any] | None = None,
        nulls: NDArray[np.bool_] = _NO_NULLS,
        *,
        grow: bool = True,
    ) -> NDArray[np.int32]:
        """The number of each value, as `number` does.

        Args:
            data: The values; the bytes of texts.
            offsets: Where texts begin and end in the bytes; None for integers.
            nulls: Which values are null; none if it is empty.
            grow: As in `number`.

        Shape:
            data (n,), or any with texts; offsets (n + 1,); nulls (n,) or (0,); result (n,).
        """
        size = len(data) if offsets is None else len(offsets) - 1
        numbers, most = np.empty(size, np.int32), self.num_values + size
        if grow:
            if most > _MAX_VALUES:
                raise ConfigError(
                    f"vocabulary {self._name!r} must have at most {_MAX_VALUES} values; "
                    'set numbering = "hash" for its columns'
                )
            size = len(self._slots)
            while size * _MAX_LOAD < most:
                size *= 2
            if size > len(self._slots):
                old, self._slots = self._slots, np.zeros(size, np.uint64)
                _rehash_kernel(old, self._slots)
            if offsets is not None and self._ends is not None:
                self._ends = _with_room(self._ends, most + 1)
                most = int(self._ends[self.num_values] + offsets[-1] - offsets[0])
            self._known = _with_room(self._known, most)
        table = self._slots, self._known, self._ends, self.num_values
        self.num_values = _number_kernel(data, offsets, nulls, *table, grow, numbers)
        return numbers

    @property
    def known(self) -> NDArray[Any]:
        """All integers, by number, (num_values,)."""
        return self._known[: self.num_values]

    def values(self) -> pa.Array:
        """All values, by number: int64 or large text. The array shares this object's memory."""
        import pyarrow as pa

        if self._ends is None:
            return pa.array(self.known)
        ends = self._ends[: self.num_values + 1]
        return pa.LargeStringArray.from_buffers(
            self.num_values, pa.py_buffer(ends), pa.py_buffer(self._known[: ends[-1]])
        )


class HashedRows:
    """Maps values to rows by a hash, without memory of the values.

    An integer is hashed by SplitMix64, a text by 64-bit FNV-1a of its UTF-8 bytes and then by
    SplitMix64; the row is the remainder by `num_rows`. Missing values hash as the empty text.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def number(self, values: pa.Array, *, grow: bool = False) -> NDArray[np.int32]:
        """The row of each value, (len(values),); values are int64 or texts. None is kept."""
        num_rows = np.uint64(self.num_rows)
        if values.type == "int64":
            bits = values.view("uint64").fill_null(int(_FNV_BASIS)).to_numpy()
            return (mix64(bits + GOLDEN) % num_rows).astype(np.int32)
        rows = np.empty(len(values), np.int32)
        offsets, data = _texts_of(values)
        _hash_texts_kernel(offsets, data, _nulls_of(values), num_rows, rows)
        return rows


class ValueCounts:
    """How often each value of a table appears in the training part.

    Args:
        num_values: Values are numbered from 0 to num_values - 1.
    """

    def __init__(self, num_values: int) -> None:
        self._counts = np.zeros(num_values, np.int64)
        self._order = np.empty(num_values, np.int32)  # by first appearance
        self._num_seen = 0

    def add(self, numbers: NDArray[np.int32]) -> None:
        """Count values, in the order of their appearance; negative numbers are left out."""
        self._num_seen = _count_kernel(numbers, self._counts, self._order, self._num_seen)

    def chosen(self, min_count: int, max_rows: int, first_row: int) -> NDArray[np.int32]:
        """The values that get rows of their own, in the order of their rows.

        Args:
            min_count: Rarer values get no row.
            max_rows: The most rows that the table has, the first rows included; 0: no limit. The
                most frequent values are kept; of equally frequent ones, those that were seen first.
            first_row: Rows before it are for no single value.
        """
        order = self._order[: self._num_seen]
        order = order[self._counts[order] >= min_count]
        limit = max(max_rows - first_row, 0) if max_rows else len(order)
        if limit < len(order):
            most_frequent = np.argsort(-self._counts[order], kind="stable")[:limit]
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


def read_vocabulary(file: Path, numbers: Numbers, first_row: int, num_rows: int) -> None:
    """Number the values of a vocabulary: the value of row r gets number r - first_row.

    Args:
        file: A file that `write_vocabulary` made.
        numbers: An empty numbering.
        first_row: The first row that belongs to a value.
        num_rows: Rows of the table.

    Raises:
        StoreError: the file cannot be read, is of another kind of values or of another number of
            rows, or is damaged.
    """
    import pyarrow as pa

    kind, num_read = numbers.values().type, 0
    try:
        with pa.OSFile(str(file), "rb") as source, pa.ipc.open_file(source) as reader:
            for index in range(reader.num_record_batches):
                values = reader.get_batch(index).column(0)
                if values.type != kind:
                    raise pa.ArrowInvalid(f"values must be {kind}, got {values.type}")
                # The kernels trust offsets. Parquet may hold text that is not UTF-8: bytes are
                # bytes.
                is_text = values.type == pa.large_string()
                (values.view(pa.large_binary()) if is_text else values).validate(full=True)
                numbers.number(values.slice(max(first_row - num_read, 0)))
                num_read += len(values)
        if not num_read == num_rows == first_row + numbers.num_values:
            found = f"{num_read} with {numbers.num_values} distinct values"
            raise pa.ArrowInvalid(f"the table has {num_rows} rows, its vocabulary {found}")
    except (pa.ArrowException, OSError, IndexError, UnicodeDecodeError) as error:
        raise StoreError(f"{file} is damaged ({error}); prepare the store again") from error


def _nulls_of(values: pa.Array) -> NDArray[np.bool_]:
    """Which values are null, (n,); (0,) if none is."""
    return values.is_null().to_numpy(zero_copy_only=False) if values.null_count else _NO_NULLS


def _texts_of(values: pa.Array) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Where texts begin and end, (n + 1,), and their bytes, without a copy."""
    dtype = np.dtype(np.int64 if values.type == "large_string" else np.int32)
    _, offsets, data = values.buffers()
    begins = np.frombuffer(bytes(8), dtype, 1)
    if len(values):
        begins = np.frombuffer(offsets, dtype, len(values) + 1, dtype.itemsize * values.offset)
    return begins, np.frombuffer(data if data is not None and data.size else bytes(1), np.uint8)


def _with_room(array: NDArray[Any], size: int) -> NDArray[Any]:
    """The array, or a copy at least twice as large if it has fewer elements than `size`."""
    if size <= len(array):
        return array
    larger = np.empty(max(size, 2 * len(array)), array.dtype)
    larger[: len(array)] = array
    return larger


_mix64: Any = kernel(mix64)  # of one number


@kernel_part
def _hash(data: NDArray[Any], begin: np.int64, size: np.int64) -> Any:
    bits = _FNV_BASIS
    for index in range(size):
        bits = (bits ^ np.uint64(data[begin + index])) * _FNV_PRIME
    return _mix64(bits + GOLDEN)


@kernel
def _number_kernel(
    data: NDArray[Any],
    offsets: NDArray[Any] | None,
    nulls: NDArray[np.bool_],
    slots: NDArray[np.uint64],
    known: NDArray[Any],
    ends: NDArray[np.int64] | None,
    num_values: int,
    grow: bool,
    numbers: NDArray[np.int32],
) -> int:
    """Number n values; value k so far is `known[ends[k] : ends[k + 1]]`, or integer `known[k]`."""
    mask = np.uint64(len(slots) - 1)
    for position in range(len(numbers)):
        begin = np.int64(position if offsets is None else offsets[position])
        size = np.int64(1 if offsets is None else offsets[position + 1] - begin)
        if size == 0 or (len(nulls) and nulls[position]):
            numbers[position] = MISSING
            continue
        tag = _hash(data, begin, size) >> np.uint64(32)
        slot = tag & mask
        number = np.int64(UNKNOWN)
        while slots[slot] != 0:
            entry = slots[slot]
            if (entry >> np.uint64(32)) == tag:
                found = np.int64(entry & np.uint64(0xFFFFFFFF)) - 1
                start = found if ends is None else ends[found]
                if ends is None or ends[found + 1] - start == size:
                    index = np.int64(0)
                    while index < size and known[start + index] == data[begin + index]:
                        index += 1
                    if index == size:
                        number = found
                        break
            slot = (slot + np.uint64(1)) & mask
        if number == UNKNOWN and grow:
            number = np.int64(num_values)
            start = number if ends is None else ends[number]
            for step in range(size):
                known[start + step] = data[begin + step]
            num_values += 1
            if ends is not None:
                ends[num_values] = start + size
            slots[slot] = (tag << np.uint64(32)) | np.uint64(num_values)
        numbers[position] = number
    return num_values


@kernel
def _rehash_kernel(old: NDArray[np.uint64], slots: NDArray[np.uint64]) -> None:
    mask = np.uint64(len(slots) - 1)
    for entry in old:
        if entry != 0:
            slot = (entry >> np.uint64(32)) & mask
            while slots[slot] != 0:
                slot = (slot + np.uint64(1)) & mask
            slots[slot] = entry


@kernel
def _hash_texts_kernel(
    offsets: NDArray[Any],
    data: NDArray[np.uint8],
    nulls: NDArray[np.bool_],
    num_rows: np.uint64,
    rows: NDArray[np.int32],
) -> None:
    for position in range(len(rows)):
        begin, size = (
            np.int64(offsets[position]),
            np.int64(offsets[position + 1] - offsets[position]),
        )
        if len(nulls) and nulls[position]:
            size = np.int64(0)
        rows[position] = np.int32(_hash(data, begin, size) % num_rows)


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
