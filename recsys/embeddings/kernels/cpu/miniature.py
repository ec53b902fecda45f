"""A miniature cache: simulates slots for a sample of the rows, with the eviction of the real slots.

    rows        the row in each simulated slot, or EMPTY
    num_uses    how often claims looked that row up; the clock's hand halves it in passing
    last_claim  the last claim that looked it up
    keys        a hash table with linear probing: the row at each place, or EMPTY
    places      the simulated slot of that row

Kernels here run on one thread: claiming a few sampled rows takes less time than waking another one.

Letters: S slots, N values, n simulated slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys._support.jit import kernel, kernel_part
from recsys.embeddings.kernels.cpu.slot_arrays import EMPTY, PINNED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recsys.embeddings.kernels.cpu.slot_arrays import Requests, SlotArrays

__all__ = ["Miniature", "claim_in_miniature", "sample_rows"]

_MOST_USES = 255
_BLOCK = 64
_MOST_HELD = 64  # at most this many claims are held at once; older ones have been released
_FACTOR = np.uint32(2654435769)  # 2**32 / golden ratio


class Miniature(NamedTuple):
    """One miniature cache; `counts` is (hand, rows fetched, rows evicted, claims)."""

    rows: NDArray[np.int32]
    num_uses: NDArray[np.uint8]
    last_claim: NDArray[np.int64]
    keys: NDArray[np.int32]
    places: NDArray[np.int32]
    counts: NDArray[np.int64]

    @classmethod
    def of_size(cls, num_slots: int) -> Miniature:
        """An empty miniature; its hash table is never more than half full."""
        num_keys = 1 << (2 * num_slots - 1).bit_length()
        return cls(
            np.full(num_slots, EMPTY, np.int32),
            np.zeros(num_slots, np.uint8),
            np.zeros(num_slots, np.int64),
            np.full(num_keys, EMPTY, np.int32),
            np.zeros(num_keys, np.int32),
            np.zeros(4, np.int64),
        )

    def clear(self) -> None:
        """Remove all rows; `counts` stay."""
        self.rows[:] = EMPTY
        self.keys[:] = EMPTY


def sample_rows(
    slots: SlotArrays,
    requests: Requests,
    values: NDArray[Any],
    rate: float,
    found: NDArray[np.int32],
) -> int:
    """List the sampled rows of a claim; a row is sampled in every claim or in none.

    A multiplicative hash (Knuth, The Art of Computer Programming, 6.4) decides which rows are
    sampled. It spreads consecutive rows evenly, and costs one multiplication.

    Args:
        slots: The real slots; rows pinned in them are skipped.
        requests: Which values are looked up in which table; every value must be a valid row.
        values: (N,).
        rate: Fraction of the rows to sample.
        found: Receives the sampled rows, once per lookup; those that do not fit are dropped.

    Returns:
        The number of rows written to `found`.
    """
    last = np.uint32(max(1, round(rate * 2**32)) - 1)
    return int(_sample_kernel(slots.slot_of_row, slots.flags, *requests, values, last, found))


def claim_in_miniature(
    slots: SlotArrays,
    cache: Miniature,
    sampled: NDArray[np.int32],
    num_sampled: int,
    missing: NDArray[np.int32],
) -> None:
    """Simulate the claim of the sampled rows of a mini-batch.

    Args:
        slots: The real slots, which tell whether a ticket needs a row.
        cache: Changed in place.
        sampled: Rows, possibly repeated; only the first `num_sampled` are read.
        num_sampled: Number of sampled rows.
        missing: Scratch memory, as long as `sampled`.
    """
    _claim_kernel(
        slots.slot_of_row,
        slots.num_claims,
        *cache,
        sampled,
        num_sampled,
        missing,
    )


@kernel_part
def _hash(row: Any) -> Any:
    """The hash of a row, in [0, 2**32): MurmurHash3's finalizer."""
    mixed = np.uint32(row)
    mixed = np.uint32((mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    mixed = np.uint32((mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(mixed ^ (mixed >> np.uint32(16)))


@kernel
def _sample_kernel(
    slot_of_row: NDArray[np.int32],
    flags: NDArray[np.uint8],
    of_table: NDArray[np.uint64],
    begins: NDArray[np.uint64],
    ends: NDArray[np.uint64],
    first_rows: NDArray[np.uint64],
    values: NDArray[Any],
    last: Any,
    found: NDArray[np.int32],
) -> int:
    count = 0
    for table in range(len(first_rows) - 1):
        first_row = np.uint32(first_rows[table])
        for run in range(np.int64(of_table[table]), np.int64(of_table[table + 1])):
            end = np.int64(ends[run])
            for begin in range(np.int64(begins[run]), end, _BLOCK):
                block = values[begin : min(begin + _BLOCK, end)]
                num_found = 0  # usually 0; a loop without branches is vectorised
                for place in range(len(block)):
                    row = np.uint32(np.uint32(block[place]) + first_row)
                    num_found += np.uint32(row * _FACTOR) <= last
                if not num_found:
                    continue
                for place in range(len(block)):
                    row = np.uint32(np.uint32(block[place]) + first_row)
                    if np.uint32(row * _FACTOR) <= last and count < len(found):
                        slot = np.int64(slot_of_row[row])
                        if not (0 <= slot < len(flags) and flags[slot] & PINNED):
                            found[count] = np.int32(row)
                            count += 1
    return count


@kernel_part
def _find(keys: NDArray[np.int32], row: int) -> Any:
    """The place of a row in the hash table, or of the empty place where it belongs."""
    mask = len(keys) - 1
    place = np.int64(_hash(row)) & mask
    while keys[place] != EMPTY and keys[place] != row:
        place = (place + 1) & mask
    return place


@kernel_part
def _remove(keys: NDArray[np.int32], places: NDArray[np.int32], row: int) -> None:
    """Remove a row from the hash table; the rows that it had displaced move up."""
    mask = len(keys) - 1
    gap = _find(keys, row)
    place = gap
    while True:
        place = (place + 1) & mask
        if keys[place] == EMPTY:
            break
        home = np.int64(_hash(keys[place])) & mask
        if (place - home) & mask >= (place - gap) & mask:
            keys[gap], places[gap] = keys[place], places[place]
            gap = place
    keys[gap] = EMPTY


@kernel
def _claim_kernel(
    slot_of_row: NDArray[np.int32],
    num_claims: NDArray[np.int16],
    rows: NDArray[np.int32],
    num_uses: NDArray[np.uint8],
    last_claim: NDArray[np.int64],
    keys: NDArray[np.int32],
    places: NDArray[np.int32],
    counts: NDArray[np.int64],
    sampled: NDArray[np.int32],
    num_sampled: int,
    missing: NDArray[np.int32],
) -> None:
    num_missing = 0
    counts[3] += 1
    for number in range(num_sampled):
        place = _find(keys, sampled[number])
        if keys[place] == EMPTY:
            missing[num_missing] = sampled[number]
            num_missing += 1
        else:
            slot = places[place]
            if last_claim[slot] != counts[3] and num_uses[slot] < _MOST_USES:
                num_uses[slot] += np.uint8(1)
            last_claim[slot] = counts[3]
    hand = counts[0]
    for number in range(num_missing):
        row = missing[number]
        if keys[_find(keys, row)] == row:  # repeated in this claim
            continue
        counts[1] += 1
        num_claimed = 0
        while num_claimed < len(rows):
            slot = hand
            hand += 1
            if hand == len(rows):
                hand = 0
            old = rows[slot]
            if old != EMPTY:
                if counts[3] - last_claim[slot] < _MOST_HELD:  # an older claim has been released
                    real = slot_of_row[old]
                    if 0 <= real < len(num_claims) and num_claims[real] > 0:
                        num_claimed += 1
                        continue
                num_claimed = 0
                if num_uses[slot] > 0:
                    num_uses[slot] >>= np.uint8(1)
                    continue
                _remove(keys, places, old)
                counts[2] += 1
            rows[slot], num_uses[slot], last_claim[slot] = row, 1, counts[3]
            place = _find(keys, row)
            keys[place], places[place] = row, slot
            break
    counts[0] = hand
