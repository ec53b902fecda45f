"""The map of slots against that of operations of torch; `test_claimed_slots` has traces."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.embeddings.kernels.cpu.slot_arrays import NOWHERE
from recsys.embeddings.kernels.cpu.slots import NoSuchRow, Shortage
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.row_space import number_rows
from recsys.embeddings.kernels.triton.claim_kernels import NO_ROW
from recsys.embeddings.kernels.triton.slots import TritonSlotMap
from recsys.embeddings.rows.lookups import Lookups
from tests.torch_kernels import TorchSlotMap

SIZES = [40, 3, 0, 7]
# Features 2 and 5 are looked up in no table, features 0 and 4 in the same one.
TABLES, POSITIONS = np.array([0, 1, 3, 0], np.uint64), np.array([0, 1, 3, 4], np.uint64)
LOOKUPS = Lookups(tables=TABLES, positions=POSITIONS, columns=POSITIONS, width=6)
NUM_FEATURES = 6
ROWS_OF_FEATURE = torch.tensor([40, 3, 1000, 7, 40, 1000])


def make_bags(generator, device, batch_size, longest, dtype, padding, *, has_bad):
    lengths = torch.ones(NUM_FEATURES * batch_size, dtype=torch.int64)
    if longest is not None:
        lengths = torch.randint(0, longest + 1, (len(lengths),), generator=generator)
    rows = ROWS_OF_FEATURE.repeat_interleave(batch_size).repeat_interleave(lengths)
    values = (torch.rand(len(rows), generator=generator) * rows).to(dtype)
    if has_bad and len(values):
        values[torch.randint(0, len(values), (2,), generator=generator)] = -4
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(dtype)
    return TorchBags.from_tensors(
        values.to(device),
        offsets.to(device),
        None,
        batch_size,
        is_mean=False,
        is_one_hot=longest is None,
        padding=padding,
    )


def outcome(slots, bags):
    """The claim of a mini-batch, or why there is none; and what both maps must agree on."""
    try:
        claim = slots.claim(LOOKUPS, bags)
    except NoSuchRow as error:
        return None, error.position
    except Shortage as error:
        return None, (sorted(error.needed.tolist()), error.num_lacking, error.num_needed)
    is_found = claim.slot_of_value != NOWHERE
    rows_N = torch.where(is_found, slots.row_of_slot[claim.slot_of_value.long()], NOWHERE)
    moves = claim.moves
    return claim, (
        claim[3:],  # counts
        rows_N.tolist(),
        sorted(claim.held[claim.held != NOWHERE].tolist()),
        sorted(moves.fetched_rows.tolist()),
        sorted(moves.fetched_slots.tolist()),
        sorted(zip(moves.written_rows.tolist(), moves.written_slots.tolist(), strict=True)),
    )


@settings(max_examples=settings().max_examples // 3)
@given(
    seed=st.integers(0, 99),
    num_slots=st.integers(1, 60),
    longest=st.sampled_from([None, 1, 3]),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    padding=st.sampled_from([None, 1]),
    batch_size=st.integers(0, 5),
)
def test_a_map_claims_as_that_of_torch(
    triton_device, seed, num_slots, longest, dtype, padding, batch_size
):
    generator = torch.Generator().manual_seed(seed)
    numbers = number_rows(SIZES, 1, torch.zeros(1, 1, device=triton_device))
    ours, theirs = (kind(numbers, num_slots) for kind in (TritonSlotMap, TorchSlotMap))
    held = []

    for step in range(4):
        bags = make_bags(
            generator, triton_device, batch_size, longest, dtype, padding, has_bad=step == 2
        )
        (ours_claim, found), (theirs_claim, expected) = outcome(ours, bags), outcome(theirs, bags)
        assert found == expected
        # From here on, the same rows are in the same slots.
        ours.slot_of_row.copy_(theirs.slot_of_row)
        ours.row_of_slot.copy_(theirs.row_of_slot)
        if ours_claim is not None:
            held.append((ours_claim.held, theirs_claim.held))
        if step % 2 and held:
            ours.mark_dirty(held[0][0])
            theirs.mark_dirty(held[0][1])
            ours.release(held[0][0])
            theirs.release(held.pop(0)[1])
        for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
            assert torch.equal(mine, other)


def test_a_claim_that_refuses_no_value_claims_the_rows_of_the_others(triton_device):
    numbers = number_rows([5, 5], 1, torch.zeros(1, 1, device=triton_device))
    slots = TritonSlotMap(numbers, 2)
    positions = np.array([0, 1], np.uint64)
    lookups = Lookups(tables=positions, positions=positions, columns=positions, width=2)

    def start(values):
        bags = TorchBags(torch.tensor(values, device=triton_device), None, None, 2, is_mean=False)
        started = slots.start(lookups, bags, refuses=False)
        moved = [each[each != NOWHERE].tolist() for each in started.transfer[:4]]
        return started, started.slot_of_value.tolist(), moved, started.counts.tolist()

    first, slot_of_value, moved, counts = start([1, 9, -2, 1])
    assert sorted(slot_of_value) == [NO_ROW, NO_ROW, 0, 1]
    assert slot_of_value[1:3] == [NO_ROW] * 2
    assert sorted(moved[2]) == [1, 6]
    assert counts == [2, 0, 2, 0, 2, 0]
    slots.mark_dirty(first.held)
    slots.release(first.held)
    _, slot_of_value, moved, counts = start([1, 1, 5, 0])
    assert slot_of_value[2] == NO_ROW
    assert moved[0] == [6]
    assert moved[2] == [5]
    assert counts == [3, 2, 2, 1, 1, 1]


def test_values_of_a_claim_without_slots_are_no_padding(triton_device):
    numbers = number_rows([9], 1, torch.zeros(1, 1, device=triton_device))
    slots = TritonSlotMap(numbers, 1)
    values = torch.tensor([4, 0, 2], device=triton_device)
    bags = TorchBags(values, None, None, 3, is_mean=False, padding=0)

    started = slots.start(Lookups.one(0, 1), bags, refuses=False)

    assert not started.transfer.is_enough
    assert started.slot_of_value.tolist() == [NO_ROW, NOWHERE, NO_ROW]
    assert (slots.num_claims == 0).all()


def test_ids_may_be_a_column_of_a_matrix(triton_device):
    numbers = number_rows([9], 1, torch.zeros(1, 1, device=triton_device))
    column = torch.tensor([[4, 1], [2, 1], [4, 1]], device=triton_device)[:, 0]
    bags = TorchBags.from_tensors(column, column, None, 3, is_mean=False, is_one_hot=True)

    claim = TritonSlotMap(numbers, 5).claim(Lookups.one(0, 1), bags)

    assert sorted(claim.moves.fetched_rows.tolist()) == [2, 4]
    assert bags.given == (column,)
