"""Slots that Triton kernels claim against those of the kernels for the CPU."""

from contextlib import nullcontext
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.embeddings.kernels.cpu.slot_arrays import AWAITED, DIRTY, NOWHERE, PINNED
from recsys.embeddings.kernels.cpu.slots import Shortage, SlotMap
from recsys.embeddings.kernels.torch.bags import TorchBags, layers_of
from recsys.embeddings.kernels.torch.row_space import number_rows
from recsys.embeddings.kernels.torch.slots import (
    TorchSlots,
    Transfer,
    distinct_rows,
    first_unpinned,
    needs,
)
from recsys.embeddings.rows.lookups import Bags, Lookups

CPU = torch.device("cpu")
NUM_ROWS = 14
batches = st.lists(
    st.tuples(
        st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=7),
        st.booleans(),  # whether its rows are updated
    ),
    max_size=12,
)


class Claimed(NamedTuple):
    """Distinct rows and the slot of each, the slot of each value, and the rows to copy."""

    rows: torch.Tensor
    slots: torch.Tensor
    slot_of_value: torch.Tensor
    transfer: Transfer


SMALL_PROGRAMS = {"_BLOCK_VALUES": 4, "_BLOCK_SLOTS": 2, "_MOST_PROGRAMS": 2}


class ByTriton:
    """Slots of rows, claimed by Triton kernels.

    Args:
        num_slots: S.
        is_split: Whether even small cases are divided among several programs.
    """

    def __init__(self, num_slots, *, is_split=False):
        from recsys.embeddings.kernels.triton import claims
        from recsys.embeddings.kernels.triton.slots import TritonSlotMap

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._claims = claims
        # On a GPU a block should fill the threads of a program; larger cases are in
        # `triton/test_claim_kernels`.
        self._sizes = SMALL_PROGRAMS if is_split and device.type == "cpu" else {}
        numbers = number_rows([NUM_ROWS], 1, torch.zeros(1, 1, device=device))
        self._map = TritonSlotMap(numbers, num_slots)
        self.slots, self.mark_dirty = self._map.tensors, self._map.mark_dirty
        self.release = self._map.release
        _, [self._layer] = layers_of(numbers, Lookups.one(0, 1), 1)

    def claim(self, rows, first_slot=0):
        values = torch.as_tensor(rows, device=self.slots.flags.device)
        bags = TorchBags(values, None, None, len(values), is_mean=False)
        num_places = 16 * (1 + len(values) // 16)
        with mock.patch.multiple(self._claims, **self._sizes) if self._sizes else nullcontext():
            started = self._claims.claim(
                self.slots, self._layer, bags, num_places, None, first_slot=first_slot
            )
        return Claimed(started.rows.long(), started.held, started.slot_of_value, started.transfer)


def listed(numbers):
    """Those that are not `NOWHERE`."""
    return numbers[numbers != NOWHERE].tolist()


def num_needed(slots, rows_U):
    """How many slots tickets and these rows need."""
    return sum(int(each.sum()) for each in needs(slots, rows_U))


class BothSlots:
    """The same claims by numba, which gets distinct rows in ascending order, and on a device."""

    def __init__(self, ours, pinned):
        self.ours, num_slots = ours, ours.slots.num_slots
        self.theirs = SlotMap(np.array([0, NUM_ROWS], np.uint64), num_slots)
        pinned = range(pinned.start, min(pinned.stop, num_slots))
        for slot in pinned:
            row = NUM_ROWS - 1 - slot
            for slots in (ours.slots, self.theirs):
                slots.slot_of_row[row] = slot + AWAITED
                slots.row_of_slot[slot], slots.flags[slot] = row, PINNED
        self.theirs.recount()
        self.first_slot = 0 if pinned.start else min(len(pinned), num_slots - 1)

    def claim(self, rows):
        first_slot = first_unpinned(self.ours.slots)
        assert first_slot == self.first_slot
        distinct = torch.tensor(np.unique(rows), device=self.ours.slots.flags.device)
        needed = num_needed(self.ours.slots, distinct)
        before = self.theirs.slot_of_row.clone()
        claimed = self.ours.claim(rows, first_slot=first_slot)
        rows_U, slot_U, slot_of_value, transfer = claimed
        assert sorted(listed(rows_U)) == distinct.tolist()
        bags = Bags(distinct.cpu().numpy(), None, None, len(distinct), is_mean=False)
        if not transfer.is_enough:
            with pytest.raises(Shortage) as raised:
                self.theirs.claim(Lookups.one(0, 1), bags)
            assert raised.value.num_needed == needed
            assert not any(listed(each) for each in (slot_U, *transfer[:4]))
            assert torch.equal(self.theirs.slot_of_row, before)
            return claimed
        assert self.ours.slots.row_of_slot[slot_of_value].tolist() == rows
        found = self.theirs.claim(Lookups.one(0, 1), bags)
        self._compare(listed(slot_U), found.slot_of_value.tolist())
        written = [listed(each) for each in transfer[:2]]
        theirs = found.moves.written_rows.tolist(), found.moves.written_slots.tolist()
        self._compare(list(zip(*written, strict=True)), list(zip(*theirs, strict=True)))
        fetched = dict(zip(*map(listed, transfer[2:4]), strict=True))
        assert sorted(fetched) == sorted(found.moves.fetched_rows.tolist())
        assert sorted(fetched.values()) == sorted(found.moves.fetched_slots.tolist())
        for row, slot in fetched.items():
            assert self.ours.slots.slot_of_row[row] == slot
            assert self.ours.slots.row_of_slot[slot] == row
        # From here on, the same rows are in the same slots.
        self.ours.slots.slot_of_row[:-1] = self.theirs.slot_of_row
        self.ours.slots.row_of_slot[:-1] = self.theirs.row_of_slot
        return claimed

    def _compare(self, ours, theirs):
        assert sorted(ours) == sorted(theirs)

    def require_same(self):
        for name, found in zip(TorchSlots._fields[:5], self.ours.slots, strict=False):
            assert found[:-1].tolist() == getattr(self.theirs, name).tolist(), name
        assert int(self.ours.slots.hand) == self.theirs._hand


def require_slots_of_the_cpu(ours, batches, pinned):
    """The same slots are taken as by the kernels for the CPU."""
    both = BothSlots(ours, pinned)
    held = []

    for rows, is_updated in batches:
        _, slot_U, _, transfer = both.claim(rows)
        both.require_same()
        held.append(slot_U)
        if is_updated and transfer.is_enough:
            both.ours.mark_dirty(slot_U)
            both.theirs.mark_dirty(listed(slot_U))
        if len(held) > 1:
            given_back = held.pop(0)
            both.ours.release(given_back)
            both.theirs.release(np.array(listed(given_back), np.int32))
        both.require_same()


CASES = {"batches": batches, "num_slots": st.integers(1, 10)}
PINNED_SLOTS = st.sampled_from([range(0), range(2), range(3), range(1, 2), range(2, 5)])
SLOW = settings(max_examples=settings().max_examples // 4)  # kernels may be interpreted


@SLOW
@given(**CASES, pinned=PINNED_SLOTS, is_split=st.booleans())
def test_triton_takes_slots_as_the_kernels_for_the_cpu(batches, num_slots, pinned, is_split):
    require_slots_of_the_cpu(ByTriton(num_slots, is_split=is_split), batches, pinned)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([5, 2, 5, 2, 9], [2, 5, 9, -1, -1]), ([-1, 3, -1], [3, -1, -1]), ([], [])],
    ids=str,
)
def test_distinct_rows_come_first_and_in_order(rows, expected):
    assert distinct_rows(torch.tensor(rows, dtype=torch.int64)).tolist() == expected


def test_a_claim_does_nothing_that_would_wait_for_a_device(no_round_trips):
    ours = ByTriton(4)
    mini_batches = torch.tensor([[1, 2, 2], [5, 5, 9], [2, 1, 7]])
    held = []

    with no_round_trips:
        for rows in mini_batches:
            held.append(ours.claim(rows).slots)
            ours.mark_dirty(held[-1])
            ours.release(held[-1])

    assert [sorted(listed(slot_U)) for slot_U in held] == [[0, 1], [2, 3], [0, 1, 2]]


def test_a_claim_that_finds_too_few_slots_changes_nothing():
    ours = ByTriton(3)
    ours.mark_dirty(ours.claim([4, 7]).slots)
    before = [each.clone() for each in ours.slots]

    claimed = ours.claim([1, 4, 5])

    assert not claimed.transfer.is_enough
    assert not listed(claimed.slots)
    assert all(torch.equal(*pair) for pair in zip(ours.slots, before, strict=True))
    assert int((ours.slots.flags & DIRTY).sum()) == 2 * DIRTY
