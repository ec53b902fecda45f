"""The arrays of a slot map in the CPU's memory: which row is in which slot, and who needs it.

    slot_of_row   slot of a row; NOWHERE; or AWAITED + slot: the row's own slot, still empty
    row_of_slot   row of a slot; EMPTY
    num_claims    how many tickets need the row that a slot holds
    num_uses      how many tickets needed the row; the clock's hand halves it in passing
    flags         PINNED: the slot keeps its row; DIRTY: the cold store has an older value;
                  POPULAR: pinned for its uses, until the next choice of popular rows

Row numbers count over all tables of the row space.

Letters: T tables, L lookups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "AWAITED",
    "DIRTY",
    "EMPTY",
    "MARKED",
    "NOWHERE",
    "PINNED",
    "POPULAR",
    "SEEN",
    "Requests",
    "SlotArrays",
]

NOWHERE = EMPTY = -1
AWAITED = 1 << 30
PINNED, DIRTY = 1, 2
SEEN = 4  # by the claim that is being made
POPULAR = 8
MARKED = 16  # only while `Slots.are_among` runs


class SlotArrays(NamedTuple):
    """Slots and what they hold, for kernels; see the top of this module."""

    slot_of_row: NDArray[np.int32]
    row_of_slot: NDArray[np.int32]
    num_claims: NDArray[np.int16]
    num_uses: NDArray[np.uint8]
    flags: NDArray[np.uint8]


class Requests(NamedTuple):
    """Runs of values and the table each is looked up in, sorted by table."""

    of_table: NDArray[np.uint64]  # (T + 1,) where each table's runs begin
    begins: NDArray[np.uint64]  # (L,) into the values
    ends: NDArray[np.uint64]  # (L,)
    first_rows: NDArray[np.uint64]  # (T + 1,) where each table's rows begin among all
