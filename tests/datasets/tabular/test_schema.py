import json
import tomllib

import pytest

from recsys.datasets.store_writer import Feature
from recsys.datasets.tabular.schemas.named import NAMED_SCHEMAS, find_schema
from recsys.datasets.tabular.schemas.schema import Schema
from recsys.datasets.tabular.schemas.schema_parts import (
    DenseColumn,
    FractionSplit,
    PositiveRule,
    TimestampSplit,
)
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

[split]
by = "timestamp"
test_from = 2014-10-29
validation_from = "2014-10-30T01:00:00+01:00"
"""
SMALL = {"label": "y", "categorical": {"c": {}}}
POSITIVES = {"group": "u", "categorical": {"u": {}, "i": {}, "f": {}}}


def test_toml_and_json_give_the_same_schema_back(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(WHOLE)
    schema = Schema.from_toml(path)
    assert Schema.from_dict(tomllib.loads(schema.to_toml())) == schema
    tree = json.loads(json.dumps(schema.as_dict()))
    assert Schema.from_dict(tree) == schema
    assert tree["split"] == {
        "by": "timestamp",
        "test_from": 1414540800,
        "validation_from": 1414627200,
    }


def test_features_tables_and_columns_are_in_order():
    schema = Schema.from_dict(tomllib.loads(WHOLE))
    assert schema.features == (
        Feature("user", "user"),
        Feature("item", "item"),
        Feature("site", "site"),
        Feature("tags", "tags", "multi"),
        Feature("seen", "item", "sequence"),
        Feature("recent", "item", "sequence"),
    )
    assert [table.name for table in schema.tables] == ["user", "item", "site", "tags"]
    item, site = schema.tables[1:3]
    assert (item.columns, item.max_rows, item.min_count) == (("item", "seen"), 1000, 2)
    assert [table.has_missing_row for table in schema.tables] == [False, True, False, False]
    assert (site.numbering, site.num_rows) == ("hash", 64)
    features = ("price", "a.b", "user", "item", "site", "tags", "seen")
    assert schema.columns == (*features, "stars", "ts", "w")


def test_weights_belong_to_a_column_and_are_read_after_the_values():
    sequence = {"s": {"weights": "dwell", "max_length": 3}}
    multi = {"m": {"weights": "w"}, "n": {}}
    schema = Schema.from_dict({**SMALL, "multi": multi, "sequence": sequence})
    assert schema.weights_of == {"w": "m", "dwell": "s"}
    assert schema.columns == ("c", "m", "n", "s", "w", "dwell", "y")
    assert [each.is_weighted for each in schema.features] == [False, True, False, True]
    assert Schema.from_dict(schema.as_dict()) == schema


def test_defaults():
    schema = Schema.from_dict(SMALL)
    assert schema.split == FractionSplit()
    assert (schema.split.test_share * 14, schema.split.validation_share * 14) == (1, 1)
    assert DenseColumn().missing == 0.0
    assert schema.as_dict() == {**SMALL, "split": {"by": "fraction"}}


@pytest.mark.parametrize(
    ("text", "comparison", "number"), [(">= 4", ">=", 4), ("==1", "==", 1), ("< -0.5", "<", -0.5)]
)
def test_rules_for_positives(text, comparison, number):
    assert PositiveRule.parse(text) == PositiveRule(comparison=comparison, number=number)


@pytest.mark.parametrize("text", ["yes", "not clicked", "J/N", "1a", "naïf", "= 1"])
def test_a_rule_for_text(text):
    assert PositiveRule.parse(f" == {text} ") == PositiveRule(comparison="==", text=text)


def test_shares_are_exact():
    split = FractionSplit(test=0.1, validation="1/3")
    assert (split.test_share * 10, split.validation_share * 3) == (1, 1)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "must name at least one dense, categorical, multi or sequence"),
        ({"label": "y"}, "must name at least one"),
        ({"categorical": {"c": {}}}, "needs a label, or negatives"),
        ({**SMALL, "labels": "y"}, "unknown key labels; did you mean label?"),
        ({**SMALL, "label": 3}, "label must be text, got '3'"),
        ({**SMALL, "label": "c"}, "label: column 'c' is named in categorical, too"),
        ({**SMALL, "group": "y"}, "label and group must be two columns, got 'y'"),
        ({**SMALL, "dense": {"c": {}}}, "categorical.c: 'c' is named in dense already"),
        ({**SMALL, "dense": {"": {}}}, "dense: a name must be printable text, got ''"),
        ({**SMALL, "dense": 3}, "dense must be a table of keys, got '3'"),
        ({**SMALL, "dense": {"d": 3}}, "dense.d must be a table of keys"),
        ({**SMALL, "dense": {"d": {"missing": "median"}}}, "dense.d: missing must be a finite"),
        ({**SMALL, "dense": {"d": {"missing": float("inf")}}}, "must be a finite number"),
        ({**SMALL, "dense": {"d": {"missing": True}}}, "dense.d.missing must be a number or text"),
        ({**SMALL, "dense": {"d": {"transform": "sqrt"}}}, "transform must be one of 'none'"),
        ({**SMALL, "positive": "about 4"}, "positive must be ==, >=, >, <= or <"),
        ({**SMALL, "positive": ">= nan"}, "positive must be"),
        *[
            ({**SMALL, "positive": text}, "positive must be")
            for text in (
                *(">= yes", "== ", "== nan", "== a\tb", "== inf", "yes"),
                *('== "yes"', "== 'yes'"),
            )
        ],
        ({**SMALL, "delimiter": "é"}, "delimiter"),
        *[({**SMALL, "quote": text}, "quote") for text in ("''", "\n", ",")],
        ({**SMALL, "delimiter": ";", "quote": ";"}, "quote"),
        ({"positive": ">= 4", **POSITIVES}, "positive needs the key label"),
        ({**SMALL, "delimiter": "::"}, "delimiter must be one character of ASCII"),
        (
            {**SMALL, "missing_values": ["\ud800"]},
            "missing_values must be text that UTF-8 can hold",
        ),
        (
            {**SMALL, "multi": {"m": {"split": "\ud800"}}},
            "multi.m.split must be text that UTF-8 can hold",
        ),
        (
            {**POSITIVES, "negatives": {"item": "i", "per_positive": 2**31}},
            "negatives: per_positive must be in [1, 1000], got 2147483648",
        ),
        (
            {
                **POSITIVES,
                "negatives": {"item": "i"},
                "history": {"h": {"of": "i", "max_length": 2**40}},
            },
            "history.h: max_length must be",
        ),
        ({**SMALL, "timestamp_format": "ms"}, "timestamp_format needs the key timestamp"),
        ({**SMALL, "timestamp": "t", "timestamp_format": "min"}, "must be one of ms, us, ns"),
        (
            {**SMALL, "timestamp": "t", "timestamp_format": "%d.%m.%Y %I:%M"},
            "%p (AM or PM) together",
        ),
        ({**SMALL, "timestamp": "t", "timestamp_format": "%Y%m%d %H %p"}, "%p (AM or PM) together"),
        ({**SMALL, "timestamp": "t", "timestamp_format": "%G-W%V"}, "not have %G, as weeks are"),
        ({**SMALL, "missing_values": "NA"}, "missing_values must be a list, got 'NA'"),
        ({**SMALL, "missing_values": [1.5]}, "missing_values must list text or integers"),
        ({**SMALL, "missing_values": ["\ud800"]}, "missing_values must be text that UTF-8"),
        ({**SMALL, "multi": {"m": {"split": "\udfff"}}}, "multi.m.split must be text that UTF-8"),
        ({"label": "y", "categorical": {"c": {"min_count": 0}}}, "min_count must be at least 1"),
        ({"label": "y", "categorical": {"c": {"min_count": "2"}}}, "must be an integer"),
        ({"label": "y", "categorical": {"c": {"min_count": True}}}, "must be an integer"),
        ({"label": "y", "categorical": {"c": {"max_rows": 1}}}, "max_rows must be 0"),
        ({"label": "y", "categorical": {"c": {"num_rows": 9}}}, "num_rows is for numbering 'hash'"),
        ({"label": "y", "categorical": {"c": {"numbering": "hash"}}}, "num_rows must be at least"),
        (
            {"label": "y", "categorical": {"c": {"max_rows": 2, "missing": "own"}}},
            "max_rows must be 0 or at least 3 with missing 'own'",
        ),
        (
            {
                "label": "y",
                "categorical": {"c": {"numbering": "hash", "num_rows": 9, "missing": "own"}},
            },
            "missing 'own' is for numbering 'first'",
        ),
        (
            {
                "label": "y",
                "categorical": {"c": {"numbering": "hash", "num_rows": 9, "max_rows": 5}},
            },
            "min_count and max_rows are for numbering 'first'",
        ),
        (
            {**SMALL, "multi": {"m": {"table": "c", "values": "integer"}}},
            "columns 'c' and 'm' share table 'c' and must have the same values",
        ),
        ({**SMALL, "multi": {"m": {"split": "||"}}}, "multi.m: split must be one character"),
        ({**SMALL, "sequence": {"s": {}}}, "sequence.s: max_length is required"),
        (
            {**SMALL, "multi": {"m": {"weights": "c"}}},
            "multi.m.weights: column 'c' is named in categorical, too; a column has one meaning",
        ),
        ({**SMALL, "multi": {"m": {"weights": "m"}}}, "column 'm' is named in multi, too"),
        (
            {**SMALL, "multi": {"m": {"weights": "w"}, "n": {"weights": "w"}}},
            "multi.n.weights: column 'w' is named in multi.m.weights, too",
        ),
        (
            {**SMALL, "multi": {"m": {"weights": "y"}}},
            "label: column 'y' is named in multi.m.weights, too; take it out of there",
        ),
        (
            {
                **SMALL,
                "sequence": {"s": {"weights": "w", "max_length": 2}},
                "split": {"by": "column", "column": "w", "train": ["a"], "test": ["b"]},
            },
            "split.column: 'w' is named in sequence.s.weights, too",
        ),
        (
            {**SMALL, "multi": {"m": {"weights": "/w"}}},
            "multi.m.weights: a name must not begin with '/'",
        ),
        (
            {**SMALL, "multi": {"m": {"weights": "a\nb"}}},
            "multi.m.weights: a name must be printable text",
        ),
        ({**SMALL, "multi": {"m": {"weights": 3}}}, "multi.m.weights must be text, got '3'"),
        (
            {**SMALL, "group": "u", "history": {"h": {"of": "c", "weights": "w"}}},
            "unknown key history.h.weights",
        ),
        ({**SMALL, "history": {"h": {"of": "c"}}}, "history.h needs the key group"),
        ({**SMALL, "group": "u", "history": {"h": {"of": "u"}}}, "must be a categorical column"),
        ({**SMALL, "group": "u", "history": {"h": {}}}, "history.h: of is required"),
        ({**SMALL, "history": {"c": {"of": "c"}}}, "a history a name of its own"),
        ({**SMALL, "split": {"by": "user"}}, "split.by must be one of fraction, timestamp"),
        ({**SMALL, "split": {"by": "timestamp"}}, "needs the key timestamp"),
        ({**SMALL, "split": {"by": "last_one_out"}}, "needs the key group"),
        (
            {**SMALL, "group": "u", "split": {"by": "last_one_out"}},
            "no metric can judge in data with a label, got label 'y'; take another split, or",
        ),
        ({**SMALL, "dense": {"/label": {}}}, "dense: a name must not begin with '/'"),
        ({**SMALL, "group": "u", "history": {"/time": {"of": "c"}}}, "must not begin with '/'"),
        (
            {"label": "y", "categorical": {"user.id": {}}},
            "column 'user.id': the name of its table must be printable text without a '.', got "
            "'user.id'; set the key table of the column to another name, such as \"user_id\"",
        ),
        (
            {"label": "y", "multi": {"m": {"table": "item\u00a0id"}}},
            "got 'item\\xa0id'; set the key table of the column to another name, such as",
        ),
        ({**SMALL, "split": {"test": 1}}, "split: test must be in [0, 1)"),
        ({**SMALL, "split": {"test": "1/0"}}, "split: test must be in [0, 1)"),
        ({**SMALL, "split": {"test": "1e999999999"}}, "split: test must be in [0, 1)"),
        ({**SMALL, "split": {"test": float("nan")}}, "split: test must be in [0, 1)"),
        ({**SMALL, "split": {"test": 0.5, "validation": "1/2"}}, "must be below 1"),
        ({**SMALL, "split": {"seed": 1}}, "unknown key split.seed"),
        ({**SMALL, "split": {"by": "random", "seed": -1}}, "seed must be at least 0"),
        ({**SMALL, "split": {"by": "column", "train": ["a"]}}, "column is required"),
        ({**SMALL, "split": {"by": "column", "column": "s", "train": ["a"]}}, "at least one value"),
        (
            {**SMALL, "split": {"by": "column", "column": "s", "train": ["a"], "test": ["a"]}},
            "a value must be listed once, got 'a' again",
        ),
        (
            {**SMALL, "split": {"by": "column", "column": "y", "train": [0], "test": [1]}},
            "split.column: 'y' is the label, timestamp or weight",
        ),
        (
            {**SMALL, "timestamp": "t", "split": {"by": "timestamp", "test_from": "soon"}},
            "split.test_from must be seconds since 1970 or ISO text",
        ),
        (
            {**SMALL, "timestamp": "t", "split": {"by": "timestamp", "validation_from": 5}},
            "validation_from needs test_from",
        ),
        ({**SMALL, "negatives": {"item": "c"}}, "negatives are for data without a label"),
        ({"categorical": {"i": {}}, "negatives": {"item": "i"}}, "negatives need the key group"),
        ({**POSITIVES, "negatives": {"item": "x"}}, "'x' must be a categorical column"),
        ({**POSITIVES, "negatives": {"item": "u"}}, "'u' is the group, which is never redrawn"),
        ({**POSITIVES, "negatives": {}}, "negatives: item is required"),
        ({**POSITIVES, "negatives": {"item": "i", "per_positive": 2**32}}, "per_positive must be"),
        ({**SMALL, "multi": {"m": {"max_length": 2**32}}}, "max_length must be"),
        (
            {**POSITIVES, "negatives": {"item": "i", "item_columns": ["f", "f"]}},
            "item_columns must name each further column once",
        ),
        ([], "a schema must be a table of keys"),
    ],
)
def test_what_a_schema_refuses(keys, words):
    with pytest.raises(ConfigError) as caught:
        Schema.from_dict(keys)
    assert words in str(caught.value)


def test_a_file_may_begin_with_the_mark_of_utf_8(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('label = "y"\n[dense.x]\n', encoding="utf-8-sig")

    assert list(Schema.from_toml(path).dense) == ["x"]


def test_moments_before_1970_and_fractions_of_seconds_round_down():
    assert Schema.from_dict(
        {**SMALL, "timestamp": "t", "split": {"by": "timestamp", "test_from": "1969-12-31T23:59"}}
    ).split == TimestampSplit(test_from=-60)


@pytest.mark.parametrize("name", NAMED_SCHEMAS)
def test_named_schemas_are_valid_and_are_found(name):
    schema = find_schema(name)
    assert schema == Schema.from_dict(NAMED_SCHEMAS[name])
    assert Schema.from_dict(schema.as_dict()) == schema


def test_a_schema_is_found_by_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('label = "y"\n[categorical.c]\n')
    assert find_schema(str(path)) == Schema.from_dict(SMALL)


def test_a_name_with_a_dot_needs_another_name_for_its_table():
    columns = {"user.id": {"table": "user_id"}}
    schema = Schema.from_dict({"label": "y", "categorical": columns, "dense": {"a.b": {}}})
    assert [table.name for table in schema.tables] == ["user_id"]
