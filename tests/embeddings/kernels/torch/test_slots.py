"""Slots against those of the kernels for the CPU, and against a dictionary of rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.cpu.slots import AWAITED, DIRTY, NOWHERE, PINNED, Shortage, SlotMap
from recsys.embeddings.kernels.torch.slots import (
    TorchSlots,
    claim,
    distinct_rows,
    first_unpinned,
    mark_dirty,
    needs,
    release,
)
from recsys.embeddings.rows.lookups import Bags, Lookups

CPU = torch.device("cpu")
NUM_ROWS = 14
batches = st.lists(
    st.tuples(
        st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=7),
        st.booleans(),  # whether its rows are updated
        st.integers(0, 2),  # how many later batches it is held for
    ),
    max_size=12,
)


def num_needed(slots, rows_U):
    """How many slots tickets and these rows need."""
    return sum(int(each.sum()) for each in needs(slots, rows_U))


class BothSlots:
    """The same claims by numba, which gets distinct rows in ascending order, and by torch."""

    def __init__(self, num_slots, num_pinned=0):
        self.ours = TorchSlots.empty(NUM_ROWS, num_slots, CPU)
        self.theirs = SlotMap(np.array([0, NUM_ROWS], np.uint64), num_slots)
        for slot in range(num_pinned):
            row = NUM_ROWS - 1 - slot
            for slots in (self.ours, self.theirs):
                slots.slot_of_row[row] = slot + AWAITED
                slots.row_of_slot[slot], slots.flags[slot] = row, PINNED
        self.theirs.recount()
        self.num_pinned = num_pinned

    def claim(self, rows):
        rows_U = distinct_rows(torch.tensor(rows))
        first_slot = first_unpinned(self.ours)
        assert first_slot == min(self.num_pinned, self.ours.num_slots - 1)
        needed = num_needed(self.ours, rows_U)
        before = self.theirs.slot_of_row.clone()
        slot_U, transfer = claim(self.ours, rows_U, first_slot=first_slot)
        values = np.unique(rows)
        bags = Bags(values, None, None, len(values), is_mean=False)
        if not transfer.is_enough:
            with pytest.raises(Shortage) as raised:
                self.theirs.claim(Lookups.one(0, 1), bags)
            assert raised.value.num_needed == needed
            assert (slot_U == NOWHERE).all()
            assert torch.equal(self.theirs.slot_of_row, before)
            return slot_U, transfer
        found = self.theirs.claim(Lookups.one(0, 1), bags)
        assert slot_U[slot_U != NOWHERE].tolist() == found.slot_of_value.tolist()
        for ours, theirs in (
            (transfer.written_slots, found.moves.written_slots),
            (transfer.written_rows, found.moves.written_rows),
        ):
            assert ours[ours != NOWHERE].tolist() == theirs.tolist()
        fetched = transfer.fetched_rows[transfer.fetched_rows != NOWHERE].tolist()
        assert fetched == sorted(found.moves.fetched_rows.tolist())
        return slot_U, transfer

    def require_same(self):
        for name, found in zip(TorchSlots._fields[:5], self.ours, strict=False):
            assert found[:-1].tolist() == getattr(self.theirs, name).tolist(), name
        assert int(self.ours.hand) == self.theirs._hand


@given(batches=batches, num_slots=st.integers(1, 10), num_pinned=st.integers(0, 3))
def test_slots_are_taken_as_by_the_kernels_for_the_cpu(batches, num_slots, num_pinned):
    both = BothSlots(num_slots, min(num_pinned, num_slots))
    held = []

    for rows, is_updated, _ in batches:
        slot_U, transfer = both.claim(rows)
        both.require_same()
        held.append(slot_U)
        if is_updated and transfer.is_enough:
            mark_dirty(both.ours, slot_U)
            both.theirs.mark_dirty(slot_U[slot_U != NOWHERE].numpy())
        if len(held) > 1:
            given_back = held.pop(0)
            release(both.ours, given_back)
            both.theirs.release(given_back[given_back != NOWHERE].int().numpy())
        both.require_same()


def copy(target, source, targets, sources):
    """As a transfer says."""
    is_row = sources != NOWHERE
    target[targets[is_row]] = source[sources[is_row]]


@given(
    batches=batches,
    num_slots=st.integers(1, 10),
    num_looked_at=st.one_of(st.none(), st.integers(1, 12)),
)
def test_every_row_has_its_newest_value_in_its_slot_or_in_the_cold_store(
    batches, num_slots, num_looked_at
):
    slots = TorchSlots.empty(NUM_ROWS, num_slots, CPU)
    cold = torch.arange(NUM_ROWS, dtype=torch.float64).view(-1, 1)
    hot = torch.full((num_slots, 1), torch.nan, dtype=torch.float64)
    expected, held, places = dict(enumerate(cold.flatten().tolist())), [], []

    for number, (rows, is_updated, length) in enumerate(batches):
        for end, slot_U in [each for each in held if each[0] <= number]:
            held.remove((end, slot_U))
            release(slots, slot_U)
        rows_U = distinct_rows(torch.tensor(rows))
        before = [each.clone() for each in slots]
        slot_U, transfer = claim(slots, rows_U, num_looked_at)
        if not transfer.is_enough:
            is_all = num_looked_at is None or num_looked_at >= num_slots
            assert all(map(torch.equal, slots, before))
            too_many = num_needed(slots, rows_U) > num_slots
            assert too_many or not is_all
            assert too_many == (
                len(set(rows) | {r for _, s in held for r in slots.row_of_slot[s[s >= 0]].tolist()})
                > num_slots
            )
            continue
        held.append((number + 1 + length, slot_U))
        copy(cold, hot, transfer.written_rows, transfer.written_slots)
        copy(hot, cold, transfer.fetched_slots, transfer.fetched_rows)
        places = dict(zip(rows_U.tolist(), slot_U.tolist(), strict=True))
        for row in set(rows):
            assert hot[places[row]].item() == expected[row]
            if is_updated:
                expected[row] += 100
                hot[places[row]] += 100
        if is_updated:
            mark_dirty(slots, slot_U)

    for row, value in expected.items():
        slot = int(slots.slot_of_row[row])
        assert (cold[row] if slot == NOWHERE else hot[slot]).item() == value


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([5, 2, 5, 2, 9], [2, 5, 9, -1, -1]), ([-1, 3, -1], [3, -1, -1]), ([], [])],
    ids=str,
)
def test_distinct_rows_come_first_and_in_order(rows, expected):
    assert distinct_rows(torch.tensor(rows, dtype=torch.int64)).tolist() == expected


def test_a_claim_does_nothing_that_would_wait_for_a_device(no_round_trips):
    slots = TorchSlots.empty(NUM_ROWS, 4, CPU)
    mini_batches = torch.tensor([[1, 2, 2], [5, 5, 9], [2, 1, 7]])
    held = []

    with no_round_trips:
        for rows in mini_batches:
            held.append(claim(slots, distinct_rows(rows))[0])
            mark_dirty(slots, held[-1])
            release(slots, held[-1])

    assert [slot_U.tolist() for slot_U in held] == [[0, 1, -1], [2, 3, -1], [0, 1, 2]]


def test_a_claim_that_finds_too_few_slots_changes_nothing():
    slots = TorchSlots.empty(NUM_ROWS, 3, CPU)
    held, _ = claim(slots, torch.tensor([4, 7]))
    mark_dirty(slots, held)
    before = [each.clone() for each in slots]

    slot_U, transfer = claim(slots, torch.tensor([1, 4, 5]))

    assert not transfer.is_enough
    assert slot_U.tolist() == [NOWHERE] * 3
    assert all(torch.equal(*pair) for pair in zip(slots, before, strict=True))
    assert int((slots.flags & DIRTY).sum()) == 2 * DIRTY
