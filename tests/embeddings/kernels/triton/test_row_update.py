"""The row update against that of torch operations."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recsys._support.cuda.replays import replaying
from recsys.embeddings.kernels.cpu.rounding import TO_NEAREST, table_key
from recsys.embeddings.kernels.cpu.slot_arrays import DIRTY, NOWHERE, PINNED
from recsys.embeddings.kernels.torch.bags import TorchBags, lengths_of
from recsys.embeddings.kernels.torch.errors import NO_ROW, errors_on
from recsys.embeddings.kernels.torch.row_space import RowNumbers, SlotRows, TorchRowSpace
from recsys.embeddings.kernels.torch.slots import TorchSlots
from recsys.embeddings.kernels.triton.row_update import _settings, row_update
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Lookups
from recsys.embeddings.rows.row_space import compute_dtype
from recsys.errors import NonFiniteGradient
from tests.fake_replays import record_on_cpu
from tests.torch_kernels import row_update as by_torch

OPTIMIZERS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1, betas=(0.8, 0.9), eps=0.5),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
HOW = ["one-hot", "jagged", "weighted", "mean", "weighted mean", "padding", "mean padding"]
SIZES = [1, 6, 40]
TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    # A sum in another order may round to the next number of 16 bits.
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-2},
}

# An interpreted update takes half a second.
few = settings(max_examples=max(6, settings.default.max_examples // 6))


class Entry(NamedTuple):
    """A mini-batch of four features: the third is looked up in two tables, the last in none.

    Attributes:
        lookups: Their columns are in another order, and some columns belong to none.
        bags: The input.
        gradient: Of all columns; not contiguous.
    """

    lookups: Lookups
    bags: TorchBags
    gradient: torch.Tensor


def make_entry(seed, dim, batch_size, how, dtype, *, longest=4, are_integers=False):
    generator = torch.Generator().manual_seed(seed)
    computed = compute_dtype(dtype)
    lookups = Lookups(
        tables=np.array([0, 1, 2, 2], np.uint64),
        positions=np.array([1, 2, 0, 2], np.uint64),
        columns=np.array([0, 3, 2, 4], np.uint64) * np.uint64(dim),
        width=5 * dim,
    )
    lengths = torch.ones(4 * batch_size, dtype=torch.int64)
    if how != "one-hot":
        lengths = torch.randint(0, longest + 1, (4 * batch_size,), generator=generator)
    highs = torch.tensor([40, 1, 6, 5]).repeat_interleave(batch_size).repeat_interleave(lengths)
    values = (torch.rand(len(highs), generator=generator) * highs).long()
    weights = torch.rand(len(values), generator=generator, dtype=computed)
    bags = TorchBags.from_tensors(
        values.int() if seed % 2 else values,
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(
            torch.int32 if seed % 2 else torch.int64
        ),
        weights if "weighted" in how else None,
        batch_size,
        is_mean="mean" in how,
        is_one_hot=how == "one-hot" or None,
        padding=0 if "padding" in how else None,
    )
    wide = torch.randn(batch_size, 5 * dim + 3, generator=generator, dtype=computed)
    if are_integers:
        wide = (4 * wide).round()
    return Entry(lookups, bags, wide[:, : 5 * dim])


def on(device, entry):
    bags = TorchBags(*(each.to(device) if torch.is_tensor(each) else each for each in entry.bags))
    return LedgerEntry(entry.lookups, bags, entry.gradient.to(device))


def make_tables(dim, dtype, optimizer, seed=0):
    """The tables, and then each state of all tables."""
    generator = torch.Generator().manual_seed(seed)
    sizes = list(optimizer.state_sizes(dim).values())
    tables = [torch.randn(size, dim, generator=generator).to(dtype) for size in SIZES]
    states = [
        [torch.rand(rows, size, generator=generator).to(compute_dtype(dtype)) for rows in SIZES]
        for size in sizes
    ]
    return [tables, *states]


def train(update, device, entries, optimizer, dim, dtype, *, num_steps=1, seed=None, factors=1):
    """Tables and states after some steps by all entries."""
    arrays = [[table.to(device) for table in each] for each in make_tables(dim, dtype, optimizer)]
    space, *states = [TorchRowSpace(each) for each in arrays]
    for step in range(1, num_steps + 1):
        rates = [
            optimizer.rate_and_eps(optimizer.lr * factor, step)
            for factor in np.broadcast_to(factors, 3)
        ]
        keys = TO_NEAREST
        if seed is not None:
            keys = np.array([table_key(seed, step, table) for table in range(3)], np.uint64)
        ledger = [on(device, entry) for entry in entries]
        update(space, states, optimizer, np.array(rates), ledger, keys)
    return [table.cpu() for each in arrays for table in each]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
@few
@given(
    seed=st.integers(0, 2**31),
    dim=st.sampled_from([1, 6, 33]),
    batch_size=st.integers(0, 9),
    how=st.lists(st.sampled_from(HOW), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    factors=st.sampled_from([1, (1, 2, 3)]),
)
def test_rows_are_updated_as_by_torch(
    triton_device, optimizer, seed, dim, batch_size, how, dtype, factors
):
    entries = [
        make_entry(seed + number, dim, batch_size, each, dtype) for number, each in enumerate(how)
    ]
    entries = [entry._replace(lookups=entries[0].lookups) for entry in entries]
    arguments = (triton_device, entries, optimizer, dim, dtype)

    found = train(row_update, *arguments, factors=factors)

    expected = train(by_torch, *arguments, factors=factors)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCES[ours.dtype])


@few
@given(
    seed=st.integers(-(2**40), 2**40),
    dim=st.sampled_from([1, 6, 16]),
    how=st.sampled_from(["one-hot", "jagged", "padding"]),
    optimizer=st.sampled_from(OPTIMIZERS),
    dtype=st.sampled_from(DTYPES),
    is_by_chance=st.booleans(),
)
def test_sums_of_integers_give_the_bits_of_torch_up_to_square_roots(
    triton_device, seed, dim, how, optimizer, dtype, is_by_chance
):
    entries = [make_entry(abs(seed), dim, 50, how, dtype, are_integers=True)]
    arguments = (triton_device, entries, optimizer, dim, dtype)
    chance = seed if is_by_chance else None

    found = train(row_update, *arguments, num_steps=2, seed=chance)

    expected = train(by_torch, *arguments, num_steps=2, seed=chance)
    # On a GPU torch's mean multiplies by 1 / D.
    is_mean_exact = triton_device.type == "cpu" or dim & (dim - 1) == 0
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if (number >= len(SIZES) and is_mean_exact) or isinstance(optimizer, SGD):
            assert torch.equal(ours, theirs)
        else:  # torch's square root on a CPU is not rounded to nearest
            torch.testing.assert_close(ours, theirs, **TOLERANCES[dtype])


def one_table(values, gradient):
    """One-hot bags of one feature, in a table with as many columns as the gradient."""
    lookups = Lookups.one(0, gradient.shape[1])
    bags = TorchBags.from_tensors(values, values, None, len(values), is_mean=False, is_one_hot=True)
    return Entry(lookups, bags, gradient)


def updated(device, entry, num_rows):
    """A table of zeros after an update by SGD with a rate of 1."""
    table = torch.zeros(num_rows, entry.gradient.shape[1], device=device)
    rates = np.array([[1.0, 0.0]])
    row_update(TorchRowSpace([table]), [], SGD(lr=1.0), rates, [on(device, entry)])
    return table.cpu()


@pytest.mark.in_ci("-1-4", "33-4", "545-3", "2100-256")
@pytest.mark.parametrize(
    ("num_lookups", "dim"),
    [(1, 4), (2, 4), (31, 4), (32, 4), (33, 4), (64, 4), (65, 4), (513, 1), (545, 3), (2100, 256)],
)
def test_all_lookups_may_be_of_one_row(triton_device, num_lookups, dim):
    """With D = 256, more of them than one pass over sums of chunks takes."""
    gradient = torch.randint(-9, 9, (num_lookups, dim)).float()
    entry = one_table(torch.zeros(num_lookups, dtype=torch.int64), gradient)

    found = updated(triton_device, entry, 1)

    assert torch.equal(found, -gradient.sum(0, keepdim=True))


@pytest.mark.in_ci("513")
@pytest.mark.parametrize("num_lookups", [1, 511, 512, 513, 1500])
def test_all_rows_may_be_distinct(triton_device, num_lookups):
    gradient = torch.randn(num_lookups, 4)
    rows = torch.randperm(num_lookups)

    found = updated(triton_device, one_table(rows, gradient), num_lookups)

    assert torch.equal(found[rows], -gradient)


@few
@given(
    lengths=st.lists(
        st.sampled_from([0, 1, 2, 3, 31, 32, 33, 34, 63, 64, 65, 97, 200]), min_size=1, max_size=12
    ),
    seed=st.integers(0, 99),
)
@example(lengths=[33, 33, 33, 65, 2, 33], seed=0)
def test_runs_of_any_lengths_lie_beside_each_other(triton_device, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows = rows[torch.randperm(len(rows), generator=generator)]
    gradient = torch.randint(-9, 9, (len(rows), 3), generator=generator).float()

    found = updated(triton_device, one_table(rows, gradient), len(lengths))

    assert torch.equal(found, torch.zeros(len(lengths), 3).index_add_(0, rows, gradient, alpha=-1))


def test_the_order_of_a_sum_depends_on_the_rows_lookups_alone(triton_device):
    """Not on other rows, nor on whether a run's first place is a multiple of anything."""
    gradient = 1e4 * torch.randn(200, 5)
    of_row = torch.arange(200) % 2 == 0
    alone = updated(triton_device, one_table(torch.zeros(100, dtype=int), gradient[of_row]), 1)

    for before in (0, 1, 7, 50):
        others = (torch.arange(100) % 50 >= before) * 2  # rows 0 and 2
        rows = torch.ones(200, dtype=torch.int64)
        rows[~of_row] = others
        among = updated(triton_device, one_table(rows, gradient), 3)
        assert torch.equal(among[1:2], alone)


@pytest.mark.in_ci("cuda-dtype2")
@pytest.mark.parametrize("dtype", DTYPES)
@few
@given(seed=st.integers(0, 2**31), optimizer=st.sampled_from(OPTIMIZERS), how=st.sampled_from(HOW))
def test_slots_in_any_order_give_the_bits_of_tables(triton_device, dtype, seed, optimizer, how):
    dim, num_rows = 6, sum(SIZES)
    entry = make_entry(seed, dim, 40, how, dtype)
    lookups = entry.lookups.of_tables([0, 1])  # a value has one slot, so it is looked up once
    entry = entry._replace(lookups=lookups)
    expected = train(
        row_update, triton_device, [entry], optimizer, dim, dtype, seed=5, factors=(1, 2, 3)
    )

    numbers = RowNumbers([0, 1, 7], SIZES, num_rows, dim, dtype, triton_device)
    slots = TorchSlots.empty(num_rows, num_rows + 4, triton_device)
    slot_of_row = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)) + 2
    slots.row_of_slot[slot_of_row.to(triton_device)] = (
        torch.arange(num_rows).int().to(triton_device)
    )
    spaces = []
    for each in make_tables(dim, dtype, optimizer):
        in_slots = torch.zeros(num_rows + 4, each[0].shape[1], dtype=each[0].dtype)
        in_slots[slot_of_row] = torch.cat(each)
        spaces.append(SlotRows(in_slots.to(triton_device), slots, numbers))
    first_row_of_value = rows_before(entry, [7, 0, 1, 0])
    slot_of_value = slot_of_row[entry.bags.values + first_row_of_value].int()
    is_padding = entry.bags.values == (-1 if entry.bags.padding is None else entry.bags.padding)
    bags = entry.bags.at_slots(torch.where(is_padding, NOWHERE, slot_of_value))
    rates = [optimizer.rate_and_eps(optimizer.lr * factor, 1) for factor in (1, 2, 3)]
    keys = np.array([table_key(5, 1, table) for table in range(3)], np.uint64)
    ledger = [on(triton_device, entry._replace(bags=bags))]
    row_update(spaces[0], spaces[1:], optimizer, np.array(rates), ledger, keys)

    for number, space in enumerate(spaces):
        ours, theirs = space.rows.cpu()[slot_of_row], expected[3 * number : 3 * number + 3]
        assert torch.equal(ours, torch.cat(theirs))


@pytest.mark.parametrize("update", [row_update, by_torch], ids=["triton", "torch"])
def test_the_slots_of_updated_rows_are_marked_and_no_others(triton_device, update):
    values, gradient = torch.tensor([4, 1, 4, -1, 6]), torch.ones(5, 3)
    entry = one_table(values, gradient)
    entry = on(triton_device, entry._replace(bags=entry.bags._replace(padding=-1)))
    numbers = RowNumbers([0], [9], 9, 3, torch.float32, triton_device)
    slots = TorchSlots.empty(9, 8, triton_device)
    slots.flags[1] = PINNED
    space = SlotRows(torch.zeros(8, 3, device=triton_device), slots, numbers)
    arguments = space, [], SGD(lr=0.1), np.array([[0.1, 0.0]])

    entry.gradient[0, 0] = torch.nan
    update(*arguments, [entry])
    assert slots.flags.tolist() == [0, PINNED, 0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(NonFiniteGradient):
        space.errors.check()

    entry.gradient[0, 0] = 1
    update(*arguments, [entry])
    assert slots.flags.tolist() == [0, PINNED | DIRTY, 0, 0, DIRTY, 0, DIRTY, 0, 0]


def test_rows_of_one_table_are_rounded_by_their_ids(triton_device):
    gradient = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    entry = one_table(torch.arange(40), gradient)
    arguments = [], SGD(lr=0.01), np.array([[0.01, 0.0]])
    keys = np.array([table_key(3, 1, 0)], np.uint64)
    found = []

    for update in (row_update, by_torch):
        table = torch.ones(40, 4, dtype=torch.bfloat16, device=triton_device)
        update(TorchRowSpace([table]), *arguments, [on(triton_device, entry)], keys)
        found.append(table.cpu())

    assert torch.equal(*found)


def rows_before(entry, first_row_of_feature):
    """The first row of each value's table."""
    bags = entry.bags
    offsets = bags.bounds()
    lengths = offsets[bags.batch_size :: bags.batch_size] - offsets[: -1 : bags.batch_size]
    return torch.tensor(first_row_of_feature).repeat_interleave(lengths)


def test_state_may_have_other_row_numbers_than_its_table(triton_device):
    """A table without state has none of the rows that the state's numbers count."""
    optimizer = Adam(lr=0.1)
    entry = make_entry(0, 4, 9, "jagged", torch.float32)
    entry = entry._replace(lookups=entry.lookups.of_tables([0, 2]))

    def train_without(update):
        tables, *states = make_tables(4, torch.float32, optimizer)
        states = [[each[0], each[1][:0], each[2]] for each in states]
        arrays = [[table.to(triton_device) for table in each] for each in (tables, *states)]
        space, *of_states = [TorchRowSpace(each) for each in arrays]
        rates = np.array([optimizer.rate_and_eps(0.1, 1)] * 3)
        update(space, of_states, optimizer, rates, [on(triton_device, entry)])
        return [table.cpu() for each in arrays for table in each]

    for ours, theirs in zip(train_without(row_update), train_without(by_torch), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.in_ci("nan", "inf-Adam-jagged")
@pytest.mark.parametrize("how", ["one-hot", "jagged"])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), Adam(lr=0.1)], ids=["SGD", "Adam"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_that_is_not_finite_changes_no_row(triton_device, how, optimizer, wrong):
    entry = make_entry(1, 4, 9, how, torch.float32)
    looked_up = torch.nonzero(entry.bags.bounds().diff()[9:18]).flatten()  # in column 0
    entry.gradient[looked_up[-1], 3] = wrong
    before = [table for each in make_tables(4, torch.float32, optimizer) for table in each]

    found = train(row_update, triton_device, [entry], optimizer, 4, torch.float32)

    assert all(torch.equal(*pair) for pair in zip(found, before, strict=True))
    with pytest.raises(NonFiniteGradient):
        errors_on(triton_device).check()
    entry.gradient[looked_up[-1], 3] = 1
    found = train(row_update, triton_device, [entry], optimizer, 4, torch.float32)
    assert not torch.equal(found[0], before[0])


@pytest.mark.parametrize("num_lookups", [2, 40])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of numpy, which interprets
def test_a_sum_that_is_not_finite_changes_no_row(triton_device, num_lookups):
    """The second row comes first, so that it would be updated before."""
    rows = torch.tensor([*[1] * num_lookups, 0])
    gradient = torch.full((num_lookups + 1, 4), 2e38)
    gradient[1:-2] = 0

    found = updated(triton_device, one_table(rows, gradient), 2)

    assert not found.any()
    with pytest.raises(NonFiniteGradient):
        errors_on(triton_device).check()


def test_the_gradient_of_an_empty_bag_and_of_padding_may_be_anything(triton_device):
    entry = make_entry(3, 4, 9, "padding", torch.float32)
    lengths = lengths_of(entry.bags)[9:18]
    assert (lengths == 0).any()
    expected = train(row_update, triton_device, [entry], SGD(lr=0.1), 4, torch.float32)
    entry.gradient[:, :4][lengths == 0] = torch.nan

    found = train(row_update, triton_device, [entry], SGD(lr=0.1), 4, torch.float32)

    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    errors_on(triton_device).check()


def test_rows_rest_until_an_earlier_error_has_been_raised(triton_device):
    entry = make_entry(0, 2, 3, "one-hot", torch.float32)
    before = make_tables(2, torch.float32, SGD(lr=0.1))[0]
    arguments = (triton_device, [entry], SGD(lr=0.1), 2, torch.float32)
    errors_on(triton_device).note(NO_ROW, torch.tensor([False, True], device=triton_device))

    found = train(row_update, *arguments)

    assert all(torch.equal(*pair) for pair in zip(found, before, strict=True))
    with pytest.raises(AssertionError, match="position 1"):
        errors_on(triton_device).check()
    assert not torch.equal(train(row_update, *arguments)[0], before[0])


@pytest.mark.in_ci("SGD-dtype1", "Adam-dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.5), Adam(lr=0.1)], ids=["SGD", "Adam"])
def test_replayed_updates_are_those_that_are_launched(triton_device, monkeypatch, optimizer, dtype):
    """Ids, gradients, rates and keys of rounding are others in each step, memory is the same."""
    if triton_device.type == "cpu":
        record_on_cpu(monkeypatch)
    entries = [on(triton_device, make_entry(2 * seed, 4, 9, "one-hot", dtype)) for seed in range(3)]
    gradient = entries[0].gradient.clone()
    numbers = [each.gradient.clone() for each in entries]

    def run():
        arrays = [
            [each.to(triton_device) for each in of] for of in make_tables(4, dtype, optimizer)
        ]
        space, *states = [TorchRowSpace(each) for each in arrays]
        for step, (entry, number) in enumerate(zip(entries, numbers, strict=True), 1):
            gradient.copy_(number)
            rates = np.array(
                [optimizer.rate_and_eps(0.1 / (step + table), step) for table in SIZES]
            )
            keys = np.array([table_key(7, step, table) for table in range(3)], np.uint64)
            row_update(
                space,
                states,
                optimizer,
                rates,
                [entries[0]._replace(bags=entry.bags, gradient=gradient)],
                keys,
            )
        return space, [table.cpu() for each in arrays for table in each]

    _, expected = run()
    with replaying():
        space, found = run()

    assert len(space.replays._recorded) == 1
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_nothing_is_updated_without_lookups_or_rows(triton_device):
    entry = make_entry(0, 2, 0, "jagged", torch.float32)
    before = make_tables(2, torch.float32, SGD(lr=0.1))[0]

    found = train(row_update, triton_device, [entry], SGD(lr=0.1), 2, torch.float32)

    assert all(torch.equal(*pair) for pair in zip(found, before, strict=True))
    no_lookup = one_table(torch.zeros(1, dtype=torch.int64), torch.ones(1, 3))
    assert not len(updated(triton_device, no_lookup, 0))


def test_nothing_waits_for_the_device(triton_device, no_round_trips):
    entries = [make_entry(0, 4, 9, how, torch.bfloat16) for how in ("one-hot", "mean padding")]
    entries[1] = entries[1]._replace(lookups=entries[0].lookups)

    with no_round_trips:
        found = train(row_update, triton_device, entries, Adam(lr=0.1), 4, torch.bfloat16, seed=1)

    assert found


def test_each_stream_has_settings_of_its_own():
    """They are copied to the device on the current stream, and no other waits for it."""
    rates = np.array([[0.1, 1e-8]]).tobytes()
    found = [_settings(rates, (0.0, 0.0), (0,), None, torch.device("cpu"), on) for on in (0, 1, 0)]

    assert found[0] is found[2]
    assert found[0] is not found[1]
