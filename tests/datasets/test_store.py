import copy
import errno
import json
import os
import pickle
import re

import numpy as np
import pytest

from recsys.datasets.store import Store
from recsys.datasets.store_writer import StoreWriter, classic_splits
from recsys.errors import AlreadyExists, StoreError


@pytest.fixture
def store(tmp_path):
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path / "store") as writer:
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
    return Store(tmp_path / "store")


def test_reading_gathers_samples_in_the_order_asked_for(store):
    samples = np.array([20, 3, 3, 0])

    batch = store.read(samples)

    np.testing.assert_array_equal(batch.labels, store.labels[samples])
    expected_dense = np.log(store.dense[samples].astype(np.float32) + 1)
    np.testing.assert_array_equal(batch.dense_features, expected_dense)
    assert batch.sparse_features.keys() == ["cat_0", "cat_1", "cat_2"]
    for column, key in enumerate(batch.sparse_features.keys()):
        np.testing.assert_array_equal(
            batch.sparse_features[key].values(), store.sparse[samples, column]
        )


def test_a_copy_has_the_splits_of_its_store_and_is_made_in_any_folder(store, monkeypatch, tmp_path):
    relative = Store(os.path.relpath(store.path))
    relative.splits["train"] = range(3)
    monkeypatch.chdir(tmp_path)

    copied = copy.deepcopy(relative)

    assert len(pickle.dumps(store)) < 500
    assert copied.splits == relative.splits
    np.testing.assert_array_equal(copied.labels, store.labels)


@pytest.mark.parametrize("samples", [[-1], [21], [0, 21]])
def test_sample_numbers_out_of_range_are_refused(store, samples):
    with pytest.raises(IndexError, match=r"must lie in \[0, 21\)"):
        store.read(np.array(samples))


@pytest.fixture
def foreign_store(tmp_path):
    """Dense features transformed already, raw ids unknown."""
    with StoreWriter(tmp_path / "store", dense_transform="none") as writer:
        writer.append(
            np.array([0, 1, 0], np.int8),
            np.array([[0.5], [-2.25], [7.0]], np.float32),
            np.array([[0], [4], [1]], np.int32),
        )
        writer.finish(
            dense_names=["int_0"],
            table_sizes={"cat_0": 5},
            splits=classic_splits(3),
            about={"convention": "torchrec", "sources": []},
        )
    return Store(tmp_path / "store")


def test_floats_are_read_as_they_are_and_unknown_ids_are_none(foreign_store):
    batch = foreign_store.read(np.array([2, 1]))

    assert batch.dense_features.tolist() == [[7.0], [-2.25]]
    assert foreign_store.ids is None
    assert foreign_store.table_sizes == {"cat_0": 5}
    assert not (foreign_store.path / "ids.bin").exists()
    assert "num_rows=5" in repr(foreign_store)


def test_nothing_is_left_behind_when_the_disk_is_full(tmp_path):
    class FullDisk:
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        close = fileno = write_through = lambda self: self.write(b"")

    def fail():
        with StoreWriter(tmp_path / "store") as writer:
            writer._files["labels"].close()
            writer._files["labels"] = FullDisk()
            writer.append(
                np.zeros(1, np.int8), np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32)
            )

    with pytest.raises(OSError, match="No space left"):
        fail()

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_killed_writer_left_is_named(tmp_path):
    left = tmp_path / ".my store.partial"
    left.mkdir()

    with pytest.raises(AlreadyExists, match=re.escape(f"rm -r '{left}'")):
        StoreWriter(tmp_path / "my store")

    assert left.is_dir()


@pytest.mark.parametrize(
    "change",
    [
        {"sources": [{"sha256": "0" * 64}]},
        {"convention": "torchrec"},
        {"num_embeddings": {"cat_0": 4, "cat_1": 6, "cat_2": 5}},
        {"num_embeddings": {"cat_1": 5, "cat_0": 5, "cat_2": 5}},
        {"splits": {"train": [0, 17], "test": [17, 20], "validation": [20, 21]}},
    ],
)
def test_stores_of_other_raw_bytes_tables_or_splits_have_another_fingerprint(store, change):
    before = store.fingerprint
    meta = json.loads((store.path / "meta.json").read_text())
    (store.path / "meta.json").write_text(json.dumps(meta | change))

    assert Store(store.path).fingerprint != before


def test_stores_with_other_bounds_of_their_ids_are_other_data(store):
    meta = json.loads((store.path / "meta.json").read_text())
    fingerprints = {store.fingerprint}
    for bound in (7, 2**32 - 1):
        (store.path / "meta.json").write_text(json.dumps(meta | {"max_ind_range": bound}))

        bounded = Store(store.path)

        fingerprints.add(bounded.fingerprint)
        assert bounded.describe()["max_ind_range"] == bound
    assert len(fingerprints) == 3
    assert "max_ind_range" not in store.describe()


@pytest.mark.parametrize(
    ("num_samples", "sizes"),
    [(0, [0, 0, 0]), (1, [1, 0, 0]), (13, [12, 1, 0]), (137_139, [117_548, 9_796, 9_795])],
)
def test_the_classic_split_halves_the_last_of_seven_parts(num_samples, sizes):
    splits = classic_splits(num_samples)

    assert [len(splits[name]) for name in ("train", "test", "validation")] == sizes
    assert [*splits["train"], *splits["test"], *splits["validation"]] == list(range(num_samples))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *[(f"{name}.bin", lambda data: data[:-1]) for name in ("labels", "dense", "sparse", "ids")],
        ("meta.json", lambda data: data.replace(b'"version": 1', b'"version": 99')),
        *[
            ("meta.json", lambda _, text=text: text)
            for text in (
                *(b"", b"[]", b"{}", b"\xff", b"[" * 100_000),
                b'{"a":' * 100 + b"0" + b"}" * 100,
            )
        ],
    ],
)
def test_a_damaged_file_is_refused_by_name(store, file, damage):
    (store.path / file).write_bytes(damage((store.path / file).read_bytes()))

    with pytest.raises(StoreError, match=file):
        Store(store.path)
