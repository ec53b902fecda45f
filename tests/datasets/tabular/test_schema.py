import json
import tomllib

import pytest

from recsys.datasets import Schema
from recsys.errors import ConfigError

WHOLE = """
label = "stars"
positive = ">= 4"
group = "user"
timestamp = "ts"
timestamp_format = "ms"
weight = "w"
delimiter = ";"
missing_values = ["NA"]

[filter]
kind = ["buy", 3]

[dense.price]
transform = "log"
missing = "mean"
[dense."a.b"]
missing = -1.5

[categorical.user]
[categorical.item]
values = "integer"
min_count = 2
max_rows = 1000
missing = "own"
[categorical.site]
numbering = "hash"
num_rows = 64

[multi.tags]
split = "|"
max_length = 3
[sequence.seen]
values = "integer"
min_count = 2
max_rows = 1000
table = "item"
max_length = 5

[history.recent]
of = "item"
where = {kind = "cart", day = true}

[split]
by = "timestamp"
test_from = 2014-10-29
"""
SMALL = {"label": "y", "categorical": {"c": {}}}
POSITIVES = {"group": "u", "categorical": {"u": {}, "i": {}, "f": {}}}


def test_toml_and_json_give_the_same_schema_back(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(WHOLE, encoding="utf-8-sig")
    schema = Schema.from_toml(path)
    assert Schema.from_dict(tomllib.loads(schema.to_toml())) == schema
    tree = json.loads(json.dumps(schema.as_dict()))
    assert Schema.from_dict(tree) == schema
    assert tree["split"] == {"by": "timestamp", "test_from": 1414540800}
    assert tree["history"]["recent"]["where"] == {"kind": ["cart"], "day": ["true"]}


def test_features_tables_and_columns_are_in_order():
    schema = Schema.from_dict(tomllib.loads(WHOLE))
    assert [tuple(feature) for feature in schema.features] == [
        ("user", "user", "one"),
        ("item", "item", "one"),
        ("site", "site", "one"),
        ("tags", "tags", "multi"),
        ("seen", "item", "sequence"),
        ("recent", "item", "sequence"),
    ]
    assert [table.name for table in schema.tables] == ["user", "item", "site", "tags"]
    assert schema.tables[1].columns == ("item", "seen")
    assert [table.first_row for table in schema.tables] == [1, 2, 1, 1]
    features = ("price", "a.b", "user", "item", "site", "tags", "seen")
    assert schema.columns == (*features, "stars", "ts", "w", "kind", "day")


def test_a_schema_has_the_keys_that_are_not_as_by_default():
    assert Schema.from_dict(SMALL).as_dict() == {**SMALL, "split": {"by": "fraction"}}


@pytest.mark.parametrize(
    ("moment", "seconds"),
    [("2014-10-30T01:00:00+01:00", 1414627200), ("1969-12-31T23:59", -60), (5, 5)],
)
def test_a_moment_is_seconds_or_iso_text(moment, seconds):
    split = {"by": "timestamp", "test_from": moment}
    schema = Schema.from_dict({**SMALL, "timestamp": "t", "split": split})
    assert schema.as_dict()["split"]["test_from"] == seconds


HASH = {"numbering": "hash", "num_rows": 9}
# A schema, and what its error must name: the key, and where there is one the value.
REFUSED = [
    ({}, "categorical"),
    ({"label": "y"}, "categorical"),
    ({"categorical": {"c": {}}}, "label"),
    ({**SMALL, "lable": "y"}, "lable"),
    ({**SMALL, "label": 3}, "label.*3"),
    ({**SMALL, "label": "c"}, "label.*'c'.*categorical"),
    ({**SMALL, "labels": ["x"]}, "label and labels"),
    ({"labels": ["x", "x"], "categorical": {"c": {}}}, "label.*'x'"),
    ({**SMALL, "group": "y"}, "group.*'y'.*label"),
    ({**SMALL, "filter": {"y": 1}}, "filter.*'y'.*label"),
    ({**SMALL, "filter": {"z": []}}, "filter.z"),
    ({**SMALL, "filter": {"z": "> x"}}, "filter.z.*> x"),
    ({**SMALL, "filter": {"z": 1.5}}, "filter.z.*1.5"),
    ({**SMALL, "dense": {"c": {}}}, "categorical.*'c'.*dense"),
    ({**SMALL, "dense": {"": {}}}, "dense"),
    ({**SMALL, "dense": {"/label": {}}}, "dense.*'/label'"),
    ({**SMALL, "dense": 3}, "dense.*3"),
    ({**SMALL, "dense": {"d": 3}}, "dense.d.*3"),
    *[
        ({**SMALL, "dense": {"d": {"missing": value}}}, "dense.d.missing")
        for value in ("median", float("inf"), True)
    ],
    ({**SMALL, "dense": {"d": {"transform": "sqrt"}}}, "dense.d.transform.*sqrt"),
    *[
        ({**SMALL, "positive": text}, "positive")
        for text in ("about 4", ">= nan", ">= yes", "== ", "== nan", "== a\tb", '== "yes"', "yes")
    ],
    ({"positive": ">= 4", **POSITIVES}, "positive.*label"),
    *[({**SMALL, "delimiter": text}, "delimiter") for text in ("é", "::")],
    *[({**SMALL, "quote": text}, "quote") for text in ("''", "\n", ",")],
    ({**SMALL, "delimiter": ";", "quote": ";"}, "quote"),
    *[
        ({**SMALL, "missing_values": value}, "missing_values")
        for value in ("NA", [1.5], ["\ud800"])
    ],
    ({**SMALL, "multi": {"m": {"split": "\udfff"}}}, "multi.m.split"),
    ({**SMALL, "multi": {"m": {"split": "||"}}}, "multi.m.split.*||"),
    ({**SMALL, "multi": {"m": {"max_length": 2**32}}}, "multi.m.max_length.*4294967296"),
    ({**SMALL, "multi": {"m": {"weights": "w"}}}, "multi.m.weights"),
    ({**SMALL, "multi": {"m": {"table": "c", "values": "integer"}}}, "'m'.*'c'.*values"),
    ({**SMALL, "multi": {"m": {"table": "item\u00a0id"}}}, "'m'"),
    ({**SMALL, "sequence": {"s": {}}}, "sequence.s.max_length"),
    ({**SMALL, "timestamp_format": "ms"}, "timestamp"),
    *[
        ({**SMALL, "timestamp": "t", "timestamp_format": form}, f"timestamp_format.*{form}")
        for form in ("min", "%H:%M %Z", "%d.%m.%Y %I:%M", "%Y%m%d %H %p", "%G-W%V")
    ],
    *[
        ({"label": "y", "categorical": {"c": keys}}, "categorical.c")
        for keys in (
            *({"min_count": 0}, {"min_count": "2"}, {"min_count": True}, {"max_rows": 1}),
            *({"num_rows": 9}, {"numbering": "hash"}, {"max_rows": 2, "missing": "own"}),
            *({**HASH, "missing": "own"}, {**HASH, "max_rows": 5}, {**HASH, "min_count": 2}),
        )
    ],
    ({"label": "y", "categorical": {"user.id": {}}}, "'user.id'.*\"user_id\""),
    ({**SMALL, "history": {"h": {"of": "c"}}}, "history.h.*group"),
    ({**SMALL, "group": "u", "history": {"h": {"of": "u"}}}, "history.h.of.*'u'"),
    ({**SMALL, "group": "u", "history": {"h": {}}}, "history.h.of"),
    ({**SMALL, "group": "u", "history": {"c": {"of": "c"}}}, "history.*'c'"),
    ({**SMALL, "split": {"by": "user"}}, "split.*'user'.*'by'"),
    ({**SMALL, "split": {"by": "timestamp"}}, "timestamp"),
    *[({**SMALL, "split": {"by": by}}, f"{by}.*group") for by in ("last_one_out", "group")],
    ({**SMALL, "group": "u", "split": {"by": "last_one_out"}}, "label"),
    *[
        ({**SMALL, "split": {"test": share}}, "split.test")
        for share in (1, "1/0", "1e999999999", float("nan"), "x")
    ],
    ({**SMALL, "split": {"test": 0.5, "validation": "1/2"}}, "split.*1/2"),
    ({**SMALL, "split": {"seed": 1}}, "split.seed"),
    ({**SMALL, "split": {"by": "random", "seed": -1}}, "split.seed.*-1"),
    ({**SMALL, "split": {"by": "column", "train": ["a"], "test": ["b"]}}, "split.column"),
    *[
        ({**SMALL, "split": {"by": "column", "column": "s", **lists}}, "split")
        for lists in ({"train": ["a"]}, {"train": ["a"], "test": ["a"]})
    ],
    (
        {**SMALL, "split": {"by": "column", "column": "y", "train": [0], "test": [1]}},
        "split.column.*'y'",
    ),
    *[
        ({**SMALL, "timestamp": "t", "split": {"by": "timestamp", **keys}}, name)
        for keys, name in (
            ({"test_from": "soon"}, "split.test_from.*soon"),
            ({"test_from": 5, "validation_from": 4}, "unknown key split.validation_from"),
        )
    ],
    ({**SMALL, "negatives": {"item": "c"}}, "negatives.*label"),
    ({"categorical": {"i": {}}, "negatives": {"item": "i"}}, "negatives.*group"),
    *[
        ({**POSITIVES, "negatives": keys}, "negatives")
        for keys in (
            *({"item": "x"}, {"item": "u"}, {}, {"item": "i", "per_positive": 2**32}),
            {"item": "i", "item_columns": ["f", "f"]},
        )
    ],
    ({**POSITIVES, "categorical": {"u": {}, "i": HASH}, "negatives": {"item": "i"}}, "'i'"),
    ([], "a schema"),
]


@pytest.mark.parametrize(("keys", "name"), REFUSED)
def test_a_schema_is_refused_by_name(keys, name):
    with pytest.raises(ConfigError, match=name):
        Schema.from_dict(keys)
