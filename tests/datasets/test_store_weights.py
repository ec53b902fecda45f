"""Stores with a weight for each value of a bag."""

import json

import numpy as np
import pytest
import torch

from recsys.datasets.splits import classic_splits
from recsys.datasets.store import Store
from recsys.datasets.store_writer import Feature, StoreWriter
from recsys.errors import StoreError

FEATURES = (
    Feature("tags", "tag", "multi", is_weighted=True),
    Feature("item", "item"),
    Feature("seen", "item", "sequence"),
)
TAGS = [[3, 1], [], [2], [0, 0, 3]]
SCORES = [[0.5, -2.0], [], [4.0], [0.25, 1.0, 0.0]]
SEEN = [[8], [1, 2], [], [7]]


def append(writer, samples, **changes):
    bags = [bag for sample in samples for bag in (TAGS[sample], SEEN[sample])]
    weights = [each for sample in samples for each in (SCORES[sample], [1.0] * len(SEEN[sample]))]
    arrays = {
        "bag_values": np.array([row for bag in bags for row in bag], np.int32),
        "bag_lengths": np.array([len(bag) for bag in bags]).reshape(-1, 2),
        "bag_weights": np.array([one for bag in weights for one in bag], np.float32),
    }
    writer.append(
        np.zeros(len(samples), np.int8),
        np.zeros((len(samples), 1), np.float32),
        np.array([[sample] for sample in samples], np.int32),
        **arrays | changes,
    )


@pytest.fixture
def store(tmp_path):
    with StoreWriter(tmp_path / "store", dense_transform="none", features=FEATURES) as writer:
        append(writer, [0])
        append(writer, [1, 2, 3])
        writer.finish(
            dense_names=["price"],
            table_sizes={"tag": 4, "item": 9},
            splits=classic_splits(4),
            about={"convention": "table", "sources": []},
        )
    return Store(tmp_path / "store")


def change_meta(store, change):
    file = store.path / "meta.json"
    meta = json.loads(file.read_text())
    change(meta)
    file.write_text(json.dumps(meta))


@pytest.mark.parametrize("samples", [[3, 0, 0, 2], [1], [1, 1], []])
def test_batches_have_a_weight_for_each_lookup(store, samples):
    features = store.read(np.array(samples, np.int64)).sparse_features

    weights = features.weights_or_none()
    assert weights.dtype == torch.float32
    assert weights.tolist() == [
        *[weight for sample in samples for weight in SCORES[sample]],
        *[1.0] * len(samples),
        *[1.0] * sum(len(SEEN[sample]) for sample in samples),
    ]
    assert features["tags"].values().tolist() == [row for each in samples for row in TAGS[each]]


def test_a_store_says_which_features_have_weights(store):
    assert store.features == FEATURES
    features = store.describe()["features"]
    assert features[0] == {"name": "tags", "table": "tag", "kind": "multi", "is_weighted": True}
    assert features[1] == {"name": "item", "table": "item", "kind": "one"}
    assert store.meta["dtypes"]["bag_weights"] == "<f4"
    before = store.fingerprint
    change_meta(store, lambda meta: meta["features"][2].update(is_weighted=True))
    assert Store(store.path).fingerprint != before


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda meta: meta["dtypes"].pop("bag_weights"), "dtypes"),
        (lambda meta: meta["dtypes"].update(bag_weights="<f8"), "dtypes"),
        (lambda meta: meta["features"][0].pop("is_weighted"), "dtypes"),
        (lambda meta: meta["features"][0].update(is_weighted=1), "features"),
        (lambda meta: meta["features"][0].update(is_weighted=None), "features"),
        (lambda meta: meta["features"][1].update(is_weighted=True), "features"),
    ],
)
def test_a_description_that_does_not_fit_is_refused_by_name(store, change, key):
    change_meta(store, change)

    with pytest.raises(StoreError, match=rf"meta\.json: {key} must be "):
        Store(store.path)
