import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


def worst_reference(levels, segments, values, offsets, num_samples):
    """`worst_levels` in plain numpy, one sample after another."""
    worst = np.zeros(num_samples, np.uint8)
    for base, first, first_bag in zip(
        segments.bases, segments.first, segments.first_bag, strict=True
    ):
        for sample in range(num_samples):
            at = first + sample * segments.stride
            bag = slice(at, at + 1)
            if offsets is not None:
                bag = slice(*offsets[first_bag + sample : first_bag + sample + 2])
            worst[sample] = levels[base + values[bag]].max(initial=worst[sample])
    return worst


@st.composite
def lookups(draw):
    """Segments over a few tables: columns of a store, or bags of any size."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    num_samples = draw(st.integers(0, 12))
    tables = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    num_features = len(tables)
    bases = (np.cumsum(sizes) - sizes)[tables]
    of_tables = np.array(sizes)[tables]
    if draw(st.booleans()):
        columns = rng.integers(0, of_tables, (num_samples, num_features)).astype(dtype)
        first, num = np.arange(num_features), np.full(num_features, num_samples)
        values, offsets, stride = columns.reshape(-1), None, num_features
    else:
        lengths = rng.integers(0, 4, num_features * num_samples)
        offsets, stride = np.concatenate([[0], np.cumsum(lengths)]).astype(dtype), 1
        ends = offsets[np.arange(num_features + 1) * num_samples].astype(np.int64)
        first, num = ends[:-1], np.diff(ends)
        values = rng.integers(0, np.repeat(of_tables, num)).astype(dtype)
    segments = Segments(
        np.array(tables),
        bases,
        of_tables,
        first,
        num,
        np.arange(num_features) * num_samples,
        stride,
    )
    return segments, values, offsets, num_samples, int(np.sum(sizes))


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.serial)])
def threads(request, monkeypatch):
    """That many of them take part, however few lookups there are, and in several blocks."""
    torch.set_num_threads(request.param)
    monkeypatch.setattr(counting, "_MIN_SHARED_LOOKUPS", 0)
    return request.param


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_counts_are_those_of_the_reference_on_any_number_of_threads(threads, dtype):
    @given(lookups())
    def agrees(case):
        segments, values, _, _, num_rows = case
        counts, expected = np.arange(num_rows, dtype=dtype), np.arange(num_rows, dtype=dtype)

        bad = count_rows(counts, segments, values)

        count_rows_reference(expected, segments, values)
        assert bad == -1
        np.testing.assert_array_equal(counts, expected)

    agrees()


def test_the_worst_level_of_a_sample_is_that_of_the_reference_on_any_number_of_threads(threads):
    @given(lookups(), st.integers(0, 2**32))
    def agrees(case, seed):
        segments, values, offsets, num_samples, num_rows = case
        levels = np.random.default_rng(seed).integers(0, 4, num_rows).astype(np.uint8)

        worst = worst_levels(levels, segments, values, offsets, num_samples)

        expected = worst_reference(levels, segments, values, offsets, num_samples)
        np.testing.assert_array_equal(worst, expected)

    agrees()


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


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("value", [-1, 5, 2**31 - 1, -(2**31)])
def test_a_value_that_is_no_row_is_named_and_touches_no_count(threads, dtype, value):
    rows_BF = np.zeros((6, 3), dtype)
    rows_BF[4, 1] = rows_BF[5, 0] = value
    segments = columns_of(rows_BF, [5, 5, 5])
    counts = np.zeros(15, np.uint32)

    bad = count_rows(counts, segments, rows_BF.reshape(-1))

    assert bad == 13
    assert counts[[0, 5, 10]].tolist() == [5, 5, 6]
    assert counts.sum() == 16
