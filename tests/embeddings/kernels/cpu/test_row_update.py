import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.cpu import row_update as module
from recsys.embeddings.kernels.cpu.rounding import TO_NEAREST, table_key
from recsys.embeddings.kernels.cpu.row_update import row_update
from recsys.embeddings.optimizer import (
    SGD,
    Adagrad,
    Adam,
    PartialRowWiseAdam,
    RowWiseAdagrad,
)
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Bags, Lookups
from recsys.embeddings.rows.row_space import RowSpace, compute_dtype
from tests.torch_kernels import fold, round_rows, signed, update_reference

OPTIMIZERS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1, betas=(0.8, 0.9), eps=0.5),
]
SIZES = [3, 7, 1, 40]
each_optimizer = pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__
)


def make_tables(dim, generator, dtype=torch.float64):
    return [torch.randn(size, dim, generator=generator, dtype=dtype) for size in SIZES]


def make_entry(
    dim,
    batch_size,
    generator,
    dtype=torch.float64,
    *,
    longest=None,
    is_mean=False,
    has_weights=True,
):
    """Five lookups over four tables: the last table is looked up by two features."""
    tables = [0, 1, 2, 3, 3]
    lookups = Lookups(
        tables=np.array(tables, np.uint64),
        positions=np.array([2, 0, 1, 3, 4], np.uint64),
        columns=np.arange(5, dtype=np.uint64) * np.uint64(dim),
        width=5 * dim,
    )
    size_of_position = {2: 3, 0: 7, 1: 1, 3: 40, 4: 40}
    if longest is None:
        lengths = torch.ones(5 * batch_size, dtype=torch.int64)
    else:
        lengths = torch.randint(0, longest + 1, (5 * batch_size,), generator=generator)
    values = torch.cat(
        [
            torch.randint(
                0, size_of_position[bag // batch_size], (int(length),), generator=generator
            )
            for bag, length in enumerate(lengths)
        ]
        or [torch.empty(0, dtype=torch.int64)]
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    weights = torch.rand(len(values), generator=generator, dtype=dtype) if longest else None
    if is_mean or not has_weights:
        weights = None
    bags = Bags.from_tensors(values, offsets, weights, batch_size, is_mean=is_mean)
    gradient = torch.randn(batch_size, 5 * dim, generator=generator, dtype=dtype)
    return LedgerEntry(lookups, bags, gradient)


def by_value(entry, table):
    """Rows and gradients of one table's lookups, one by one, in lookup order."""
    rows, gradients = [], []
    bags, lookups = entry.bags, entry.lookups
    dim = lookups.width // 5
    for number, position, column in zip(
        lookups.tables.tolist(), lookups.positions.tolist(), lookups.columns.tolist(), strict=True
    ):
        if number != table:
            continue
        for sample in range(bags.batch_size):
            bag = position * bags.batch_size + sample
            begin, end = (bag, bag + 1) if bags.offsets is None else bags.offsets[bag : bag + 2]
            for value in range(begin, end):
                scale = 1.0 if bags.weights is None else bags.weights[value]
                if bags.is_mean:
                    scale /= end - begin
                rows.append(int(bags.values[value]))
                gradients.append(entry.gradient[sample, column : column + dim] * scale)
    if not rows:
        return torch.empty(0, dtype=torch.int64), entry.gradient.new_empty(0, dim)
    return torch.tensor(rows), torch.stack(gradients)


def states_of(tables, optimizer):
    """By state: of every table."""
    sizes = optimizer.state_sizes(tables[0].shape[1]).values()
    dtype = compute_dtype(tables[0].dtype)
    return [[torch.zeros(len(table), size, dtype=dtype) for table in tables] for size in sizes]


def keys_of(tables, seed, step):
    """None rounds to nearest."""
    if seed is None:
        return TO_NEAREST
    return np.array([table_key(seed, step, number) for number in range(len(tables))], np.uint64)


def run(tables, optimizer, ledgers, num_threads=2, seed=None):
    """Our update of copies, ledger by ledger; the tables and their states."""
    torch.set_num_threads(num_threads)
    tables = [table.clone() for table in tables]
    states = states_of(tables, optimizer)
    spaces = [RowSpace(state) for state in states]
    for step, ledger in enumerate(ledgers, 1):
        rates_T2 = np.array([optimizer.rate_and_eps(optimizer.lr, step)] * len(tables))
        keys_T = keys_of(tables, seed, step)
        row_update(RowSpace(tables), spaces, optimizer, rates_T2, ledger, keys_T)
    return [*tables, *(table for state in states for table in state)]


@each_optimizer
@given(
    seed=st.integers(0, 2**31),
    dim=st.sampled_from([1, 2, 3, 5, 7, 8, 9, 13, 20]),  # of those with a kernel 8 alone
    batch_sizes=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    longest=st.sampled_from([None, 1, 4]),
    is_mean=st.booleans(),
    num_threads=st.integers(1, 9),
)
def test_every_row_moves_once_by_the_sum_of_its_gradients(
    optimizer, seed, dim, batch_sizes, longest, is_mean, num_threads
):
    generator = torch.Generator().manual_seed(seed)
    tables = make_tables(dim, generator)
    ledgers = [
        [make_entry(dim, size, generator, longest=longest, is_mean=is_mean) for size in batch_sizes]
        for _ in range(2)
    ]

    found = run(tables, optimizer, ledgers, num_threads)

    expected = [table.clone() for table in tables]
    states = states_of(tables, optimizer)
    for step, ledger in enumerate(ledgers, 1):
        for number in range(len(tables)):
            parts = [by_value(entry, number) for entry in ledger]
            rows, gradients = (torch.cat(part) for part in zip(*parts, strict=True))
            state = [of_table[number] for of_table in states]
            update_reference(optimizer, expected[number], state, rows, gradients, step)
    expected += [table for state in states for table in state]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@each_optimizer
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"longest": 4, "has_weights": False},
        {"longest": 4},
        {"longest": 4, "is_mean": True},
    ],
    ids=["one_hot", "bags", "weighted", "mean"],
)
@pytest.mark.parametrize(
    ("dim", "dtype"), [(8, torch.float64), (16, torch.float32), (64, torch.float32)], ids=str
)
def test_a_dim_with_a_kernel_of_its_own_has_the_bits_of_the_kernel_for_any(
    optimizer, kind, dim, dtype, monkeypatch
):
    generator = torch.Generator().manual_seed(dim)
    tables = make_tables(dim, generator, dtype)
    ledgers = [[make_entry(dim, 40, generator, dtype, **kind)]] * 2
    asked, kernel_for = [], module._row_update_kernel
    monkeypatch.setattr(
        module, "_row_update_kernel", lambda dim, line: asked.append(dim) or kernel_for(dim, line)
    )
    found = run(tables, optimizer, ledgers)

    monkeypatch.setattr(module, "_COMPILED_DIMS", ())
    expected = run(tables, optimizer, ledgers)

    assert asked == [dim, dim, 0, 0]
    assert not torch.equal(found[0], tables[0])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(lr=0.5), lambda tables: torch.optim.SGD(tables, lr=0.5)),
        (Adagrad(lr=0.1), lambda tables: torch.optim.Adagrad(tables, lr=0.1)),
        (Adam(lr=0.1), lambda tables: torch.optim.SparseAdam(tables, lr=0.1)),
    ],
    ids=["SGD", "Adagrad", "Adam"],
)
def test_steps_are_those_of_torchs_optimizer_on_sparse_gradients(ours, theirs, dtype, rtol):
    generator = torch.Generator().manual_seed(0)
    tables = make_tables(8, generator, dtype)
    ledgers = [[make_entry(8, 9, generator, dtype, longest=3)] for _ in range(4)]

    found = run(tables, ours, ledgers)

    optimizer = theirs(tables)
    for (entry,) in ledgers:
        for number, table in enumerate(tables):
            rows, gradients = by_value(entry, number)
            gradient = torch.sparse_coo_tensor(
                rows.unsqueeze(0), gradients, table.shape, check_invariants=True
            )
            table.grad = gradient.coalesce()
        # torch's Adagrad makes sparse tensors; torch warns unless told whether to check them.
        with torch.sparse.check_sparse_tensor_invariants(enable=True):
            optimizer.step()
    for moved, expected in zip(found, tables, strict=False):
        torch.testing.assert_close(moved, expected, rtol=rtol, atol=rtol)


def test_every_table_has_a_rate_of_its_own():
    generator = torch.Generator().manual_seed(0)
    tables = make_tables(4, generator)
    entry = make_entry(4, 20, generator)
    rates_T2 = np.array([[0.1, 0.0], [0.2, 0.0], [0.0, 0.0], [0.4, 0.0]])
    moved = [table.clone() for table in tables]

    row_update(RowSpace(moved), [], SGD(lr=7.0), rates_T2, [entry])

    for number, (table, (rate, _)) in enumerate(zip(tables, rates_T2, strict=True)):
        update_reference(SGD(lr=rate), table, [], *by_value(entry, number))
        torch.testing.assert_close(moved[number], table, rtol=1e-12, atol=1e-12)


@pytest.mark.threads
@each_optimizer
def test_bits_do_not_depend_on_the_number_of_threads(optimizer):
    generator = torch.Generator().manual_seed(0)
    tables = make_tables(17, generator, torch.float32)
    ledger = [make_entry(17, 300, generator, torch.float32, longest=3)]

    results = [run(tables, optimizer, [ledger], num_threads) for num_threads in (1, 2, 5, 16)]

    for found in results[1:]:
        for ours, first in zip(found, results[0], strict=True):
            assert torch.equal(ours, first)


def test_gradients_of_a_row_are_summed_in_lookup_order():
    table = torch.zeros(2, 1)
    lookups = Lookups(
        tables=np.zeros(1, np.uint64),
        positions=np.zeros(1, np.uint64),
        columns=np.zeros(1, np.uint64),
        width=1,
    )
    gradient = torch.tensor([[1.0], [5.0], [2.0**24], [-(2.0**24)]])
    bags = Bags.from_tensors(torch.tensor([1, 0, 1, 1]), torch.arange(5), None, 4, is_mean=False)

    row_update(
        RowSpace([table]),
        [],
        SGD(lr=1.0),
        np.array([[1.0, 0.0]]),
        [LedgerEntry(lookups, bags, gradient)],
    )

    # 1 + 2**24 is 2**24 in float32; in another order the 1 would be left.
    assert table.tolist() == [[-5.0], [0.0]]


def test_an_update_per_backward_is_not_an_update_per_step():
    """Adagrad by the sum of 1 and -9 moves differently from Adagrad by 1 and then by -9."""
    generator = torch.Generator().manual_seed(0)
    tables = make_tables(4, generator)
    entries = [make_entry(4, 5, generator) for _ in range(2)]

    together = run(tables, Adagrad(lr=0.1), [entries])
    apart = run(tables, Adagrad(lr=0.1), [[entry] for entry in entries])

    assert not torch.allclose(together[1], apart[1], atol=1e-3)


@each_optimizer
@pytest.mark.parametrize("seed", [None, 11])
def test_rows_of_16_bits_have_the_references_bits(seed, optimizer):
    """Gradients are whole numbers, so that squares add up to the same in any order."""
    generator = torch.Generator().manual_seed(0)
    tables = make_tables(16, generator, torch.bfloat16)
    ledgers = []
    for _ in range(4):
        entry = make_entry(16, 12, generator, torch.float32)
        entry.gradient.copy_(torch.randint(-9, 10, entry.gradient.shape, generator=generator))
        ledgers.append([entry])

    found = run(tables, optimizer, ledgers, seed=seed)

    expected = [table.clone() for table in tables]
    states = states_of(tables, optimizer)
    for step, (entry,) in enumerate(ledgers, 1):
        for number in range(len(tables)):
            key = None if seed is None else table_key(seed, step, number)
            state = [of_table[number] for of_table in states]
            lookups = by_value(entry, number)
            update_reference(optimizer, expected[number], state, *lookups, step, key)
    expected += [table for state in states for table in state]
    assert not torch.equal(found[1], tables[1])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@each_optimizer
@given(
    seed=st.none() | st.integers(0, 2**64 - 1),
    dim=st.sampled_from([1, 2, 3, 7, 17, 40]),
    batch_sizes=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    longest=st.sampled_from([None, 1, 4]),
    is_mean=st.booleans(),
    num_threads=st.integers(1, 3),
)
def test_rows_of_16_bits_move_as_float32_ones_and_are_rounded(
    optimizer, seed, dim, batch_sizes, longest, is_mean, num_threads
):
    generator = torch.Generator().manual_seed(dim)
    tables = make_tables(dim, generator, torch.bfloat16)
    ledger = [
        make_entry(dim, size, generator, torch.float32, longest=longest, is_mean=is_mean)
        for size in batch_sizes
    ]

    found = run(tables, optimizer, [ledger], num_threads, seed)

    expected = run([table.float() for table in tables], optimizer, [ledger], num_threads)
    for number, table in enumerate(expected[: len(tables)]):
        keys = None
        if seed is not None:
            keys = fold(signed(table_key(seed, 1, number)), torch.arange(len(table)))
        expected[number] = round_rows(table, keys)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.outside_ci
@pytest.mark.threads
@each_optimizer
def test_bits_of_rows_rounded_by_chance_do_not_depend_on_the_number_of_threads(optimizer):
    generator = torch.Generator().manual_seed(0)
    tables = make_tables(17, generator, torch.bfloat16)
    ledger = [make_entry(17, 300, generator, torch.float32, longest=3)]

    results = [run(tables, optimizer, [ledger], threads, seed=3) for threads in (1, 2, 3, 7)]

    for found in results[1:]:
        for ours, first in zip(found, results[0], strict=True):
            assert torch.equal(ours, first)


def test_steps_that_the_nearest_number_loses_add_up_by_chance():
    """600 steps, each a sixteenth of the way from a number to the next."""
    dim, num_steps = 64, 600
    step = torch.finfo(torch.bfloat16).eps / 16
    table = torch.ones(3, dim, dtype=torch.bfloat16)
    lookups = Lookups(
        tables=np.zeros(1, np.uint64),
        positions=np.zeros(1, np.uint64),
        columns=np.zeros(1, np.uint64),
        width=dim,
    )
    bags = Bags.from_tensors(torch.tensor([1]), torch.arange(2), None, 1, is_mean=False)
    ledger = [LedgerEntry(lookups, bags, torch.full((1, dim), -step))]

    [nearest] = run([table], SGD(lr=1.0), [ledger] * num_steps)
    [by_chance] = run([table], SGD(lr=1.0), [ledger] * num_steps, seed=0)

    assert torch.equal(nearest, table)
    assert torch.equal(by_chance[::2], table[::2])
    # Each step is up by eps with probability 1/16, in every column by itself.
    deviation = torch.finfo(torch.bfloat16).eps * (num_steps * 15 / 256 / dim) ** 0.5
    assert by_chance[1].double().mean().item() - 1 == pytest.approx(
        num_steps * step, abs=5 * deviation
    )


def test_one_kernel_is_compiled_for_ids_and_offsets_of_every_width():
    kernel = module._row_update_kernel(0, 8)._serial
    found, signatures = [], set()

    for longest, ids, offsets in (
        *((3, *widths) for widths in itertools.product((np.int32, np.int64), repeat=2)),
        *((None, width, width) for width in (np.int32, np.int64)),
    ):
        generator = torch.Generator().manual_seed(0)
        tables = make_tables(5, generator)
        entry = make_entry(5, 4, generator, longest=longest, has_weights=False)
        bags = entry.bags._replace(values=entry.bags.values.astype(ids))
        assert (bags.offsets is None) == (longest is None)
        if longest:
            bags = bags._replace(offsets=bags.offsets.astype(offsets))
        rates = np.tile([0.5, 0.0], (len(SIZES), 1))
        row_update(RowSpace(tables), [], SGD(lr=0.5), rates, [entry._replace(bags=bags)])
        found.append(torch.cat(tables))
        signatures.add(len(kernel.signatures))

    assert all(torch.equal(tables, found[0]) for tables in found[:4])
    assert torch.equal(*found[4:])
    assert len(signatures) == 1
