"""Pooled lookup in one table: as `pooled_lookup`, from the caller's own tensors."""

import itertools
import os

import numpy as np
import pytest
import torch
from torch.nn import functional

from recsys.embeddings.kernels.cpu.one_table import (
    BAGS,
    ONE_HOT,
    REFUSED,
    TableMemory,
    pool_one_table,
)

NUM_ROWS = 40


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.threads)])
def num_threads(request):
    torch.set_num_threads(request.param)
    return request.param


def pool(ids, offsets, num_bags, *, dim=8, is_mean=False, dtype=torch.float32, keep=True):
    torch.manual_seed(0)
    table = torch.randn(NUM_ROWS, dim, dtype=dtype)
    result = torch.full((num_bags, dim), 7.0, dtype=dtype)
    kept = torch.empty(ids.numel() + num_bags + 1, dtype=ids.dtype).numpy() if keep else None
    kind = pool_one_table(TableMemory(table), ids, offsets, num_bags, result, kept, is_mean=is_mean)
    return kind, result, kept, table


# `make stress` compiles the kernel for all; otherwise each dim, and each dtype with each of ids.
SOME = [
    (1, torch.float64, torch.int64),
    (3, torch.float32, torch.int32),
    (8, torch.float32, torch.int64),
    (16, torch.float64, torch.int32),
    (264, torch.float32, torch.int64),
]
ALL = list(
    itertools.product(
        [1, 3, 8, 16, 264], [torch.float32, torch.float64], [torch.int32, torch.int64]
    )
)
CASES = ALL if os.environ.get("HYPOTHESIS_PROFILE") == "stress" else SOME


@pytest.mark.in_ci("1-1-", "1-5-", "1-4000-", "2-4000-8")
@pytest.mark.parametrize(("dim", "dtype", "id_type"), CASES)
@pytest.mark.parametrize("num_bags", [1, 5, 4000])
def test_one_id_per_bag_is_copied(dim, dtype, id_type, num_bags, num_threads):
    ids = torch.randint(0, NUM_ROWS, (num_bags,)).to(id_type)
    for offsets in (
        None,
        torch.arange(num_bags).to(id_type),
        torch.arange(num_bags + 1).to(id_type),
    ):
        kind, result, kept, table = pool(ids, offsets, num_bags, dim=dim, dtype=dtype)

        assert kind == ONE_HOT
        assert torch.equal(result, table[ids.long()])
        assert np.array_equal(kept[: ids.numel()], ids.numpy())


@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("has_end", [False, True])
@pytest.mark.parametrize("num_bags", [1, 6, 3000])
def test_bags_are_pooled_in_order(is_mean, has_end, num_bags, num_threads):
    lengths = torch.randint(0, 5, (num_bags,))
    lengths[0] = 2
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, NUM_ROWS, (int(ends[-1]),))
    offsets = ends if has_end else ends[:-1].clone()

    kind, result, kept, table = pool(ids, offsets, num_bags, is_mean=is_mean, dtype=torch.float64)

    expected = functional.embedding_bag(
        ids, table, ends, mode="mean" if is_mean else "sum", include_last_offset=True
    )
    assert kind == BAGS
    torch.testing.assert_close(result, expected, rtol=1e-14, atol=1e-14)
    assert np.array_equal(kept[: ids.numel()], ids.numpy())
    assert np.array_equal(kept[len(ids) :], ends.numpy())


def test_bags_of_one_length_need_no_offsets(num_threads):
    ids = torch.randint(0, NUM_ROWS, (7, 3))

    kind, result, kept, table = pool(ids, None, 7)

    assert kind == BAGS
    torch.testing.assert_close(result, table[ids].sum(1))
    assert kept[21:].tolist() == list(range(0, 22, 3))


def test_nothing_is_kept_where_nobody_needs_it():
    _, result, kept, table = pool(torch.tensor([3, 4]), None, 2, keep=False)

    assert kept is None
    assert torch.equal(result, table[[3, 4]])


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        ([0, NUM_ROWS], [0, 1]),
        ([0, -1], [0, 1]),
        ([0, 1, NUM_ROWS], [0, 2]),
        ([0, 1, -(2**62)], [0, 2]),
        ([0, 1, 2], [1, 2]),
        ([0, 1, 2], [0, 4]),
        ([0, 1, 2], [0, -1]),
        ([0, 1, 2, 3], [0, 3, 2, 4]),
        ([0, 1, 2], [0, 1, 2]),
        ([0, 1, 2], [0, 2, 4]),
    ],
)
def test_what_is_wrong_is_refused(ids, offsets, num_threads):
    num_bags = 2 if len(ids) < 4 else 3

    kind, *_ = pool(torch.tensor(ids), torch.tensor(offsets), num_bags)

    assert kind == REFUSED
