import numpy as np
import pandas as pd
import pytest

from recsys.datasets import Store, prepare_table, write_store
from recsys.datasets.numbering import read_vocabulary
from recsys.datasets.tabular.encode import Encoder
from recsys.datasets.tabular.schema import Schema
from recsys.errors import DatasetFormatError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

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


def test_negatives_are_beside_the_positives_of_the_training_part(tmp_path):
    frame = purchases()
    report = write_store(frame, Schema.from_dict(PURCHASES), tmp_path / "store")
    store = Store(report.path)
    num_train = report.num_rows - report.splits["test"] - report.splits["validation"]
    assert report.splits["test"] == report.splits["validation"] == 6
    assert (report.splits["train"], report.num_lacking) == (4 * num_train, 0)
    about = {"item": "item", "item_features": ["genre"], "repeats": True}
    assert store.meta["ranking"] == about

    labels = store.labels[: 4 * num_train].reshape(-1, 4)
    assert (labels == [1, 0, 0, 0]).all()
    assert (store.labels[4 * num_train :] == 1).all()
    users, items, genres = store.sparse.T
    for sample in np.flatnonzero(store.labels == 0).tolist():
        assert items[sample] != items[sample - sample % 4]
        assert items[sample] > 0
        beside = sample - sample % 4
        for same in (users, store.groups, store.times):
            assert same[sample] == same[beside]
    assert (store.catalog[items, 0] == genres)[items > 0].all()


def test_negatives_have_the_history_of_their_positive(tmp_path):
    write_store(purchases(), Schema.from_dict(PURCHASES), tmp_path / "store")
    store = Store(tmp_path / "store")
    num_train = len(store.splits["train"])
    histories = bags_of(store)
    for sample in range(num_train):
        assert histories[sample] == histories[sample - sample % 4]
    in_history = [store.sparse[each, 1] in histories[each] for each in range(num_train)]
    assert np.array(in_history).reshape(-1, 4)[:, 1:].any()  # as items come again


def pairs_of(store, samples):
    """The groups and items of samples."""
    users, items, *_ = store.sparse[samples].T
    return set(zip(users.tolist(), items.tolist(), strict=True))


def test_answers_of_test_and_validation_may_be_negatives(tmp_path):
    tree = {**PURCHASES, "history": {}}
    write_store(purchases(), Schema.from_dict(tree), tmp_path / "store")
    store = Store(tmp_path / "store")
    assert store.meta["ranking"]["repeats"] is False
    num_train = len(store.splits["train"])
    train = np.arange(num_train)
    negatives = pairs_of(store, train[store.labels[:num_train] == 0])
    answers = pairs_of(store, np.arange(num_train, store.num_samples))
    positives = pairs_of(store, train[store.labels[:num_train] == 1])
    assert not negatives & positives
    assert negatives & (answers - positives)


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


def test_an_impression_is_not_in_the_histories_of_its_own_rows(tmp_path):
    """The clicked item of an impression comes first, as many logs have it."""
    frame = pd.DataFrame(
        {
            "click": [1, 0, 0, 1, 0, 1],
            "user": ["u"] * 6,
            "item": ["a", "b", "c", "d", "a", "b"],
            "ts": [10, 10, 10, 20, 20, 20],
        }
    )
    tree = {
        "label": "click",
        "group": "user",
        "timestamp": "ts",
        "categorical": {"item": {}},
        "history": {"recent": {"of": "item"}},
        "split": {"by": "fraction", "test": 0, "validation": 0},
    }
    write_store(frame, Schema.from_dict(tree), tmp_path / "store")
    assert bags_of(Store(tmp_path / "store")) == [[], [], [], [1], [1], [1]]
    del tree["timestamp"]
    write_store(frame, Schema.from_dict(tree), tmp_path / "file_order")
    in_order = [[], [1], [1], [1], [1, 4], [1, 4]]
    assert bags_of(Store(tmp_path / "file_order")) == in_order


@pytest.mark.filterwarnings("ignore:label 'click' is 1 in all 3 rows of the training part")
def test_histories_of_training_rows_have_no_row_of_other_parts(tmp_path):
    frame = pd.DataFrame(
        {
            "click": [1] * 6,
            "user": ["u"] * 6,
            "item": ["a", "b", "c", "d", "e", "f"],
            "fold": ["train", "test", "train", "valid", "train", "test"],
        }
    )
    tree = {
        "label": "click",
        "group": "user",
        "categorical": {"item": {}},
        "history": {"recent": {"of": "item"}},
        "split": {
            "by": "column",
            "column": "fold",
            "train": ["train"],
            "test": ["test"],
            "validation": ["valid"],
        },
    }
    write_store(frame, Schema.from_dict(tree), tmp_path / "store")
    a, c = 1, 2  # rows; those of other parts are unknown to training: row 0
    train, test, valid = [[], [a], [a, c]], [[a], [a, 0, c, 0, 3]], [[a, 0, c]]
    assert bags_of(Store(tmp_path / "store")) == [*train, *valid, *test]


def test_rows_like_a_store_begin_with_empty_histories(tmp_path):
    write_store(purchases(), Schema.from_dict(PURCHASES), tmp_path / "store")
    with pytest.warns(UserWarning, match=r"begin empty; .* name the files of store .*store too"):
        write_store(purchases(), None, tmp_path / "like", like=tmp_path / "store")


def bags_of(store):
    ends = np.fromfile(store.path / "bag_ends.bin", np.int64)
    values = np.fromfile(store.path / "bag_values.bin", np.int32)
    return [values[begin:end].tolist() for begin, end in zip([0, *ends], ends, strict=False)]


def test_the_seed_of_negatives_decides(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        tree = PURCHASES | {"negatives": PURCHASES["negatives"] | {"seed": seed}}
        write_store(purchases(), Schema.from_dict(tree), tmp_path / name)
    first, again, other = (Store(tmp_path / name).sparse for name in "abc")
    assert (first == again).all()
    assert (first != other).any()


def test_a_group_with_all_items_has_fewer_negatives(tmp_path):
    frame = pd.DataFrame({"user": list("aaaab"), "item": [1, 2, 3, 4, 1]})
    tree = {
        "group": "user",
        "categorical": {"user": {}, "item": {"values": "integer"}},
        "split": {"by": "fraction", "test": 0, "validation": 0},
        "negatives": {"item": "item", "per_positive": 2},
    }
    report = write_store(frame, Schema.from_dict(tree), tmp_path / "store")
    assert (report.num_lacking, report.num_samples) == (8, 7)
    assert Store(report.path).labels.tolist() == [1, 1, 1, 1, 1, 0, 0]


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


def test_negatives_are_drawn_for_rows_like_a_store(tmp_path):
    tree = {
        "group": "user",
        "categorical": {"user": {}, "item": {"values": "integer"}},
        "split": {"by": "fraction", "test": 0.2, "validation": 0},
        "negatives": {"item": "item", "per_positive": 2},
    }
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"user": rng.integers(0, 9, 60), "item": rng.integers(0, 30, 60)})
    frame["user"] = "u" + frame["user"].astype(str)
    write_store(frame, Schema.from_dict(tree), tmp_path / "store")

    report = write_store(frame[:30], None, tmp_path / "new", like=tmp_path / "store", split=True)

    found = Store(report.path)
    assert found.labels[: report.splits["train"]].tolist() == [1, 0, 0] * 24
    assert report.splits["test"] == 6


def test_a_vocabulary_names_the_value_of_each_row(tmp_path):
    frame = pd.DataFrame({"click": [1, 0, 1, 1], "site": ["b", "ä", None, "b"], "n": [7, 7, 8, 9]})
    tree = {
        "label": "click",
        "categorical": {
            "site": {"missing": "own"},
            "n": {"values": "integer", "min_count": 2},
            "hashed": {"numbering": "hash", "num_rows": 5},
        },
        "split": {"by": "fraction", "test": 0, "validation": 0},
    }
    write_store(frame.assign(hashed="x"), Schema.from_dict(tree), tmp_path / "store")
    found = {
        file.name: pa.ipc.open_file(file).read_all().column("value").to_pylist()
        for file in (tmp_path / "store" / "vocabulary").iterdir()
    }
    assert found == {"0.arrow": [None, None, "b", "ä"], "1.arrow": [None, 7]}
    assert Store(tmp_path / "store").table_sizes == {"site": 4, "n": 2, "hashed": 5}


def test_text_of_parquet_that_is_not_utf8_is_numbered_by_its_bytes(tmp_path):
    sites = pa.array([b"\xff", b"a", b"\xff"], pa.binary()).view(pa.string())
    table = pa.table({"click": [1, 0, 1], "site": sites})
    split = {"by": "fraction", "test": 0, "validation": 0}
    schema = Schema.from_dict({"label": "click", "categorical": {"site": {}}, "split": split})
    write_store(table, schema, tmp_path / "store")
    write_store(table, None, tmp_path / "like", like=tmp_path / "store")
    for name in ("store", "like"):
        assert Store(tmp_path / name).sparse.ravel().tolist() == [1, 2, 1]


def test_an_encoder_gives_the_samples_of_the_store(tmp_path, files):
    rows = files(clicks(30))
    prepare_table(rows, tmp_path / "store", Schema.from_dict(CLICKS))
    store = Store(tmp_path / "store")
    encoder = Encoder(store)
    (batch,) = encoder.files(rows).batches()
    encoded = encoder.encode(batch)
    mine, theirs = encoded.as_batch(), store.read(np.arange(30))
    assert mine.sparse_features.keys() == theirs.sparse_features.keys()
    assert mine.sparse_features.values().equal(theirs.sparse_features.values())
    assert mine.sparse_features.offsets().equal(theirs.sparse_features.offsets())
    assert mine.dense_features.equal(theirs.dense_features)
    assert mine.labels.equal(theirs.labels)
    assert set(encoder.unknown) == {"site", "size", "tags"}


def test_an_encoder_needs_no_label_and_counts_unknown_values(tmp_path, files):
    prepare_table(files(clicks(30)), tmp_path / "store", Schema.from_dict(CLICKS))
    new = clicks(4, seed=8).drop(columns="click").assign(site=["a", "q", None, "b"])
    encoder = Encoder(Store(tmp_path / "store"))
    (batch,) = encoder.files(files(new)).batches()
    encoded = encoder.encode(batch)
    encoder.encode(batch)
    assert encoded.others == {}
    assert encoder.unknown["site"] == 2


def test_an_encoder_reads_features_and_labels_alone(tmp_path, files):
    tree = CLICKS | {"group": "size", "timestamp": "time", "weight": "w"}
    frame = clicks(30).assign(size=7, time=range(30), w=1.0)
    prepare_table(files(frame), tmp_path / "store", Schema.from_dict(tree))
    new = frame.assign(size=None, time="never", click=pd.array([1, None] * 15, "Int64"))
    encoder = Encoder(Store(tmp_path / "store"))
    table = encoder.files(files(new))
    (batch,) = table.batches()
    encoded = encoder.encode(batch)
    assert table.columns == ("price", "site", "size", "tags", "click")
    assert encoded.features["size"].tolist() == [1] * 30  # the row of missing values
    assert {name: values.tolist() for name, values in encoded.others.items()} == {
        "labels": [1, -1] * 15
    }


def test_vocabularies_of_a_store_to_be_like_are_read_once(tmp_path, files, monkeypatch):
    prepare_table(files(clicks(30)), tmp_path / "store", Schema.from_dict(CLICKS))
    names = []

    def read(file, *others):
        names.append(file.name)
        return read_vocabulary(file, *others)

    monkeypatch.setattr("recsys.datasets.tabular.encode.read_vocabulary", read)
    prepare_table(files(clicks(5)), tmp_path / "of_files", like=tmp_path / "store")
    write_store(clicks(5), None, tmp_path / "of_frames", like=tmp_path / "store")
    assert names == ["0.arrow", "1.arrow", "2.arrow"] * 2


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
    other_tests = pd.concat([frame[:48], clicks(8, seed=9)])
    assert encoding({}, other_tests) == own
