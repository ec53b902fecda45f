"""The map of the slots in the CPU's memory: which row is in which slot, and who needs it.

    slot_of_row   slot of a row; NOWHERE; or AWAITED + slot: the row's own slot, still empty
    row_of_slot   row of a slot; EMPTY
    num_claims    how many tickets need the row that a slot holds
    num_uses      how many tickets needed the row; the clock's hand halves it when passing
    flags         PINNED: the slot keeps its row; DIRTY: the cold store has an older value;
                  POPULAR: pinned for its uses, until the next choice of popular rows

Row numbers count over all tables of the row space. A claim makes three passes. The first looks up
every value, counts the claim into the slots it finds, and lists the missing rows. The second finds
a slot for each missing row. The third writes these slots where the first pass left stand-ins. A
claim can be taken back between the first and the second pass; nothing has changed then.

Letters: T tables, R rows, S slots, N values, L lookups, M rows missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import prange

from recsys._support.jit import kernel, num_parts, parallel_kernel
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import prefetch
from recsys.embeddings.kernels.cpu.intrinsics.turns import next_turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.rows.lookups import Bags, Lookups

__all__ = [
    "AWAITED",
    "DIRTY",
    "EMPTY",
    "MARKED",
    "NOWHERE",
    "PINNED",
    "POPULAR",
    "Moves",
    "NoSuchRow",
    "Requests",
    "Shortage",
    "SlotArrays",
    "SlotClaim",
    "SlotMap",
]

NOWHERE = EMPTY = -1
AWAITED = 1 << 30
PINNED, DIRTY = 1, 2
_SEEN = 4  # by the claim that is being made
POPULAR = 8
MARKED = 16  # only while `Slots.are_among` runs

_FIRST_MISSING = -2  # in slot_of_row while a claim is made: the first of its missing rows
_MOST_USES = 255
_MOST_KEPT = 64
_AHEAD = np.uint64(16)
_MIN_SHARED = 4096  # values; fewer are found before another thread wakes


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
        by_table: Values before those of each table, (T + 1,), and its hits, (T,); None on a device.
    """

    slot_of_value: Any
    held: Any
    moves: Moves
    num_lookups: int
    num_hits: int
    num_rows: int
    num_rows_hit: int
    by_table: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None


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


class _KnownRequests(NamedTuple):
    """The last requests of some lookups; those of one-hot bags depend on the batch size alone."""

    order: tuple[NDArray[np.uint64], NDArray[np.int64]]  # results of `SlotMap._order`
    batch_size: int  # -1 if bags are not one-hot
    requests: Requests


class _FirstPass(NamedTuple):
    """Where the first pass writes; table t's part of the lists begins at `starts[t]`."""

    starts: NDArray[np.uint64]  # (T + 1,)
    num_held: NDArray[np.int64]  # (T,)
    num_woken: NDArray[np.int64]  # (T,) of the slots found: neither claimed before, nor pinned
    num_hits: NDArray[np.int64]  # (T,) values whose row was in its slot
    num_awaited: NDArray[np.int64]  # (T,)
    num_missing: NDArray[np.int64]  # (T,)
    bad: NDArray[np.int64]  # (T,) the first value that is no row; -1 for none
    held: NDArray[np.int32]  # (N,) slots found, each once
    awaited: NDArray[np.int32]  # (N,) of the slots found: those that are still empty
    missing: NDArray[np.int32]  # (N,) rows that are in no slot, each once
    placed: NDArray[np.int32]  # (N,) by the second pass, the slot of each missing row

    @classmethod
    def empty(cls, num_tables: int, num_values: int) -> _FirstPass:
        """With room for mini-batches of at most N values."""
        counts, lists = np.empty((6, num_tables), np.int64), np.empty((4, num_values), np.int32)
        return cls(np.zeros(num_tables + 1, np.uint64), *counts, *lists)


class SlotMap:
    """Claims slots in the CPU's memory; `TorchSlotMap` does it on a device.

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
        self._found: _FirstPass | None = None

    def claim(self, lookups: Lookups, bags: Bags) -> SlotClaim:
        """Give every row of a mini-batch a slot, and count the claim into each of these slots.

        Args:
            lookups: Which features are looked up in which tables; each feature in at most one.
            bags: The input; its values are rows.

        Raises:
            NoSuchRow: a value is not a row of its table; nothing was claimed.
            Shortage: too few slots are free.
        """
        slots, requests, values = self.arrays, self.requests_of(lookups, bags), bags.values
        found, slot_of_value = self._room_for(len(values)), np.zeros(len(values), np.int32)
        is_small = len(values) < _MIN_SHARED
        first_pass = _claim_kernel.alone if is_small else _claim_kernel
        parts = 1 if is_small else num_parts()
        first_pass(slots, requests, values, slot_of_value, found, parts, np.zeros(1, np.int64))
        bad, num_held, num_woken, num_hits, num_awaited, num_missing = _totals_kernel(found)
        if bad >= 0:
            _take_back_kernel(slots, found)
            raise NoSuchRow(bad)
        num_lacking = num_missing + num_woken - self._num_idle
        if num_lacking > 0:
            needed = np.flatnonzero(slots.num_claims)
            _take_back_kernel(slots, found)
            raise Shortage(needed, num_missing, num_lacking)
        held = np.empty(num_held + num_missing, np.int32)
        fetched_rows, fetched_slots = np.empty((2, num_awaited + num_missing), np.int32)
        written_rows, written_slots = np.empty((2, num_missing), np.int32)
        num_written, self._hand = _place_kernel(
            slots, found, self._hand, held, fetched_rows, fetched_slots, written_rows, written_slots
        )
        if num_missing:
            resolve = _resolve_kernel.alone if is_small else _resolve_kernel
            resolve(requests, slot_of_value, found.placed, parts)
        self._num_idle -= num_woken + num_missing
        return SlotClaim(
            slot_of_value,
            held,
            Moves(
                fetched_rows, fetched_slots, written_rows[:num_written], written_slots[:num_written]
            ),
            num_lookups=int(found.starts[-1]),
            num_hits=num_hits,
            num_rows=len(held),
            num_rows_hit=num_held - num_awaited,
            by_table=(found.starts.copy(), found.num_hits.copy()),
        )

    def _room_for(self, num_values: int) -> _FirstPass:
        """Memory for the first pass; each claim overwrites that of the one before."""
        if self._found is None or len(self._found.held) < num_values:
            self._found = _FirstPass.empty(len(self._first_rows) - 1, num_values)
        return self._found

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


@parallel_kernel
def _claim_kernel(
    slots: SlotArrays,
    requests: Requests,
    values: NDArray[Any],
    slot_of_value: NDArray[np.int32],
    found: _FirstPass,
    num_parts: int,
    turns: NDArray[np.int64],
) -> None:
    """A part is a thread. It takes tables until none are left, so each row has one owner."""
    slot_of_row, num_claims, num_uses = slots.slot_of_row, slots.num_claims, slots.num_uses
    flags, first_rows = slots.flags, requests.first_rows
    # Under names of their own: numba drops writes to a tuple's arrays inside of prange.
    starts, bad_T = found.starts, found.bad
    held, awaited, missing = found.held, found.awaited, found.missing
    num_held, num_woken, num_hits = found.num_held, found.num_woken, found.num_hits
    num_awaited, num_missing = found.num_awaited, found.num_missing
    num_tables = len(first_rows) - 1
    for table in range(num_tables):
        starts[table + 1] = starts[table]
        for run in range(requests.of_table[table], requests.of_table[table + 1]):
            starts[table + 1] += requests.ends[run] - requests.begins[run]
    for _ in prange(num_parts):
        while True:
            table = np.uint64(next_turn(turns))
            if table >= num_tables:
                break
            first_row = first_rows[table]
            size = first_rows[table + np.uint64(1)] - first_row
            start = starts[table]
            of_held = of_awaited = of_missing = start
            woken = hits = 0
            bad = np.int64(-1)
            for run in range(requests.of_table[table], requests.of_table[table + np.uint64(1)]):
                begin, end = requests.begins[run], requests.ends[run]
                for place in range(begin, end):
                    if place + _AHEAD < end:
                        prefetch(slot_of_row, first_row + np.uint64(values[place + _AHEAD]))
                    row = np.uint64(values[place])
                    if row >= size:  # a negative id becomes a very large number
                        if bad < 0 or np.int64(place) < bad:
                            bad = np.int64(place)
                        continue
                    row += first_row
                    slot = slot_of_row[row]
                    if slot == NOWHERE:
                        missing[of_missing] = np.int32(row)
                        slot = np.int32(_FIRST_MISSING - np.int64(of_missing))
                        slot_of_row[row] = slot
                        of_missing += np.uint64(1)
                    elif slot >= 0:
                        hits += slot < AWAITED
                        if slot >= AWAITED:
                            slot -= AWAITED
                            slot_of_row[row] = slot
                            awaited[of_awaited] = slot
                            of_awaited += np.uint64(1)
                        at = np.uint64(slot)
                        if not flags[at] & _SEEN:
                            flags[at] |= _SEEN
                            woken += num_claims[at] == 0 and not flags[at] & PINNED
                            num_claims[at] += np.int16(1)
                            if num_uses[at] < _MOST_USES:
                                num_uses[at] += np.uint8(1)
                            held[of_held] = slot
                            of_held += np.uint64(1)
                    slot_of_value[place] = slot
            for place in range(start, of_held):
                flags[held[place]] &= np.uint8(255 - _SEEN)
            bad_T[table] = bad
            num_held[table] = np.int64(of_held - start)
            num_woken[table] = woken
            num_hits[table] = hits
            num_awaited[table] = np.int64(of_awaited - start)
            num_missing[table] = np.int64(of_missing - start)


@kernel
def _totals_kernel(found: _FirstPass) -> tuple[int, int, int, int, int, int]:
    """Of all tables: the first bad value, then held, woken, hits, awaited and missing."""
    bad = -1
    held = woken = hits = awaited = missing = 0
    for table in range(len(found.bad)):
        if found.bad[table] >= 0 and (bad < 0 or found.bad[table] < bad):
            bad = found.bad[table]
        held += found.num_held[table]
        woken += found.num_woken[table]
        hits += found.num_hits[table]
        awaited += found.num_awaited[table]
        missing += found.num_missing[table]
    return bad, held, woken, hits, awaited, missing


@kernel
def _place_kernel(
    slots: SlotArrays,
    found: _FirstPass,
    hand: int,
    held: NDArray[np.int32],
    fetched_rows: NDArray[np.int32],
    fetched_slots: NDArray[np.int32],
    written_rows: NDArray[np.int32],
    written_slots: NDArray[np.int32],
) -> tuple[int, int]:
    """Find a slot for each missing row; list the slots held, and the rows to copy."""
    slot_of_row, row_of_slot, flags = slots.slot_of_row, slots.row_of_slot, slots.flags
    num_claims, num_uses = slots.num_claims, slots.num_uses
    num_slots, num_written = len(row_of_slot), 0
    of_held = of_fetched = 0
    for table in range(len(found.num_held)):
        first = np.int64(found.starts[table])
        for place in range(first, first + found.num_held[table]):
            held[of_held] = found.held[place]
            of_held += 1
        for place in range(first, first + found.num_awaited[table]):
            fetched_slots[of_fetched] = found.awaited[place]
            fetched_rows[of_fetched] = row_of_slot[found.awaited[place]]
            of_fetched += 1
    for table in range(len(found.num_missing)):
        first = np.int64(found.starts[table])
        for place in range(first, first + found.num_missing[table]):
            while True:
                slot = hand
                hand += 1
                if hand == num_slots:
                    hand = 0
                if num_claims[slot] or flags[slot] & PINNED:
                    continue
                old = row_of_slot[slot]
                if old == EMPTY:
                    break
                if num_uses[slot] == 0:
                    slot_of_row[old] = NOWHERE
                    if flags[slot] & DIRTY:
                        written_slots[num_written] = slot
                        written_rows[num_written] = old
                        num_written += 1
                    break
                num_uses[slot] >>= np.uint8(1)
            row = found.missing[place]
            slot_of_row[row] = slot
            row_of_slot[slot] = row
            num_claims[slot] = 1
            num_uses[slot] = 1
            flags[slot] = 0
            found.placed[place] = slot
            held[of_held] = fetched_slots[of_fetched] = slot
            fetched_rows[of_fetched] = row
            of_held += 1
            of_fetched += 1
    return num_written, hand


@parallel_kernel
def _resolve_kernel(
    requests: Requests, slot_of_value: NDArray[np.int32], placed: NDArray[np.int32], num_parts: int
) -> None:
    """A part is a share of the runs."""
    num_runs = len(requests.begins)
    for part in prange(num_parts):
        for run in range(part, num_runs, num_parts):
            for place in range(requests.begins[run], requests.ends[run]):
                slot = slot_of_value[place]
                if slot < 0:
                    slot_of_value[place] = placed[_FIRST_MISSING - slot]


@kernel
def _take_back_kernel(slots: SlotArrays, found: _FirstPass) -> None:
    slot_of_row, num_claims, num_uses = slots.slot_of_row, slots.num_claims, slots.num_uses
    for table in range(len(found.num_held)):
        first = np.int64(found.starts[table])
        for place in range(first, first + found.num_held[table]):
            slot = found.held[place]
            num_claims[slot] -= np.int16(1)
            num_uses[slot] -= np.uint8(num_uses[slot] > 0)
        for place in range(first, first + found.num_awaited[table]):
            slot = found.awaited[place]
            slot_of_row[slots.row_of_slot[slot]] = slot + AWAITED
        for place in range(first, first + found.num_missing[table]):
            slot_of_row[found.missing[place]] = NOWHERE


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
