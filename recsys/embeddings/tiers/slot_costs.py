"""What slots cost.

    bytes = rows of the row space * 4                       the row map
          + slots * (row + its optimizer state + 8)         and the records of each slot

The row map tells in one step whether a row is in a slot. The budget pays for it before any slot.

These bytes do not include memory in proportion to a mini-batch, like its ids and pooled rows. A
ticket's slot numbers take 4 bytes per lookup and 4 per row, on CUDA 24 per row. A claim takes at
most 20 bytes per lookup and 60 per row in all, freed before the mini-batch is computed; on CUDA
torch keeps them for the next claim. On all devices staging takes at most 16 MiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED
from recsys.embeddings.rows.row_space import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

__all__ = ["MAX_SLOTS", "floor_bytes", "map_bytes", "require_numbers", "row_bytes", "slot_bytes"]

# A slot number and the AWAITED bit fit in an int32, and so does the mark of a claim on a device.
MAX_SLOTS = AWAITED - 2
_MAP_BYTES_PER_ROW = 4
_RECORD_BYTES_PER_SLOT = 8  # row, claims, uses, flags


def map_bytes(num_rows: int) -> int:
    """Bytes of the row map of `num_rows` rows."""
    return num_rows * _MAP_BYTES_PER_ROW


def row_bytes(dim: int, dtype: torch.dtype, state_sizes: Mapping[str, int]) -> int:
    """Bytes of a row and its state."""
    return dim * dtype.itemsize + sum(state_sizes.values()) * compute_dtype(dtype).itemsize


def slot_bytes(dim: int, dtype: torch.dtype, state_sizes: Mapping[str, int]) -> int:
    """Bytes of one slot: a row, its state, and the slot's records."""
    return row_bytes(dim, dtype, state_sizes) + _RECORD_BYTES_PER_SLOT


def floor_bytes(num_rows: int, slots: Iterable[tuple[int, int]]) -> int:
    """The least fast memory for tables: the row map, and a slot for every row needed at once.

    Args:
        num_rows: Number of rows of all tables.
        slots: For every row space, its number of slots and the bytes of one slot.
    """
    return map_bytes(num_rows) + sum(count * num_bytes for count, num_bytes in slots)


def require_numbers(num_rows: int, num_slots: int) -> None:
    """Check that 32 bits can number the rows and slots of one row space.

    Raises:
        ValueError: they cannot.
    """
    if num_rows >= AWAITED * 2 or num_slots > MAX_SLOTS:
        raise ValueError(
            f"a row space has at most {AWAITED * 2 - 1} rows and {MAX_SLOTS} slots, got "
            f"{num_rows} and {num_slots}; divide the tables among several modules"
        )
