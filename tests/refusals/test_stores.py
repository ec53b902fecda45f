"""What a writer of stores, and a store, refuse: the error, and the name that it gives."""

import numpy as np
import pytest

from recsys.datasets.store import Store
from recsys.datasets.store_writer import Feature, StoreWriter, classic_splits
from recsys.errors import AlreadyExists, StoreError

TAGS = Feature("tags", "tag", "multi")


def write(folder, features, table="tag", sparse=0, **arrays):
    """Write a store of one sample; `sparse` is the number of features of one row."""
    with StoreWriter(folder / "store", features=features) as writer:
        writer.append(
            np.zeros(1, np.int8),
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


def cut_values(folder):
    one = np.ones((1, 1), np.int32)
    file = write(folder, [TAGS], bag_values=one[0], bag_lengths=one) / "bag_values.bin"
    file.write_bytes(file.read_bytes()[:-1])
    Store(folder / "store")


REFUSALS = [
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
