"""Stores as they are written and read: raw Criteo data, and declared features of any kind."""

import errno
import re

import numpy as np
import pytest

from recsys.batch import JaggedIds
from recsys.datasets import Store
from recsys.datasets.store_writer import Feature, StoreWriter, classic_splits
from recsys.errors import AlreadyExists, StoreError

FEATURES = (
    Feature("user", "user"),
    Feature("tags", "tag", "multi"),
    Feature("item", "item"),
    Feature("history", "item", "sequence"),
)
TABLES = {"user": 7, "tag": 4, "item": 9}
NUM_SAMPLES = 30


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
    bags = iter(np.split(ids.values().numpy(), ids.offsets().numpy()[1:-1]))
    for name in (each.name for each in FEATURES):
        for sample in samples:
            assert next(bags).tolist() == expected.rows[sample][name]
    np.testing.assert_array_equal(batch.labels, expected.labels[samples])
    np.testing.assert_array_equal(batch.dense_features, expected.dense[samples])
    np.testing.assert_array_equal(batch.weights, expected.weights[samples])
    JaggedIds(ids.keys(), ids.values(), ids.offsets())  # checks the offsets
    none = store.read(np.arange(0))
    assert len(none) == none.sparse_features.stride() == len(none.weights) == 0
    for outside in ([-1], [0, 30]):
        with pytest.raises(IndexError, match=r"must lie in \[0, 30\)"):
            store.read(np.array(outside))


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


def test_integers_are_read_as_their_logarithms(tmp_path):
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path / "criteo") as writer:
        writer.append(
            rng.integers(0, 2, 21).astype(np.int8),
            rng.integers(0, 100, (21, 2)).astype(np.int32),
            rng.integers(0, 5, (21, 3)).astype(np.int32),
        )
        writer.finish(
            dense_names=["int_0", "int_1"],
            ids={name: np.arange(5, dtype=np.uint32) for name in ("cat_0", "cat_1", "cat_2")},
            splits=classic_splits(21),
            about={"convention": "classic", "sources": []},
        )
    store, samples = Store(tmp_path / "criteo"), np.array([20, 3, 3, 0])

    batch = store.read(samples)

    np.testing.assert_array_equal(batch.labels, store.labels[samples])
    expected = np.log(store.dense[samples].astype(np.float32) + 1)
    np.testing.assert_array_equal(batch.dense_features, expected)
    for column, key in enumerate(["cat_0", "cat_1", "cat_2"]):
        np.testing.assert_array_equal(
            batch.sparse_features[key].values(), store.sparse[samples, column]
        )


def test_nothing_is_left_behind_when_the_disk_is_full(tmp_path, expected, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("recsys.datasets.store_writer.flush_to_disk", fail)
    with new_writer(tmp_path / "store") as writer:
        expected.append_to(writer, range(NUM_SAMPLES))
        with pytest.raises(OSError, match="No space left"):
            finish(writer)

    assert list(tmp_path.iterdir()) == []


def test_the_files_of_a_store_are_flushed_before_its_name_appears_and_the_name_after_it(
    tmp_path, monkeypatch
):
    path, is_there = tmp_path / "store", {}
    monkeypatch.setattr(
        "recsys.datasets.store_writer.flush_to_disk",
        lambda flushed: is_there.update({flushed.name: path.exists()}),
    )
    with new_writer(path) as writer:
        finish(writer)

    names = [".store.partial", *(file.name for file in path.iterdir())]
    assert is_there == dict.fromkeys(names, False) | {tmp_path.name: True}


def test_a_folder_that_a_killed_writer_left_is_named(tmp_path):
    left = tmp_path / ".my store.partial"
    left.mkdir()

    with pytest.raises(AlreadyExists, match=re.escape(f"rm -r '{left}'")):
        StoreWriter(tmp_path / "my store")


@pytest.mark.parametrize(
    ("num_samples", "sizes"),
    [(0, [0, 0, 0]), (1, [1, 0, 0]), (13, [12, 1, 0]), (137_139, [117_548, 9_796, 9_795])],
)
def test_the_classic_split_halves_the_last_of_seven_parts(num_samples, sizes):
    splits = classic_splits(num_samples)

    assert [len(splits[name]) for name in ("train", "test", "validation")] == sizes
    assert [*splits["train"], *splits["test"], *splits["validation"]] == list(range(num_samples))


ARRAYS = ("labels", "dense", "sparse", "bag_values", "bag_ends", "weights", "groups", "times")


def with_value(name, place, value):
    """Changes a value of an array."""

    def change(data):
        array = np.frombuffer(data, {"bag_ends": np.int64, "catalog": np.int32}[name]).copy()
        array[place] = value
        return array.tobytes()

    return name, change


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *[(name, lambda data: data[:-1]) for name in (*ARRAYS, "catalog")],
        *[
            with_value("bag_ends", *at)
            for at in ((0, -1), (18, 2**62), (17, 2**40), (18, -(2**63)), (-1, -4))
        ],
        *[with_value("catalog", 4, row) for row in (7, -1)],
        ("meta", lambda data: data.replace(b'"version": 1', b'"version": 99')),
        *[
            ("meta", lambda _, text=text: text)
            for text in (
                *(b"", b"[]", b"{}", b"\xff", b"[" * 100_000),
                b'{"a":' * 100 + b"0" + b"}" * 100,
            )
        ],
    ],
)
def test_a_damaged_file_is_refused_by_name(store, name, damage):
    file = store.path / ("meta.json" if name == "meta" else f"{name}.bin")
    file.write_bytes(damage(file.read_bytes()))

    with pytest.raises(StoreError, match=file.name):
        Store(store.path)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": {"label": "buy"}},
        {"encoding": "another hash"},
        {"features": [each._asdict() | {"name": f"{each.name}_"} for each in FEATURES]},
        {"ranking": {"item": "user", "item_features": ["item"]}},
        {"sources": [{"sha256": "0" * 64}]},
        {"convention": "torchrec"},
        {"max_ind_range": 7},
        {"num_embeddings": {"user": 7, "tag": 4, "item": 10}},
        {"num_embeddings": {"item": 9, "tag": 4, "user": 7}},
        {"splits": {"train": [0, 25], "test": [25, 29], "validation": [29, 30]}},
    ],
)
def test_stores_of_other_sources_schemas_tables_or_splits_have_another_fingerprint(store, change):
    before = store.fingerprint

    store.meta |= change

    assert store.fingerprint != before
