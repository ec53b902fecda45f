"""Weights for the values of bags: from files and frames to arrays and mini-batches of a store."""

import csv
import json
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.datasets import Store, store_writer
from recsys.datasets.tabular.encoding.file_encoder import Encoder
from recsys.datasets.tabular.frames import write_store
from recsys.datasets.tabular.prepare import prepare_table
from recsys.datasets.tabular.schemas.schema import Schema
from recsys.datasets.tabular.store_parts import spool
from recsys.errors import DatasetFormatError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TREE = {
    "label": "click",
    "categorical": {"site": {}},
    "multi": {
        "words": {"split": "|"},
        "tags": {"split": "|", "weights": "scores", "max_length": 2},
    },
    "sequence": {"seen": {"split": "|", "values": "integer", "max_length": 2, "weights": "dwell"}},
    "split": {"by": "fraction", "test": 0.2, "validation": 0.2},
}
BAGS = {"words": None, "tags": "scores", "seen": "dwell"}
_NUMBER = st.integers(-3, 3).map(float) | st.floats(-1e6, 1e6).map(lambda x: round(x, 3))


@st.composite
def frames(draw):
    """Rows whose bags have missing values, with and without a weight of their own."""
    n = draw(st.integers(1, 12))
    values = {"words": st.sampled_from("abc"), "tags": st.sampled_from("abcd")}
    values["seen"] = st.integers(-2, 2)
    columns = {
        "click": [row % 2 for row in range(n)],
        "site": draw(st.lists(st.sampled_from("xy"), min_size=n, max_size=n)),
    }
    for name, weights in BAGS.items():
        # A text file cannot tell a bag of one missing value from an empty bag.
        bags = st.lists(st.none() | values[name], max_size=4).filter(lambda bag: bag != [None])
        columns[name] = [draw(st.none() | bags) for _ in range(n)]
        if weights:
            columns[weights] = [
                bag and [draw(st.none() | _NUMBER if value is None else _NUMBER) for value in bag]
                for bag in columns[name]
            ]
    return pd.DataFrame({name: pd.Series(each, dtype="object") for name, each in columns.items()})


def write_csv(frame, file):
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(frame.columns)
        for row in frame.itertuples(index=False):
            writer.writerow(
                ""
                if each is None
                else "|".join("" if one is None else str(one) for one in each)
                if isinstance(each, list)
                else each
                for each in row
            )


def arrow_table(frame):
    types = {
        "words": pa.list_(pa.string()),
        "tags": pa.large_list(pa.string()),
        "scores": pa.list_(pa.float64()),
        "seen": pa.list_(pa.int64()),
        "dwell": pa.large_list(pa.float64()),
    }
    return pa.table(
        {name: pa.array(values.tolist(), types.get(name)) for name, values in frame.items()}
    )


def kept_of(frame, name, row):
    """The values of a bag that are kept, each with its weight."""
    values, weights = frame[name][row] or [], frame[BAGS[name]][row] if BAGS[name] else None
    pairs = zip(values, weights or [1.0] * len(values), strict=True)
    pairs = [(value, weight) for value, weight in pairs if value is not None]
    return {"words": pairs, "tags": pairs[:2], "seen": pairs[-2:]}[name]


def expected_of(frame):
    """For each bag feature and row: rows of the table with their weights."""
    num_train = len(frame) - int(len(frame) * 0.4 + 1e-9)
    found = {}
    for name in BAGS:
        bags = [kept_of(frame, name, row) for row in range(len(frame))]
        seen = dict.fromkeys(value for bag in bags[:num_train] for value, _ in bag)
        rows = {value: 1 + place for place, value in enumerate(seen)}
        found[name] = [[(rows.get(value, 0), weight) for value, weight in bag] for bag in bags]
    return found


@pytest.fixture(autouse=True)
def in_small_blocks_without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(store_writer, "flush_to_disk", lambda path: None)
    monkeypatch.setattr(spool, "BLOCK_ROWS", 4)


@settings(max_examples=min(25, settings().max_examples))
@given(frame=frames())
def test_csv_parquet_and_frames_give_the_weights_that_plain_python_works_out(frame):
    schema, expected = Schema.from_dict(TREE), expected_of(frame)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_csv(frame, folder / "rows.csv")
        pq.write_table(arrow_table(frame), folder / "rows.parquet", row_group_size=5)
        prepare_table([folder / "rows.csv"], folder / "csv", schema, num_threads=2)
        prepare_table([folder / "rows.parquet"], folder / "parquet", schema)
        write_store([frame.iloc[:3], frame.iloc[3:]], schema, folder / "frames")
        prepare_table([folder / "rows.parquet"], folder / "like", like=folder / "csv")
        store = Store(folder / "csv")
        pairs = [pair for row in range(len(frame)) for name in BAGS for pair in expected[name][row]]
        weights = np.array([weight for _, weight in pairs], np.float32)
        np.testing.assert_array_equal(store.bag_values, [row for row, _ in pairs])
        np.testing.assert_array_equal(store.bag_weights, weights)
        for other in ("parquet", "frames", "like"):
            for file in ("bag_values.bin", "bag_ends.bin", "bag_weights.bin"):
                assert (folder / other / file).read_bytes() == (folder / "csv" / file).read_bytes()
        check_batches(store, expected)
        with Encoder(store) as encoder:
            (batch,) = encoder.open_files([folder / "rows.csv"]).batches()
            found = encoder.encode(batch).as_batch().sparse_features
        of_store = store.read(np.arange(len(frame))).sparse_features
        assert torch.equal(found.values(), of_store.values())
        assert torch.equal(found.weights_or_none(), of_store.weights_or_none())


def check_batches(store, expected):
    samples = np.arange(store.num_samples)[::-1].copy()
    features = store.read(samples).sparse_features
    assert features.keys() == ["site", *BAGS]
    assert features.weights_or_none().dtype == torch.float32
    assert features["site"].weights_or_none().tolist() == [1.0] * len(samples)
    for name in BAGS:
        pairs = [pair for sample in samples for pair in expected[name][sample]]
        found = features[name]
        assert found.values().tolist() == [row for row, _ in pairs]
        weights = np.array([weight for _, weight in pairs], np.float32)
        np.testing.assert_array_equal(found.weights_or_none(), weights)


def test_only_features_with_weights_are_marked(tmp_path):
    frame = pd.DataFrame({"click": [0, 1], "tags": [["a"], []], "w": [[0.5], []], "more": [[], []]})
    tree = {"label": "click", "multi": {"tags": {"weights": "w"}, "more": {}}}
    tree["split"] = {"test": 0, "validation": 0}
    write_store(frame, Schema.from_dict(tree), tmp_path / "weighted")
    del tree["multi"]["tags"]["weights"]
    write_store(frame, Schema.from_dict(tree), tmp_path / "plain")

    weighted, plain = (
        json.loads((tmp_path / name / "meta.json").read_text()) for name in ("weighted", "plain")
    )

    assert weighted["features"] == [
        {"name": "tags", "table": "tags", "kind": "multi", "is_weighted": True},
        {"name": "more", "table": "more", "kind": "multi"},
    ]
    assert weighted["features"][1] == plain["features"][1]
    assert "is_weighted" not in plain["features"][0]
    assert "bag_weights" not in plain["dtypes"]
    assert not (tmp_path / "plain" / "bag_weights.bin").exists()
    assert weighted["encoding"] != plain["encoding"]
    assert Store(tmp_path / "plain").read(np.arange(2)).sparse_features.weights_or_none() is None


def test_negatives_and_the_last_rows_of_groups_keep_their_weights(tmp_path):
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(6), 5)
    tags = [rng.choice(list("abcd"), rng.integers(0, 4)).tolist() for _ in users]
    frame = pd.DataFrame(
        {
            "user": users,
            "item": rng.integers(0, 9, len(users)),
            "tags": tags,
            "scores": [rng.normal(size=len(bag)).tolist() for bag in tags],
        }
    )
    tree = {
        "group": "user",
        "categorical": {"item": {"values": "integer"}},
        "multi": {"tags": {"weights": "scores"}},
        "history": {"recent": {"of": "item", "max_length": 3}},
        "split": {"by": "last_one_out"},
        "negatives": {"item": "item", "per_positive": 2},
    }

    write_store(frame, Schema.from_dict(tree), tmp_path / "store")

    store = Store(tmp_path / "store")
    places, in_group = np.arange(30), np.tile(np.arange(5), 6)
    order = [
        *np.repeat(places[in_group < 3], 3),  # with two negatives each
        *places[in_group == 4],
        *places[in_group == 3],
    ]
    assert store.labels.tolist() == [1, 0, 0] * 18 + [1] * 12
    features = store.read(np.arange(store.num_samples)).sparse_features
    expected = np.array([one for row in order for one in frame["scores"][row]], np.float32)
    np.testing.assert_array_equal(features["tags"].weights_or_none(), expected)
    for name in ("item", "recent"):
        assert (features[name].weights_or_none() == 1).all()


def test_a_bag_of_one_missing_value_may_have_its_weight(tmp_path):
    rows = ["a|b,1|2", "NA,0.5", "NA,", ",", "NA|b,3|4"] * 4
    lines = ["click,site,tags,scores", *(f"{n % 2},x,{row}" for n, row in enumerate(rows))]
    (tmp_path / "rows.csv").write_text("\n".join([*lines, ""]))
    (tmp_path / "empty.csv").write_text("\n".join([*lines[:2], "0,x,,0.5", ""]))
    tree = {key: TREE[key] for key in ("label", "categorical", "split")}
    tree["multi"] = {"tags": {"split": "|", "weights": "scores"}}
    schema = Schema.from_dict({**tree, "missing_values": ["NA"]})
    rule = "line 3, column 'scores'"

    prepare_table([tmp_path / "rows.csv"], tmp_path / "store", schema)
    with pytest.raises(DatasetFormatError, match=rule):
        prepare_table([tmp_path / "empty.csv"], tmp_path / "other", Schema.from_dict(tree))

    features = Store(tmp_path / "store").read(np.arange(5)).sparse_features["tags"]
    assert features.lengths().tolist() == [2, 0, 0, 0, 1]
    assert features.weights_or_none().tolist() == [1, 2, 4]
