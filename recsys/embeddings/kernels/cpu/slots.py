"""The map of the slots in the CPU's memory: gives the rows of mini-batches their slots.

`slot_arrays` says what the map consists of, `claim_kernels` how slots are claimed.

Letters: T tables, R rows, S slots, N values, L lookups, M rows missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys._support.jit import kernel, num_parts
from recsys.embeddings.kernels.cpu.claim_kernels import ClaimScratch, claim_kernel, take_back_kernel
from recsys.embeddings.kernels.cpu.slot_arrays import (
    DIRTY,
    EMPTY,
    NOWHERE,
    PINNED,
    Requests,
    SlotArrays,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.rows.lookups import Bags, Lookups

__all__ = ["Moves", "NoSuchRow", "Shortage", "SlotClaim", "SlotMap"]

_MOST_KEPT = 64
_MIN_SHARED = 4096  # values; fewer are found before another thread wakes
_MOST_VALUES_KEPT = 2**16  # memory for as many values is kept from claim to claim


class NoSuchRow(Exception):  # stays inside this package: callers name the id
    """A value is not a row of its table.

    Attributes:
        position: Position of the first such value.
    """

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class Shortage(Exception):  # stays inside this package
    """The rows of a mini-batch need more slots than are free; nothing was claimed.

    Attributes:
        needed: The slots that this mini-batch or another ticket needs.
        num_lacking: How many more free slots the mini-batch needs.
        num_needed: The total number of slots with which the claim would succeed.
    """

    def __init__(self, needed: Any, num_missing: int, num_lacking: int) -> None:
        super().__init__(num_lacking)
        self.needed, self.num_lacking = needed, num_lacking
        self.num_needed = len(needed) + num_missing


class Moves(NamedTuple):
    """The rows that one transfer copies: first those written back, then those fetched.

    Attributes:
        fetched_rows: Rows to fetch, counted over all tables, (M,).
        fetched_slots: The slot of each.
        written_rows: Rows to write back, (K,).
        written_slots: The slot of each.
    """

    fetched_rows: NDArray[np.int32]
    fetched_slots: NDArray[np.int32]
    written_rows: NDArray[np.int32]
    written_slots: NDArray[np.int32]


class SlotClaim(NamedTuple):
    """The claim of one mini-batch.

    Attributes:
        slot_of_value: (N,); any slot for a value that is not looked up.
        held: The slots that count this claim.
        moves: The rows to copy before the slots are read.
        num_lookups, num_hits: Values looked up, and those whose row was in its slot.
        num_rows, num_rows_hit: Distinct rows, and those that were in their slot.
    """

    slot_of_value: Any
    held: Any
    moves: Moves
    num_lookups: int
    num_hits: int
    num_rows: int
    num_rows_hit: int


class _KnownRequests(NamedTuple):
    """The last requests of some lookups; those of one-hot bags depend on the batch size alone."""

    order: tuple[NDArray[np.uint64], NDArray[np.int64]]  # results of `SlotMap._order`
    batch_size: int  # -1 if bags are not one-hot
    requests: Requests


class SlotMap:
    """Claims slots in the CPU's memory; `TritonSlotMap` does it on a device.

    Args:
        first_rows: Where each table's rows begin among all, (T + 1,).
        num_slots: S.

    Attributes:
        arrays: For kernels.
        slot_of_row: (R,) int32, a tensor over the same memory, as are the next four.
        row_of_slot: (S,) int32.
        num_claims: (S,) int16.
        num_uses: (S,) uint8.
        flags: (S,) uint8.
    """

    def __init__(self, first_rows: NDArray[np.uint64], num_slots: int) -> None:
        self.arrays = SlotArrays(
            np.full(int(first_rows[-1]), NOWHERE, np.int32),
            np.full(num_slots, EMPTY, np.int32),
            np.zeros(num_slots, np.int16),
            np.zeros(num_slots, np.uint8),
            np.zeros(num_slots, np.uint8),
        )
        self.slot_of_row, self.row_of_slot, self.num_claims, self.num_uses, self.flags = map(
            torch.from_numpy, self.arrays
        )
        self._first_rows, self._hand = first_rows, 0
        self._num_idle = num_slots  # slots that are neither claimed nor pinned
        self._requests: dict[Lookups, _KnownRequests] = {}
        self._scratch: ClaimScratch | None = None

    def claim(self, lookups: Lookups, bags: Bags) -> SlotClaim:
        """Give every row of a mini-batch a slot, and count the claim into each of these slots.

        Args:
            lookups: Which features are looked up in which tables; each feature in at most one.
            bags: The input; its values are rows.

        Raises:
            NoSuchRow: a value is not a row of its table; nothing was claimed.
            Shortage: too few slots are free.
        """
        slots, values, scratch = self.arrays, bags.values, self._scratch_for(len(bags.values))
        slot_of_value = np.zeros(len(values), np.int32)
        is_small = len(values) < _MIN_SHARED
        claim = claim_kernel.alone if is_small else claim_kernel
        (
            bad,
            num_found,
            num_newly_claimed,
            num_hits,
            num_awaited,
            num_missing,
            num_written,
            self._hand,
        ) = claim(
            slots,
            self.requests_of(lookups, bags),
            values,
            slot_of_value,
            *scratch,
            self._num_idle,
            self._hand,
            1 if is_small else num_parts(),
            np.zeros(1, np.int64),
        )
        num_lacking = num_missing + num_newly_claimed - self._num_idle
        if bad >= 0 or num_lacking > 0:
            needed = np.flatnonzero(slots.num_claims)
            take_back_kernel(slots, *scratch)
            raise NoSuchRow(bad) if bad >= 0 else Shortage(needed, num_missing, num_lacking)
        self._num_idle -= num_newly_claimed + num_missing
        return SlotClaim(
            slot_of_value,
            scratch.held(num_found + num_missing),
            Moves(*scratch.fetched(num_awaited + num_missing), *scratch.written(num_written)),
            num_lookups=int(scratch.starts[-1]),
            num_hits=num_hits,
            num_rows=num_found + num_missing,
            num_rows_hit=num_found - num_awaited,
        )

    def _scratch_for(self, num_values: int) -> ClaimScratch:
        """Memory for a claim of N values."""
        known = self._scratch
        if known is not None and known.lists.shape[1] >= num_values:
            return known
        found = ClaimScratch.for_values(num_values, len(self._first_rows) - 1)
        if num_values <= _MOST_VALUES_KEPT:  # it is in no budget
            self._scratch = found
        return found

    def release(self, held: NDArray[np.int32]) -> None:
        """Take a claim out of its slots' counts; `held` as in its `SlotClaim`."""
        slots = self.arrays
        self._num_idle += int(_release_kernel(slots.num_claims, slots.flags, held))

    def mark_dirty(self, slots: Any) -> None:
        """Note that rows in these slots, (M,), are newer than in the cold store."""
        self.arrays.flags[np.asarray(slots)] |= np.uint8(DIRTY)

    def recount(self) -> None:
        """Count idle slots again after slots were pinned or unpinned."""
        slots = self.arrays
        self._num_idle = int(((slots.num_claims == 0) & (slots.flags & PINNED == 0)).sum())

    def requests_of(self, lookups: Lookups, bags: Bags) -> Requests:
        """The runs of values of each lookup."""
        known = self._requests.get(lookups)
        if known is not None and bags.offsets is None and known.batch_size == bags.batch_size:
            return known.requests
        order = self._order(lookups) if known is None else known.order
        of_table, positions = order
        begins = positions * bags.batch_size
        ends = begins + bags.batch_size
        if bags.offsets is not None:
            begins, ends = bags.offsets[begins], bags.offsets[ends]
        requests = Requests(
            of_table, begins.astype(np.uint64), ends.astype(np.uint64), self._first_rows
        )
        if known is None and len(self._requests) > _MOST_KEPT:
            self._requests.clear()
        batch_size = bags.batch_size if bags.offsets is None else -1
        self._requests[lookups] = _KnownRequests(order, batch_size, requests)
        return requests

    def _order(self, lookups: Lookups) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Where each table's lookups begin, (T + 1,), and the features' positions, by table."""
        order = np.argsort(lookups.tables, kind="stable")
        of_table = np.searchsorted(lookups.tables[order], np.arange(len(self._first_rows)))
        return of_table.astype(np.uint64), lookups.positions[order].astype(np.int64)


@kernel
def _release_kernel(
    num_claims: NDArray[np.int16], flags: NDArray[np.uint8], held: NDArray[np.int32]
) -> int:
    num_free = 0
    for slot in held:
        num_claims[slot] -= np.int16(1)
        if num_claims[slot] == 0 and not flags[slot] & PINNED:
            num_free += 1
    return num_free
