"""Counting on one thread and on two; `tests/embeddings/popularity` counts bags and columns."""

import numpy as np
import pytest
import torch

from recsys.embeddings.kernels.cpu import counting
from recsys.embeddings.kernels.cpu.counting import (
    Segments,
    count_rows,
    worst_levels,
)


def count_rows_reference(counts, segments, values):
    """`count_rows` in plain numpy, for values that are all rows of their tables."""
    for base, size, first, num in zip(
        segments.bases, segments.sizes, segments.first, segments.num, strict=True
    ):
        rows = values[first : first + num * segments.stride : segments.stride]
        counts[base : base + size] += np.bincount(rows, minlength=size).astype(counts.dtype)


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.serial)])
def threads(request, monkeypatch):
    """That many of them take part, however few lookups there are, and in several blocks."""
    torch.set_num_threads(request.param)
    monkeypatch.setattr(counting, "_MIN_SHARED_LOOKUPS", 0)
    return request.param


def columns_of(rows_BF, sizes):
    """Segments of columns, each looked up in a table of its own."""
    num_samples, num_features = rows_BF.shape
    sizes, features = np.array(sizes), np.arange(num_features)
    num = np.full(num_features, num_samples)
    return Segments(
        features,
        np.cumsum(sizes) - sizes,
        sizes,
        features,
        num,
        features * num_samples,
        num_features,
    )


def test_columns_longer_than_a_block_are_counted_whole(threads):
    rng = np.random.default_rng(0)
    rows_BF = rng.integers(0, [7, 5000], (2 * counting._BLOCK + 1, 2)).astype(np.int32)
    segments = columns_of(rows_BF, [7, 5000])
    counts, expected = np.zeros(5007, np.uint32), np.zeros(5007, np.uint32)

    count_rows(counts, segments, rows_BF.reshape(-1))

    count_rows_reference(expected, segments, rows_BF.reshape(-1))
    np.testing.assert_array_equal(counts, expected)
    assert counts.sum() == rows_BF.size
    levels = rng.integers(0, 4, 5007).astype(np.uint8)
    worst = worst_levels(levels, segments, rows_BF.reshape(-1), None, len(rows_BF))
    np.testing.assert_array_equal(worst, levels[rows_BF + np.array([0, 7])].max(1))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("value", [-1, 5, 2**31 - 1, -(2**31)])
def test_a_value_that_is_no_row_is_named_and_touches_no_count(threads, dtype, value):
    rows_BF = np.zeros((6, 3), dtype)
    rows_BF[4, 1] = rows_BF[5, 0] = value
    segments = columns_of(rows_BF, [5, 5, 5])
    counts = np.zeros(15, np.uint32)

    assert count_rows(counts, segments, rows_BF.reshape(-1)) == 13
    assert counts[[0, 5, 10]].tolist() == [5, 5, 6]
    assert counts.sum() == 16
