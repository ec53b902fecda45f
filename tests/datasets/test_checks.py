"""What a prepared store says of itself: each finding, and none where there is nothing to say."""

import numpy as np
import pandas as pd
import pytest

from recsys.datasets import Schema, Store, write_store
from tests.commands import recsys

NUM_ROWS = 4000
RNG = np.random.default_rng(0)
CLICK = RNG.integers(0, 2, NUM_ROWS)
ITEMS = RNG.integers(0, 50, NUM_ROWS)
GROUPS = RNG.integers(0, 200, NUM_ROWS)
SCHEMA = {
    "label": "click",
    "group": "user",
    "categorical": {"user": {}, "item": {}},
    "dense": {"price": {}},
    "multi": {"tags": {"split": "|"}},
    "split": {"by": "fraction", "test": "1/5", "validation": "1/5"},
}


def findings(tmp_path, columns, **schema):
    frame = pd.DataFrame(
        {
            "click": CLICK,
            "user": GROUPS,
            "item": ITEMS,
            "price": RNG.random(NUM_ROWS),
            "tags": [f"{tag}|x" for tag in RNG.integers(0, 9, NUM_ROWS)],
            **columns,
        }
    )
    path = write_store(frame, Schema.from_dict(SCHEMA | schema), tmp_path / "store").path
    return Store(path).describe().get("findings", [])


@pytest.mark.parametrize(
    ("columns", "schema"),
    [
        ({}, {}),
        # Of 50 popular items, some are never drawn as a negative.
        (
            {"item": np.where(GROUPS < 60, ITEMS, 50 + np.arange(NUM_ROWS))},
            {"label": "", "negatives": {"item": "item", "per_positive": 2}},
        ),
    ],
)
def test_there_is_nothing_to_say_of_good_data(tmp_path, columns, schema):
    assert findings(tmp_path, columns, **schema) == []


def few_positives(first):
    return np.where(np.arange(NUM_ROWS) < first, CLICK, 0) | (np.arange(NUM_ROWS) % 64 == 0)


@pytest.mark.parametrize(
    ("columns", "schema", "names"),
    [
        ({"item": np.where(CLICK, ITEMS % 5, 7)}, {}, ["click", "item"]),
        ({"item": np.where(CLICK, "bought", "")}, {}, ["click", "item"]),
        ({"price": np.where(CLICK, RNG.random(NUM_ROWS), np.nan)}, {}, ["click", "price"]),
        ({"price": CLICK + RNG.random(NUM_ROWS)}, {}, ["click", "price"]),
        ({"tags": np.where(CLICK, "", "a|b")}, {}, ["click", "tags"]),
        ({"item": np.where(CLICK & (ITEMS % 2), "bought", "")}, {}, ["click", "item"]),
        ({"item": np.where(CLICK, ITEMS % 2, 0)}, {}, ["click", "item"]),
        ({"price": np.where(CLICK & (ITEMS % 2), ITEMS * 0.5, 0.0)}, {}, ["click", "price"]),
        ({"item": np.full(NUM_ROWS, "")}, {}, ["training part", "item"]),
        ({"price": np.where(np.arange(NUM_ROWS) < 2400, 0, ITEMS)}, {}, ["training", "price"]),
        ({"item": np.arange(NUM_ROWS) // 2}, {}, ["test part", "item"]),
        ({"user": np.arange(NUM_ROWS) // 20}, {}, ["groups", "user", "test part"]),
        ({"user": np.arange(NUM_ROWS)}, {"categorical": {"item": {}}}, ["GAUC", "validation"]),
        ({"click": few_positives(2400)}, {}, ["click", "test 1"]),
    ],
)
def test_what_makes_a_model_doubtful_is_named(tmp_path, columns, schema, names):
    found = findings(tmp_path, columns, **schema)

    assert any(all(name in finding for name in names) for finding in found)


def test_preparing_and_training_say_it(tmp_path):
    lines = [f"{click},{item},{click}" for click, item in zip(CLICK, ITEMS, strict=True)]
    (tmp_path / "a.csv").write_text("click,item,bought\n" + "\n".join(lines) + "\n")
    (tmp_path / "s.toml").write_text('label = "click"\n[categorical.item]\n[categorical.bought]\n')
    table = ("table", tmp_path / "a.csv", "--schema", tmp_path / "s.toml")

    prepared = recsys("prepare", *table, "--out", tmp_path / "store")
    trained = recsys("train", tmp_path / "store", "--run", tmp_path / "run")

    for out in (prepared, trained):
        assert any("'click'" in line and "'bought'" in line for line in out.splitlines())
