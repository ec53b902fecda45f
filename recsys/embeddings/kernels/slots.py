"""Which slot holds which row: claiming the rows of a mini-batch, and giving up others for them.

    slot_of_row   slot of a row; NOWHERE; or AWAITED + slot: the row's own slot, still empty
    row_of_slot   row of a slot; EMPTY
    num_claims    how many tickets need the row that a slot holds
    num_uses      how often tickets have asked for it, halved whenever a slot is looked for
    flags         PINNED: the slot is its row's for good; DIRTY: the cold store has an older value;
                  POPULAR: pinned by its uses, until they are looked at again

A row number here counts over all tables of the row space. A claim has three passes: `claim_rows`
looks up every value, counts itself into the slots it finds and lists the rows that are nowhere;
`place_rows` finds a slot for each of these; `resolve` replaces what stood in for slots not yet
known. Between the first and the second the claim can be taken back, and nothing has happened.

Letters: T tables, R rows, S slots, N values, L lookups, M rows missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import prange

from recsys.embeddings.kernels.prefetch import prefetch
from recsys.embeddings.kernels.turns import next_turn
from recsys.jit import kernel, num_parts, parallel_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "AWAITED",
    "DIRTY",
    "EMPTY",
    "MARKED",
    "MIN_POPULAR_USES",
    "NOWHERE",
    "PINNED",
    "POPULAR",
    "Claim",
    "Requests",
    "SlotArrays",
    "claim_rows",
    "mark_dirty",
    "place_rows",
    "release_slots",
    "resolve",
    "take_back",
]

NOWHERE = EMPTY = -1
AWAITED = 1 << 30
PINNED, DIRTY = 1, 2
_SEEN = 4  # by the claim being made
POPULAR = 8
MARKED = 16  # for the length of a question
MIN_POPULAR_USES = 2  # a row that came for one mini-batch has one

_FIRST_MISSING = -2  # in slot_of_row, for the length of a claim: the first of the rows it misses
_MOST_USES = 255
_AHEAD = np.uint64(16)


class SlotArrays(NamedTuple):
    """Slots and what they hold."""

    slot_of_row: NDArray[np.int32]
    row_of_slot: NDArray[np.int32]
    num_claims: NDArray[np.uint16]
    num_uses: NDArray[np.uint8]
    flags: NDArray[np.uint8]


class Requests(NamedTuple):
    """Runs of values and the tables they are looked up in, sorted by table."""

    of_table: NDArray[np.uint64]  # (T + 1,) where each table's runs begin
    begins: NDArray[np.uint64]  # (L,) into the values
    ends: NDArray[np.uint64]  # (L,)
    first_rows: NDArray[np.uint64]  # (T + 1,) where each table's rows begin among all

    @classmethod
    def sort(
        cls,
        tables: Sequence[int],
        begins: NDArray[Any],
        ends: NDArray[Any],
        first_rows: NDArray[np.uint64],
    ) -> Requests:
        """Runs in any order.

        Args:
            tables: Of each run.
            begins: Of each run.
            ends: Of each run.
            first_rows: As above.
        """
        order = np.argsort(tables, kind="stable")
        in_order = np.asarray(tables, np.int64)[order]
        of_table = np.searchsorted(in_order, np.arange(len(first_rows)))
        return cls(
            of_table.astype(np.uint64),
            begins[order].astype(np.uint64),
            ends[order].astype(np.uint64),
            first_rows,
        )


class Claim(NamedTuple):
    """What `claim_rows` found; table t's part of each array begins at `starts[t]`."""

    starts: NDArray[np.uint64]  # (T + 1,)
    held: NDArray[np.int32]  # slots found, each once
    num_held: NDArray[np.int64]  # (T,)
    num_woken: NDArray[np.int64]  # (T,) of the slots found: neither claimed before, nor pinned
    num_hits: NDArray[np.int64]  # (T,) values whose row was in its slot
    awaited: NDArray[np.int32]  # those of them that are still empty
    num_awaited: NDArray[np.int64]  # (T,)
    missing: NDArray[np.int32]  # rows that are nowhere, each once
    num_missing: NDArray[np.int64]  # (T,)


def claim_rows(
    slots: SlotArrays, requests: Requests, values: NDArray[Any]
) -> tuple[NDArray[np.int32], Claim, int]:
    """Count a new ticket into the slots of its rows, as far as they have some.

    Args:
        slots: Changed in place.
        requests: Which values are rows of which table.
        values: Rows of tables, (N,) int32 or int64.

    Returns:
        The slot of each value, (N,), or what stands for it; what was found; and the position of the
        first value that is no row, or -1, in which case the claim must be taken back.
    """
    lengths = np.concatenate([np.zeros(1, np.uint64), np.cumsum(requests.ends - requests.begins)])
    starts = lengths[requests.of_table.astype(np.int64)].astype(np.uint64)
    num_values, num_tables = int(lengths[-1]), len(starts) - 1
    found = Claim(
        starts,
        np.empty(num_values, np.int32),
        np.zeros(num_tables, np.int64),
        np.zeros(num_tables, np.int64),
        np.zeros(num_tables, np.int64),
        np.empty(num_values, np.int32),
        np.zeros(num_tables, np.int64),
        np.empty(num_values, np.int32),
        np.zeros(num_tables, np.int64),
    )
    slot_of_value = np.zeros(len(values), np.int32)
    bad_T = np.full(num_tables, -1)
    _claim_kernel(
        slots, requests, values, slot_of_value, found, bad_T, num_parts(), np.zeros(1, np.int64)
    )
    bad = bad_T[bad_T >= 0]
    return slot_of_value, found, int(bad.min()) if len(bad) else -1


def place_rows(
    slots: SlotArrays, claim: Claim, hand: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], int]:
    """Find a slot for every missing row; there must be enough that are neither claimed nor pinned.

    Args:
        slots: Changed in place.
        claim: Its missing rows.
        hand: The slot to look at first.

    Returns:
        A slot for each place of `claim.missing`; the slots given up whose rows must be written
        back, and those rows; where to look first next time.
    """
    slot_of_missing = np.empty(len(claim.missing), np.int32)
    num_missing = int(claim.num_missing.sum())
    dirty_slots, dirty_rows = np.empty(num_missing, np.int32), np.empty(num_missing, np.int32)
    num_dirty, hand = _place_kernel(slots, claim, slot_of_missing, dirty_slots, dirty_rows, hand)
    return slot_of_missing, dirty_slots[:num_dirty], dirty_rows[:num_dirty], hand


def resolve(
    slots: SlotArrays,
    requests: Requests,
    claim: Claim,
    slot_of_value: NDArray[np.int32],
    slot_of_missing: NDArray[np.int32],
) -> None:
    """End a claim: put slots for what stood in for them, and forget what was marked.

    Args:
        slots: Changed in place.
        requests: As they were claimed.
        claim: What was found.
        slot_of_value: Changed in place.
        slot_of_missing: As from `place_rows`.
    """
    _resolve_kernel(
        slots.flags,
        requests,
        slot_of_value,
        slot_of_missing,
        claim,
        num_parts(),
    )


def take_back(slots: SlotArrays, claim: Claim) -> None:
    """Undo `claim_rows`."""
    _take_back_kernel(slots, claim)


def release_slots(slots: SlotArrays, held: NDArray[np.int32]) -> int:
    """Count a ticket out of its slots; how many are now neither claimed nor pinned."""
    return int(_release_kernel(slots.num_claims, slots.flags, held))


def mark_dirty(slots: SlotArrays, held: NDArray[np.int32]) -> None:
    """Note that rows were moved since they were fetched."""
    slots.flags[held] |= DIRTY


@parallel_kernel
def _claim_kernel(
    slots: SlotArrays,
    requests: Requests,
    values: NDArray[Any],
    slot_of_value: NDArray[np.int32],
    claim: Claim,
    bad_T: NDArray[np.int64],
    num_parts: int,
    turns: NDArray[np.int64],
) -> None:
    """A part is a thread, which takes tables until none are left: rows have one owner."""
    slot_of_row, num_claims, num_uses = slots.slot_of_row, slots.num_claims, slots.num_uses
    flags, first_rows = slots.flags, requests.first_rows
    # By names of their own: what is written to a tuple's arrays inside of prange, numba drops.
    held, awaited, missing = claim.held, claim.awaited, claim.missing
    num_held, num_woken, num_hits = claim.num_held, claim.num_woken, claim.num_hits
    num_awaited, num_missing = claim.num_awaited, claim.num_missing
    num_tables = len(first_rows) - 1
    for _ in prange(num_parts):
        while True:
            table = np.uint64(next_turn(turns))
            if table >= num_tables:
                break
            first_row = first_rows[table]
            size = first_rows[table + np.uint64(1)] - first_row
            start = claim.starts[table]
            of_held = of_awaited = of_missing = start
            woken = hits = 0
            for run in range(requests.of_table[table], requests.of_table[table + np.uint64(1)]):
                begin, end = requests.begins[run], requests.ends[run]
                for place in range(begin, end):
                    if place + _AHEAD < end:
                        prefetch(slot_of_row, first_row + np.uint64(values[place + _AHEAD]))
                    row = np.uint64(values[place])
                    if row >= size:  # a negative one is among the largest
                        if bad_T[table] < 0 or np.int64(place) < bad_T[table]:
                            bad_T[table] = np.int64(place)
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
                            num_claims[at] += np.uint16(1)
                            if num_uses[at] < _MOST_USES:
                                num_uses[at] += np.uint8(1)
                            held[of_held] = slot
                            of_held += np.uint64(1)
                    slot_of_value[place] = slot
            num_held[table] = np.int64(of_held - start)
            num_woken[table] = woken
            num_hits[table] = hits
            num_awaited[table] = np.int64(of_awaited - start)
            num_missing[table] = np.int64(of_missing - start)


@kernel
def _place_kernel(
    slots: SlotArrays,
    claim: Claim,
    slot_of_missing: NDArray[np.int32],
    dirty_slots: NDArray[np.int32],
    dirty_rows: NDArray[np.int32],
    hand: int,
) -> tuple[int, int]:
    slot_of_row, row_of_slot, flags = slots.slot_of_row, slots.row_of_slot, slots.flags
    num_claims, num_uses = slots.num_claims, slots.num_uses
    num_slots, num_dirty = len(row_of_slot), 0
    for table in range(len(claim.num_missing)):
        first = np.int64(claim.starts[table])
        for place in range(first, first + claim.num_missing[table]):
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
                        dirty_slots[num_dirty] = slot
                        dirty_rows[num_dirty] = old
                        num_dirty += 1
                    break
                num_uses[slot] >>= np.uint8(1)
            row = claim.missing[place]
            slot_of_row[row] = slot
            row_of_slot[slot] = row
            num_claims[slot] = 1
            num_uses[slot] = 1
            flags[slot] = 0
            slot_of_missing[place] = slot
    return num_dirty, hand


@parallel_kernel
def _resolve_kernel(
    flags: NDArray[np.uint8],
    requests: Requests,
    slot_of_value: NDArray[np.int32],
    slot_of_missing: NDArray[np.int32],
    claim: Claim,
    num_parts: int,
) -> None:
    """A part is a share of the tables, then of the runs."""
    num_tables, num_runs = len(claim.num_held), len(requests.begins)
    for part in prange(num_parts):
        for table in range(part, num_tables, num_parts):
            first = np.int64(claim.starts[table])
            for place in range(first, first + claim.num_held[table]):
                flags[claim.held[place]] &= np.uint8(255 - _SEEN)
        if len(slot_of_missing):
            for run in range(part, num_runs, num_parts):
                for place in range(requests.begins[run], requests.ends[run]):
                    slot = slot_of_value[place]
                    if slot < 0:
                        slot_of_value[place] = slot_of_missing[_FIRST_MISSING - slot]


@kernel
def _take_back_kernel(
    slots: SlotArrays,
    claim: Claim,
) -> None:
    slot_of_row, num_claims = slots.slot_of_row, slots.num_claims
    num_uses, flags = slots.num_uses, slots.flags
    for table in range(len(claim.num_held)):
        first = np.int64(claim.starts[table])
        for place in range(first, first + claim.num_held[table]):
            slot = claim.held[place]
            num_claims[slot] -= np.uint16(1)
            num_uses[slot] -= np.uint8(num_uses[slot] > 0)
            flags[slot] &= np.uint8(255 - _SEEN)
        for place in range(first, first + claim.num_awaited[table]):
            slot = claim.awaited[place]
            slot_of_row[slots.row_of_slot[slot]] = slot + AWAITED
        for place in range(first, first + claim.num_missing[table]):
            slot_of_row[claim.missing[place]] = NOWHERE


@kernel
def _release_kernel(
    num_claims: NDArray[np.uint16], flags: NDArray[np.uint8], held: NDArray[np.int32]
) -> int:
    num_free = 0
    for slot in held:
        num_claims[slot] -= np.uint16(1)
        if num_claims[slot] == 0 and not flags[slot] & PINNED:
            num_free += 1
    return num_free
