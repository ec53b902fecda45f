"""Triton kernels give the bits of plain PyTorch, in the interpreter or on a GPU."""

import pytest
import torch

from recsys.embeddings.optimizer import SGD
from recsys.engine.rows.bags import Bags, Lookups
from recsys.engine.rows.tables import compute_dtype
from tests.unit.engine.oracle import Oracle

pytest.importorskip("triton")

from recsys.engine.kernels.triton.lookup import DeviceInput, DeviceLookups, pool
from recsys.engine.kernels.triton.memory import (
    BAD_OFFSETS,
    BAD_WEIGHT,
    LEFT_OUT,
    NO_ROW,
    DeviceMemories,
    ErrorRecord,
    Rows,
)

SIZES = [3, 7, 40]
# Table, position, column; the third feature is looked up in two tables, the last in none.
LOCATIONS = [(0, 1, 0), (1, 2, 3), (2, 0, 2), (2, 2, 4)]


class Setup:
    """Tables on a device, some of whose rows are in slots."""

    def __init__(self, device, dim, dtype=torch.float32, *, has_slots=False, is_mean=False):
        self.device, self.generator = device, torch.Generator().manual_seed(dim)
        draw = torch.randn(sum(SIZES), dim, generator=self.generator).to(dtype)
        self.tables = list(draw.split(SIZES))
        locations = [(table, position, column * dim) for table, position, column in LOCATIONS]
        self.lookups = Lookups(locations, is_mean=is_mean)
        self.oracle = Oracle(self.tables, SGD(lr=1.0))
        self.width, self.dtype = 5 * dim, compute_dtype(dtype)
        held = [table.clone().to(device) for table in self.tables]
        firsts = [0, 3, 10, 50]
        slots, slot_of_row = draw[:0].to(device), None
        if has_slots:  # every third row is in a slot, and cold memory has other numbers
            in_slots = torch.arange(0, 50, 3)
            slot_of_row = torch.full((50,), -1, dtype=torch.int32)
            slot_of_row[in_slots] = torch.arange(len(in_slots), dtype=torch.int32)
            slot_of_row, slots = slot_of_row.to(device), draw[in_slots].to(device)
            for table, first in zip(held, firsts, strict=False):
                table[(torch.arange(len(table)) + first) % 3 == 0] = 77
        rows = Rows(held, slots)
        self.memories = DeviceMemories(
            rows, [], torch.tensor(firsts, device=device), 50, slot_of_row, None,
            ErrorRecord(device),
        )  # fmt: skip
        self.placed = DeviceLookups(self.lookups.locations, SIZES, firsts, device)

    def bags(self, how, num_samples=5, dtype=torch.int64):
        num_bags = 4 * num_samples
        lengths = torch.full((num_bags,), {"one-hot": 1, "equal": 2}.get(how, 0))
        if how not in ("one-hot", "equal"):
            lengths = torch.randint(0, 5, (num_bags,), generator=self.generator)
        highs = torch.tensor([40, 3, 7, 5]).repeat_interleave(num_samples)
        highs = highs.repeat_interleave(lengths)
        ids = (torch.rand(len(highs), generator=self.generator) * highs).to(dtype)
        offsets = None
        if how not in ("one-hot", "equal"):
            offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(dtype)
            offsets = offsets if how == "with the end" else offsets[:-1]
        weights = None
        if how == "weighted":
            weights = torch.rand(len(ids), generator=self.generator).to(self.dtype)
        return Bags(ids, offsets, weights, num_samples, num_bags)

    def look_up(self, bags):
        """The result, and what is kept."""
        ids, num_samples, num_bags = bags.ids, bags.num_samples, bags.num_bags
        on_device = [None if each is None else each.to(self.device) for each in bags[:3]]
        given = DeviceInput(*on_device, num_samples, num_bags, self.lookups.is_mean)
        kept = torch.full((len(ids) + num_bags + 1,), -7, dtype=torch.int32, device=self.device)
        result = torch.zeros(num_samples, self.width, dtype=self.dtype, device=self.device)
        pool(self.memories, self.placed, given, kept, result)
        return result.cpu(), kept.cpu()


@pytest.mark.parametrize("how", ["one-hot", "equal", "jagged", "with the end", "weighted"])
@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize(
    ("dim", "dtype", "is_mean"),
    [(16, torch.float32, False), (5, torch.float64, True), (300, torch.bfloat16, False)],
)
def test_rows_are_pooled_in_lookup_order(triton_device, how, has_slots, dim, dtype, is_mean):
    setup = Setup(triton_device, dim, dtype, has_slots=has_slots, is_mean=is_mean)
    bags = setup.bags(how, dtype=torch.int32 if dim == 5 else torch.int64)
    result, kept = setup.look_up(bags)
    assert torch.equal(result, setup.oracle.look_up(setup.lookups, bags, setup.width))
    assert setup.memories.record.take() is None
    last = 3 * bags.num_samples  # the last feature is looked up in no table
    if how != "one-hot":
        bounds = kept[len(bags.ids) :].tolist()
        last = bounds[last]
        assert bounds[-1] == len(bags.ids)
        if bags.offsets is not None:
            assert bounds[:-1] == bags.offsets[: bags.num_bags].tolist()
    assert torch.equal(kept[:last], bags.ids[:last].int())


def test_what_is_wrong_with_an_input_is_recorded_once(triton_device):
    setup = Setup(triton_device, 4)
    bags = setup.bags("one-hot")
    bags.ids[[2, 3]] = torch.tensor([40, -1])
    result, _ = setup.look_up(bags)
    assert not result[2:4, 8:12].any()
    assert setup.memories.record.take() == [NO_ROW, 2, 40, 2]
    assert setup.memories.record.take() is None
    bags = setup.bags("weighted")
    bags.weights[3] = float("nan")
    setup.look_up(bags)
    assert setup.memories.record.take() == [BAD_WEIGHT, 0, 0, 3]
    bags = setup.bags("with the end")
    bags.offsets[4] = 1000
    setup.look_up(bags)
    kind, _, number, position = setup.memories.record.take()
    assert (kind, number, position) == (BAD_OFFSETS, 1000, 4)


def test_an_id_that_is_left_out_adds_nothing(triton_device):
    setup = Setup(triton_device, 4, is_mean=True)
    bags = setup.bags("equal")
    left_out = bags.ids.view(-1, 2)[:, 1]
    expected = setup.look_up(
        bags._replace(ids=bags.ids[::2].contiguous(), offsets=torch.arange(20), num_bags=20)
    )[0]
    left_out.fill_(LEFT_OUT)
    assert torch.equal(setup.look_up(bags)[0], expected)
    assert setup.memories.record.take() is None
