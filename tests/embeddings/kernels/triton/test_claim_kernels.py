"""Claims of many programs; `test_claimed_slots` has traces of small ones."""

import pytest
import torch

from recsys.embeddings.kernels.cpu.slot_arrays import NOWHERE
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.row_space import number_rows
from recsys.embeddings.kernels.triton.slots import TritonSlotMap
from recsys.embeddings.rows.lookups import Lookups
from tests.torch_kernels import TorchSlotMap


def rows_of(bags):
    return sorted(set(bags.values.tolist()))


@pytest.mark.in_ci("5")
@pytest.mark.parametrize("num_rows", [1, 5])
def test_programs_that_contend_for_few_rows_list_each_once(triton_device, num_rows):
    """On a GPU thousands of programs look up the same rows at the same time."""
    is_gpu = triton_device.type == "cuda"
    num_values, num_steps = (1 << 20, 200) if is_gpu else (700, 6)
    slots = TritonSlotMap(number_rows([12], 1, torch.zeros(1, 1, device=triton_device)), 8)
    generator = torch.Generator().manual_seed(num_rows)

    for _ in range(num_steps):
        chosen = torch.randperm(12, generator=generator)[:num_rows]
        places = torch.randint(0, num_rows, (num_values,), generator=generator)
        places[:num_rows] = torch.arange(num_rows)
        values = chosen[places].to(triton_device)
        bags = TorchBags(values, None, None, num_values, is_mean=False)
        num_hits = int((slots.slot_of_row[values] >= 0).sum())
        claim = slots.claim(Lookups.one(0, 1), bags)
        held = claim.held[claim.held != NOWHERE].long()
        assert slots.row_of_slot[held].sort().values.tolist() == rows_of(bags)
        assert torch.equal(slots.row_of_slot[claim.slot_of_value.long()].long(), values)
        assert slots.num_claims.sum() == slots.num_claims[held].sum() == num_rows
        assert (claim.num_lookups, claim.num_hits) == (num_values, num_hits)
        require_one_to_one(slots)
        slots.mark_dirty(claim.held)
        slots.release(claim.held)


def require_one_to_one(slots):
    """The slot of a row holds this row; no mark of a claim is left."""
    rows = slots.row_of_slot[:-1]
    full = (rows != NOWHERE).nonzero().flatten()
    assert torch.equal(slots.slot_of_row[rows[full].long()].long(), full)
    assert int((slots.slot_of_row != NOWHERE).sum()) == len(full)


def test_claims_of_many_programs_take_the_slots_that_torch_takes(triton_device):
    is_gpu = triton_device.type == "cuda"
    num_rows, num_slots, num_values = (800_000, 300_000, 100_000) if is_gpu else (4000, 1600, 900)
    numbers = number_rows([num_rows], 1, torch.zeros(1, 1, device=triton_device))
    ours, theirs = (kind(numbers, num_slots) for kind in (TritonSlotMap, TorchSlotMap))
    generator = torch.Generator().manual_seed(0)

    for step in range(8):
        # Some rows are looked up far more often than others.
        values = torch.rand(num_values, generator=generator).pow(4).mul(num_rows).long()
        bags = TorchBags(values.to(triton_device), None, None, num_values, is_mean=False)
        mine, other = (each.claim(Lookups.one(0, 1), bags) for each in (ours, theirs))
        assert mine[3:] == other[3:]
        for found, expected in zip(mine.moves, other.moves, strict=True):
            assert sorted(found.tolist()) == sorted(expected.tolist())
        require_one_to_one(ours)
        ours.slot_of_row.copy_(theirs.slot_of_row)
        ours.row_of_slot.copy_(theirs.row_of_slot)
        for each, claim in ((ours, mine), (theirs, other)):
            each.mark_dirty(claim.held)
            if step != 3:  # which is never released
                each.release(claim.held)
        assert all(map(torch.equal, ours.tensors, theirs.tensors))
