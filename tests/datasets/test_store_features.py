"""Stores with declared features: bags, shared tables, weights, groups, times, a catalog."""

import json

import numpy as np
import pytest
import torch

from recsys.batch import JaggedIds
from recsys.cli import main
from recsys.datasets.store import Store
from recsys.datasets.store_writer import Feature, StoreWriter, classic_splits
from recsys.errors import StoreError

FEATURES = (
    Feature("user", "user"),
    Feature("tags", "tag", "multi"),
    Feature("item", "item"),
    Feature("history", "item", "sequence"),
)
TABLES = {"user": 7, "tag": 4, "item": 9}
NUM_SAMPLES = 30


KEYS = [feature._asdict() for feature in FEATURES]


class Expected:
    """The samples that the store of these tests holds, as lists of Python."""

    def __init__(self, seed=0, num_samples=NUM_SAMPLES):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 2, num_samples).astype(np.int8)
        self.dense = rng.normal(size=(num_samples, 2)).astype(np.float32)
        self.rows = [
            {
                each.name: rng.integers(
                    0, TABLES[each.table], rng.integers(0, 5) if each.is_bag else 1
                ).tolist()
                for each in FEATURES
            }
            for _ in range(num_samples)
        ]
        self.weights = rng.random(num_samples).astype(np.float32)
        self.groups = rng.integers(0, 5, num_samples).astype(np.int32)
        self.times = rng.integers(0, 2**40, num_samples)

    def append_to(self, writer, samples):
        rows = [self.rows[sample] for sample in samples]
        bags = [each.name for each in FEATURES if each.is_bag]
        ones = [each.name for each in FEATURES if not each.is_bag]
        chosen = slice(samples.start, samples.stop)
        writer.append(
            self.labels[chosen],
            self.dense[chosen],
            np.array([[of[name][0] for name in ones] for of in rows], np.int32),
            bag_values=np.array(
                [row for of in rows for name in bags for row in of[name]], np.int32
            ),
            bag_lengths=np.array([len(of[name]) for of in rows for name in bags]).reshape(-1, 2),
            weights=self.weights[chosen],
            groups=self.groups[chosen],
            times=self.times[chosen],
        )


def finish(writer, **changes):
    arguments = {
        "dense_names": ["price", "age"],
        "table_sizes": TABLES,
        "splits": classic_splits(writer.num_samples),
        "about": {
            "convention": "table",
            "sources": [],
            "schema": {"label": "click"},
            "ranking": {"item": "item", "item_features": ["user"]},
        },
        "catalog": np.arange(9, dtype=np.int32)[:, None] % 7,
    }
    return writer.finish(**arguments | changes)


def new_writer(path, **changes):
    arguments = {
        "dense_transform": "none",
        "features": FEATURES,
        "has_weights": True,
        "has_groups": True,
        "has_times": True,
    }
    return StoreWriter(path, **arguments | changes)


@pytest.fixture
def expected():
    return Expected()


@pytest.fixture
def store(tmp_path, expected):
    with new_writer(tmp_path / "store") as writer:
        for samples in (range(11), range(11, 11), range(11, NUM_SAMPLES)):
            expected.append_to(writer, samples)
        finish(writer)
    return Store(tmp_path / "store")


def test_batches_hold_all_features_in_their_order(store, expected):
    samples = np.array([29, 3, 3, 0, 11, 10])

    batch = store.read(samples)

    ids = batch.sparse_features
    assert ids.keys() == ["user", "tags", "item", "history"]
    ends = ids.offsets().numpy()[1:-1]
    bags = iter(np.split(ids.values().numpy(), ends))
    for name in (each.name for each in FEATURES):
        for sample in samples:
            assert next(bags).tolist() == expected.rows[sample][name]
    np.testing.assert_array_equal(batch.labels, expected.labels[samples])
    np.testing.assert_array_equal(batch.dense_features, expected.dense[samples])
    np.testing.assert_array_equal(batch.weights, expected.weights[samples])
    JaggedIds(ids.keys(), ids.values(), ids.offsets())  # checks the offsets


def test_no_samples_make_an_empty_batch(store):
    batch = store.read(np.arange(0))

    assert len(batch) == 0
    assert batch.sparse_features.stride() == 0
    assert batch.weights.shape == (0,)


def test_arrays_beside_the_batch_are_as_they_were_written(store, expected):
    np.testing.assert_array_equal(store.groups, expected.groups)
    np.testing.assert_array_equal(store.times, expected.times)
    assert store.catalog.tolist() == [[row % 7] for row in range(9)]
    assert store.features == FEATURES
    assert store.feature_tables == {
        "user": "user",
        "tags": "tag",
        "item": "item",
        "history": "item",
    }
    assert store.table_sizes == TABLES
    assert store.describe()["features"] == KEYS
    assert KEYS[3] == {"name": "history", "table": "item", "kind": "sequence"}


def test_a_store_may_have_bags_alone_and_no_dense_features(tmp_path):
    with StoreWriter(
        tmp_path / "store", dense_transform="none", features=[Feature("tags", "tag", "multi")]
    ) as writer:
        writer.append(
            np.array([1, 0], np.int8),
            np.empty((2, 0), np.float32),
            np.empty((2, 0), np.int32),
            bag_values=np.array([2, 0], np.int32),
            bag_lengths=np.array([[0], [2]]),
        )
        finish(
            writer,
            dense_names=[],
            table_sizes={"tag": 3},
            about={"convention": "table", "sources": []},
            catalog=None,
        )

    batch = Store(tmp_path / "store").read(np.array([1, 0]))

    assert batch.sparse_features.values().tolist() == [2, 0]
    assert batch.sparse_features.offsets().tolist() == [0, 2, 2]
    assert batch.dense_features.shape == (2, 0)
    assert batch.weights is None


def test_features_of_one_row_that_share_a_table_make_one_hot_batches(tmp_path):
    features = [Feature("from", "city"), Feature("to", "city")]
    with StoreWriter(tmp_path / "store", features=features) as writer:
        writer.append(np.zeros(1, np.int8), np.zeros((1, 1), np.int32), np.array([[2, 1]]))
        writer.finish(
            dense_names=["int_0"],
            table_sizes={"city": 3},
            splits=classic_splits(1),
            about={"convention": "table", "sources": []},
        )
    store = Store(tmp_path / "store")

    ids = store.read(np.arange(1)).sparse_features

    assert ids.is_known_one_hot()
    assert (ids.keys(), ids.values().tolist()) == (["from", "to"], [2, 1])
    assert store.bag_values is None


def write_labels(path, labels, names):
    with StoreWriter(path, label_names=names) as writer:
        num_samples = len(labels)
        writer.append(
            np.array(labels, np.int8),
            np.zeros((num_samples, 1), np.int32),
            np.zeros((num_samples, 1), np.int32),
        )
        return Store(
            writer.finish(
                dense_names=["int_0"],
                table_sizes={"item": 1},
                splits=classic_splits(num_samples),
                about={"convention": "table", "sources": []},
            )
        )


@pytest.mark.parametrize("names", [["click"], ["click", "buy"]])
def test_named_labels_make_a_column_each(tmp_path, capsys, names):
    labels = [[number % 2, number % 3 == 1][: len(names)] for number in range(14)]
    store = write_labels(tmp_path / "store", labels, names)

    batch = store.read(np.array([4, 0, 13]))

    assert batch.labels.dtype == torch.float32
    assert batch.labels.tolist() == [labels[4], labels[0], labels[13]]
    assert batch.select(torch.tensor([2])).labels.tolist() == [labels[13]]
    assert store.label_names == tuple(names) == tuple(store.describe()["labels"])
    before = store.fingerprint
    store.meta["labels"] = ["like"]
    assert store.fingerprint != before
    assert main(["train", str(store.path), "--run", str(tmp_path / "run")]) == 2
    assert "'click'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        *[
            (name, None, None)
            for name in (*("bag_values", "bag_ends", "weights", "groups", "times", "catalog"),)
        ],
        *[("bag_ends", *at) for at in ((0, -1), (18, 2**62), (17, 2**40), (18, -(2**63)))],
        ("bag_ends", -1, -4),
        ("catalog", 4, 7),
        ("catalog", 4, -1),
    ],
)
def test_a_damaged_array_is_refused_by_name(store, name, place, value):
    file = store.path / f"{name}.bin"
    array = np.fromfile(file, store.meta["dtypes"][name])
    if place is not None:
        array[place] = value
    file.write_bytes(array.tobytes()[: -1 if place is None else None])

    with pytest.raises(StoreError, match=rf"{name}\.bin"):
        Store(store.path)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": {"label": "buy"}},
        {"encoding": "another hash"},
        {"features": [{**each._asdict(), "name": f"{each.name}_"} for each in FEATURES]},
        {"ranking": {"item": "user", "item_features": ["item"]}},
    ],
)
def test_stores_of_other_schemas_have_another_fingerprint(store, change):
    before, changed = store.fingerprint, json.loads(json.dumps(change))
    meta = json.loads((store.path / "meta.json").read_text()) | changed
    if "features" in change:
        meta["ranking"] = {"item": "item_", "item_features": ["user_"]}
    store.meta = meta

    assert store.fingerprint != before
