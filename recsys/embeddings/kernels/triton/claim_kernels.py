"""The kernels of a claim of slots on a CUDA device, in the order of their launches.

    mark      looks up every value. The first value of a row marks the row in the row map and lists
              it, so each row is listed once; the ticket is counted into the slots that are found
    count     counts the slots that may be taken, by the round in which the clock's hand takes them
    take      gives these slots to the rows without one, and lists the rows to copy
    resolve   removes the marks, and gives every value its slot

The arrays are those of `torch.slots`, and so is the choice of the slots that are taken: it depends
on the state of the slots and on the number of rows without one. Which of these rows gets which of
the slots may differ from run to run.

During a claim the row map holds -3 - x in place of x for the claim's rows. These marks are below
`NOWHERE`, and marking twice gives x again. So no array is needed to remember the rows seen. The
last launch always removes the marks. If there are too few slots, or a value is no row, it restores
the map, and nothing was claimed.

Programs of a launch run at the same time and never wait for each other. Launches run one after the
other, so a launch reads everything that earlier ones wrote. Where programs of one launch touch the
same number, a comment says why that is safe.

Letters: R rows, S slots, W slots looked at, N values, L lookups, F features, B samples, U places of
distinct rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys._support.cuda.triton_launches import launched
from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED, DIRTY, EMPTY, NOWHERE, PINNED

__all__ = [
    "NO_ROW",
    "NUM_BINS",
    "count_kernel",
    "mark_kernel",
    "release_kernel",
    "resolve_kernel",
    "take_kernel",
]

NO_ROW = -2  # in place of a slot, for a value that is looked up and is not a row of its table
NUM_BINS = 16  # of rounds; slots that may not be taken are in those from `_NUM_ROUNDS` on

# Places in `numbers`; the first are those of `claims.ClaimNumbers`.
_BAD, _IS_ENOUGH, _NUM_LOOKUPS, _NUM_HITS, _NUM_ROWS, _NUM_ROWS_HIT, _NUM_FETCHED = map(
    tl.constexpr, range(7)
)
_NUM_WRITTEN, _NUM_MISSING, _NUM_HELD, _NUM_AWAITED, _HAND = map(tl.constexpr, range(7, 12))

_NUM_ROUNDS = tl.constexpr(9)  # the number of bits of a use count is 0 to 8
_BINS = tl.constexpr(NUM_BINS)
_MARK = tl.constexpr(-3)
_NO_ROW = tl.constexpr(NO_ROW)
_NOWHERE, _EMPTY, _AWAITED = tl.constexpr(NOWHERE), tl.constexpr(EMPTY), tl.constexpr(AWAITED)
_PINNED, _DIRTY = tl.constexpr(PINNED), tl.constexpr(DIRTY)
_MOST_USES = tl.constexpr(255)


@triton.jit
def _unmarked(found):
    """What the row map holds outside of a claim; see the top of this module."""
    return tl.where(found < _NOWHERE, -found + _MARK, found)


@triton.jit
def _slot(known):
    """The slot of a row that has one, without the note that it awaits its fetch."""
    return tl.where(known >= _AWAITED, known - _AWAITED, known)


@triton.jit
def _lists(numbers, num_places):
    """The lists of U places after the numbers: those of `Transfer`, then `rows` and `held`.

    U is always a multiple of 16, which Triton may rely on: a launch compiles nothing anew for it.
    """
    size, first = num_places.to(tl.int64), numbers + 16
    return (
        first,
        first + size,
        first + 2 * size,
        first + 3 * size,
        first + 4 * size,
        first + 5 * size,
    )


@launched
@triton.jit(
    do_not_specialize=["num_values", "batch_size", "padding", "num_features", "num_lookups"],
    do_not_specialize_on_alignment=["values", "offsets"],
)
def mark_kernel(
    values,
    offsets,
    lookup_of_feature,
    first_rows,
    sizes,
    slot_of_row,
    num_claims,
    row_of_value,
    numbers,
    num_values,
    batch_size,
    padding,
    num_places,
    num_features,
    num_lookups,
    HAS_PADDING: tl.constexpr,
    NUM_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program looks up BLOCK values.

    Rows in no slot are listed from the first of the U places on, other rows from the last one back.
    """
    rows_U = _lists(numbers, num_places)[4]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_value = places < num_values
    ids = tl.load(values + places, is_value, 0).to(tl.int64)
    if offsets is None:
        features = places // batch_size
    else:
        # The last feature that begins at or before the value. Invalid offsets find some feature,
        # and so a row that exists; the lookup reports them.
        features = tl.zeros([BLOCK], tl.int32)
        for bit in tl.static_range(NUM_BITS):
            following = features + (1 << (NUM_BITS - 1 - bit))
            is_bound = following <= num_features
            bounds = tl.load(offsets + following.to(tl.int64) * batch_size, is_bound, 0)
            features = tl.where(is_bound & (bounds <= places), following, features)
    lookups = tl.load(lookup_of_feature + features, is_value, num_lookups)
    is_wanted = lookups < num_lookups
    if HAS_PADDING:
        is_wanted &= ids != padding
    is_row = is_wanted & (ids >= 0) & (ids < tl.load(sizes + lookups))
    is_bad = is_wanted & ~is_row
    rows = tl.where(is_bad, _NO_ROW, _NOWHERE)
    rows = tl.where(is_row, tl.load(first_rows + lookups) + ids, rows)
    tl.store(row_of_value + places, rows.to(tl.int32), is_value)

    # Another program may be marking the same row. With and without the mark, `known` is the same.
    found = tl.load(slot_of_row + rows, is_row, _NOWHERE, volatile=True)
    known = _unmarked(found)
    # All lanes write the same mark, and exactly one gets the unmarked number back: it owns the row.
    is_tried = is_row & (found >= _NOWHERE)
    before = tl.atomic_xchg(slot_of_row + rows, -known + _MARK, is_tried, sem="relaxed")
    is_first = is_tried & (before >= _NOWHERE)
    is_missing, is_held = is_first & (known < 0), is_first & (known >= 0)

    # Only the owner of a row counts into the row's slot.
    claims = num_claims + _slot(known)
    tl.store(claims, tl.load(claims, is_held, 0) + 1, is_held)

    # Adding to a counter gives every program places of its own.
    missing, held = is_missing.to(tl.int32), is_held.to(tl.int32)
    start = tl.atomic_add(numbers + _NUM_MISSING, tl.sum(missing, 0), sem="relaxed")
    tl.store(rows_U + start + tl.cumsum(missing, 0) - 1, rows.to(tl.int32), is_missing)
    start = tl.atomic_add(numbers + _NUM_HELD, tl.sum(held, 0), sem="relaxed")
    tl.store(rows_U + num_places - start - tl.cumsum(held, 0), rows.to(tl.int32), is_held)

    is_hit = is_row & (known >= 0) & (known < _AWAITED)
    tl.atomic_add(numbers + _NUM_LOOKUPS, tl.sum(is_row.to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(numbers + _NUM_HITS, tl.sum(is_hit.to(tl.int32), 0), sem="relaxed")
    is_awaited = is_first & (known >= _AWAITED)
    tl.atomic_add(numbers + _NUM_AWAITED, tl.sum(is_awaited.to(tl.int32), 0), sem="relaxed")
    bad = tl.max(tl.where(is_bad, num_values - places, 0), 0)
    tl.atomic_max(numbers + _BAD, bad, mask=bad > 0, sem="relaxed")


@triton.jit
def _look_at(
    row_of_slot, num_claims, num_uses, flags, hand, places_W, first_slot, num_slots, num_looked_at
):
    """The slots at these places from the hand on; their rows, flags, uses and rounds.

    The round is the one in which the hand takes the slot: the number of bits of the uses, and 0 for
    an empty slot. It is `_NUM_ROUNDS` for a slot that may not be taken.
    """
    is_place = places_W < num_looked_at
    slots = places_W + tl.maximum(tl.load(hand).to(tl.int32), first_slot)
    slots = tl.where(slots >= num_slots, slots - num_slots + first_slot, slots)
    uses = tl.load(num_uses + slots, is_place, 0).to(tl.int32)
    rounds = tl.zeros_like(uses)
    for bit in tl.static_range(_NUM_ROUNDS - 1):
        rounds += ((uses >> bit) > 0).to(tl.int32)
    rows = tl.load(row_of_slot + slots, is_place, _EMPTY)
    of_slots = tl.load(flags + slots, is_place, 0)
    is_free = is_place & (tl.load(num_claims + slots, is_place, 0) == 0)
    is_free &= (of_slots & _PINNED) == 0
    rounds = tl.where(is_free, tl.where(rows == _EMPTY, 0, rounds), _NUM_ROUNDS)
    return slots, rows, of_slots, uses, rounds


@launched
@triton.jit(do_not_specialize=["first_slot", "num_slots", "num_looked_at", "num_chunks"])
def count_kernel(
    row_of_slot,
    num_claims,
    num_uses,
    flags,
    hand,
    counts,
    first_slot,
    num_slots,
    num_looked_at,
    num_chunks,
    BLOCK: tl.constexpr,
):
    """A program counts the slots of each round in `num_chunks` blocks of slots."""
    program, bins = tl.program_id(0), tl.arange(0, _BINS)
    found = tl.zeros([_BINS], tl.int32)
    chunk = program * num_chunks
    while chunk < (program + 1) * num_chunks:
        places_W = chunk * BLOCK + tl.arange(0, BLOCK)
        chunk += 1
        _, _, _, _, rounds = _look_at(
            row_of_slot,
            num_claims,
            num_uses,
            flags,
            hand,
            places_W,
            first_slot,
            num_slots,
            num_looked_at,
        )
        found += tl.sum((rounds[:, None] == bins[None, :]).to(tl.int32), 0)
    tl.store(counts + program * _BINS + bins, found)


@launched
@triton.jit(do_not_specialize=["first_slot", "num_slots", "num_looked_at", "num_chunks"])
def take_kernel(
    slot_of_row,
    row_of_slot,
    num_claims,
    num_uses,
    flags,
    hand,
    counts,
    numbers,
    num_places,
    first_slot,
    num_slots,
    num_looked_at,
    num_chunks,
    REFUSES: tl.constexpr,
    MOST_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes slots among those that it counted.

    Every program adds up the counts of all, so that it knows the round of the last slot taken, and
    how many slots the programs before it take.

    No two programs write to the same slot, nor to the same row: a row that loses its slot has one,
    and a row that gets a slot has none. The next launch moves the hand, which all read here.
    """
    lists = _lists(numbers, num_places)
    written_rows_U, written_slots_U, fetched_rows_U, fetched_slots_U, rows_U, held_U = lists
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, _BINS)
    others = tl.arange(0, MOST_PROGRAMS)[:, None]
    found = tl.load(counts + others * _BINS + bins[None, :], others < num_programs, 0)
    in_all = tl.where(bins < _NUM_ROUNDS, tl.sum(found, 0), 0)
    before = tl.sum(tl.where(others < program, found, 0), 0)
    num_missing = tl.load(numbers + _NUM_MISSING)
    has_enough = num_missing <= tl.sum(in_all, 0)
    if REFUSES:
        has_enough &= tl.load(numbers + _BAD) == 0
    if program == 0:
        tl.store(numbers + _IS_ENOUGH, has_enough.to(tl.int32))
    if has_enough & (num_missing > 0):
        # All slots of earlier rounds are taken, and of the last round the first `num_last`.
        last = tl.sum((tl.cumsum(in_all, 0) < num_missing).to(tl.int32), 0)
        num_last = num_missing - tl.sum(tl.where(bins < last, in_all, 0), 0)
        num_earlier = tl.sum(tl.where(bins < last, before, 0), 0)
        num_same = tl.sum(tl.where(bins == last, before, 0), 0)
        chunk = program * num_chunks
        while chunk < (program + 1) * num_chunks:
            places_W = chunk * BLOCK + tl.arange(0, BLOCK)
            chunk += 1
            slots, old, of_slots, uses, rounds = _look_at(
                row_of_slot,
                num_claims,
                num_uses,
                flags,
                hand,
                places_W,
                first_slot,
                num_slots,
                num_looked_at,
            )
            earlier, same = (rounds < last).to(tl.int32), (rounds == last).to(tl.int32)
            earlier_before = num_earlier + tl.cumsum(earlier, 0) - earlier
            same_before = num_same + tl.cumsum(same, 0) - same
            num_earlier += tl.sum(earlier, 0)
            num_same += tl.sum(same, 0)
            is_passed = same_before < num_last  # by the hand in its last round
            is_taken = (earlier > 0) | ((same > 0) & is_passed)
            is_last = (same > 0) & (same_before == num_last - 1)
            tl.store(numbers + _HAND + tl.zeros_like(slots), (slots + 1) % num_slots, is_last)

            places_U = earlier_before + tl.minimum(same_before, num_last)
            rows = tl.load(rows_U + places_U, is_taken, 0).to(tl.int64)
            is_full = is_taken & (old != _EMPTY)
            is_written = is_full & ((of_slots & _DIRTY) != 0)
            num_written = tl.sum(is_written.to(tl.int32), 0)
            tl.atomic_add(numbers + _NUM_WRITTEN, num_written, sem="relaxed")
            # No thread stores before all have looked: which slots are taken follows from all uses.
            tl.store(slot_of_row + old.to(tl.int64), _NOWHERE, is_full)
            tl.store(slot_of_row + rows, slots, is_taken)
            tl.store(row_of_slot + slots, rows.to(tl.int32), is_taken)
            tl.store(num_claims + slots, 1, is_taken)
            tl.store(flags + slots, 0, is_taken)
            uses = tl.where(is_taken, 1, uses >> (last + is_passed.to(tl.int32)))
            tl.store(num_uses + slots, uses.to(tl.uint8), rounds < _NUM_ROUNDS)

            tl.store(held_U + places_U, slots, is_taken)
            tl.store(fetched_rows_U + places_U, rows.to(tl.int32), is_taken)
            tl.store(fetched_slots_U + places_U, slots, is_taken)
            tl.store(written_rows_U + places_U, tl.where(is_written, old, _NOWHERE), is_taken)
            tl.store(written_slots_U + places_U, tl.where(is_written, slots, _NOWHERE), is_taken)


@launched
@triton.jit(do_not_specialize=["num_values"])
def resolve_kernel(
    slot_of_row,
    num_claims,
    num_uses,
    hand,
    numbers,
    slot_of_value,
    num_values,
    num_places,
    BLOCK: tl.constexpr,
):
    """A program removes the marks of BLOCK distinct rows, and finds the slots of BLOCK values."""
    lists = _lists(numbers, num_places)
    written_rows_U, written_slots_U, fetched_rows_U, fetched_slots_U, rows_U, held_U = lists
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    has_enough = tl.load(numbers + _IS_ENOUGH) != 0
    num_missing, num_held = tl.load(numbers + _NUM_MISSING), tl.load(numbers + _NUM_HELD)
    num_awaited = tl.load(numbers + _NUM_AWAITED)
    if tl.program_id(0) == 0:
        tl.store(numbers + _NUM_ROWS, num_missing + num_held)
        tl.store(numbers + _NUM_ROWS_HIT, num_held - num_awaited)
        tl.store(numbers + _NUM_FETCHED, num_missing + num_awaited)
    is_place, is_missing = places < num_places, places < num_missing
    is_held = is_place & (places >= num_places - num_held)
    rows = tl.load(rows_U + places, is_missing | is_held, _NOWHERE)
    tl.store(rows_U + places, rows, is_place)
    rows = rows.to(tl.int64)

    # A row is listed once, so no other program removes its mark.
    known = _unmarked(tl.load(slot_of_row + rows, is_held, _NOWHERE))
    slots = tl.where(is_held, _slot(known), _NOWHERE)
    if has_enough:
        tl.store(slot_of_row + rows, slots, is_held)
        uses = tl.load(num_uses + slots, is_held, 0).to(tl.int32)
        tl.store(num_uses + slots, tl.minimum(uses + 1, _MOST_USES).to(tl.uint8), is_held)
        if (tl.program_id(0) == 0) & (num_missing > 0):
            tl.store(hand, tl.load(numbers + _HAND).to(tl.int64))
    else:
        tl.store(slot_of_row + rows, known, is_missing | is_held)
        tl.store(num_claims + slots, tl.load(num_claims + slots, is_held, 1) - 1, is_held)
        slots = tl.full([BLOCK], _NOWHERE, tl.int32)

    # The previous launch has filled the places of missing rows, if there were slots for them.
    # In Triton's interpreter `has_enough & is_missing` would be a mask of int32, which 3.9 refuses.
    is_left = is_place & (places >= tl.where(has_enough, num_missing, 0))
    is_fetched = (known >= _AWAITED) & has_enough
    tl.store(held_U + places, slots, is_left)
    tl.store(fetched_rows_U + places, tl.where(is_fetched, rows.to(tl.int32), _NOWHERE), is_left)
    tl.store(fetched_slots_U + places, tl.where(is_fetched, slots, _NOWHERE), is_left)
    tl.store(written_rows_U + places, _NOWHERE, is_left)
    tl.store(written_slots_U + places, _NOWHERE, is_left)

    # Another program may be removing the mark of the row; see the first launch.
    rows = tl.load(slot_of_value + places, places < num_values, _NOWHERE).to(tl.int64)
    found = tl.load(slot_of_row + rows, rows >= 0, _NOWHERE, volatile=True)
    slots = tl.where(rows >= 0, _slot(_unmarked(found)), rows.to(tl.int32))
    # Without slots no value may look like one that is not looked up, or like padding.
    slots = tl.where(has_enough | (rows == _NOWHERE), slots, _NO_ROW)
    tl.store(slot_of_value + places, slots, places < num_values)


@launched
@triton.jit(do_not_specialize=["num_places"])
def release_kernel(num_claims, held_M, num_places, BLOCK: tl.constexpr):
    """A slot has one place in a ticket, so no two programs count in the same slot."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(held_M + places, places < num_places, _NOWHERE)
    is_held = slots >= 0
    tl.store(num_claims + slots, tl.load(num_claims + slots, is_held, 0) - 1, is_held)
