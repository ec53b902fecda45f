"""`Transfer`: moves rows between slots and the cold tier, as a claim has listed them.

Cold memory is the tables themselves and the optimizer's state. Tables in files are mapped into
memory, so their rows are moved in the same way.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from recsys.embeddings.kernels.cpu.claim import DONE, NUM_COUNTS
from recsys.embeddings.kernels.cpu.move import announce_rows, move_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.rows.tables import TableGroup

__all__ = ["Transfer"]


class Transfer:
    """The rows that are written back, then those that are fetched, by one call of a kernel.

    It refers to memory and not to the group, so a thread that runs it keeps no group alive.

    Args:
        group: Whose rows they are.
        most: How many rows can be fetched or written back.
        generation: Of the mini-batch whose rows are fetched.

    Attributes:
        generation: As given.
        moves_4M: Rows and slots, for the claim to fill.
        counts: Their numbers, (NUM_COUNTS,).
        lock: Held until the transfer is done.
        is_started: Whether the queue's thread runs it.
    """

    def __init__(self, group: TableGroup, most: int, generation: int) -> None:
        self.generation = generation
        self.moves_4M: NDArray[np.int32] = np.empty((4, most), np.int32)
        self.counts: NDArray[np.int64] = np.zeros(NUM_COUNTS, np.int64)
        self.lock = threading.Lock()
        self.lock.acquire()
        self.is_started = False
        self._memories, self._dims, self._files = group.memories, group.dims, group.files

    @property
    def is_done(self) -> bool:
        """Whether all rows were copied."""
        return bool(self.counts[DONE])

    def run(self, *, is_alone: bool) -> None:
        """Copy the rows; a second time it does nothing.

        Args:
            is_alone: Whether the calling thread does it alone, as one in the background must.

        Raises:
            ColdTierError: rows are in files, and this process was forked from the one with them.
        """
        if self._files is not None:
            self._files.require_owner()
            announce_rows(self._memories, self._dims, self.moves_4M, self.counts)
        move_rows(self._memories, self._dims, self.moves_4M, self.counts, is_alone=is_alone)
