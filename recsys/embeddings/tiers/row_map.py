"""The row map of a table group: the location of every row. Nothing else says where a row is.

A `Fetcher` has it; kernels read it at each lookup and update. Only the thread that trains writes
to it; `kernels.cpu.places` says what its numbers mean. Invariant: a row has one location, and a
slot one row.
"""

from __future__ import annotations

import numpy as np

from recsys.embeddings.kernels.cpu.claim import Marks
from recsys.embeddings.kernels.cpu.places import EMPTY, NOWHERE

__all__ = ["MAP_BYTES_PER_ROW", "MARK_BYTES_PER_SLOT", "make_marks"]

MAP_BYTES_PER_ROW, MARK_BYTES_PER_SLOT = 4, 11


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
