"""Stores of tables: rows like those of another store, encodings, labels, what is warned of."""

import errno

import numpy as np
import pandas as pd
import pytest
import torch

from recsys.datasets import Schema, Store, prepare_table, write_store
from recsys.errors import DatasetFormatError
from tests.commands import refused
from tests.datasets.tabular.decoded import ALL_TRAIN, rows_of, vocabularies_of

CLICKS = {
    "label": "click",
    "dense": {"price": {"transform": "standardize", "missing": "mean"}},
    "categorical": {"site": {}, "size": {"values": "integer", "missing": "own"}},
    "multi": {"tags": {"split": "|"}},
}
PURCHASES = {
    "group": "user",
    "timestamp": "ts",
    "categorical": {"user": {}, "item": {"values": "integer"}, "genre": {}},
    "history": {"recent": {"of": "item", "max_length": 2}},
    "split": {"by": "last_one_out"},
    "negatives": {"item": "item", "item_columns": ["genre"], "per_positive": 3, "seed": 5},
}


def clicks(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "click": rng.integers(0, 2, num_rows),
            "price": np.where(rng.random(num_rows) < 0.2, np.nan, rng.normal(5, 2, num_rows)),
            "site": rng.choice(["a", "b", "c"], num_rows),
            "size": pd.array(rng.choice([1, 2, None], num_rows), "Int64"),
            "tags": rng.choice(["x|y", "", "z"], num_rows),
        }
    )


def purchases(num_users=6, num_rows=80, num_items=30):
    rng = np.random.default_rng(1)
    items = rng.integers(1, num_items, num_rows)
    return pd.DataFrame(
        {
            "user": [f"u{each}" for each in rng.integers(0, num_users, num_rows)],
            "item": items,
            "genre": [f"g{each % 4}" for each in items],
            "ts": rng.permutation(num_rows),
        }
    )


@pytest.fixture
def files(tmp_path):
    def write(frame, name="rows.csv"):
        frame.to_csv(tmp_path / name, index=False)
        return [tmp_path / name]

    return write


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, "'genre'"),
        ({"dense": {"size": {}}, "multi": {"words": {}}}, "'size', 'genre', 'words'"),
        ({"history": {}, "dense": {"mood": {}}}, "'genre'"),
    ],
)
def test_columns_that_belong_to_the_item_are_warned_of(tmp_path, change, names):
    frame = purchases()
    frame["size"] = frame["item"] * 0.5
    frame["words"] = [["a"] * (each % 3) for each in frame["item"]]
    frame["mood"] = np.arange(len(frame))
    tree = PURCHASES | {"negatives": {"item": "item"}} | change
    with pytest.warns(UserWarning, match=f"negatives: {names} .*'item'"):
        write_store(frame, Schema.from_dict(tree), tmp_path / "store")


def test_rows_like_a_store_have_its_rows_and_statistics(tmp_path, files):
    first = prepare_table(files(clicks(50)), tmp_path / "store", Schema.from_dict(CLICKS))
    new = clicks(20, seed=3)
    new.loc[[2, 5], "site"] = ["new", "newer"]
    new.loc[4, "tags"] = "x|unknown|z"
    report = prepare_table(files(new, "new.csv"), tmp_path / "like", like=first.path)
    assert report.splits == {"train": 0, "test": 20, "validation": 0}
    assert report.unknown["test"] == {"site": 2, "size": 0, "tags": 1}
    store, like = Store(first.path), Store(report.path)
    assert like.table_sizes == store.table_sizes
    assert like.meta["dense_rules"] == store.meta["dense_rules"]
    assert like.meta["encoding"] == store.meta["encoding"]
    assert (like.sparse[:, 0] == 0).nonzero()[0].tolist() == [2, 5]
    again = prepare_table(files(new, "new.csv"), tmp_path / "again", like=report.path)
    assert (Store(again.path).sparse == like.sparse).all()


def test_rows_like_a_store_may_be_divided_to_train_on(tmp_path, files):
    first = prepare_table(files(clicks(50)), tmp_path / "store", Schema.from_dict(CLICKS))
    new = clicks(20, seed=3)

    report = prepare_table(files(new, "new.csv"), tmp_path / "new", like=first.path, split=True)
    of_frame = write_store(new, None, tmp_path / "of_frame", like=first.path, split=True)
    prepare_table(files(new, "new.csv"), tmp_path / "test", like=first.path)

    alone = write_store(new, Schema.from_dict(CLICKS), tmp_path / "alone")
    assert report.splits == of_frame.splits == alone.splits
    assert report.splits["train"]
    store, for_test = Store(report.path), Store(tmp_path / "test")
    assert store.meta["encoding"] == Store(first.path).meta["encoding"]
    assert (store.sparse == Store(of_frame.path).sparse).all()
    # The same rows in the order of the parts.
    assert sorted(map(tuple, store.sparse)) == sorted(map(tuple, for_test.sparse))
    assert (store.labels == Store(alone.path).labels).all()


def test_rows_like_a_store_need_the_column_of_its_split_only_to_train_on(tmp_path, files):
    split = {"by": "column", "column": "fold", "train": ["t"], "test": ["v"]}
    frame = clicks(10).assign(fold=list("tttttttttv"))
    like = write_store(frame, Schema.from_dict(CLICKS | {"split": split}), tmp_path / "store").path
    without = frame.drop(columns="fold")

    for name, rows in (
        ("without", without),
        ("with", frame.assign(fold="else")),
        ("empty", frame.assign(fold="")),
    ):
        report = prepare_table(files(rows), tmp_path / name, like=like)
        assert report.splits["test"] == 10
    report = write_store(frame, None, tmp_path / "new", like=like, split=True)
    assert report.splits["train"] == 9
    with pytest.raises(DatasetFormatError, match="fold"):
        write_store(without, None, tmp_path / "x", like=like, split=True)


def test_a_vocabulary_names_the_value_of_each_row(tmp_path):
    sites = ["b", "ä", None, "b", "ä", "c"]
    frame = pd.DataFrame({"click": [1, 0] * 3, "site": sites, "n": [7, 7, 8, 9, 10, 11]})
    tree = {
        "label": "click",
        "categorical": {
            "site": {"missing": "own", "max_rows": 4},
            "n": {"values": "integer", "min_count": 2},
            "hashed": {"numbering": "hash", "num_rows": 5},
        },
        "split": ALL_TRAIN,
    }
    write_store(frame.assign(hashed="x"), Schema.from_dict(tree), tmp_path / "store")
    store = Store(tmp_path / "store")
    assert store.table_sizes == {"site": 4, "n": 2, "hashed": 5}
    del store.table_sizes["hashed"]  # it has no vocabulary
    assert vocabularies_of(store) == {"site": [None, None, "b", "ä"], "n": [None, 7]}


def test_stores_have_one_encoding_if_their_features_are_made_alike(tmp_path):
    def encoding(change, frame):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        write_store(frame, Schema.from_dict(CLICKS | change), path)
        return Store(path).meta["encoding"]

    frame = clicks(56)
    dense = {"price": {}, "age": {}}
    changes = [
        {"dense": dense},
        {"dense": dict(reversed(dense.items()))},
        {"dense": {"age": {}, "price": {"transform": "log"}}},
        {"categorical": {"size": {"values": "integer", "missing": "own"}, "site": {}}},
        {"categorical": {"site": {}, "size": {"values": "integer"}}},
        {"categorical": {"site": {"numbering": "hash", "num_rows": 4}}},
        {"multi": {"tags": {"split": "|", "max_length": 1}}},
        {"sequence": {"tags": {"split": "|", "max_length": 9}}, "multi": {}},
    ]
    own = encoding({}, frame)
    others = [encoding(change, frame.assign(age=frame["price"])) for change in changes]
    others.append(encoding({}, frame[::-1]))

    assert len({own, *others}) == 1 + len(changes) + 1
    assert encoding({"missing_values": ["NA"]}, frame) == own
    assert encoding({"weight": "w"}, frame.assign(w=2.0)) == own
    assert encoding({}, pd.concat([frame[:48], clicks(8, seed=9)])) == own


def test_nothing_is_left_behind_when_the_disk_is_full(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("recsys.datasets.tabular.split.Spool._write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_store(clicks(9), Schema.from_dict(CLICKS), tmp_path / "store")

    assert list(tmp_path.iterdir()) == []


def test_a_schema_may_name_several_labels(tmp_path):
    frame = pd.DataFrame({"click": [1, 1, 0, 0], "buy": [True, False, False, True], "c": "x"})
    tree = {"labels": ["click", "buy"], "categorical": {"c": {}}, "split": ALL_TRAIN}
    write_store(frame, Schema.from_dict(tree), tmp_path / "store")

    store = Store(tmp_path / "store")
    assert store.meta["labels"] == ["click", "buy"]
    batch, before = store.read(np.arange(4)), store.fingerprint
    assert batch.labels.tolist() == [[1, 1], [1, 0], [0, 0], [0, 1]]
    assert batch.select(torch.tensor([2])).labels.tolist() == [[0, 0]]
    assert batch.sparse_features.is_known_one_hot()
    assert store.label_names == ("click", "buy") == tuple(store.describe()["labels"])
    store.meta["labels"] = ["click", "like"]
    assert store.fingerprint != before
    assert "'click'" in refused("train", store.path, "--run", tmp_path / "run")


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame", "category"])
def test_text_labels_are_made_0_and_1_by_a_rule(tmp_path, kind):
    def write(rows, name, **options):
        if kind in ("csv", "parquet"):
            file = tmp_path / f"{name}.{kind}"
            rows.to_csv(file, index=False) if kind == "csv" else rows.to_parquet(file)
            return Store(prepare_table([file], tmp_path / name, **options).path)
        rows = rows.astype({"bought": "category"}) if kind == "category" else rows
        schema = options.pop("schema", None)
        return Store(write_store(rows, schema, tmp_path / name, **options).path)

    columns = {"categorical": {"c": {}}, "split": {"test": "1/6", "validation": 0}}
    schema = Schema.from_dict({"label": "bought", "positive": "== yes", **columns})
    frame = pd.DataFrame({"c": list("ababab"), "bought": ["yes", "no", "Yes", "no", "yes", "not"]})

    assert write(frame, "store", schema=schema).labels.tolist() == [1, 0, 0, 0, 1, 0]
    new = frame.assign(bought=["no", "yes"] * 3)
    assert write(new, "like", like=tmp_path / "store").labels.tolist() == [0, 1] * 3


def test_histories_are_of_one_group_and_count_no_value_twice(tmp_path, files):
    rows = {"user": list("aabb"), "item": [3, 3, 5, 6], "ts": [0, 7, 7, 8], "click": [1] * 4}
    tree = {"group": "user", "timestamp": "ts", "label": "click"}
    tree |= {"categorical": {"item": {"values": "integer", "min_count": 2}}}
    tree |= {"history": {"recent": {"of": "item", "where": {"kind": ["buy"]}}}}
    frame = pd.DataFrame(rows | {"kind": ["buy"] * 4})
    assert rows_of(files(frame), tree, tmp_path)["recent"] == [[], [3], [], [None]]
