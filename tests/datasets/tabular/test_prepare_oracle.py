"""Random frames and schemas: a store holds what plain Python works out, from files and frames."""

import csv
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from recsys.datasets import Schema, Store, prepare_table, write_store
from tests.datasets.tabular.decoded import bags_of
from tests.datasets.tabular.table_oracle import Expected

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

_TEXT = st.text(alphabet='ab,"é漢|\n ', min_size=1, max_size=3)
_PIECE = st.text(alphabet='ab,"é漢', min_size=1, max_size=2)
_INTEGER = st.one_of(st.integers(-3, 3), st.sampled_from([2**62, -(2**63)]))
_FLOAT = st.one_of(st.integers(-4, 9), st.floats(-1e6, 1e6).map(lambda x: round(x, 3)))


@st.composite
def frames(draw):
    n = draw(st.integers(1, 25))

    def column(values, can_miss=True):
        return draw(st.lists(st.none() | values if can_miss else values, min_size=n, max_size=n))

    return pd.DataFrame(
        {
            "click": column(st.integers(0, 1), can_miss=False),
            "stars": column(st.integers(1, 5), can_miss=False),
            "user": column(st.sampled_from(["u1", "u 2", "ü,3"]), can_miss=False),
            "ts": column(st.integers(-5, 5), can_miss=False),
            "w": column(st.sampled_from([0.0, 0.5, 2.0]), can_miss=False),
            "kind": pd.Series(column(st.sampled_from(["view", "cart", "buy"])), dtype="object"),
            "place": column(st.sampled_from([0, 1, 2]), can_miss=False),
            "fold": column(st.sampled_from(["x", "y", "z"]), can_miss=False),
            "price": pd.Series(column(_FLOAT), dtype="object"),
            "size": column(_FLOAT, can_miss=False),
            "site": pd.Series(column(_TEXT), dtype="object"),
            "page": pd.Series(column(_TEXT), dtype="object"),
            "item": pd.Series(column(_INTEGER), dtype="object"),
            "tags": pd.Series(column(st.lists(st.none() | _PIECE, max_size=4)), dtype="object"),
            "seen": pd.Series(column(st.lists(st.none() | _INTEGER, max_size=4)), dtype="object"),
        }
    )


CONDITIONS = [
    {"kind": "cart"},
    {"kind": ["buy", "view"], "place": [0, 1]},
    {"user": ["u1", "u 2"]},
    {"place": ">= 1"},
]


@st.composite
def schemas(draw):
    def maybe(**choices):
        chosen = {key: draw(st.none() | st.sampled_from(each)) for key, each in choices.items()}
        return {key: value for key, value in chosen.items() if value is not None}

    def dense(*missing):
        return maybe(transform=["none", "log", "standardize"], missing=["mean", 1.5, -2, *missing])

    def table():
        if draw(st.booleans()):
            return maybe(min_count=[2], max_rows=[3, 4])
        return (
            {"numbering": "hash", "num_rows": draw(st.integers(1, 7))}
            if draw(st.booleans())
            else {}
        )

    items, texts = table(), table()
    missing = {} if texts.get("numbering") == "hash" else maybe(missing=["own", "rare"])
    shared = {"table": "text"} if draw(st.booleans()) else {}
    seen = {"table": "item"} if draw(st.booleans()) else {}
    tree = {
        "label": "click",
        "group": "user",
        "dense": {"price": dense(), "size": dense("error")},
        "categorical": {
            "site": texts | missing | shared,
            "item": items | {"values": "integer"},
            "page": texts | shared,
        },
        "multi": {"tags": {"split": "|"} | texts | shared | maybe(max_length=[1, 2])},
        "sequence": {
            "seen": items
            | seen
            | {"values": "integer", "split": "|"}
            | {"max_length": draw(st.integers(1, 3))},
        },
        "history": {
            name: {"of": draw(st.sampled_from(["item", "site"])), "max_length": 2} | where
            for name, where in (("recent", {}), ("carts", maybe(where=CONDITIONS)))
        },
        **maybe(
            filter=CONDITIONS,
            timestamp=["ts"],
            weight=["w"],
            missing_values=[["NA"], ["null", "?"]],
        ),
    }
    if "timestamp" in tree:
        tree |= maybe(timestamp_format=["ms"])
    if draw(st.booleans()):
        tree |= {"label": "stars", "positive": draw(st.sampled_from([">= 4", "< 3", "== 5"]))}
    elif items.get("numbering") != "hash" and draw(st.booleans()):
        del tree["label"]
        chosen = maybe(item_columns=[["site"], ["page", "site"]], by=["popularity"], seed=[7])
        tree["negatives"] = {"item": "item", "per_positive": draw(st.integers(1, 3)), **chosen}
    for kind in ("dense", "multi", "sequence", "history"):
        if draw(st.booleans()):
            del tree[kind]
    by = ["fraction", "random", "column", "group"]
    if "negatives" in tree:
        by += ["last_one_out"] * len(by)  # only these may be divided so
    shares = maybe(test=["1/14", 0.3, "1/3"], validation=[0.2, 0, "1/7"])
    if "timestamp" in tree:
        by += ["timestamp", "moments"]
    split = {"by": draw(st.sampled_from(by))}
    if split["by"] == "moments":
        split = {"by": "timestamp", "test_from": draw(st.integers(-3, 5))}
        split |= maybe(validation=[0, "1/7", 0.9])
    elif split["by"] == "column":
        split |= {"column": "fold", "train": ["x"], "test": ["y", "z"]}
        if draw(st.booleans()):
            split |= {"test": ["z"], "validation": ["y"]}
    elif split["by"] != "last_one_out":
        split |= shares
    if split["by"] in ("random", "group"):
        split["seed"] = 3
    return tree | {"split": split}


def write_csv(frame, file, end, missing=""):
    rows = frame.copy()
    for name in ("tags", "seen"):
        rows[name] = [
            missing if bag is None else "|".join(missing if v is None else str(v) for v in bag)
            for bag in frame[name]
        ]
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(rows.columns)
        for row in rows.itertuples(index=False):
            writer.writerow([missing if each is None else each for each in row])
    if not end:
        file.write_bytes(file.read_bytes().removesuffix(b"\n"))


def arrow_table(frame):
    types = {
        "price": pa.float64(),
        "kind": pa.string(),
        "site": pa.string(),
        "page": pa.large_string(),
        "item": pa.int64(),
        "tags": pa.list_(pa.string()),
        "seen": pa.large_list(pa.int64()),
    }
    return pa.table(
        {name: pa.array(values.tolist(), types.get(name)) for name, values in frame.items()}
    )


@pytest.fixture(autouse=True)
def in_small_blocks_without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("recsys.datasets.store_writer.flush_to_disk", lambda path: None)
    monkeypatch.setattr("recsys.datasets.tabular.split.BLOCK_ROWS", 4)
    monkeypatch.setattr("recsys.datasets.numbering._BLOCK_VALUES", 3)


@pytest.mark.filterwarnings("ignore:histories list rows of these files alone")
@pytest.mark.filterwarnings("ignore:negatives:")
@pytest.mark.filterwarnings("ignore:label .* in all .* rows of the training part")
@given(frame=frames(), tree=schemas(), end=st.booleans())
def test_a_store_is_what_plain_python_works_out(frame, tree, end):
    expected = Expected(frame, tree)
    assume(expected.num_train)
    means = [name for name, keys in tree.get("dense", {}).items() if keys.get("missing") == "mean"]
    is_train = np.array([expected.is_train(row) for row in range(expected.n)])
    assume(all(frame[name][is_train].notna().any() for name in means))
    schema = Schema.from_dict(tree)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        missing = tree.get("missing_values", [""])[-1] if end else ""
        write_csv(frame, folder / "rows.csv", end, missing)
        pq.write_table(arrow_table(frame), folder / "rows.parquet", row_group_size=7)
        report = prepare_table([folder / "rows.csv"], folder / "csv", schema, num_threads=2)
        num_wanted = expected.num_train * tree.get("negatives", {}).get("per_positive", 0)
        assert report.num_lacking == num_wanted - expected.num_negatives()
        prepare_table([folder / "rows.parquet"], folder / "parquet", schema)
        write_store([frame.iloc[:5], frame.iloc[5:]], schema, folder / "frames")
        store = Store(folder / "csv")
        check_store(store, expected)
        for other in ("parquet", "frames"):
            require_equal_files(folder / "csv", folder / other)
        prepare_table([folder / "rows.parquet"], folder / "like", like=folder / "csv")
        check_like(Store(folder / "like"), store, expected)
        assert not list(folder.glob(".*"))


def check_store(store, expected):
    tree = expected.schema
    assert [len(part) for part in store.splits.values()] == expected.sizes
    assert store.labels.tolist() == expected.sample_labels()
    assert bags_of(store) == expected.features()
    assert store.table_sizes == {table: size for table, (_, size) in expected.vocabularies.items()}
    np.testing.assert_allclose(store.dense, expected.dense(), rtol=2e-6, atol=1e-6)
    assert store.groups.tolist() == expected.groups()
    order, weights = expected.order, expected.frame["w"].tolist()
    for key, array, values in (
        ("timestamp", store.times, expected.times),
        ("weight", store.weights, weights),
    ):
        if key in tree:
            assert array.tolist() == [values[row] for row in order]
        else:
            assert array is None
    if "negatives" in tree:
        assert store.meta["ranking"]["repeats"] == expected.has_repeats()


def check_like(like, store, expected):
    """All rows of the same file, in its order, have the rows that they have in the store."""
    assert [len(part) for part in like.splits.values()] == [0, len(expected.kept()), 0]
    assert like.table_sizes == store.table_sizes
    assert like.labels.tolist() == [expected.labels[row][0] for row in expected.kept()]
    assert bags_of(like) == expected.features(is_new=True)
    places = {row: place for place, row in enumerate(expected.kept())}
    order = [places[row] for row in expected.order]
    np.testing.assert_array_equal(like.dense[order], store.dense)


def require_equal_files(first, second):
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    for name in names:
        if name.name != "meta.json":
            assert (first / name).read_bytes() == (second / name).read_bytes(), name
