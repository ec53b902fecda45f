from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.batch import features_by_table, has_bags
from recsys.datasets import SyntheticTaobao
from recsys.datasets.splits import classic_splits
from recsys.errors import ConfigError
from recsys.train.metrics.metrics import auc

NUM_SAMPLES = 20_000
NUM_STEPS = 20  # of a full history, by default
FEATURES = ["user", "item_history", "item", "category_history", "category"]


@pytest.fixture(scope="module")
def whole():
    """A source of the default tables, and all its samples."""
    source = SyntheticTaobao(NUM_SAMPLES)
    return source, source.read(np.arange(NUM_SAMPLES))


def rows_of(batch, feature):
    return batch.sparse_features[feature].values().numpy()


def ranks_of(source, items):
    """The popularity ranks of items: the inverse of the bijection that numbers them."""
    size, multiplier, shift = source._items
    return (items - shift) % size * pow(multiplier, -1, size) % size


def categories_of(source, items):
    return source._categories.rows(ranks_of(source, items) % source.table_sizes["category"])


def assert_same_samples(batch, expected):
    found, others = batch.sparse_features, expected.sparse_features
    assert torch.equal(found.values(), others.values())
    assert torch.equal(found.offsets(), others.offsets())
    assert torch.equal(batch.labels, expected.labels)


def in_history(batch):
    """How many steps of each sample have the candidate's category."""
    history = batch.sparse_features["category_history"]
    bags = np.repeat(np.arange(len(batch)), history.lengths().numpy())
    is_same = history.values().numpy() == rows_of(batch, "category")[bags]
    return np.bincount(bags, is_same, len(batch))


def test_batch_has_the_shapes_and_dtypes_of_a_source():
    batch = SyntheticTaobao(100).read(np.array([3, 99, 3]))

    assert batch.dense_features.shape == (3, 0)
    assert batch.dense_features.dtype == batch.labels.dtype == torch.float32
    assert batch.sparse_features.keys() == FEATURES
    assert batch.sparse_features.values().dtype == torch.int64
    assert batch.sparse_features.stride() == len(batch) == 3


def test_no_samples_give_an_empty_batch():
    batch = SyntheticTaobao(100).read(np.array([], np.int64))

    assert len(batch) == batch.sparse_features.stride() == 0


@settings(derandomize=True, max_examples=50)
@given(samples=st.lists(st.integers(0, NUM_SAMPLES - 1), min_size=1, max_size=40))
def test_a_sample_is_the_same_in_any_batch_and_order(whole, samples):
    source, everything = whole

    assert_same_samples(source.read(np.array(samples)), everything.select(torch.tensor(samples)))


def test_a_sample_is_the_same_in_any_thread(whole):
    source, everything = whole

    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(source.read, np.array_split(np.arange(NUM_SAMPLES), 40)))

    assert_same_samples(type(everything).concatenate(batches), everything)


def test_a_sample_does_not_depend_on_how_many_there_are(whole):
    _, everything = whole

    few = SyntheticTaobao(50).read(np.arange(50))

    assert_same_samples(few, everything.select(torch.arange(50)))


@pytest.mark.parametrize("other", [1, -1, 2**70 + 5])
def test_another_seed_makes_other_samples(whole, other):
    _, everything = whole

    changed = SyntheticTaobao(NUM_SAMPLES, seed=other).read(np.arange(NUM_SAMPLES))

    assert (rows_of(changed, "item") == rows_of(everything, "item")).mean() < 0.01
    assert 0.45 < (changed.labels == everything.labels).float().mean() < 0.55


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (3, 7, 7), (1, 1_000, 1), (2**31, 2**31, 2**31 - 1), (10, 50, 7)]
)
@pytest.mark.parametrize("num_steps", [1, 7])
def test_any_table_sizes_give_rows_in_range(sizes, num_steps):
    names = dict(zip(("num_users", "num_items", "num_categories"), sizes, strict=True))
    source = SyntheticTaobao(2_000, **names, num_steps=num_steps)

    batch = source.read(np.arange(2_000))

    for feature, table in source.feature_tables.items():
        rows = rows_of(batch, feature)
        assert 0 <= rows.min() <= rows.max() < source.table_sizes[table]
    items = rows_of(batch, "item_history")
    assert (categories_of(source, items) == rows_of(batch, "category_history")).all()


def test_every_item_of_a_small_table_is_reached():
    source = SyntheticTaobao(20_000, num_items=50, num_categories=7)

    assert len(np.unique(rows_of(source.read(np.arange(20_000)), "item"))) == 50


def test_histories_are_mostly_full_and_never_empty(whole):
    _, batch = whole
    features = batch.sparse_features

    lengths = features["item_history"].lengths()

    assert torch.equal(lengths, features["category_history"].lengths())
    assert sorted(set(lengths.tolist())) == list(range(1, NUM_STEPS + 1))
    assert 0.79 < (lengths == NUM_STEPS).float().mean() < 0.83
    for feature in ("user", "item", "category"):
        assert bool((features[feature].lengths() == 1).all())


def test_categories_are_those_of_the_items(whole):
    source, batch = whole

    for items, categories in (("item", "category"), ("item_history", "category_history")):
        expected = categories_of(source, rows_of(batch, items))
        np.testing.assert_array_equal(rows_of(batch, categories), expected)


def test_half_of_the_samples_are_clicks(whole):
    _, batch = whole

    assert batch.labels.mean().item() == pytest.approx(0.5, abs=0.015)
    assert set(batch.labels.unique().tolist()) == {0.0, 1.0}


def test_clicks_go_to_categories_of_the_history(whole):
    _, batch = whole
    labels, steps = batch.labels.numpy(), in_history(batch)

    assert np.corrcoef(labels, steps > 0)[0, 1] > 0.6
    assert 0.6 < (steps[labels == 1] > 0).mean() < 0.9
    assert (steps[labels == 0] > 0).mean() < 0.01
    assert 0.8 < auc(steps, labels) < 0.95


def test_clicks_go_to_interests_seen_lately(whole):
    _, batch = whole
    history = batch.sparse_features["category_history"]
    is_full = history.lengths().numpy() == NUM_STEPS
    is_click = is_full & (batch.labels.numpy() == 1)
    ends = history.offsets().numpy()[1:][is_click]
    steps = history.values().numpy()[ends[:, None] - 1 - np.arange(NUM_STEPS)]

    shares = (steps == rows_of(batch, "category")[is_click][:, None]).mean(0)

    assert shares[:4].min() > 0.25
    assert shares[-5:].max() < 0.05


def test_popularity_alone_does_not_tell_clicks(whole):
    source, batch = whole
    ranks = ranks_of(source, rows_of(batch, "item"))
    num_categories = source.table_sizes["category"]
    popularity = -np.log((ranks % num_categories + 1.0) * (ranks // num_categories + 1.0))

    assert 0.7 < auc(popularity, batch.labels.numpy()) < 0.8


def test_few_rows_get_many_of_the_lookups(whole):
    source, batch = whole

    for table in ("item", "category"):
        rows = rows_of(batch, f"{table}_history")
        falling = np.sort(np.bincount(rows, minlength=source.table_sizes[table]))[::-1]
        assert falling[: len(falling) // 10].sum() > 0.35 * len(rows)


def test_popular_rows_are_not_the_low_ones(whole):
    source, batch = whole

    rows, counts = np.unique(rows_of(batch, "item_history"), return_counts=True)
    popular = rows[np.argsort(counts)[-300:]]

    assert 100 < (popular < source.table_sizes["item"] / 2).sum() < 200


def test_features_share_tables_and_histories_have_candidates():
    source = SyntheticTaobao(100)

    assert features_by_table(source) == {
        "user": ("user",),
        "item": ("item_history", "item"),
        "category": ("category_history", "category"),
    }
    assert source.histories == {"item_history": "item", "category_history": "category"}
    assert has_bags(source)
    assert source.num_dense == 0
    assert source.splits == classic_splits(100)


def test_fingerprints_tell_settings_apart():
    sources = [
        SyntheticTaobao(100),
        SyntheticTaobao(101),
        SyntheticTaobao(100, seed=1),
        SyntheticTaobao(100, num_users=5),
        SyntheticTaobao(100, num_items=9_001),
        SyntheticTaobao(100, num_categories=8_999),
        SyntheticTaobao(100, num_steps=21),
    ]

    assert len({source.fingerprint for source in sources}) == len(sources)
    assert SyntheticTaobao(100).fingerprint == sources[0].fingerprint


def test_description_is_json():
    source = SyntheticTaobao(np.int64(50), seed=4, num_items=np.int64(9_000))

    described = json.loads(json.dumps(source.describe()))

    assert described["name"] == "synthetic:taobao"
    assert described["num_samples"] == 50
    assert described["seed"] == 4
    assert described["table_sizes"] == {"user": 100_000, "item": 9_000, "category": 9_000}
    assert [each["name"] for each in described["features"]] == FEATURES
    assert [each["kind"] for each in described["features"]][:3] == ["one", "sequence", "one"]


@pytest.mark.parametrize("sample", [-1, 100])
def test_a_sample_that_there_is_not_is_named(sample):
    with pytest.raises(IndexError, match=rf"sample {sample} is not in \[0, 100\)"):
        SyntheticTaobao(100).read(np.array([0, sample]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 6}, "num_samples must be at least 7"),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"num_users": 0}, r"the size of table 'user' must be in \[1, 2147483648\], got 0"),
        ({"num_items": 2**31 + 1}, "the size of table 'item' must be in"),
        ({"num_items": 10}, "an item for each category, got 10 items and 9000 categories"),
    ],
)
def test_settings_that_make_no_samples_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SyntheticTaobao(**{"num_samples": 100, **arguments})


def test_samples_are_those_of_their_settings():
    """A change that is meant to alter them raises the version in the fingerprint."""
    source = SyntheticTaobao(1_000_000, seed=3)

    batch = source.read(np.random.default_rng(0).permutation(1_000_000)[:1_001])

    features = batch.sparse_features
    arrays = [features.values(), features.offsets(), batch.labels.long()]
    joined = b"".join(each.numpy().astype("<i8").tobytes() for each in arrays)
    assert hashlib.sha256(joined).hexdigest()[:16] == "026006699fe4ee8a"
