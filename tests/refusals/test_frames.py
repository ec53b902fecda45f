"""Rows that no store can be made of: what is done, the error, and the name that it gives."""

import json

import pandas as pd
import pytest

from recsys.datasets import Schema, Store, prepare_table, write_store
from recsys.errors import AlreadyExists, ConfigError, DatasetFormatError, StoreError

pa = pytest.importorskip("pyarrow")

FRAME = pd.DataFrame(
    {
        "click": [0, 1, 1, 0],
        "price": [0.5, 2.0, 0.0, 4.0],
        "site": ["ab", "c", "d", "c"],
        "item": [5, 0, 7, 5],
        "tags": ["x|y", "z", "x", "q"],
    }
)
TREE = {
    "label": "click",
    "dense": {"price": {"transform": "standardize"}},
    "categorical": {"site": {}, "item": {"values": "integer"}},
    "multi": {"tags": {"split": "|"}},
    "split": {"by": "fraction", "test": 0, "validation": 0},
}
FOLDS = {"by": "column", "column": "fold", "train": ["x"], "test": ["y"]}
GROUPS = {"group": "user"}
RULE = {"label": "bought", "positive": "== yes"}


def write(folder, *frames, **keys):
    return write_store(list(frames), Schema.from_dict(TREE | keys), folder / "store").path


def write_with(folder, keys, frame=FRAME, **columns):
    """Write the frame with these columns, by a schema with these keys."""
    write(folder, frame.assign(**columns), **keys)


def prepare(folder, *columns, like=None, keys=None, **options):
    """Prepare a file for each dict of columns, by a schema unless a store is named."""
    files = [folder / f"{place}.csv" for place in range(len(columns))]
    for file, each in zip(files, columns, strict=True):
        FRAME.assign(**each).to_csv(file, index=False)
    schema = Schema.from_dict(TREE | (keys or {}))
    prepare_table(files, folder / "new", None if like else schema, like=like, **options)


def write_like(folder, damage):
    """Write rows like a store that was damaged."""
    store = write(folder, FRAME)
    damage(store)
    write_store(FRAME, None, folder / "new", like=store)


def edit(store, **entries):
    meta = json.loads((store / "meta.json").read_text()) | entries
    meta = {key: value for key, value in meta.items() if value is not None}
    (store / "meta.json").write_text(json.dumps(meta))


def swap(store, first, second):
    names = [store / "vocabulary" / f"{name}.arrow" for name in (first, second)]
    contents = [name.read_bytes() for name in names]
    for name, content in zip(names, reversed(contents), strict=True):
        name.write_bytes(content)


def write_later_rows(folder):
    """Rows that come after the moment of a split, to be trained on."""
    split = {"by": "timestamp", "test_from": 3}
    store = write(folder, FRAME.assign(ts=range(4)), timestamp="ts", split=split)
    write_store(FRAME.assign(ts=range(4, 8)), None, folder / "new", like=store, split=True)


def cut_values(folder):
    file = write(folder, FRAME) / "bag_values.bin"
    file.write_bytes(file.read_bytes()[:-1])
    Store(folder / "store")


REFUSALS = [
    ("a truncated array", cut_values, StoreError, "bag_values.bin"),
    ("a folder that is no store", Store, StoreError, "meta.json"),
    ("a dict", lambda folder: write_store(FRAME, TREE, folder / "a"), TypeError, "schema"),
    ("lists", lambda folder: write(folder, FRAME.to_dict("list")), TypeError, "frame 0"),
    ("an array", lambda folder: write(folder, FRAME.to_numpy()), TypeError, "frame 0"),
    *[
        (
            f"a value of {place}: {name}",
            lambda folder, keys=keys, columns=columns: write_with(folder, keys, **columns),
            DatasetFormatError,
            name,
        )
        for place, (keys, columns, name) in enumerate(
            [
                ({"positive": ">= 4"}, {"click": ["5", "nan", "4", "1"]}, "column 'click'"),
                ({}, {"item": pd.Series([2**64, 0, 7, 5], dtype=object)}, "column 'item'"),
                ({}, {"site": pd.Series(["\udc80", *"abc"], dtype=object)}, "column 'site'"),
                ({}, {"site": [3.0, None, 1.0, 2.0]}, 'astype("Int64")'),
                ({}, {"price": ["0.5", "?", "0", "4"]}, "column 'price'"),
                (GROUPS, {"user": [1.5, 1, 1, 2]}, "column 'user'"),
                (RULE, {"bought": [True, False] * 2}, "column 'bought'"),
                (RULE, {"bought": [1, 0] * 2}, "column 'bought'"),
                (RULE, {"bought": [1.5, 0.0] * 2}, "column 'bought'"),
                ({"label": "bought"}, {"bought": ["yes", "no"] * 2}, "'yes'"),
                ({"split": FOLDS}, {"fold": list("xyzx")}, "row 2 (from 0), column 'fold'"),
                (
                    {"dense": {"huge": {}}},
                    {"huge": [0, 1e300, 0, 0]},
                    "row 1 (from 0), column 'huge'",
                ),
            ]
        )
    ],
    (
        "no row of training",
        lambda folder: write(
            folder, FRAME, split={"by": "random", "test": 0.999999, "validation": 0}
        ),
        DatasetFormatError,
        "training",
    ),
    ("no rows", lambda folder: write(folder, FRAME[:0]), DatasetFormatError, "row"),
    ("later rows", write_later_rows, DatasetFormatError, "[split]"),
    (
        "no bag and no categorical column",
        lambda folder: write(folder, FRAME, categorical={}, multi={}),
        ConfigError,
        "[categorical]",
    ),
    (
        "a bad value of a later file",
        lambda folder: prepare(
            folder, {"fold": "x"}, {"fold": list("xxzx")}, keys={"split": FOLDS}
        ),
        DatasetFormatError,
        "1.csv, line 4, column 'fold'",
    ),
    (
        "a store that exists",
        lambda folder: [write(folder, FRAME), write(folder, FRAME)],
        AlreadyExists,
        "store",
    ),
    (
        "no schema of a frame",
        lambda folder: write_store(FRAME, None, folder / "store"),
        ConfigError,
        "schema",
    ),
    ("no schema", lambda folder: prepare_table([], folder / "store"), ConfigError, "schema"),
    (
        "a schema and a store",
        lambda folder: prepare_table(
            [], folder / "new", Schema.from_dict(TREE), like=write(folder, FRAME)
        ),
        ConfigError,
        "schema",
    ),
    ("a split alone", lambda folder: prepare(folder, {}, split=True), ConfigError, "split"),
    *[
        (
            f"a store whose {name} is damaged: {place}",
            lambda folder, damage=damage: write_like(folder, damage),
            StoreError,
            name,
        )
        for place, (name, damage) in enumerate(
            [
                ("0.arrow", lambda store: (store / "vocabulary" / "0.arrow").unlink()),
                ("0.arrow", lambda store: (store / "vocabulary" / "0.arrow").write_bytes(b"x")),
                ("values", lambda store: swap(store, "0", "1")),
                ("0.arrow", lambda store: swap(store, "0", "2")),
                ("schema", lambda store: edit(store, schema=None)),
            ]
        )
    ],
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name(tmp_path, act, error, name):
    with pytest.raises(error) as raised:
        act(tmp_path)

    assert name in str(raised.value)
    assert not (tmp_path / "new").exists()
