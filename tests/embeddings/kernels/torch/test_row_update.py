import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.cpu import row_update as numba
from recsys.embeddings.kernels.cpu.rounding import TO_NEAREST
from recsys.embeddings.kernels.torch.errors import NO_ROW
from recsys.embeddings.kernels.torch.row_space import TorchRowSpace
from recsys.embeddings.kernels.torch.row_update import merge_by_row, row_update
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.rounding import table_key
from recsys.embeddings.rows.row_space import RowSpace, compute_dtype

OPTIMIZERS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1, betas=(0.8, 0.9), eps=0.5),
]
HOW = ["sum", "mean", "weighted", "weighted mean"]


def states_of(case, optimizer):
    """By state: of every table."""
    dtype = compute_dtype(case.tables[0].dtype)
    sizes = optimizer.state_sizes(case.tables[0].shape[1]).values()
    return [[torch.zeros(len(table), size, dtype=dtype) for table in case.tables] for size in sizes]


def ledger_of(cases, kind):
    dtype = compute_dtype(cases[0].tables[0].dtype)
    return [
        LedgerEntry(
            case.lookups,
            case.bags() if kind is TorchRowSpace else case.numba_bags(),
            case.gradient(dtype),
        )
        for case in cases
    ]


def train(kind, cases, optimizer, *, num_steps=2, seed=None, factors=(1, 1, 1)):
    """Tables and states behind some steps by all cases; by numba or by torch."""
    tables, states = cases[0].copies(), states_of(cases[0], optimizer)
    update = row_update if kind is TorchRowSpace else numba.row_update
    for step in range(1, num_steps + 1):
        rates = [optimizer.rate_and_eps(optimizer.lr * factor, step) for factor in factors]
        keys = TO_NEAREST
        if seed is not None:
            keys = np.array([table_key(seed, step, table) for table in range(3)], np.uint64)
        spaces = [kind(state) for state in states]
        update(kind(tables), spaces, optimizer, np.array(rates), ledger_of(cases, kind), keys)
    return [*tables, *(table for state in states for table in state)]


@given(
    seed=st.integers(0, 2**31),
    dim=st.integers(1, 6),
    batch_size=st.integers(0, 9),
    entries=st.lists(
        st.tuples(st.sampled_from([None, 0, 1, 4]), st.sampled_from(HOW)), min_size=1, max_size=3
    ),
    optimizer=st.sampled_from(OPTIMIZERS),
    factors=st.sampled_from([(1, 1, 1), (1, 2, 3)]),
)
def test_rows_move_as_by_the_kernel_for_the_cpu(
    make_case, seed, dim, batch_size, entries, optimizer, factors
):
    cases = [
        make_case(seed + number, dim, batch_size, longest, how)
        for number, (longest, how) in enumerate(entries)
    ]
    cases = [case._replace(lookups=cases[0].lookups) for case in cases]

    found = train(TorchRowSpace, cases, optimizer, factors=factors)

    expected = train(RowSpace, cases, optimizer, factors=factors)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("optimizer", OPTIMIZERS[:2], ids=["SGD", "Adagrad"])
def test_one_hot_gradients_are_added_in_the_order_of_the_kernel_for_the_cpu(make_case, optimizer):
    case = make_case(0, 4, 200, None, dtype=torch.float32)

    found = train(TorchRowSpace, [case], optimizer, num_steps=1)

    for ours, theirs in zip(found, train(RowSpace, [case], optimizer, num_steps=1), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.in_ci("bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@given(seed=st.integers(-(2**40), 2**40), is_by_chance=st.booleans())
def test_rows_of_16_bits_are_rounded_as_by_the_kernel_for_the_cpu(
    make_case, seed, dtype, is_by_chance
):
    case = make_case(abs(seed), 5, 30, None, dtype=dtype)
    chance = seed if is_by_chance else None

    found = train(TorchRowSpace, [case], SGD(lr=0.01), num_steps=1, seed=chance)

    expected = train(RowSpace, [case], SGD(lr=0.01), num_steps=1, seed=chance)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_only_rows_that_were_looked_up_move_and_their_state(make_case):
    case = make_case(7, 4, 2, None)

    found = train(TorchRowSpace, [case], Adam(lr=0.1), num_steps=1)

    before = case.tables + [state for states in states_of(case, Adam(lr=0.1)) for state in states]
    looked_up = [{2, 3}, {4, 5}, {0, 1, 4, 5}] * 3
    for table, (ours, known, places) in enumerate(zip(found, before, looked_up, strict=True)):
        rows = {int(case.values[place]) for place in places}
        has_moved = (ours != known).any(1)
        assert set(has_moved.nonzero().flatten().tolist()) == rows, table


def test_distinct_rows_come_in_order_and_places_left_over_repeat_the_first(make_case):
    case = make_case(0, 2, 3, None)
    case.values[:] = torch.tensor([9, 9, 5, 2, 2, 2, 0, 1, 1, 0, 0, 0])
    space = TorchRowSpace(case.copies())

    merged = merge_by_row(space, ledger_of([case], TorchRowSpace))

    assert merged.rows.tolist() == [2, 3, 4, 10, 11, 15, 19, 2, 2, 2, 2, 2]
    assert bool(merged.is_row.all())
    of_first = case.gradient()[:, :2].sum(0)
    torch.testing.assert_close(merged.sums[0], of_first)
    assert torch.equal(merged.sums[7], merged.sums[0])


def test_a_mini_batch_of_padding_alone_moves_nothing(make_case):
    case = make_case(0, 2, 3, 4, "mean")
    case.values[:] = 1
    tables, states = case.copies(), states_of(case, Adam(lr=0.1))
    entry = LedgerEntry(case.lookups, case.bags(padding=1), case.gradient())

    spaces = [TorchRowSpace(state) for state in states]
    row_update(TorchRowSpace(tables), spaces, Adam(lr=0.1), np.full((3, 2), 0.1), [entry])

    assert all(torch.equal(*pair) for pair in zip(tables, case.tables, strict=True))
    assert not any(table.any() for state in states for table in state)


def test_rows_rest_until_what_is_wrong_has_been_raised(make_case):
    case = make_case(0, 2, 3, None)
    tables = case.copies()
    space = TorchRowSpace(tables)
    ledger = ledger_of([case], TorchRowSpace)
    space.errors.note(NO_ROW, torch.tensor([False, True]))

    row_update(space, [], SGD(lr=0.1), np.ones((3, 2)), ledger)

    assert all(torch.equal(*pair) for pair in zip(tables, case.tables, strict=True))
    space.errors.report(KeyError)
    with pytest.raises(KeyError, match="1"):
        row_update(space, [], SGD(lr=0.1), np.ones((3, 2)), ledger)
    row_update(space, [], SGD(lr=0.1), np.ones((3, 2)), ledger)
    assert not torch.equal(tables[0], case.tables[0])
