"""Claims slots for the rows of a mini-batch on a device, as many as there are.

    mark     marks the slots of all ids with the mini-batch's generation, and lists each row without
             a slot once
    count    counts the slots whose generation is over, by the round in which the clock's hand takes
             them: the number of bits of the use count, 0 for an empty slot
    take     gives as many of these slots to the listed rows as there are, and lists the moves; the
             rows that got none stay where they are

Which slots are taken depends on the state of the slots and on the number of rows without one. Which
of these rows gets which of the slots may differ from run to run; no result depends on it.

Programs of a launch run at the same time and never wait for each other. Launches run one after the
other, so a launch reads everything that earlier ones wrote. Where programs of one launch touch the
same number, a comment says why that is safe. The row map must not be read by other streams
meanwhile.

Letters: R rows, S slots, W slots looked at, N ids, M moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from recsys._support.cuda.triton_launches import launched
from recsys._support.sizes import cdiv
from recsys.embeddings.kernels.cpu.claim import (
    FETCHED,
    HITS,
    LOOKUPS,
    NUM_COUNTS,
    ROWS,
    ROWS_HIT,
    WITHOUT_SLOT,
    WRITTEN,
)
from recsys.embeddings.kernels.cpu.row_map import EMPTY, NOWHERE, WANTED
from recsys.embeddings.kernels.triton.lookup import bounds_of

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.embeddings.kernels.triton.lookup import DeviceInput, DeviceLookups

__all__ = ["DeviceMarks", "Moves", "claim", "most_rows"]

_BLOCK_IDS, _BLOCK_SLOTS = 256, 256
_MOST_PROGRAMS = 128  # that look at slots; each adds up the counts of all
_LOOKED_AT = 4  # slots for each row that may need one, at least
_NUM_COUNTS = 16  # those of the CPU, and others
_LOOKUPS, _HITS, _ROWS, _ROWS_HIT, _WITHOUT_SLOT, _FETCHED, _WRITTEN = map(
    tl.constexpr, (LOOKUPS, HITS, ROWS, ROWS_HIT, WITHOUT_SLOT, FETCHED, WRITTEN)
)
_MISSING, _HAND = tl.constexpr(NUM_COUNTS), tl.constexpr(NUM_COUNTS + 1)
_ROUNDS, _BINS = tl.constexpr(9), tl.constexpr(16)  # the number of bits of a use count is 0 to 8
_NOWHERE, _WANTED, _EMPTY = (tl.constexpr(int(code)) for code in (NOWHERE, WANTED, EMPTY))
_MOST_USES = tl.constexpr(255)


class DeviceMarks(NamedTuple):
    """Where rows are, and what is known of slots; see `kernels.cpu.row_map.Marks`.

    Attributes:
        slot_of_row: The row map, (R,) int32: the slot, or `NOWHERE`.
        row_of_slot: (S,) int32.
        generations: (S,) int32.
        uses: (S,) uint8.
        is_dirty: (S,) uint8.
        hand: (1,) int64.
        pins: (S,) uint8.
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    generations: Tensor
    uses: Tensor
    is_dirty: Tensor
    hand: Tensor
    pins: Tensor

    @classmethod
    def empty(cls, num_rows: int, num_slots: int, device: torch.device) -> DeviceMarks:
        """The row map and the marks of empty slots."""
        kinds = torch.int32, torch.int32, torch.uint8, torch.uint8, torch.uint8
        of_slots = [torch.zeros(num_slots, dtype=kind, device=device) for kind in kinds]
        slot_of_row = torch.full((num_rows,), int(NOWHERE), dtype=torch.int32, device=device)
        hand = torch.zeros(1, dtype=torch.int64, device=device)
        row_of_slot, generations, uses, is_dirty, pins = of_slots
        row_of_slot.fill_(int(EMPTY))
        return cls(slot_of_row, row_of_slot, generations, uses, is_dirty, hand, pins)


class Moves(NamedTuple):
    """The rows that a claim moves, known to the device only.

    Attributes:
        lists_2M: Rows to write back, and rows to fetch: row << 32 | slot each, ascending, int64.
        counts: Counts as of a claim on the CPU, int32; then others.
    """

    lists_2M: Tensor
    counts: Tensor


def most_rows(lookups: DeviceLookups, given: DeviceInput, num_slots: int) -> int:
    """How many slots the rows of an input may take."""
    return min(given.ids.numel() * lookups.num_layers, num_slots)


def claim(
    marks: DeviceMarks,
    generation: int,
    needed: int,
    lookups: DeviceLookups,
    given: DeviceInput,
    num_others: int,
) -> Moves:
    """Claim slots; see the top of this module. The host waits for nothing.

    Args:
        marks: Of the group; no row is on its way.
        generation: Of the mini-batch.
        needed: The oldest generation that is not over.
        lookups: What is looked up.
        given: The input. What is wrong with it is left to the lookup.
        num_others: How many slots are pinned or may be of other generations that are not over, for
            which that is the sum of `most_rows`. If it is too low, free slots may be overlooked.
    """
    num_slots, num_ids = len(marks.row_of_slot), given.ids.numel()
    most = most_rows(lookups, given, num_slots)
    device = marks.hand.device
    counts = torch.zeros(_NUM_COUNTS, dtype=torch.int32, device=device)
    lists_2M = torch.full((2, most), 2**63 - 1, dtype=torch.int64, device=device)
    if not most or not given.num_samples:
        return Moves(lists_2M, counts)
    missing = torch.empty(num_ids * lookups.num_layers, dtype=torch.int32, device=device)
    num_looked_at = min(num_slots, max(_LOOKED_AT * most, most + num_others))
    num_blocks = cdiv(cdiv(num_looked_at, _BLOCK_SLOTS), _MOST_PROGRAMS)  # of each program
    num_programs = cdiv(num_looked_at, _BLOCK_SLOTS * num_blocks)
    bins = torch.empty(_MOST_PROGRAMS * _BINS.value, dtype=torch.int32, device=device)
    window = num_slots, num_looked_at, num_blocks, needed
    num_offsets = 0 if given.offsets is None else given.offsets.numel()
    with torch.cuda.device_of(counts):
        _mark_kernel[(cdiv(num_ids, _BLOCK_IDS) * lookups.num_layers,)](
            given.ids,
            given.offsets,
            lookups.numbers,
            marks.slot_of_row,
            marks.generations,
            marks.uses,
            marks.hand,
            missing,
            counts,
            generation,
            num_ids,
            given.num_samples,
            num_offsets,
            num_ids // max(given.num_bags, 1),
            NUM_LOOKUPS=lookups.num_lookups,
            NUM_LAYERS=lookups.num_layers,
            NUM_FEATURES=lookups.num_features,
            NUM_BITS=lookups.num_features.bit_length(),
            BLOCK=_BLOCK_IDS,
        )
        of_slots = *marks[1:4], marks.pins
        _count_kernel[(num_programs,)](*of_slots, counts, bins, *window, BLOCK=_BLOCK_SLOTS)
        _take_kernel[(num_programs,)](
            *marks,
            missing,
            counts,
            bins,
            lists_2M,
            *window,
            generation,
            most,
            MOST_PROGRAMS=_MOST_PROGRAMS,
            BLOCK=_BLOCK_SLOTS,
        )
        return Moves(lists_2M.sort(dim=1).values, counts)


@launched
@triton.jit(
    do_not_specialize=["generation", "num_ids", "num_samples", "num_offsets", "length"],
    do_not_specialize_on_alignment=["ids_N", "offsets"],
)
def _mark_kernel(
    ids_N,
    offsets,
    numbers_5L,
    slot_of_row,
    generations,
    uses,
    hand,
    missing,
    counts,
    generation,
    num_ids,
    num_samples,
    num_offsets,
    length,
    NUM_LOOKUPS: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    NUM_FEATURES: tl.constexpr,
    NUM_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program marks the rows of BLOCK ids in one layer, that of one lookup of each feature."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(counts + _HAND, tl.load(hand).to(tl.int32))
    places = (program // NUM_LAYERS).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = places < num_ids
    features = tl.zeros([BLOCK], tl.int64)
    for bit in tl.static_range(NUM_BITS):
        # The last feature that begins at or before the id. Invalid offsets give some feature.
        following = features + (1 << (NUM_BITS - 1 - bit))
        begins = bounds_of(offsets, following * num_samples, num_ids, num_offsets, length)
        is_later = (following <= NUM_FEATURES) & (begins <= places)
        features = tl.where(is_later, following, features)
    of_features = numbers_5L + (5 * NUM_LOOKUPS + program % NUM_LAYERS * NUM_FEATURES)
    lookups = tl.load(of_features + features, is_id & (features < NUM_FEATURES), NUM_LOOKUPS)
    of_lookups, is_lookup = numbers_5L + lookups, lookups < NUM_LOOKUPS
    ids = tl.load(ids_N + places, is_lookup, -1).to(tl.int64)
    is_row = (ids >= 0) & (ids < tl.load(of_lookups + NUM_LOOKUPS, is_lookup, 0))
    rows = ids + tl.load(of_lookups + 2 * NUM_LOOKUPS, is_lookup, 0)

    # Other programs may be marking the same rows and slots. Exactly one gets the old mark.
    slots = tl.load(slot_of_row + rows, is_row, _WANTED)
    is_hit = slots >= 0
    is_old = is_hit & (tl.load(generations + slots, is_hit, 0) < generation)
    before = tl.atomic_max(generations + slots, generation, is_old, sem="relaxed")
    is_first = is_old & (before < generation)
    num_uses = tl.load(uses + slots, is_first, 0).to(tl.int32)
    tl.store(uses + slots, tl.minimum(num_uses + 1, _MOST_USES).to(tl.uint8), is_first)
    is_nowhere = slots == _NOWHERE
    before = tl.atomic_xchg(slot_of_row + rows, _WANTED, is_nowhere, sem="relaxed")
    is_missing = is_nowhere & (before == _NOWHERE)
    # Adding to a counter gives every program places of its own.
    numbers = tl.cumsum(is_missing.to(tl.int32), 0)
    start = tl.atomic_add(counts + _MISSING, tl.max(numbers, 0), sem="relaxed")
    tl.store(missing + (start + numbers - 1), rows.to(tl.int32), is_missing)
    tl.atomic_add(counts + _LOOKUPS, tl.sum(is_row.to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(counts + _HITS, tl.sum(is_hit.to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(counts + _ROWS_HIT, tl.sum(is_first.to(tl.int32), 0), sem="relaxed")


@triton.jit
def _look_at(
    row_of_slot, generations, uses, pins, counts, places_W, num_slots, num_looked_at, needed
):
    """The slots at these places from the hand on, their rows and uses, and the rounds.

    The round is the one in which the hand takes the slot; `_ROUNDS` if it may not be taken.
    """
    slots = places_W + tl.load(counts + _HAND)
    slots = tl.where(slots >= num_slots, slots - num_slots, slots)
    is_place = places_W < num_looked_at
    num_uses = tl.load(uses + slots, is_place, 0).to(tl.int32)
    rows = tl.load(row_of_slot + slots, is_place, _EMPTY)
    rounds = tl.zeros_like(num_uses)
    for bit in tl.static_range(_ROUNDS - 1):
        rounds += ((num_uses >> bit) > 0).to(tl.int32)
    is_over = tl.load(generations + slots, is_place, needed) < needed
    is_over &= tl.load(pins + slots, is_place, 1) == 0
    rounds = tl.where(is_place & is_over, tl.where(rows == _EMPTY, 0, rounds), _ROUNDS)
    return slots, rows, num_uses, rounds


@launched
@triton.jit(do_not_specialize=["num_slots", "num_looked_at", "num_blocks", "needed"])
def _count_kernel(
    row_of_slot,
    generations,
    uses,
    pins,
    counts,
    bins_PB,
    num_slots,
    num_looked_at,
    num_blocks,
    needed,
    BLOCK: tl.constexpr,
):
    """A program counts the slots of each round in `num_blocks` blocks of slots."""
    program, bins = tl.program_id(0), tl.arange(0, _BINS)
    found = tl.zeros([_BINS], tl.int32)
    block = program * num_blocks
    while block < (program + 1) * num_blocks:
        places_W = block * BLOCK + tl.arange(0, BLOCK)
        _, _, _, rounds = _look_at(
            row_of_slot, generations, uses, pins, counts, places_W, num_slots, num_looked_at, needed
        )
        found += tl.sum((rounds[:, None] == bins[None, :]).to(tl.int32), 0)
        block += 1
    tl.store(bins_PB + program * _BINS + bins, found)


@launched
@triton.jit(
    do_not_specialize=[
        "num_slots",
        "num_looked_at",
        "num_blocks",
        "needed",
        "generation",
        "most",
    ]
)
def _take_kernel(
    slot_of_row,
    row_of_slot,
    generations,
    uses,
    is_dirty,
    hand,
    pins,
    missing,
    counts,
    bins_PB,
    lists_2M,
    num_slots,
    num_looked_at,
    num_blocks,
    needed,
    generation,
    most,
    MOST_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes slots among those that it counted.

    Every program adds up the counts of all, so that it knows the round of the last slot taken, and
    how many slots the programs before it take. No two programs write to the same slot, nor to the
    same row: a row that loses its slot has one, and a row that gets a slot has none.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    bins, others = tl.arange(0, _BINS), tl.arange(0, MOST_PROGRAMS)[:, None]
    found = tl.load(bins_PB + others * _BINS + bins[None, :], others < num_programs, 0)
    in_all = tl.where(bins < _ROUNDS, tl.sum(found, 0), 0)
    before = tl.sum(tl.where(others < program, found, 0), 0)
    num_missing = tl.load(counts + _MISSING)
    num_taken = tl.minimum(num_missing, tl.sum(in_all, 0))
    if program == 0:
        tl.store(counts + _ROWS, num_missing + tl.load(counts + _ROWS_HIT))
        tl.store(counts + _FETCHED, num_taken)
        tl.store(counts + _WITHOUT_SLOT, num_missing - num_taken)
    # All slots of earlier rounds are taken, and of the last round the first `num_last`.
    last = tl.sum((tl.cumsum(in_all, 0) < num_taken).to(tl.int32), 0)
    num_last = num_taken - tl.sum(tl.where(bins < last, in_all, 0), 0)
    num_earlier = tl.sum(tl.where(bins < last, before, 0), 0)
    num_same = tl.sum(tl.where(bins == last, before, 0), 0)
    block = program * num_blocks
    while (block < (program + 1) * num_blocks) & (num_taken > 0):
        places_W = block * BLOCK + tl.arange(0, BLOCK)
        slots, old, num_uses, rounds = _look_at(
            row_of_slot, generations, uses, pins, counts, places_W, num_slots, num_looked_at, needed
        )
        earlier, same = (rounds < last).to(tl.int32), (rounds == last).to(tl.int32)
        earlier_before = num_earlier + tl.cumsum(earlier, 0) - earlier
        same_before = num_same + tl.cumsum(same, 0) - same
        num_earlier += tl.sum(earlier, 0)
        num_same += tl.sum(same, 0)
        is_passed = same_before < num_last  # by the hand in its last round
        is_taken = (earlier > 0) | ((same > 0) & is_passed)
        is_last = (same > 0) & (same_before == num_last - 1)
        tl.store(hand + tl.zeros_like(slots), slots.to(tl.int64), is_last)

        places_M = (earlier_before + tl.minimum(same_before, num_last)).to(tl.int64)
        rows = tl.load(missing + places_M, is_taken, 0)
        is_full = is_taken & (old != _EMPTY)
        is_written = is_full & (tl.load(is_dirty + slots, is_taken, 0) != 0)
        numbers = tl.cumsum(is_written.to(tl.int32), 0)
        start = tl.atomic_add(counts + _WRITTEN, tl.max(numbers, 0), sem="relaxed")
        keys = (old.to(tl.int64) << 32) | slots.to(tl.int64)
        tl.store(lists_2M + (start + numbers - 1), keys, is_written)
        keys = (rows.to(tl.int64) << 32) | slots.to(tl.int64)
        tl.store(lists_2M + most + places_M, keys, is_taken)
        tl.store(slot_of_row + old, tl.full([BLOCK], 0, tl.int32) + _NOWHERE, is_full)
        tl.store(slot_of_row + rows, slots, is_taken)
        tl.store(row_of_slot + slots, rows, is_taken)
        tl.store(generations + slots, tl.full([BLOCK], 0, tl.int32) + generation, is_taken)
        tl.store(is_dirty + slots, tl.zeros([BLOCK], tl.uint8), is_taken)
        num_uses = tl.where(is_taken, 1, num_uses >> (last + is_passed.to(tl.int32)))
        tl.store(uses + slots, num_uses.to(tl.uint8), rounds < _ROUNDS)
        block += 1
    place = num_taken + program * BLOCK
    while place < num_missing:
        is_left = place + tl.arange(0, BLOCK) < num_missing
        rows = tl.load(missing + place + tl.arange(0, BLOCK), is_left, 0)
        tl.store(slot_of_row + rows, tl.full([BLOCK], 0, tl.int32) + _NOWHERE, is_left)
        place += num_programs * BLOCK
