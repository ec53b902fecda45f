"""The row map of a table group: the location of every row. Nothing else says where a row is.

    slot_of_row[row] >= 0     the row is in this slot; the cold tier may be older
    NOWHERE                   the row is in the cold tier only
    LEAVING                   a transfer is writing the row back to the cold tier
    ARRIVING - slot           a transfer is fetching the row into a slot
    WANTED                    only while a claim is made

The background thread never writes to the row map. Other threads do while they hold the lock of the
group's `Fetcher`. A transfer in the background touches the rows that are LEAVING or ARRIVING and no
others; a kernel that meets one gives up and returns IN_FLIGHT. Rows are numbered over all tables of
a group. A group without slots has an empty row map. A `Fetcher` has it. Invariant: a row has one
location, and a slot one row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ARRIVING",
    "BAD_OFFSETS",
    "EMPTY",
    "IN_FLIGHT",
    "LEAVING",
    "LEFT_OUT",
    "MAP_BYTES_PER_ROW",
    "MARK_BYTES_PER_SLOT",
    "NOWHERE",
    "OK",
    "ONE_HOT",
    "WANTED",
    "Marks",
    "make_marks",
]

NOWHERE, LEAVING, WANTED, ARRIVING = np.int32(-1), np.int32(-2), np.int32(-3), np.int32(-4)
# In row_of_slot; and on a device, an id that adds nothing to its bag, as that of padding.
EMPTY, LEFT_OUT = np.int32(-1), -(2**31)
# Results of lookups; others are positions of bad ids. ONE_HOT is OK where bag i is id i.
OK, IN_FLIGHT, BAD_OFFSETS, ONE_HOT = -1, -2, -3, -4
MAP_BYTES_PER_ROW, MARK_BYTES_PER_SLOT = 4, 11


class Marks(NamedTuple):
    """Where rows are, and what is known of slots.

    Attributes:
        slot_of_row: The row map, (R,).
        row_of_slot: (S,).
        generations: The last mini-batch that claimed the slot, by number, (S,).
        uses: How many mini-batches claimed it; the clock's hand halves it in passing, (S,).
        is_dirty: Whether the cold tier is older than the slot; updates set it, (S,).
        hand: Where the clock's hand is, (1,).
        pins: `PLANNED` or `POPULAR` for a row that does not leave its slot, else 0, (S,).
    """

    slot_of_row: NDArray[np.int32]
    row_of_slot: NDArray[np.int32]
    generations: NDArray[np.int32]
    uses: NDArray[np.uint8]
    is_dirty: NDArray[np.uint8]
    hand: NDArray[np.int64]
    pins: NDArray[np.uint8]


def make_marks(num_rows: int, num_slots: int) -> Marks:
    """The row map and the marks of empty slots.

    Args:
        num_rows: R, counted over all tables.
        num_slots: S.
    """
    return Marks(
        np.full(num_rows, NOWHERE, np.int32),
        np.full(num_slots, EMPTY, np.int32),
        np.zeros(num_slots, np.int32),
        np.zeros(num_slots, np.uint8),
        np.zeros(num_slots, np.uint8),
        np.zeros(1, np.int64),
        np.zeros(num_slots, np.uint8),
    )
