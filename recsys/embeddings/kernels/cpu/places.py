"""What the row map says of a row, and the codes that lookup kernels return.

    slot_of_row[row] >= 0     the row is in this slot; cold memory may be older
    NOWHERE                   the row is in cold memory only
    LEAVING                   a transfer is writing the row back to cold memory
    ARRIVING - slot           a transfer is fetching the row into a slot
    WANTED                    only while a claim is made

Only the thread that trains writes to the row map. A transfer in the background touches the rows
that are LEAVING or ARRIVING and no others; a kernel that meets one gives up and returns IN_FLIGHT.
Rows are numbered over all tables of a group. A group without slots has an empty row map.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "ARRIVING",
    "BAD_OFFSETS",
    "EMPTY",
    "IN_FLIGHT",
    "LEAVING",
    "LEFT_OUT",
    "NOWHERE",
    "OK",
    "WANTED",
]

NOWHERE, LEAVING, WANTED, ARRIVING = np.int32(-1), np.int32(-2), np.int32(-3), np.int32(-4)
# In row_of_slot; and on a device, an id that adds nothing to its bag, as that of padding.
EMPTY, LEFT_OUT = np.int32(-1), -(2**31)
OK, IN_FLIGHT, BAD_OFFSETS = -1, -2, -3  # results of lookups; others are positions of bad ids
