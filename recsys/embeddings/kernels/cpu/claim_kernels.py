"""Claims slots in the CPU's memory, in three passes.

The first pass looks up every value, counts the claim into the slots it finds, and lists the missing
rows. The second finds a slot for each missing row. The third writes these slots where the first
pass left stand-ins. The first pass can be taken back; nothing has changed then.

Letters: T tables, S slots, N values, L lookups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import prange

from recsys._support.jit import kernel, kernel_part, parallel_kernel
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import prefetch
from recsys.embeddings.kernels.cpu.intrinsics.turns import next_turn
from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED, DIRTY, EMPTY, NOWHERE, PINNED, SEEN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.kernels.cpu.slot_arrays import Requests, SlotArrays

__all__ = ["ClaimScratch", "claim_kernel", "take_back_kernel"]

_FIRST_MISSING = -2  # in slot_of_row while a claim is made: the first of its missing rows
_MOST_USES = 255
_AHEAD = np.uint64(16)


# Counts of each table: slots found; those among them that were neither claimed nor pinned; values
# whose row was in its slot; slots found that are still empty; rows in no slot; and the first value
# that is no row, or -1.
_FOUND, _NEWLY_CLAIMED, _HITS, _AWAITED, _MISSING, _BAD, _NUM_COUNTS = range(7)
# Lists of the first pass: slots found, those among them that are empty, rows in no slot, and the
# slots that these get. Table t's part begins at `starts[t]`.
_FOUND_SLOTS, _AWAITED_SLOTS, _MISSING_ROWS, _PLACED_SLOTS = range(4)
# Lists of the claim: slots held, rows to fetch and to write back, and the slots of both.
_HELD, _FETCHED_ROWS, _FETCHED_SLOTS, _WRITTEN_ROWS, _WRITTEN_SLOTS, _NUM_LISTS = range(4, 10)


class ClaimScratch(NamedTuple):
    """Memory that claims work in; each claim overwrites it."""

    starts: NDArray[np.int64]  # (T + 1,) number of values before those of each table
    counts: NDArray[np.int64]  # (_NUM_COUNTS, T)
    lists: NDArray[np.int32]  # (_NUM_LISTS, N)

    @classmethod
    def for_values(cls, num_values: int, num_tables: int) -> ClaimScratch:
        """Memory for claims of at most N values."""
        return cls(
            np.zeros(num_tables + 1, np.int64),
            np.empty((_NUM_COUNTS, num_tables), np.int64),
            np.empty((_NUM_LISTS, num_values), np.int32),
        )

    def held(self, count: int) -> NDArray[np.int32]:
        """Slots held, copied."""
        return self.lists[_HELD, :count].copy()

    def fetched(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Rows to fetch and the slot of each, copied."""
        return self.lists[_FETCHED_ROWS, :count].copy(), self.lists[_FETCHED_SLOTS, :count].copy()

    def written(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Rows to write back and the slot of each, copied."""
        return self.lists[_WRITTEN_ROWS, :count].copy(), self.lists[_WRITTEN_SLOTS, :count].copy()


@parallel_kernel
def claim_kernel(
    slots: SlotArrays,
    requests: Requests,
    values: NDArray[Any],
    slot_of_value: NDArray[np.int32],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    lists: NDArray[np.int32],
    num_idle: int,
    hand: int,
    num_parts: int,
    turns: NDArray[np.int64],
) -> tuple[int, int, int, int, int, int, int, int]:
    """A part is a thread. It takes tables until none are left, so each row has one owner.

    Returns:
        bad, num_found, num_newly_claimed, num_hits, num_awaited, num_missing: The first value that
            is no row, or -1; and the sums of the other counts over all tables.
        num_written: Rows to write back.
        hand: Where the hand is.

    If a value is no row, or more slots are needed than are idle, only the first pass was made.
    """
    slot_of_row, num_claims = slots.slot_of_row, slots.num_claims
    num_uses, flags = slots.num_uses, slots.flags
    of_table, begins, ends = requests.of_table, requests.begins, requests.ends
    first_rows, num_tables = requests.first_rows, len(requests.first_rows) - 1
    # Under names of their own: numba drops writes to a tuple's arrays inside of prange.
    found, awaited = lists[_FOUND_SLOTS], lists[_AWAITED_SLOTS]
    missing, placed = lists[_MISSING_ROWS], lists[_PLACED_SLOTS]
    for number in range(num_tables):
        starts[number + 1] = starts[number]
        for run in range(of_table[number], of_table[number + 1]):
            starts[number + 1] += np.int64(ends[run] - begins[run])
    for _ in prange(num_parts):
        while True:
            table = np.uint64(next_turn(turns))
            if table >= num_tables:
                break
            first_row = first_rows[table]
            size = first_rows[table + np.uint64(1)] - first_row
            start = np.uint64(starts[table])
            of_found = of_awaited = of_missing = start
            newly_claimed = hits = 0
            bad = np.int64(-1)
            for run in range(of_table[table], of_table[table + np.uint64(1)]):
                begin, end = begins[run], ends[run]
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
                        if not flags[at] & SEEN:
                            flags[at] |= SEEN
                            newly_claimed += num_claims[at] == 0 and not flags[at] & PINNED
                            num_claims[at] += np.int16(1)
                            if num_uses[at] < _MOST_USES:
                                num_uses[at] += np.uint8(1)
                            found[of_found] = slot
                            of_found += np.uint64(1)
                    slot_of_value[place] = slot
            for place in range(start, of_found):
                flags[found[place]] &= np.uint8(255 - SEEN)
            counts[_FOUND, table] = np.int64(of_found - start)
            counts[_NEWLY_CLAIMED, table] = newly_claimed
            counts[_HITS, table] = hits
            counts[_AWAITED, table] = np.int64(of_awaited - start)
            counts[_MISSING, table] = np.int64(of_missing - start)
            counts[_BAD, table] = bad
    num_found = num_newly_claimed = num_hits = num_awaited = num_missing = num_written = 0
    first_bad = -1
    for number in range(num_tables):
        num_found += counts[_FOUND, number]
        num_newly_claimed += counts[_NEWLY_CLAIMED, number]
        num_hits += counts[_HITS, number]
        num_awaited += counts[_AWAITED, number]
        num_missing += counts[_MISSING, number]
        if counts[_BAD, number] >= 0 and (first_bad < 0 or counts[_BAD, number] < first_bad):
            first_bad = counts[_BAD, number]
    if first_bad < 0 and num_missing + num_newly_claimed <= num_idle:
        num_written, hand = _place(slots, starts, counts, lists, hand)
        if num_missing:
            for part in prange(num_parts):
                for run in range(part, len(begins), num_parts):
                    for place in range(begins[run], ends[run]):
                        slot = slot_of_value[place]
                        if slot < 0:
                            slot_of_value[place] = placed[_FIRST_MISSING - slot]
    return (
        first_bad,
        num_found,
        num_newly_claimed,
        num_hits,
        num_awaited,
        num_missing,
        num_written,
        hand,
    )


@kernel_part
def _place(
    slots: SlotArrays,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    lists: NDArray[np.int32],
    hand: int,
) -> tuple[int, int]:
    """The second pass; lists the slots held, and the rows to copy."""
    slot_of_row, row_of_slot, flags = slots.slot_of_row, slots.row_of_slot, slots.flags
    num_claims, num_uses, num_slots = slots.num_claims, slots.num_uses, len(slots.row_of_slot)
    held, fetched_rows, fetched_slots = (
        lists[_HELD],
        lists[_FETCHED_ROWS],
        lists[_FETCHED_SLOTS],
    )
    of_held = of_fetched = num_written = 0
    for table in range(len(starts) - 1):
        first = starts[table]
        for place in range(first, first + counts[_FOUND, table]):
            held[of_held] = lists[_FOUND_SLOTS, place]
            of_held += 1
        for place in range(first, first + counts[_AWAITED, table]):
            slot = lists[_AWAITED_SLOTS, place]
            fetched_rows[of_fetched], fetched_slots[of_fetched] = row_of_slot[slot], slot
            of_fetched += 1
    for table in range(len(starts) - 1):
        first = starts[table]
        for place in range(first, first + counts[_MISSING, table]):
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
                        lists[_WRITTEN_ROWS, num_written] = old
                        lists[_WRITTEN_SLOTS, num_written] = slot
                        num_written += 1
                    break
                num_uses[slot] >>= np.uint8(1)
            row = lists[_MISSING_ROWS, place]
            slot_of_row[row] = slot
            row_of_slot[slot] = row
            num_claims[slot] = 1
            num_uses[slot] = 1
            flags[slot] = 0
            lists[_PLACED_SLOTS, place] = held[of_held] = slot
            fetched_rows[of_fetched], fetched_slots[of_fetched] = row, slot
            of_held += 1
            of_fetched += 1
    return num_written, hand


@kernel
def take_back_kernel(
    slots: SlotArrays,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    lists: NDArray[np.int32],
) -> None:
    """Undo the first pass."""
    slot_of_row, num_claims, num_uses = slots.slot_of_row, slots.num_claims, slots.num_uses
    for table in range(len(starts) - 1):
        first = starts[table]
        for place in range(first, first + counts[_FOUND, table]):
            slot = lists[_FOUND_SLOTS, place]
            num_claims[slot] -= np.int16(1)
            num_uses[slot] -= np.uint8(num_uses[slot] > 0)
        for place in range(first, first + counts[_AWAITED, table]):
            slot = lists[_AWAITED_SLOTS, place]
            slot_of_row[slots.row_of_slot[slot]] = slot + AWAITED
        for place in range(first, first + counts[_MISSING, table]):
            slot_of_row[lists[_MISSING_ROWS, place]] = NOWHERE
