import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.datasets import SyntheticCriteo

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


@settings(deadline=None, derandomize=True, max_examples=50)
@given(samples=st.lists(st.integers(0, REAL_NUM_SAMPLES - 1), min_size=1, max_size=40))
def test_a_sample_is_the_same_in_any_batch_and_order(kaggle, samples):
    _, everything, ids_FB = kaggle

    batch = SyntheticCriteo(num_samples=max(samples) + 7).read(np.array(samples))

    assert batch.dense_features.dtype == batch.labels.dtype == torch.float32
    assert batch.sparse_features.keys() == [f"cat_{column}" for column in range(26)]
    assert torch.equal(batch.dense_features, everything.dense_features[samples])
    assert torch.equal(batch.labels, everything.labels[samples])
    np.testing.assert_array_equal(
        batch.sparse_features.values().numpy(), ids_FB[:, samples].reshape(-1)
    )


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


def test_click_rate_is_that_of_kaggle(kaggle):
    _, batch, _ = kaggle

    assert batch.labels.mean().item() == pytest.approx(0.256, abs=0.005)
    assert set(batch.labels.unique().tolist()) == {0.0, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"seed": 1, "table_sizes": [100] * 5}, {"seed": 2, "table_sizes": [1]}]
)
def test_best_auc_and_click_rate_do_not_depend_on_seed_and_sizes(settings):
    source = SyntheticCriteo(num_samples=700_000, **settings)

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


def test_description_is_json():
    source = SyntheticCriteo(num_samples=np.int64(10), seed=4, table_sizes=np.array([3, 8]))

    described = json.loads(json.dumps(source.describe()))

    assert described["name"] == "synthetic:criteo-kaggle"
    assert described["num_samples"] == 10
    assert described["seed"] == 4
    assert described["table_sizes"] == {"cat_0": 3, "cat_1": 8}
    assert described["best_auc"] is None  # the test part is too small


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
