import tomllib

import pytest

from recsys.cli import main
from recsys.datasets.tabular.guessing.guess import guess_schema
from recsys.datasets.tabular.reading.files import TableFiles
from recsys.datasets.tabular.schemas.schema import Schema
from recsys.errors import ConfigError, DatasetFormatError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def table_of_clicks(num_rows=200):
    rows = range(num_rows)
    return {
        "row_id": [f"r{row}" for row in rows],
        "click": [row % 3 == 0 for row in rows],
        "user_id": [row % 17 for row in rows],
        "time": [1_700_000_000 + row for row in rows],
        "site": [f"site{row % 5}" for row in rows],
        "device": [row % 4 for row in rows],
        "price": [row * 0.25 for row in rows],
        "num_views": [2 ** (row % 20) for row in rows],
        "tags": ["|".join("abcd"[: 1 + row % 4]) for row in rows],
        "last_items": [" ".join(str(each) for each in range(1 + row % 6)) for row in rows],
        "title": [f"a line of words, number {row}" for row in rows],
        "country": ["nl" for _ in rows],
        "note": [None for _ in rows],
    }


def write_csv(folder, columns, delimiter=",", name="a.csv"):
    def text(value):
        return "" if value is None else f'"{value}"' if delimiter in str(value) else str(value)

    lines = [columns, *zip(*columns.values(), strict=True)]
    path = folder / name
    path.write_text("".join(delimiter.join(map(text, line)) + "\n" for line in lines))
    return path


def test_each_kind_of_column_is_recognised(tmp_path):
    guess = guess_schema([write_csv(tmp_path, table_of_clicks())])
    assert guess.schema.as_dict() == {
        "label": "click",
        "group": "user_id",
        "timestamp": "time",
        "dense": {"price": {"transform": "standardize"}},
        "categorical": {
            "user_id": {"values": "integer"},
            "site": {},
            "device": {"values": "integer"},
            "num_views": {"values": "integer"},
        },
        "multi": {
            "tags": {"split": "|"},
            "last_items": {"values": "integer", "split": " "},
        },
        "split": {"by": "timestamp", "test": "1/10", "validation": "1/10"},
    }
    assert guess.num_rows == 200
    assert guess.reasons["row_id"].startswith("a number or name of the row")
    assert guess.reasons["title"].startswith("a number or name of the row")
    assert guess.reasons["country"] == "one value in all these rows"
    assert guess.reasons["note"] == "empty in these rows"
    assert guess.role_reasons["label"] == "by its name; values false, true"


def test_the_printed_schema_is_the_guess_and_reads_the_file(tmp_path, capsys):
    path = write_csv(tmp_path, table_of_clicks())
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    schema = Schema.from_dict(tomllib.loads(text))
    assert schema == guess_schema([path]).schema
    assert "#   'country': one value in all these rows\n" in text
    assert 'label = "click"  # by its name; values false, true\n' in text
    assert "# text, 5 different values in 200 rows\n[categorical.site]\n" in text
    assert sum(batch.num_rows for batch in TableFiles([path], schema).batches()) == 200


@pytest.mark.parametrize(("delimiter", "name"), [(";", "a.csv"), ("\t", "a.tsv"), ("|", "a.txt")])
def test_the_delimiter_is_found_in_the_first_line(tmp_path, delimiter, name):
    columns = table_of_clicks()
    del columns["tags"]
    path = write_csv(tmp_path, columns, delimiter, name)
    schema = guess_schema([path]).schema
    assert schema.delimiter == ("" if name == "a.tsv" else delimiter)
    assert "site" in schema.categorical


def test_parquet_types_decide(tmp_path):
    path = tmp_path / "a.parquet"
    table = {
        "label": [0.0, 1.0] * 60,
        "when": pa.array([1_700_000_000] * 120, pa.timestamp("s")),
        "user_id": [None, 7.0, 8.0] * 40,
        "x": [1, 2, 2] * 40,
        "bag": [["a"], [], ["b", "c"]] * 40,
        "nested": [{"a": 1}] * 120,
        "scores": [[0.5], [], [0.25, 1.0]] * 40,
        "day": pa.array(["2024-01-01"] * 120),
    }
    pq.write_table(pa.table(table), path)
    guess = guess_schema([path])
    assert guess.schema.as_dict() == {
        "label": "label",
        "timestamp": "when",
        "categorical": {"user_id": {"values": "integer"}, "x": {"values": "integer"}},
        "multi": {"bag": {}},
        "split": {"by": "timestamp", "test": "1/10", "validation": "1/10"},
    }
    assert guess.reasons["nested"].startswith("its type is neither")
    assert guess.reasons["scores"].startswith("its type is neither")
    assert guess.reasons["day"] == "times; one column of times is read"
    assert sum(batch.num_rows for batch in TableFiles([path], guess.schema).batches()) == 120


@pytest.mark.parametrize(
    ("value", "form"),
    [
        ("14102101", "%y%m%d%H"),
        ("20241021", "%Y%m%d"),
        ("20241021030405", "%Y%m%d%H%M%S"),
        ("2024102103", "%Y%m%d%H"),
        ("1700000000000", "ms"),
        ("1700000000", ""),
        ("2024-10-21 03:04:05", ""),
        ("2024-10-21T03:04:05Z", ""),
    ],
)
def test_forms_of_times(tmp_path, value, form):
    columns = {"hour": [value] * 9, "label": [0, 1, 1] * 3, "c": ["a", "b", "b"] * 3}
    path = write_csv(tmp_path, columns)
    schema = guess_schema([path]).schema
    assert (schema.timestamp, schema.timestamp_format) == ("hour", form)
    first = next(iter(TableFiles([path], schema).batches())).column("hour")[0].as_py()
    assert first == {
        "14102101": 1413853200,
        "20241021": 1729468800,
        "2024102103": 1729479600,
    }.get(value, 1700000000 if value.startswith("17") else 1729479845)


def test_a_label_may_be_named_and_columns_ignored(tmp_path, capsys):
    path = write_csv(tmp_path, table_of_clicks())
    guess = guess_schema([path], label="device", ignore=["click", "title"])
    assert (guess.schema.label, guess.schema.positive) == ("device", ">= 1.5")
    assert guess.reasons["click"] == guess.reasons["title"] == "named by --ignore"
    with pytest.raises(
        ConfigError, match=r"no column .* is named 'clicks', .* columns are 'row_id'"
    ):
        guess_schema([path], label="clicks")
    with pytest.raises(
        ConfigError, match="label 'site' must hold 0 and 1, true and false, or numbers"
    ):
        guess_schema([path], label="site")
    assert main(["inspect", str(path), "--label", "site"]) == 2
    assert "recsys inspect: label 'site' must hold" in capsys.readouterr().err


def test_data_without_a_label(tmp_path):
    pairs = {"user": [1, 1, 2] * 3, "item": [4, 5, 6] * 3}
    tree = guess_schema([write_csv(tmp_path, pairs)]).schema.as_dict()
    assert (tree["group"], tree["negatives"]) == ("user", {"item": "item"})
    assert "history" not in tree
    ordered = {**pairs, "timestamp": list(range(1_700_000_000, 1_700_000_009))}
    tree = guess_schema([write_csv(tmp_path, ordered)]).schema.as_dict()
    assert (tree["history"], tree["split"]) == (
        {"recent": {"of": "item"}},
        {"by": "last_one_out"},
    )
    sessions = {"session": pairs["user"], "item": pairs["item"], "split": ["train"] * 9}
    guess = guess_schema([write_csv(tmp_path, sessions)])
    tree = guess.schema.as_dict()
    assert tree["split"] == {
        "by": "column",
        "column": "split",
        "train": ["train"],
        "test": ["test"],
    }
    assert "session" not in tree["categorical"]
    with pytest.raises(ConfigError, match="no column is named label, click, rating; name"):
        guess_schema([write_csv(tmp_path, {"a": ["x", "y"], "b": ["z", "w"]})])


@pytest.mark.parametrize(
    ("ratings", "rule"),
    [([1, 4, 5], ">= 4"), ([123456789, 123456791, 123456793], ">= 123456791")],  # with all digits
)
def test_a_rating_becomes_a_label_by_a_rule(tmp_path, ratings, rule):
    path = write_csv(tmp_path, {"rating": ratings, "c": ["a", "b", "b"]})
    assert guess_schema([path]).schema.positive == rule


@pytest.mark.parametrize(("label", "ignore"), [("/y", []), ("click", ["click"])])
def test_a_label_that_is_not_read_is_refused(tmp_path, label, ignore):
    path = write_csv(tmp_path, {"/y": [0, 1], "click": [1, 0], "label": [0, 1], "c": ["a", "b"]})
    with pytest.raises(ConfigError, match=f"no column that can be read is named '{label}'"):
        guess_schema([path], label=label, ignore=ignore)


def test_a_history_has_a_name_that_no_column_has(tmp_path):
    bags = ["a|b", "b", "a", "b", "a", "a|b", "a", "b", "b"]
    pairs = {"user": [1, 1, 2] * 3, "item": [4, 5, 6] * 3, "recent": bags}
    path = write_csv(tmp_path, {**pairs, "timestamp": list(range(1_700_000_000, 1_700_000_009))})
    tree = guess_schema([path]).schema.as_dict()
    assert ("recent" in tree["multi"], tree["history"]) == (True, {"recent_": {"of": "item"}})


def test_names_that_toml_must_quote_survive(tmp_path):
    columns = {"label": [0, 1, 1], 'a "b".c # d': ["x", "y", "y"], "ünï": ["x", "y", "y"]}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    guess = guess_schema([path])
    assert Schema.from_dict(tomllib.loads(guess.to_toml())) == guess.schema
    assert list(guess.schema.categorical) == ['a "b".c # d', "ünï"]


def test_a_table_without_rows_is_refused(tmp_path):
    path = write_csv(tmp_path, {"label": [], "c": []})
    with pytest.raises(DatasetFormatError, match="must have at least one row"):
        guess_schema([path])


@pytest.mark.parametrize("name", ["", "/x", "x\ny = 1"])
def test_a_column_whose_name_a_schema_refuses_is_not_read(tmp_path, name):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": [0, 1], "c": ["a", "b"], name: [1, 2]}), path)
    guess = guess_schema([path])
    assert guess.reasons[name] == "its name is empty, not printable, or begins with a slash"
    assert Schema.from_dict(tomllib.loads(guess.to_toml())) == guess.schema


def test_the_first_rows_of_the_first_file_are_looked_at(tmp_path, monkeypatch):
    first = write_csv(tmp_path, {"label": [0, 1, 1], "c": ["a", "b", "b"]})
    second = write_csv(tmp_path, {"d": [1, 2]}, name="b.csv")
    assert guess_schema([tmp_path]).num_rows == guess_schema([first, second]).num_rows == 3
    monkeypatch.setattr("recsys.datasets.tabular.guessing.guess._SAMPLE_ROWS", 2)
    assert guess_schema([first]).num_rows == 2


def test_numbers_too_large_for_dates_are_only_numbers(tmp_path):
    columns = {"label": [0, 1], "day": ["inf", "1"], "c": [2**62, 5]}
    guess = guess_schema([write_csv(tmp_path, columns)])
    assert (list(guess.schema.dense), list(guess.schema.categorical)) == (["day"], ["c"])


def test_a_column_of_booleans_is_drafted_as_integers(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": [0, 1, 1], "is_new": [True, False, None]}), path)
    guess = guess_schema([path])
    assert guess.schema.as_dict()["categorical"] == {"is_new": {"values": "integer"}}
    assert guess.reasons["is_new"].startswith("true (1) or false (0), 2 different values")
    (batch,) = TableFiles([path], guess.schema).batches()
    assert batch.column("is_new").to_pylist() == [1, 0, None]


def test_decimals_of_whole_numbers_are_integers(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {
        "click": pa.array([0, 1, 1, 0], pa.decimal128(1, 0)),
        "user_id": pa.array([7, 8, 7, 8], pa.decimal128(38, 0)),
        "hashed": pa.array([2**64, 5, 5, None], pa.decimal128(38, 0)),
        "tags": pa.array([[1, 2], [], [2], [1]], pa.list_(pa.decimal128(38, 0))),
        "price": pa.array([1.25, 2.5, 3.75, 5.0]).cast(pa.decimal128(38, 2)),
    }
    pq.write_table(pa.table(columns), path)

    guess = guess_schema([path])

    assert guess.schema.label == "click"
    assert guess.schema.group == "user_id"
    drafted = guess.schema.as_dict()
    assert drafted["categorical"] == {"user_id": {"values": "integer"}, "hashed": {}}
    assert drafted["multi"] == {"tags": {"values": "integer"}}
    assert list(drafted["dense"]) == ["price"]
    (batch,) = TableFiles([path], guess.schema).batches()
    assert batch["user_id"].to_pylist() == [7, 8, 7, 8]
    assert batch["hashed"].to_pylist() == [str(2**64), "5", "5", None]
    assert batch["tags"].to_pylist() == [[1, 2], [], [2], [1]]


def test_groups_may_be_integers_beyond_63_bits(tmp_path):
    path = tmp_path / "a.parquet"
    users = pa.array([2**63, 5, 2**63, 5], pa.uint64())
    pq.write_table(pa.table({"label": [0, 1, 1, 0], "user": users, "ad": list("abab")}), path)
    schema = Schema.from_dict({"label": "label", "group": "user", "categorical": {"ad": {}}})

    (batch,) = TableFiles([path], schema).batches()

    assert batch.column("user").to_pylist() == [str(2**63), "5", str(2**63), "5"]


@pytest.mark.parametrize(
    ("columns", "categorical"),
    [
        (
            {"zip": ["10115", "01067", "10115"], "n": ["10", "0", "-7"]},
            {"zip": {}, "n": {"values": "integer"}},
        ),
        ({"user.id": [1, 2, 2]}, {"user.id": {"values": "integer", "table": "user_id"}}),
    ],
    ids=["a leading zero in any row makes text", "a name with a dot has a table without"],
)
def test_a_column_becomes_a_categorical_feature(tmp_path, columns, categorical):
    guess = guess_schema([write_csv(tmp_path, {"label": [0, 1, 1]} | columns)])
    assert guess.schema.as_dict()["categorical"] == categorical


def test_a_column_of_nan_is_empty(tmp_path):
    columns = {"label": [0, 1, 1], "c": ["a", "b", "b"], "x": ["nan", "NaN", "nan"]}
    guess = guess_schema([write_csv(tmp_path, columns)])
    assert guess.reasons["x"] == "empty in these rows"


def test_a_column_has_one_role_of_label_timestamp_and_group(tmp_path):
    (tmp_path / "a.csv").write_text(
        "user_id,c,d\n" + "".join(f"2024-01-0{row % 2 + 1},{row % 3},{row}\n" for row in range(9))
    )

    guess = guess_schema([tmp_path / "a.csv"], label="c")

    assert guess.schema.timestamp == "user_id"
    assert guess.schema.group == ""
