"""Claims slots for the rows of a mini-batch, as many as there are.

The first pass goes through all ids: it marks the slots of their rows with the mini-batch's
generation, and lists the rows that have no slot. A thread takes tables until none is left, so each
row has one owner. The second pass gives these rows slots whose generation is over, until none is
left. Rows that get no slot stay where they are. So a claim cannot fail.

A clock's hand finds the slots. Of those that it may take, it halves the use count of each that it
passes, and takes the first whose count is zero. So frequently used rows stay; no list is sorted.

Letters: T tables, R rows, S slots, N ids, L lookups, M moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import prange

from recsys._support.jit import inlined_part, kernel, kernel_part, num_parts, parallel_kernel
from recsys.embeddings.kernels.cpu.intrinsics.addresses import array_at
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import prefetch
from recsys.embeddings.kernels.cpu.intrinsics.turns import next_turn
from recsys.embeddings.kernels.cpu.lookup import INT32, INT64
from recsys.embeddings.kernels.cpu.row_map import (
    ARRIVING,
    EMPTY,
    LEAVING,
    NOWHERE,
    WANTED,
    Marks,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.kernels.cpu.lookup import Input

__all__ = [
    "DONE",
    "FETCHED",
    "FETCHED_ROWS",
    "FETCHED_SLOTS",
    "HITS",
    "LOOKUPS",
    "NUM_COUNTS",
    "PLANNED",
    "POPULAR",
    "ROWS",
    "ROWS_HIT",
    "WITHOUT_SLOT",
    "WRITTEN",
    "WRITTEN_ROWS",
    "WRITTEN_SLOTS",
    "claim",
    "drop_all",
    "list_dirty",
    "note_arrivals",
]

# Counts of a claim: ids looked up, ids whose row had a slot or was on its way to one, and both with
# each row counted once, rows without a slot, rows to fetch, to write back, and whether it was done.
LOOKUPS, HITS, ROWS, ROWS_HIT, WITHOUT_SLOT, FETCHED, WRITTEN, DONE, NUM_COUNTS = range(9)
# Why a row does not leave its slot: a plan has it, or it was used more than others.
PLANNED, POPULAR = 1, 2
# Rows of the list of moves.
FETCHED_ROWS, FETCHED_SLOTS, WRITTEN_ROWS, WRITTEN_SLOTS = range(4)
_MIN_SHARED_IDS = 4096  # fewer are claimed before a second thread wakes
_AHEAD = np.uint64(16)
_MOST_USES = np.uint8(255)
_ONE = np.uint64(1)


def claim(
    marks: Marks,
    generation: int,
    needed: int,
    lookups_5L: NDArray[np.uint64],
    of_table: NDArray[np.int64],
    given: Input,
    moves_4M: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> None:
    """Claim slots; see the top of this module.

    Args:
        marks: Of the group.
        generation: Of the mini-batch.
        needed: The oldest generation that is not over.
        lookups_5L: As for `pool`, sorted by table.
        of_table: Where each table's lookups begin, (T + 1,).
        given: As for `pool`; nothing is kept.
        moves_4M: Receives the rows to move, for at most as many rows as ids or slots.
        counts: Receives the counts, (NUM_COUNTS,).
    """
    is_small = given.num_ids < _MIN_SHARED_IDS
    (_claim_kernel.alone if is_small else _claim_kernel)(
        *marks,
        generation,
        needed,
        lookups_5L,
        of_table,
        *given[:5],
        given.num_samples,
        given.num_ids // max(given.num_bags, 1),
        moves_4M,
        counts,
        1 if is_small else num_parts(),
    )


@inlined_part
def _mark(
    slot_of_row: NDArray[np.int32],
    generations: NDArray[np.int32],
    uses: NDArray[np.uint8],
    generation: np.int32,
    missing: NDArray[np.int32],
    of_missing: np.uint64,
    first_row: np.uint64,
    size: np.uint64,
    ids: NDArray[Any],
    begin: np.uint64,
    end: np.uint64,
) -> tuple[np.uint64, np.int64, np.int64]:
    """The first pass over a run of ids; returns the end of `missing`, the hits, and their rows."""
    hits = rows_hit = np.int64(0)
    for n in range(begin, end):
        if n + _AHEAD < end:
            prefetch(slot_of_row, first_row + np.uint64(ids[n + _AHEAD]))
        row = np.uint64(ids[n])  # a negative id becomes a very large number
        if row >= size:  # the lookup refuses it
            continue
        row += first_row
        slot = slot_of_row[row]
        if slot == WANTED:
            continue
        if slot in (NOWHERE, LEAVING):
            missing[of_missing] = np.int32(row) if slot == NOWHERE else ~np.int32(row)
            of_missing += _ONE
            slot_of_row[row] = WANTED
            continue
        hits += 1
        at = np.uint64(slot if slot >= 0 else ARRIVING - slot)
        if generations[at] < generation:
            generations[at] = generation
            rows_hit += 1
            if uses[at] < _MOST_USES:
                uses[at] += np.uint8(1)
    return of_missing, hits, rows_hit


@kernel_part
def _give(
    marks: Marks,
    generation: np.int32,
    needed: np.int32,
    missing: NDArray[np.int32],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    moves_4M: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> None:
    """The second pass; lists the rows to move.

    Args:
        marks: Of the group.
        generation: Of the mini-batch.
        needed: The oldest generation that is not over.
        missing: Rows without a slot; those that are leaving as `~row`.
        begins: Where each table's part of them begins.
        ends: Where it ends.
        moves_4M: The list.
        counts: Counts of the claim.
    """
    slot_of_row, row_of_slot = marks.slot_of_row, marks.row_of_slot
    generations, uses, is_dirty, pins = marks.generations, marks.uses, marks.is_dirty, marks.pins
    num_slots, slot = len(row_of_slot), marks.hand[0]
    num_fetched = num_written = 0
    num_passed = 0  # slots that may not be taken, one after the other
    for table in range(len(begins)):
        for position in range(begins[table], ends[table]):
            row, was_leaving = missing[position], missing[position] < 0
            row = ~row if was_leaving else row
            # With offsets that the lookup will refuse, rows may be more than ids.
            is_full = num_fetched >= moves_4M.shape[1]
            while num_passed < num_slots and not is_full:
                if generations[slot] >= needed or pins[slot]:
                    num_passed += 1
                else:
                    num_passed = 0
                    if row_of_slot[slot] == EMPTY or uses[slot] == 0:
                        break
                    uses[slot] >>= np.uint8(1)
                slot = slot + 1 if slot + 1 < num_slots else 0
            if num_passed >= num_slots or is_full:
                slot_of_row[row] = LEAVING if was_leaving else NOWHERE
                counts[WITHOUT_SLOT] += 1
                continue
            old = row_of_slot[slot]
            if old != EMPTY:
                slot_of_row[old] = NOWHERE
                if is_dirty[slot]:
                    slot_of_row[old] = LEAVING
                    moves_4M[WRITTEN_ROWS, num_written] = old
                    moves_4M[WRITTEN_SLOTS, num_written] = slot
                    num_written += 1
            slot_of_row[row], row_of_slot[slot] = ARRIVING - np.int32(slot), row
            generations[slot], uses[slot], is_dirty[slot] = generation, 1, 0
            moves_4M[FETCHED_ROWS, num_fetched] = row
            moves_4M[FETCHED_SLOTS, num_fetched] = slot
            num_fetched += 1
    marks.hand[0] = slot
    counts[FETCHED], counts[WRITTEN] = num_fetched, num_written


@parallel_kernel
def _claim_kernel(
    slot_of_row: NDArray[np.int32],
    row_of_slot: NDArray[np.int32],
    generations: NDArray[np.int32],
    uses: NDArray[np.uint8],
    is_dirty: NDArray[np.uint8],
    hand: NDArray[np.int64],
    pins: NDArray[np.uint8],
    generation: int,
    needed: int,
    lookups_5L: NDArray[np.uint64],
    of_table: NDArray[np.int64],
    ids_at: int,
    num_ids: int,
    is_wide: int,
    offsets_at: int,
    num_offsets: int,
    num_samples: int,
    length: int,
    moves_4M: NDArray[np.int32],
    counts: NDArray[np.int64],
    num_parts: int,
) -> None:
    """A part is a thread, which takes tables until none is left."""
    ids32, ids64 = array_at(ids_at, num_ids, INT32), array_at(ids_at, num_ids, INT64)
    offsets32 = array_at(offsets_at, num_offsets, INT32)
    offsets64 = array_at(offsets_at, num_offsets, INT64)
    num_tables, num_lookups = len(of_table) - 1, lookups_5L.shape[1]
    firsts, lasts = np.empty(num_lookups, np.int64), np.empty(num_lookups, np.int64)
    begins, ends = np.empty(num_tables, np.int64), np.empty(num_tables, np.int64)
    hits: Any = np.empty(num_tables, np.int64)
    rows_hit: Any = np.empty(num_tables, np.int64)
    total: Any = np.int64(0)
    for table in range(num_tables):
        begins[table] = total
        for lookup in range(of_table[table], of_table[table + 1]):
            bag = np.int64(lookups_5L[2, lookup]) * num_samples
            until = bag + num_samples
            first, last = bag * length, until * length
            if num_offsets:
                first = offsets64[bag] if is_wide else np.int64(offsets32[bag])
                last = np.int64(num_ids)
                if until < num_offsets:
                    last = offsets64[until] if is_wide else np.int64(offsets32[until])
            # The lookup refuses offsets that do not ascend.
            firsts[lookup] = min(max(first, 0), num_ids)  # type: ignore[assignment]
            lasts[lookup] = min(max(last, firsts[lookup]), num_ids)
            total += lasts[lookup] - firsts[lookup]
    missing = np.empty(total, np.int32)
    turns = np.empty(1, np.int64)
    turns[0] = 0
    for _ in prange(num_parts):
        while True:
            table = next_turn(turns)
            if table >= num_tables:
                break
            of_missing = np.uint64(begins[table])
            hits[table] = rows_hit[table] = 0
            for lookup in range(of_table[table], of_table[table + 1]):
                begin, end = np.uint64(firsts[lookup]), np.uint64(lasts[lookup])
                size, first_row = lookups_5L[1, lookup], lookups_5L[4, lookup]
                of_rows = slot_of_row, generations, uses, np.int32(generation), missing
                if is_wide:
                    of_missing, found, rows = _mark(
                        *of_rows, of_missing, first_row, size, ids64, begin, end
                    )
                else:
                    of_missing, found, rows = _mark(
                        *of_rows, of_missing, first_row, size, ids32, begin, end
                    )
                hits[table] += found
                rows_hit[table] += rows
            ends[table] = np.int64(of_missing)
    counts[LOOKUPS] = total
    for table in range(num_tables):
        counts[HITS] += hits[table]
        counts[ROWS_HIT] += rows_hit[table]
        counts[ROWS] += rows_hit[table] + ends[table] - begins[table]
    marks = Marks(slot_of_row, row_of_slot, generations, uses, is_dirty, hand, pins)
    _give(marks, np.int32(generation), np.int32(needed), missing, begins, ends, moves_4M, counts)


@kernel
def note_arrivals(
    slot_of_row: NDArray[np.int32], moves_4M: NDArray[np.int32], counts: NDArray[np.int64]
) -> None:
    """Note in the row map that moves are done; a second time it changes nothing."""
    for number in range(counts[FETCHED]):
        row, slot = moves_4M[FETCHED_ROWS, number], moves_4M[FETCHED_SLOTS, number]
        if slot_of_row[row] == ARRIVING - slot:
            slot_of_row[row] = slot
    for number in range(counts[WRITTEN]):
        row = moves_4M[WRITTEN_ROWS, number]
        if slot_of_row[row] == LEAVING:
            slot_of_row[row] = NOWHERE


def list_dirty(
    row_of_slot: NDArray[np.int32],
    is_dirty: NDArray[np.uint8],
    moves_4M: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> None:
    """List the rows that are newer than in the cold tier; they count as written from now on."""
    slots = np.flatnonzero(is_dirty)
    moves_4M[WRITTEN_ROWS, : len(slots)] = row_of_slot[slots]
    moves_4M[WRITTEN_SLOTS, : len(slots)] = slots
    counts[WRITTEN] = len(slots)
    is_dirty[slots] = 0  # last, because a signal may come before it


@kernel
def drop_all(
    slot_of_row: NDArray[np.int32],
    row_of_slot: NDArray[np.int32],
    generations: NDArray[np.int32],
    is_dirty: NDArray[np.uint8],
    pins: NDArray[np.uint8],
) -> None:
    """Empty all slots without writing them back; no row may be on its way."""
    for slot in range(len(row_of_slot)):
        if row_of_slot[slot] != EMPTY:
            slot_of_row[row_of_slot[slot]] = NOWHERE
            row_of_slot[slot], generations[slot], is_dirty[slot] = EMPTY, 0, 0
            pins[slot] = 0
