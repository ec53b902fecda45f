"""What a writer of stores, and a store, refuse: the error, and the name that it gives."""

import numpy as np
import pytest

from recsys.datasets.splits import classic_splits
from recsys.datasets.store import Store
from recsys.datasets.store_writer import Feature, StoreWriter
from recsys.errors import AlreadyExists, ConfigError, StoreError

TAGS = Feature("tags", "tag", "multi")


def write(folder, features, table="tag", sparse=0, **arrays):
    """Write a store of one sample; `sparse` is the number of features of one row."""
    arrays = {name: np.array(values) for name, values in arrays.items()}
    with StoreWriter(folder / "store", features=features) as writer:
        writer.append(
            arrays.pop("labels", np.zeros(1, np.int8)),
            np.zeros((1, 1), np.int32),
            np.zeros((1, sparse), np.int32),
            **arrays,
        )
        writer.finish(
            dense_names=["int_0"],
            table_sizes={table: 5},
            splits=classic_splits(1),
            about={"convention": "table", "sources": []},
        )
    return folder / "store"


def write_one_bag(folder, features=(TAGS,), lengths=((1,),), **arrays):
    return write(folder, features, bag_values=[1], bag_lengths=lengths, **arrays)


def cut_values(folder):
    file = write_one_bag(folder) / "bag_values.bin"
    file.write_bytes(file.read_bytes()[:-1])
    Store(folder / "store")


REFUSALS = [
    ("no bags", lambda folder: write(folder, [TAGS]), ValueError, "bag_values"),
    (
        "weights of samples",
        lambda folder: write_one_bag(folder, weights=[1.0]),
        ValueError,
        "weights",
    ),
    (
        "labels without names",
        lambda folder: write(folder, None, sparse=1, labels=[[0, 1]]),
        ValueError,
        "label_names",
    ),
    ("too long", lambda folder: write_one_bag(folder, lengths=[[2]]), ValueError, "bag_lengths"),
    ("flat lengths", lambda folder: write_one_bag(folder, lengths=[1]), ValueError, "bag_lengths"),
    ("below 0", lambda folder: write_one_bag(folder, lengths=[[-1]]), ValueError, "bag_lengths"),
    *[
        (
            f"feature {feature}",
            lambda folder, feature=feature: StoreWriter(folder / "store", features=[TAGS, feature]),
            ConfigError,
            feature.name,
        )
        for feature in (
            Feature("geo.city", "geo.city"),
            Feature("bag", "tag", "bag"),
            Feature("tags", "other"),
        )
    ],
    (
        "a table that no model can have",
        lambda folder: Store(write(folder, None, table="geo.city", sparse=1)),
        StoreError,
        "features",
    ),
    ("a truncated array", cut_values, StoreError, "bag_values.bin"),
    ("a folder that is no store", Store, StoreError, "meta.json"),
    ("a folder that is there", StoreWriter, AlreadyExists, "exists"),
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name(tmp_path, act, error, name):
    with pytest.raises(error) as raised:
        act(tmp_path)

    assert name in str(raised.value)
