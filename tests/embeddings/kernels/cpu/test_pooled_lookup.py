from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.embeddings.kernels.cpu import pooled_lookup as module
from recsys.embeddings.kernels.cpu.pooled_lookup import (
    MIN_SHARED_BYTES,
    pooled_lookup,
    row_gradient_dots,
)
from recsys.embeddings.rows.lookups import Bags, Lookups
from recsys.embeddings.rows.row_space import RowSpace, compute_dtype
from tests.torch_kernels import pooled_lookup_reference

SIZES = [3, 7, 40]


def make_case(seed, dim, batch_size, longest, dtype):
    """Four lookups of three features in three tables; the third feature is looked up twice."""
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randn(size, dim, generator=generator, dtype=dtype) for size in SIZES]
    lookups = Lookups(
        tables=np.array([0, 1, 2, 2], np.uint64),
        positions=np.array([1, 2, 0, 2], np.uint64),
        columns=np.arange(4, dtype=np.uint64) * np.uint64(dim),
        width=4 * dim,
    )
    smallest = [40, 3, 7]  # by feature: rows that all of its tables have
    if longest is None:
        lengths = torch.ones(3 * batch_size, dtype=torch.int64)
    else:
        lengths = torch.randint(0, longest + 1, (3 * batch_size,), generator=generator)
    highs = torch.tensor(smallest).repeat_interleave(batch_size).repeat_interleave(lengths)
    values = (torch.rand(len(highs), generator=generator) * highs).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    weights = torch.rand(len(values), generator=generator, dtype=dtype)
    return tables, lookups, values, offsets, weights


@pytest.mark.threads
def test_a_lookup_large_enough_for_several_threads_is_what_one_thread_makes():
    tables, lookups, values, offsets, _ = make_case(0, 64, 1500, None, torch.float32)
    assert MIN_SHARED_BYTES < 4 * 1500 * 64 * 4
    bags = Bags.from_tensors(values, offsets, None, 1500, is_mean=False)
    results = []

    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(torch.empty(1500, 4 * 64))
        assert pooled_lookup(RowSpace(tables), lookups, bags, results[-1]) == -1

    expected = pooled_lookup_reference(tables, lookups, values, offsets, None, 1500, is_mean=False)
    for result in results:
        assert torch.equal(result, expected)


@pytest.mark.threads
@given(
    seed=st.integers(0, 2**31),
    dim=st.integers(1, 20),
    batch_size=st.integers(0, 12),
    longest=st.sampled_from([None, 1, 4]),
    how=st.sampled_from(["sum", "mean", "weighted"]),
    int_dtype=st.sampled_from([torch.int32, torch.int64]),
    num_threads=st.integers(1, 9),
)
def test_bags_are_pooled_as_the_reference_pools_them(
    seed, dim, batch_size, longest, how, int_dtype, num_threads
):
    tables, lookups, values, offsets, weights = make_case(
        seed, dim, batch_size, longest, torch.float64
    )
    torch.set_num_threads(num_threads)
    bag_weights = weights if how == "weighted" else None
    result = torch.full((batch_size, lookups.width), torch.nan, dtype=torch.float64)
    bags = Bags.from_tensors(
        values.to(int_dtype), offsets.to(int_dtype), bag_weights, batch_size, is_mean=how == "mean"
    )

    bad = pooled_lookup(RowSpace(tables), lookups, bags, result)

    expected = pooled_lookup_reference(
        tables, lookups, values, offsets, bag_weights, batch_size, is_mean=how == "mean"
    )
    assert bad == -1
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@given(seed=st.integers(0, 2**31), batch_size=st.integers(1, 12), longest=st.integers(1, 4))
def test_gradients_of_weights_are_the_references(seed, batch_size, longest):
    tables, lookups, values, offsets, weights = make_case(
        seed, 5, batch_size, longest, torch.float64
    )
    weights.requires_grad_()
    pooled = pooled_lookup_reference(
        tables, lookups, values, offsets, weights, batch_size, is_mean=False
    )
    gradient = torch.randn_like(pooled)
    (pooled * gradient).sum().backward()
    bags = Bags.from_tensors(values, offsets, weights, batch_size, is_mean=False)
    found = torch.zeros(len(values), dtype=torch.float64)

    row_gradient_dots(RowSpace(tables), lookups, bags, gradient, found)

    torch.testing.assert_close(found, weights.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.in_ci("5-torch.float32")
@pytest.mark.threads
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (5, torch.float32),
        (8, torch.float32),
        (16, torch.float64),
        (5, torch.bfloat16),
        (16, torch.bfloat16),
    ],
    ids=str,
)
def test_rows_that_several_threads_copy_are_those_that_one_does(dim, dtype, monkeypatch):
    monkeypatch.setattr(module, "MIN_SHARED_BYTES", 0)
    tables, lookups, values, offsets, _ = make_case(3, dim, 50, None, dtype)
    bags = Bags.from_tensors(values, offsets, None, 50, is_mean=False)
    computed = compute_dtype(dtype)
    expected = pooled_lookup_reference(
        [table.to(computed) for table in tables], lookups, values, offsets, None, 50, is_mean=False
    )

    for num_threads in (1, 2, 7):
        torch.set_num_threads(num_threads)
        result = torch.full((50, lookups.width), torch.nan, dtype=computed)

        assert pooled_lookup(RowSpace(tables), lookups, bags, result) == -1
        assert torch.equal(result, expected)


@pytest.mark.in_ci("dtype0")
@pytest.mark.threads
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("longest", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dims_that_kernels_are_compiled_for_give_the_same_bits_on_any_number_of_threads(
    dim, longest, dtype
):
    tables, lookups, values, offsets, _ = make_case(3, dim, 50, longest, dtype)
    bags = Bags.from_tensors(values, offsets, None, 50, is_mean=False)
    expected = torch.cat(
        [
            torch.stack(
                [
                    sum(tables[table][values[begin:end]], torch.zeros(dim, dtype=dtype))
                    for begin, end in pairwise(offsets[50 * position : 50 * position + 51].tolist())
                ]
            )
            for table, position in zip(
                lookups.tables.tolist(), lookups.positions.tolist(), strict=True
            )
        ],
        dim=1,
    )

    for num_threads in (1, 2, 7):
        torch.set_num_threads(num_threads)
        result = torch.full((50, lookups.width), torch.nan, dtype=dtype)
        pooled_lookup(RowSpace(tables), lookups, bags, result)

        assert torch.equal(result, expected)


def test_lookups_made_once_serve_tables_that_have_moved():
    tables, lookups, values, offsets, _ = make_case(0, 4, 6, None, torch.float32)
    bags = Bags.from_tensors(values, offsets, None, 6, is_mean=False)
    first, second = torch.empty(6, lookups.width), torch.empty(6, lookups.width)
    moved = [2 * table for table in reversed(tables)][::-1]

    pooled_lookup(RowSpace(tables), lookups, bags, first)
    pooled_lookup(RowSpace(moved), lookups, bags, second)

    torch.testing.assert_close(second, 2 * first)


@pytest.mark.parametrize("place", [1, 5, 2999])
def test_bags_that_are_not_one_each_are_found_out(place):
    offsets = torch.arange(3001)
    offsets[place] -= 1

    bags = Bags.from_tensors(torch.zeros(3000).long(), offsets, None, 3000, is_mean=False)

    assert bags.offsets is not None


@pytest.mark.parametrize("is_one_hot", [None, True])
def test_bags_of_one_value_each_need_no_offsets_whoever_tells(is_one_hot):
    bags = Bags.from_tensors(
        torch.zeros(5).long(), torch.arange(6), None, 5, is_mean=True, is_one_hot=is_one_hot
    )

    assert bags.offsets is None
    assert not bags.is_mean


@pytest.mark.parametrize("is_one_hot", [True, False])
@pytest.mark.parametrize("value", [-1, 3, 2**40])
def test_the_first_value_that_is_no_row_is_told(value, is_one_hot):
    tables, lookups, values, offsets, _ = make_case(
        0, 4, 6, None if is_one_hot else 4, torch.float32
    )
    feature_1 = slice(int(offsets[6]), int(offsets[12]))  # of table 0, which has 3 rows
    values[feature_1][-2:] = value
    result = torch.empty(6, lookups.width)
    bags = Bags.from_tensors(values, offsets, None, 6, is_mean=False)

    bad = pooled_lookup(RowSpace(tables), lookups, bags, result)

    assert bad == feature_1.stop - 2


@pytest.mark.threads
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@given(
    seed=st.integers(0, 2**31),
    dim=st.integers(1, 40),
    batch_size=st.integers(0, 12),
    longest=st.sampled_from([None, 1, 4]),
    how=st.sampled_from(["sum", "mean", "weighted"]),
    num_threads=st.integers(1, 3),
)
def test_rows_of_16_bits_are_pooled_as_the_same_rows_in_float32(
    dtype, seed, dim, batch_size, longest, how, num_threads
):
    tables, lookups, values, offsets, weights = make_case(
        seed, dim, batch_size, longest, torch.float32
    )
    torch.set_num_threads(num_threads)
    stored = [table.to(dtype) for table in tables]
    bag_weights = weights if how == "weighted" else None
    bags = Bags.from_tensors(values, offsets, bag_weights, batch_size, is_mean=how == "mean")
    gradient = torch.rand(batch_size, lookups.width)
    results = []

    for rows in (stored, [table.float() for table in stored]):
        pooled = torch.full((batch_size, lookups.width), torch.nan)
        dots = torch.zeros(len(values))
        assert pooled_lookup(RowSpace(rows), lookups, bags, pooled) == -1
        row_gradient_dots(RowSpace(rows), lookups, bags, gradient, dots)
        results.append((pooled, dots))

    (pooled, dots), (expected_pooled, expected_dots) = results
    assert torch.equal(pooled, expected_pooled)
    assert torch.equal(dots, expected_dots)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("step", [0, 2, -1])
def test_ids_of_bags_may_lie_apart(step, has_weights):
    table = torch.randn(9, 16)
    ids = np.array([3, 8, 1, 5, 0, 7])
    apart = np.lib.stride_tricks.as_strided(ids, (3,), (0,)) if step == 0 else ids[::step][:3]
    weights = np.array([0.5, -1.0, 2.0], np.float32) if has_weights else None
    results = [torch.empty(2, 16) for _ in range(2)]

    for values, result in zip((apart, apart.copy()), results, strict=True):
        bags = Bags(values, np.array([0, 2, 3]), weights, 2, is_mean=False)
        assert pooled_lookup(RowSpace([table]), Lookups.one(0, 16), bags, result) == -1

    assert torch.equal(*results)
