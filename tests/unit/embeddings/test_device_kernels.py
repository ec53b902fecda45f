"""Triton kernels give the bits of plain PyTorch, in the interpreter or on a GPU."""

import numpy as np
import pytest
import torch

from recsys.embeddings import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.kernels.cpu.rounding import TO_NEAREST, table_key
from recsys.embeddings.kernels.cpu.row_map import LEFT_OUT
from recsys.embeddings.rows.bags import Bags, Lookups
from recsys.embeddings.rows.tables import compute_dtype
from tests.exact.oracle import Oracle

pytest.importorskip("triton")

from recsys.embeddings.kernels.triton.claim import DeviceMarks
from recsys.embeddings.kernels.triton.lookup import DeviceInput, DeviceLookups, pool
from recsys.embeddings.kernels.triton.memory import (
    BAD_GRADIENT,
    BAD_OFFSETS,
    BAD_WEIGHT,
    NO_ROW,
    DeviceMemories,
    ErrorRecord,
    Rows,
)
from recsys.embeddings.kernels.triton.row_sort import CHUNK, DeviceEntry
from recsys.embeddings.kernels.triton.update import update_rows

SIZES = [3, 7, 40]
PLAIN = SGD(lr=1.0)
# Table, position, column; the third feature is looked up in two tables, the last in none.
LOCATIONS = [(0, 1, 0), (1, 2, 3), (2, 0, 2), (2, 2, 4)]


class Setup:
    """Tables on a device, some of whose rows are in slots."""

    def __init__(
        self,
        device,
        dim,
        dtype=torch.float32,
        *,
        has_slots=False,
        is_mean=False,
        formula=PLAIN,
        seed=None,
    ):
        self.device, self.generator = device, torch.Generator().manual_seed(dim)
        self.dtype = compute_dtype(dtype)
        draw = torch.randn(sum(SIZES), dim, generator=self.generator).to(dtype)
        self.tables = list(draw.split(SIZES))
        locations = [(table, position, column * dim) for table, position, column in LOCATIONS]
        self.lookups = Lookups(locations, is_mean=is_mean)
        self.formula, self.seed, self.step = formula, seed, 0
        self.oracle = Oracle(self.tables, formula, seed)
        self.width = 5 * dim
        firsts, in_slots = [0, 3, 10, 50], torch.arange(0, 50 if has_slots else 0, 3)
        self.marks = None
        if has_slots:  # every third row is in a slot, and cold memory has other numbers
            self.marks = DeviceMarks.empty(50, len(in_slots), device)
            numbers = torch.arange(len(in_slots), dtype=torch.int32, device=device)
            self.marks.slot_of_row[in_slots.to(device)] = numbers
        states = [
            torch.zeros(50, size, dtype=self.dtype) for size in formula.state_sizes(dim).values()
        ]
        memories = []
        for every in (draw, *states):
            cold = every.clone()
            cold[in_slots] = 77
            held = [part.clone().to(device) for part in cold.split(SIZES)]
            memories.append(Rows(held, every[in_slots].to(device)))
        self.memories = DeviceMemories(
            memories[0],
            memories[1:],
            torch.tensor(firsts, device=device),
            50,
            None if self.marks is None else self.marks.slot_of_row,
            None if self.marks is None else self.marks.is_dirty,
            ErrorRecord(device),
        )
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

    def given(self, bags):
        """The input on the device."""
        on_device = [None if part is None else part.to(self.device) for part in bags[:3]]
        return DeviceInput(*on_device, bags.num_samples, bags.num_bags, self.lookups.is_mean)

    def look_up(self, bags):
        """The result, and what is kept."""
        ids, num_samples, num_bags = bags.ids, bags.num_samples, bags.num_bags
        given = self.given(bags)
        num_kept = len(ids) + num_bags + 1 + num_bags
        kept = torch.full((num_kept,), -7, dtype=torch.int32, device=self.device)
        result = torch.zeros(num_samples, self.width, dtype=self.dtype, device=self.device)
        pool(self.memories, self.placed, given, kept, result)
        self.last = given, kept
        return result.cpu(), kept.cpu()

    def update(self, calls, *, is_expected=True):
        """One step with `(bags, gradient)` each, which the oracle takes, too, if it is expected."""
        entries = []
        for bags, gradient in calls:
            self.look_up(bags)
            self.oracle.add(self.lookups, bags, gradient)
            given, kept = self.last
            num_bounds = (
                0 if given.offsets is None and bags.num_bags == len(bags.ids) else bags.num_bags
            )
            entries.append(
                DeviceEntry(
                    self.placed,
                    kept,
                    len(bags.ids),
                    bags.num_samples,
                    num_bounds,
                    self.lookups.is_mean,
                    given.weights,
                    gradient.to(self.device),
                )
            )
        self.step += 1
        rates = np.array([self.formula.rate_and_eps(self.formula.lr, self.step)] * len(SIZES))
        keys = TO_NEAREST
        if self.seed is not None:
            keys = np.array(
                [table_key(self.seed, self.step, table) for table in range(3)], np.uint64
            )
        update_rows(self.memories, self.formula, rates, keys, entries)
        if is_expected:
            self.oracle.step()

    def values(self):
        """All rows and state arrays, as one table each."""
        found = []
        for memory in (self.memories.rows, *self.memories.states):
            every = torch.cat(memory.tensors).cpu()
            if self.marks is not None:
                slots = self.marks.slot_of_row.cpu().long()
                every[slots >= 0] = memory.slots.cpu()[slots[slots >= 0]]
            found.append(every)
        return found

    def is_as_expected(self):
        """Whether rows and state are those of the oracle."""
        expected = [
            torch.cat(self.oracle.tables),
            *map(torch.cat, zip(*self.oracle.states, strict=True)),
        ]
        return all(map(torch.equal, self.values(), expected))


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
        bounds = kept[len(bags.ids) :][: bags.num_bags + 1].tolist()
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


FORMULAS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: type(formula).__name__)
@pytest.mark.parametrize(
    ("dim", "dtype", "is_mean"),
    [(16, torch.float32, False), (5, torch.float64, True), (8, torch.bfloat16, False)],
)
def test_rows_are_updated_wherever_they_are(triton_device, formula, dim, dtype, is_mean):
    has_slots = not is_mean
    is_by_row = not isinstance(formula, SGD | Adagrad | Adam)
    seed = 3 if isinstance(formula, SGD | Adam) and has_slots else None
    setup = Setup(
        triton_device, dim, dtype, has_slots=has_slots, is_mean=is_mean, formula=formula, seed=seed
    )
    for hows in (["one-hot"], ["jagged", "equal"], ["with the end" if is_by_row else "weighted"]):
        calls = []
        for how in hows:
            bags = setup.bags(how, 3)
            gradient = torch.randn(3, setup.width, generator=setup.generator, dtype=setup.dtype)
            # Squares of these add up exactly, in whatever order.
            calls.append((bags, (gradient * 4).round() / 4 if is_by_row else gradient))
        setup.update(calls)
        if is_by_row and is_mean:  # of which thirds are no such numbers
            continue
        assert setup.is_as_expected(), hows
    if has_slots:
        changed = setup.memories.rows.slots.cpu() != torch.cat(setup.tables)[::3]
        assert torch.equal(changed.any(1), setup.memories.is_dirty.cpu().bool())
    assert setup.memories.record.take() is None


def test_many_lookups_of_a_row_are_summed_chunk_by_chunk(triton_device):
    setup = Setup(triton_device, 4, torch.float64, formula=SGD(lr=1.0))
    bags = setup.bags("one-hot", 5 * CHUNK)
    bags.ids[: 4 * CHUNK] = 11
    gradient = torch.randint(-9, 9, (5 * CHUNK, setup.width), generator=setup.generator).double()
    setup.update([(bags, gradient)])  # whole numbers, which add up exactly in any order
    assert setup.is_as_expected()


def test_nothing_is_updated_while_there_is_an_error(triton_device):
    setup = Setup(triton_device, 4, has_slots=True)
    bags = setup.bags("one-hot")
    gradient = torch.ones(5, setup.width)
    bags.ids[7] = 3  # of table 0, which has three rows
    setup.update([(bags, gradient)], is_expected=False)
    assert torch.equal(setup.values()[0], torch.cat(setup.tables))
    assert setup.memories.record.take() == [NO_ROW, 0, 3, 7]
    bags.ids[7] = 1
    gradient[2, 0] = float("inf")  # of the first lookup, that of feature 1 in table 0
    setup.update([(bags, gradient)], is_expected=False)
    assert torch.equal(setup.values()[0], torch.cat(setup.tables))
    assert setup.memories.record.take() == [BAD_GRADIENT, 0, 1, 1]
