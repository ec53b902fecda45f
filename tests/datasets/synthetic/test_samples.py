import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.datasets import synthetic
from recsys.datasets.store_writer import classic_splits
from recsys.datasets.synthetic import (
    KAGGLE_COLUMNS,
    KAGGLE_TABLE_SIZES,
    SyntheticCriteo,
    popularity_curve,
)

ODD_SIZES = [1, 2, 3, 7, 64, 1_001]
# Aggregates of a sample of the real data with 137,139 rows: per cent of lookups that go to the
# most popular 0.1, 1, 5 and 10 per cent of the rows seen; and how many rows are seen.
REAL_NUM_SAMPLES = 137_139
REAL_POOLED = [59.1, 75.7, 86.5, 89.9]
REAL_NUM_ROWS = 316_191
REAL_COLUMNS = {
    "cat_0": (616, [50.0, 87.6, 96.9, 98.5]),
    "cat_1": (528, [11.3, 29.9, 61.1, 74.8]),
    "cat_2": (61_764, [26.2, 43.5, 54.1, 59.0]),
    "cat_3": (32_223, [30.0, 52.7, 67.8, 74.0]),
    "cat_6": (8_634, [8.2, 26.0, 50.4, 63.8]),
    "cat_8": (3, [90.0, 90.0, 90.0, 90.0]),
    "cat_9": (13_982, [29.2, 45.7, 66.2, 76.0]),
    "cat_10": (4_087, [9.2, 27.1, 51.0, 64.6]),
    "cat_11": (56_397, [28.1, 46.2, 57.2, 62.0]),
    "cat_14": (5_897, [6.0, 31.2, 61.9, 75.5]),
    "cat_15": (46_382, [28.9, 49.6, 62.3, 67.5]),
    "cat_17": (2_827, [8.7, 36.6, 67.2, 80.4]),
    "cat_20": (52_250, [28.7, 48.0, 59.5, 64.3]),
    "cat_23": (14_596, [37.4, 61.4, 76.9, 83.1]),
    "cat_25": (11_139, [59.1, 71.9, 82.6, 87.1]),
}


@pytest.fixture(scope="module")
def kaggle():
    """As many samples as the real sample has, read once: the source, its batch, its rows."""
    source = SyntheticCriteo(num_samples=REAL_NUM_SAMPLES)
    batch = source.read(np.arange(REAL_NUM_SAMPLES))
    ids_FB = batch.sparse_features.values().numpy().reshape(26, -1)
    return source, batch, ids_FB


@pytest.fixture(scope="module")
def counts(kaggle):
    _, _, ids_FB = kaggle
    return [np.unique(ids, return_counts=True)[1] for ids in ids_FB]


def top_shares(counts):
    falling = np.sort(counts)[::-1]
    tops = [max(1, int(np.ceil(share * len(falling)))) for share in (0.001, 0.01, 0.05, 0.1)]
    return [100 * falling[:top].sum() / falling.sum() for top in tops]


def assert_same_samples(batch, expected):
    assert torch.equal(batch.dense_features, expected.dense_features)
    assert torch.equal(batch.sparse_features.values(), expected.sparse_features.values())
    assert torch.equal(batch.labels, expected.labels)


def test_batch_has_the_shapes_and_dtypes_of_a_source():
    source = SyntheticCriteo(num_samples=100, table_sizes=ODD_SIZES)

    batch = source.read(np.array([3, 99, 3]))

    assert batch.dense_features.shape == (3, 13)
    assert batch.dense_features.dtype == batch.labels.dtype == torch.float32
    assert batch.sparse_features.keys() == [f"cat_{column}" for column in range(6)]
    assert batch.sparse_features.values().dtype == torch.int64
    assert batch.sparse_features.stride() == len(batch) == 3
    assert bool((batch.sparse_features.lengths() == 1).all())


def test_no_samples_give_an_empty_batch():
    batch = SyntheticCriteo(num_samples=100, table_sizes=ODD_SIZES).read(np.array([], np.int64))

    assert len(batch) == batch.sparse_features.stride() == 0


@settings(deadline=None, derandomize=True, max_examples=50)
@given(samples=st.lists(st.integers(0, REAL_NUM_SAMPLES - 1), min_size=1, max_size=40))
def test_a_sample_is_the_same_in_any_batch_and_order(kaggle, samples):
    source, everything, ids_FB = kaggle

    batch = source.read(np.array(samples))

    assert torch.equal(batch.dense_features, everything.dense_features[samples])
    assert torch.equal(batch.labels, everything.labels[samples])
    np.testing.assert_array_equal(
        batch.sparse_features.values().numpy(), ids_FB[:, samples].reshape(-1)
    )


def test_a_sample_does_not_depend_on_how_many_there_are():
    few = SyntheticCriteo(num_samples=50, seed=3, table_sizes=ODD_SIZES)
    many = SyntheticCriteo(num_samples=50_000, seed=3, table_sizes=ODD_SIZES)

    assert_same_samples(few.read(np.arange(50)), many.read(np.arange(50)))


def test_sources_of_equal_settings_are_calibrated_once(monkeypatch, request):
    request.addfinalizer(synthetic._calibrated.cache_clear)  # of what the patch returns
    scores = []
    monkeypatch.setattr(synthetic, "calibrate", lambda each: scores.append(each) or (2.0, -1.0))

    for sizes, seed in (([9, 5], 71), ([9, 5], 71), ([9, 6], 71), ([9, 5], 72)):
        for num_samples in (100, 200):
            SyntheticCriteo(num_samples=num_samples, seed=seed, table_sizes=sizes)
    assert len(scores) == 3


@pytest.mark.outside_ci
@pytest.mark.parametrize("other", [1, -1, 2**70 + 5])
def test_another_seed_makes_other_samples(other):
    samples = np.arange(1_000)
    batch = SyntheticCriteo(num_samples=1_000, table_sizes=[1_000] * 3).read(samples)

    changed = SyntheticCriteo(num_samples=1_000, seed=other, table_sizes=[1_000] * 3).read(samples)

    assert not torch.equal(batch.dense_features, changed.dense_features)
    same_ids = batch.sparse_features.values() == changed.sparse_features.values()
    assert same_ids.float().mean() < 0.05
    assert 0.5 < (batch.labels == changed.labels).float().mean() < 0.75


def test_kaggle_ids_are_in_range(kaggle):
    source, _, ids_FB = kaggle

    assert list(source.table_sizes.values()) == list(KAGGLE_TABLE_SIZES)
    for ids, size in zip(ids_FB, source.table_sizes.values(), strict=True):
        assert ids.min() >= 0
        assert ids.max() < size


@pytest.mark.outside_ci
@pytest.mark.parametrize(
    "sizes", [[1], [1, 1], ODD_SIZES, [5] * 60, [2**31, 2**31 - 1], [20_000_000] * 26]
)
def test_any_table_sizes_give_ids_in_range(sizes):
    source = SyntheticCriteo(num_samples=5_000, table_sizes=sizes)

    ids_FB = source.read(np.arange(5_000)).sparse_features.values().numpy().reshape(len(sizes), -1)

    assert ids_FB.min() >= 0
    assert (ids_FB.max(axis=1) < np.array(sizes)).all()


@pytest.mark.outside_ci
@pytest.mark.parametrize("size", [1, 2, 3, 16, 24, 30])
def test_every_row_of_a_small_table_is_reached(size):
    # C2's curve is flat enough that each of its first 30 rows is drawn within 20,000 samples.
    source = SyntheticCriteo(num_samples=20_000, table_sizes=[1, size])

    rows = source.read(np.arange(20_000)).sparse_features["cat_1"].values()

    assert sorted(set(rows.tolist())) == list(range(size))


def test_popular_rows_are_not_the_low_ones(kaggle):
    _, _, ids_FB = kaggle
    big = [column for column, size in enumerate(KAGGLE_TABLE_SIZES) if size > 10_000]

    for column in big:
        middle = KAGGLE_TABLE_SIZES[column] / 2
        rows, row_counts = np.unique(ids_FB[column], return_counts=True)
        popular = rows[np.argsort(row_counts)[-300:]]
        assert 100 < (popular < middle).sum() < 200


def test_pooled_popularity_is_that_of_the_real_sample(counts):
    pooled = np.concatenate(counts)

    assert len(pooled) == pytest.approx(REAL_NUM_ROWS, rel=0.01)
    np.testing.assert_allclose(top_shares(pooled), REAL_POOLED, atol=0.5)


@pytest.mark.parametrize("feature", REAL_COLUMNS)
def test_popularity_of_a_column_is_that_of_the_real_sample(counts, feature):
    num_rows, expected = REAL_COLUMNS[feature]

    column = counts[int(feature.removeprefix("cat_"))]

    assert len(column) == pytest.approx(num_rows, rel=0.05)
    np.testing.assert_allclose(top_shares(column), expected, atol=1.0)


@pytest.mark.parametrize(
    ("batch_size", "expected"), [(256, 0.399), (1_024, 0.310), (4_096, 0.221), (16_384, 0.153)]
)
def test_distinct_rows_of_a_batch_are_as_many_as_in_the_real_sample(kaggle, batch_size, expected):
    _, _, ids_FB = kaggle

    distinct = [
        len(np.unique(ids[start : start + batch_size]))
        for ids in ids_FB
        for start in range(0, 8 * batch_size, batch_size)
    ]

    assert np.mean(distinct) / batch_size == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("top", "expected"), [(0.05, 0.258), (0.1, 0.389), (0.2, 0.509)])
def test_samples_are_popular_in_all_columns_about_as_often_as_in_the_real_sample(
    kaggle, counts, top, expected
):
    _, _, ids_FB = kaggle
    falling = np.sort(np.concatenate(counts))[::-1]
    least = falling[int(top * len(falling))]

    counts_FB = [
        column[np.unique(ids, return_inverse=True)[1]]
        for ids, column in zip(ids_FB, counts, strict=True)
    ]

    assert (np.array(counts_FB) >= least).all(axis=0).mean() == pytest.approx(expected, abs=0.05)


def test_click_rate_is_that_of_kaggle(kaggle):
    _, batch, _ = kaggle

    assert batch.labels.mean().item() == pytest.approx(0.256, abs=0.005)
    assert set(batch.labels.unique().tolist()) == {0.0, 1.0}


@pytest.mark.outside_ci
@pytest.mark.parametrize(("seed", "sizes"), [(0, KAGGLE_TABLE_SIZES), (1, [100] * 5), (2, [1])])
def test_best_auc_and_click_rate_do_not_depend_on_seed_and_sizes(seed, sizes):
    source = SyntheticCriteo(num_samples=700_000, seed=seed, table_sizes=sizes)

    assert 0.79 < source.best_auc() < 0.81
    assert 0.25 < source.read(np.arange(50_000)).labels.mean().item() < 0.262


def test_dense_features_are_logs_of_counts_with_missing_ones_at_zero(kaggle):
    _, batch, _ = kaggle

    counts = batch.dense_features.double().expm1()
    small = counts[counts < 1_000]

    assert bool((small - small.round()).abs().max() < 1e-3)
    zeros = (batch.dense_features == 0).float().mean(0)
    assert zeros[11].item() == pytest.approx(0.940, abs=0.02)
    assert zeros[4].item() == pytest.approx(0.045, abs=0.02)


@pytest.mark.parametrize("size", [1, 10, 583, 10_000])
def test_curve_rises_from_nothing_to_all_lookups_at_the_last_row(size):
    for shape in KAGGLE_COLUMNS:
        edges, shares = popularity_curve(shape, size)

        assert edges[0] == shares[0] == 0
        assert edges[-1] == size
        assert shares[-1] == 1
        assert (np.diff(edges) > 0).all()
        assert (np.diff(shares) >= 0).all()


def test_smaller_table_truncates_the_curve():
    whole_edges, whole_shares = popularity_curve(KAGGLE_COLUMNS[2], KAGGLE_TABLE_SIZES[2])

    edges, shares = popularity_curve(KAGGLE_COLUMNS[2], 1_000)

    expected = np.interp(edges, whole_edges, whole_shares)
    np.testing.assert_allclose(shares, expected / expected[-1], rtol=1e-3)


def test_splits_are_the_classic_ones():
    source = SyntheticCriteo(num_samples=1_003, table_sizes=[1])

    assert source.splits == classic_splits(1_003)
    assert source.num_samples == 1_003
    assert source.num_dense == 13


def test_description_is_json():
    source = SyntheticCriteo(num_samples=np.int64(50), seed=4, table_sizes=np.array([3, 8]))

    described = json.loads(json.dumps(source.describe()))

    assert described["name"] == "synthetic:criteo-kaggle"
    assert described["num_samples"] == 50
    assert described["seed"] == 4
    assert described["table_sizes"] == {"cat_0": 3, "cat_1": 8}


def test_description_has_the_best_auc_of_the_test_part_where_there_is_one():
    enough = SyntheticCriteo(num_samples=70_000, table_sizes=[9])
    too_few = SyntheticCriteo(num_samples=7, table_sizes=[9])

    assert enough.describe()["best_auc"] == enough.best_auc()
    assert too_few.describe()["best_auc"] is None


def test_a_number_of_test_samples_changes_the_parts_and_no_sample():
    plain = SyntheticCriteo(num_samples=1_000, table_sizes=[9, 30])
    source = SyntheticCriteo(num_samples=1_000, table_sizes=[9, 30], test_samples=300)

    assert source.splits == {
        "train": range(400),
        "test": range(400, 700),
        "validation": range(700, 1_000),
    }
    numbers = np.arange(1_000)
    for name in ("dense_features", "labels"):
        assert torch.equal(getattr(source.read(numbers), name), getattr(plain.read(numbers), name))
    assert source.fingerprint == f"{plain.fingerprint} test=300"
    assert source.describe() == plain.describe() | {
        "test_samples": 300,
        "best_auc": source.best_auc(),
    }
