"""Where rows are on a device, and the record of what is wrong with an input.

Kernels find tables by address, on the device or in page-locked host memory, which a device reads
over PCIe. So a table without slots and a row without a slot are read in one way:

    row r of table t    slot_of_row[first_rows[t] + r] is its slot, if there are slots and it is not
                        negative; else the row begins at addresses[t] + r * dim numbers
    slot s              begins at addresses[T] + s * dim numbers

The record keeps the first error that a kernel found: its kind, and the table, the id and the
position that it names. It lies on the device, where updates read it: while it has an error they
update nothing. The kernel also sets a flag in page-locked memory, which the host reads without
waiting.

Letters: T tables, R rows, S slots, D dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

__all__ = [
    "BAD_GRADIENT",
    "BAD_OFFSETS",
    "BAD_WEIGHT",
    "NO_ROW",
    "DeviceMemories",
    "ErrorRecord",
    "Rows",
    "begins_of",
    "count_at_most",
    "divided",
    "first_step",
    "has_error",
    "note",
    "upload",
]

NO_ROW, BAD_OFFSETS, BAD_WEIGHT, BAD_GRADIENT = 1, 2, 3, 4


class Rows:
    """The rows of all tables, or one of their state arrays, as a device finds them.

    Args:
        tables: (E, dim) each, contiguous, of one dtype, in memory that the device reaches; empty
            for a table without state.
        slots: (S, dim) on the device; S may be 0.

    Attributes:
        tensors: Views of the tables, which share their versions.
        slots: As given.
        dim: Numbers per row.
        addresses: Where each table begins, and last the slots, (T + 1,) int64 on the device; 0 for
            one that is empty.
        is_aligned: Whether all begin at multiples of 16 bytes.
        locks: What keeps tables in host memory page-locked.
    """

    locks: object = None

    def __init__(self, tables: Sequence[Tensor], slots: Tensor) -> None:
        self.tensors, self.slots = [table.detach() for table in tables], slots
        self.dim: int = slots.shape[1]
        starts = [table.data_ptr() if table.numel() else 0 for table in (*tables, slots)]
        self.addresses = upload(np.array(starts, np.int64), slots.device)
        self.is_aligned = not any(start % 16 for start in starts)


class DeviceMemories(NamedTuple):
    """The tables of a group, their state, and where rows are.

    Attributes:
        rows: The tables.
        states: Their state arrays.
        first_rows: The number of each table's row 0, and R, (T + 1,) int64.
        num_rows: R.
        slot_of_row: The row map, (R,); None if all rows are in their tables.
        is_dirty: Of each slot, whether the cold tier is older, (S,) uint8; None without slots.
        record: What is wrong with an input.
    """

    rows: Rows
    states: Sequence[Rows]
    first_rows: Tensor
    num_rows: int
    slot_of_row: Tensor | None
    is_dirty: Tensor | None
    record: ErrorRecord


class ErrorRecord:
    """The first error of a group's lookups and updates on a device.

    Args:
        device: Where kernels run.

    Attributes:
        numbers: Whether there is an error, its kind, table, id and position, and the address of the
            flag, (6,) int64 on the device.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            is_cuda = device.type == "cuda"
            self._flag = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
            numbers = np.array([0, 0, 0, 0, 0, self._flag.data_ptr()], np.int64)
            self.numbers = upload(numbers, device)
        self._read = self._flag.numpy()

    def take(self) -> list[int] | None:
        """Kind, table, id and position of the error, which is then forgotten; None if none came.

        The host waits for nothing unless there is an error.
        """
        if not self._read[0]:
            return None
        found: list[int] = self.numbers[1:5].tolist()
        self.numbers[:5].zero_()
        self._read[0] = 0
        return found


def upload(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy an array to a device; the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def first_step(num: int) -> int:
    """The first step of `count_at_most` among `num` numbers."""
    return 1 << max(num.bit_length() - 1, 0)


@triton.jit
def note(record, is_bad, KIND: tl.constexpr, table, ids, places):
    """Record the first of some places that are bad, unless there is an error already."""
    lanes = tl.arange(0, is_bad.shape[0])
    first = tl.min(tl.where(is_bad, lanes, is_bad.shape[0]), 0)
    if first < is_bad.shape[0]:
        is_free = tl.atomic_xchg(record, 1) == 0
        if is_free:
            is_first = lanes == first
            tl.store(record + 1, KIND)
            tl.store(record + 2, table)
            tl.store(record + 3, tl.sum(tl.where(is_first, ids, 0), 0))
            tl.store(record + 4, tl.sum(tl.where(is_first, places, 0), 0))
            tl.store(tl.load(record + 5).to(tl.pointer_type(tl.int64)), 1)


@triton.jit
def has_error(record):
    """Whether an error is recorded."""
    return tl.load(record) != 0


@triton.jit
def count_at_most(array, limits, num, step):
    """How many of the first `num` numbers of an ascending array are at most each limit.

    If the array is not ascending, as invalid offsets are not, the result is still 0 to `num`.
    `step` is a power of two that is greater than `num` / 2.
    """
    count = limits * 0
    while step > 0:
        probe = count + step.to(limits.dtype)
        is_in = probe <= num
        is_counted = is_in & (tl.load(array + probe - 1, is_in, 0) <= limits)
        count = tl.where(is_counted, probe, count)
        step = step // 2
    return count


@triton.jit
def begins_of(address, index, numbers, DIM: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Pointers to the first number of some rows, (N, 1).

    Args:
        address: Of the table or the slots, (N,).
        index: Of the row or the slot, (N,) int64.
        numbers: A pointer to numbers of the same dtype.
        DIM: Numbers per row.
        IS_ALIGNED: As of `Rows`.
    """
    begins = address.to(tl.pointer_type(numbers.dtype.element_ty))
    if IS_ALIGNED:
        begins = tl.multiple_of(begins, [16])
    return begins[:, None] + (index * DIM)[:, None]


@triton.jit
def divided(dividend, divisor):
    """Rounded to nearest, as torch does it."""
    return tl.div_rn(dividend, divisor) if dividend.dtype == tl.float32 else dividend / divisor
