"""Logs of events: which rows are samples, which histories see, and several labels."""

import numpy as np
import pandas as pd
import pytest

from recsys.datasets import Schema, Store, write_store
from recsys.errors import DatasetFormatError

pa = pytest.importorskip("pyarrow")

EVENTS = pd.DataFrame(
    [
        ("u", "a", "view", 1),
        ("u", "b", "cart", 2),
        ("v", "c", "cart", 3),
        ("u", "a", "buy", 4),
        ("u", "d", "cart", 5),
        ("u", "b", "buy", 6),
        ("v", "c", "buy", 7),
        ("u", "d", "buy", 8),
    ],
    columns=["user", "item", "kind", "t"],
)
PURCHASES = {
    "group": "user",
    "timestamp": "t",
    "filter": {"kind": "buy"},
    "categorical": {"item": {}},
    "history": {"bought": {"of": "item"}, "carts": {"of": "item", "where": {"kind": "cart"}}},
    "split": {"by": "timestamp", "test": 0.25, "validation": 0},
    "negatives": {"item": "item", "per_positive": 1},
}


def bags_of(store):
    ends = np.fromfile(store.path / "bag_ends.bin", np.int64)
    values = np.fromfile(store.path / "bag_values.bin", np.int32)
    bags = [values[begin:end].tolist() for begin, end in zip([0, *ends], ends, strict=False)]
    return list(zip(bags[::2], bags[1::2], strict=True))


def test_purchases_see_the_carts_before_them(tmp_path):
    report = write_store(EVENTS, Schema.from_dict(PURCHASES), tmp_path / "store")

    store = Store(report.path)
    a, b, c, d = 1, 2, 3, 4  # d is in a cart of the training part, and was not bought there
    assert store.times[store.labels == 1].tolist() == [4, 6, 7, 8]
    assert report.splits == {"train": 6, "test": 1, "validation": 0}
    histories = [
        bags for bags, label in zip(bags_of(store), store.labels.tolist(), strict=True) if label
    ]
    assert histories == [([], [b]), ([a], [b, d]), ([], [c]), ([a, b], [b, d])]
    assert store.sparse[store.labels == 1, 0].tolist() == [a, b, c, d]


def test_histories_of_training_rows_list_no_event_of_another_part(tmp_path):
    parts = {"by": "column", "column": "fold", "train": ["x"], "test": ["y"]}
    frame = EVENTS.assign(fold=list("xyxxxxxy"))
    write_store(frame, Schema.from_dict(PURCHASES | {"split": parts}), tmp_path / "store")

    carts = [bags[1] for bags in bags_of(Store(tmp_path / "store"))]
    b, c, d = 2, 3, 4
    assert carts == [[], [], [d], [d], [c], [c], [b, d]]


def test_a_filter_may_be_a_rule_or_a_list(tmp_path):
    frame = pd.DataFrame({"y": [0, 1, 0, 1], "c": list("abcd"), "stars": [1.0, 4.0, 5.0, None]})
    for keys, kept in (({"stars": ">= 4"}, [1, 0]), ({"c": ["a", "d"], "y2": True}, [0])):
        tree = {"label": "y", "categorical": {"c": {}}, "filter": keys}
        split = {"by": "fraction", "test": 0, "validation": 0}
        path = tmp_path / str(len(kept))
        rows = frame.assign(y2=[True, True, True, False])
        write_store(rows, Schema.from_dict(tree | {"split": split}), path)
        assert Store(path).labels.tolist() == kept
    with pytest.raises(DatasetFormatError, match=r"row 3.*'stars'"):
        write_store(
            pa.table({"y": [0, 1] * 2, "c": list("abcd"), "stars": ["1", "4", "5", "many"]}),
            Schema.from_dict({"label": "y", "categorical": {"c": {}}, "filter": {"stars": ">= 4"}}),
            tmp_path / "bad",
        )


def test_a_schema_may_name_several_labels(tmp_path):
    frame = pd.DataFrame({"click": [1, 1, 0, 0], "buy": [True, False, False, True], "c": "x"})
    split = {"by": "fraction", "test": 0, "validation": 0}
    tree = {"labels": ["click", "buy"], "categorical": {"c": {}}, "split": split}
    write_store(frame, Schema.from_dict(tree), tmp_path / "store")

    store = Store(tmp_path / "store")
    assert store.meta["labels"] == ["click", "buy"]
    assert store.read(np.arange(4)).labels.tolist() == [[1, 1], [1, 0], [0, 0], [0, 1]]
