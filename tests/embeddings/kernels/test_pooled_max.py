import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.pooled_lookup import Bags, Lookups
from recsys.embeddings.kernels.pooled_max import max_gradients, pooled_max, pooled_max_reference
from recsys.embeddings.row_space import RowSpace

SIZES = [3, 7, 40]
SMALLEST = [40, 3, 7]  # by feature: rows that all of its tables have


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_case(seed, dim, batch_size, longest, dtype=torch.float64):
    """Four lookups of three features in three tables; numbers of few kinds, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    tables = [
        torch.randint(-2, 3, (size, dim), generator=generator).to(dtype).requires_grad_()
        for size in SIZES
    ]
    lookups = Lookups(
        tables=np.array([0, 1, 2, 2], np.uint64),
        positions=np.array([1, 2, 0, 2], np.uint64),
        columns=np.arange(4, dtype=np.uint64) * np.uint64(dim),
        width=4 * dim,
    )
    lengths = torch.randint(0, longest + 1, (3 * batch_size,), generator=generator)
    if longest == 1:
        lengths = torch.ones_like(lengths)
    highs = torch.tensor(SMALLEST).repeat_interleave(batch_size).repeat_interleave(lengths)
    values = (torch.rand(len(highs), generator=generator) * highs).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return tables, lookups, values, offsets


def pool(tables, lookups, values, offsets, batch_size):
    bags = Bags.from_tensors(values, offsets, None, batch_size, is_mean=False)
    result = torch.full((batch_size, lookups.width), torch.nan, dtype=tables[0].dtype)
    winners = torch.full((batch_size, lookups.width), 10**9)
    bad = pooled_max(RowSpace(tables), lookups, bags, result, winners)
    return bad, result, winners, bags


@given(
    seed=st.integers(0, 2**31),
    dim=st.sampled_from([1, 3, 16]),
    batch_size=st.integers(0, 12),
    longest=st.sampled_from([1, 4]),
    int_dtype=st.sampled_from([torch.int32, torch.int64]),
    num_threads=st.integers(1, 9),
)
def test_numbers_and_gradients_are_the_references(
    seed, dim, batch_size, longest, int_dtype, num_threads
):
    tables, lookups, values, offsets = make_case(seed, dim, batch_size, longest)
    torch.set_num_threads(num_threads)
    expected = pooled_max_reference(tables, lookups, values, offsets, batch_size)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)

    bad, result, winners, bags = pool(
        tables, lookups, values.to(int_dtype), offsets.to(int_dtype), batch_size
    )
    found = [torch.zeros_like(table) for table in tables]
    of_lookups = max_gradients(RowSpace(tables), lookups, bags, winners, gradient)
    for table, (rows, gradients) in zip(lookups.tables.tolist(), of_lookups, strict=True):
        found[table].index_add_(0, rows, gradients)

    assert bad == -1
    assert torch.equal(result, expected)
    for table, gradients in zip(tables, found, strict=True):
        torch.testing.assert_close(gradients, table.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [1, 16])
@pytest.mark.parametrize(
    ("numbers", "winner"),
    [
        ([2.0, 2.0], 0),
        ([0.0, -0.0], 0),
        ([-torch.inf, -torch.inf], 0),
        ([torch.nan, 1.0], 0),
        ([1.0, torch.nan], 0),
        ([1.0, torch.nan, 2.0], 2),
        ([], -1),
    ],
)
def test_the_first_of_equals_wins_and_nan_as_pytorch_has_it(numbers, winner, dim):
    table = torch.tensor([*numbers, 0.0]).unsqueeze(1).repeat(1, dim).requires_grad_()
    lookups = Lookups(
        tables=np.zeros(1, np.uint64),
        positions=np.zeros(1, np.uint64),
        columns=np.zeros(1, np.uint64),
        width=dim,
    )
    values, offsets = torch.arange(len(numbers)), torch.tensor([0, len(numbers)])
    expected = pooled_max_reference([table], lookups, values, offsets, 1)
    expected.sum().backward()

    _, result, winners, _ = pool([table], lookups, values, offsets, 1)

    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert winners.tolist() == [[winner] * dim]
    assert table.grad[:, 0].nonzero().flatten().tolist() == ([winner] if winner >= 0 else [])


def test_rows_that_win_nothing_are_told_with_zeros():
    table = torch.tensor([[1.0, 4.0], [2.0, 3.0], [0.0, 0.0]])
    lookups = Lookups(
        tables=np.zeros(1, np.uint64),
        positions=np.zeros(1, np.uint64),
        columns=np.zeros(1, np.uint64),
        width=2,
    )
    values, offsets = torch.tensor([2, 1, 0]), torch.tensor([0, 3])
    _, result, winners, bags = pool([table], lookups, values, offsets, 1)

    ((rows, gradients),) = max_gradients(
        RowSpace([table]), lookups, bags, winners, torch.tensor([[5.0, 6.0]])
    )

    assert result.tolist() == [[2.0, 4.0]]
    assert rows.tolist() == [2, 1, 0]
    assert gradients.tolist() == [[0.0, 0.0], [5.0, 0.0], [0.0, 6.0]]


def test_columns_of_nobody_are_left_alone():
    tables, lookups, values, offsets = make_case(0, 4, 5, 3)
    wide = Lookups(
        tables=lookups.tables, positions=lookups.positions, columns=lookups.columns, width=20
    )

    _, result, winners, _ = pool(tables, wide, values, offsets, 5)

    assert result[:, 16:].isnan().all()
    assert (winners[:, 16:] == 10**9).all()


@pytest.mark.parametrize("value", [-1, 3, 2**40])
def test_the_first_value_that_is_no_row_is_told(value):
    tables, lookups, values, offsets = make_case(0, 4, 6, 4)
    feature_1 = slice(int(offsets[6]), int(offsets[12]))  # of table 0, which has 3 rows
    values[feature_1][-2:] = value

    bad, *_ = pool(tables, lookups, values, offsets, 6)

    assert bad == feature_1.stop - 2


def test_weights_are_refused():
    bags = Bags.from_tensors(
        torch.zeros(1).long(), torch.tensor([0, 1]), torch.ones(1), 1, is_mean=False
    )
    lookups = Lookups(
        tables=np.zeros(1, np.uint64),
        positions=np.zeros(1, np.uint64),
        columns=np.zeros(1, np.uint64),
        width=1,
    )

    with pytest.raises(ValueError, match="max pooling takes no weights"):
        pooled_max(
            RowSpace([torch.ones(1, 1)]),
            lookups,
            bags,
            torch.empty(1, 1),
            torch.empty(1, 1, dtype=torch.int64),
        )
