import random
import tomllib

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from tests.commands import recsys, refused
from tests.datasets.tabular.decoded import rows_of

ROWS = range(200)
SECONDS = [1_700_000_000 + row for row in ROWS]
LABELS = [int(row % 7 < 2) for row in ROWS]
ADS = ["abb"[row % 3] + "xyzzy"[row % 5] for row in ROWS]
SHARES = {"test": "1/10", "validation": "1/10"}


def write_csv(folder, columns, delimiter=",", name="a.csv", header=True):
    def text(value):
        return "" if value is None else f'"{value}"' if delimiter in str(value) else str(value)

    lines = [*([columns] if header else []), *zip(*columns.values(), strict=True)]
    path = folder / name
    path.write_text("".join(delimiter.join(map(text, line)) + "\n" for line in lines))
    return path


def write_parquet(folder, columns, **options):
    path = folder / "a.parquet"
    pq.write_table(pa.table(columns), path, **options)
    return path


def draft(folder, file, *options):
    """The schema that `recsys inspect` drafts, of which a store of the file can be made."""
    path = write_csv(folder, file) if isinstance(file, dict) else file
    text = recsys("inspect", path, *options)
    assert text.startswith("# WARNING") == ("label" not in tomllib.loads(text))
    (folder / "schema.toml").write_text(text)
    return tomllib.loads(text)


def clicks(**columns):
    return {"click": LABELS, "ad": ADS, **columns}


CLICKS = {
    "row_id": [f"r{row}" for row in ROWS],
    "click": [row % 7 < 2 for row in ROWS],
    "user_id": [row % 17 for row in ROWS],
    "time": SECONDS,
    "site": [f"site{row % 5}" for row in ROWS],
    "device": [row % 4 for row in ROWS],
    "price": [row * 0.25 for row in ROWS],
    "views": [2 ** (row % 20) for row in ROWS],
    "tags": ["|".join("abcd"[: 1 + row % 4]) for row in ROWS],
    "last_items": [" ".join(str(item) for item in range(1 + row % 6)) for row in ROWS],
    "title": [f"a line of words, number {row}" for row in ROWS],
    "country": ["nl" for _ in ROWS],
    "note": [None for _ in ROWS],
}


def test_each_kind_of_column_is_recognised(tmp_path):
    assert draft(tmp_path, CLICKS) == {
        "label": "click",
        "group": "user_id",
        "timestamp": "time",
        "dense": {"price": {"transform": "standardize"}},
        "categorical": {
            "user_id": {"values": "integer"},
            "site": {},
            "device": {"values": "integer"},
            "views": {"values": "integer"},
        },
        "multi": {"tags": {"split": "|"}, "last_items": {"values": "integer", "split": " "}},
        "split": {"by": "timestamp", **SHARES},
    }


@pytest.mark.parametrize(("delimiter", "name"), [(";", "a.csv"), ("\t", "a.tsv"), ("|", "a.txt")])
def test_the_delimiter_is_found_in_the_first_line(tmp_path, delimiter, name):
    columns = {key: values for key, values in CLICKS.items() if key != "tags"}

    tree = draft(tmp_path, write_csv(tmp_path, columns, delimiter, name))

    assert tree.get("delimiter") == (None if name == "a.tsv" else delimiter)
    assert "site" in tree["categorical"]


def test_types_of_parquet_decide(tmp_path):
    columns = {
        "label": [0.0, 1.0] * 60,
        "when": pa.array([1_700_000_000] * 120, pa.timestamp("s")),
        "user_id": [None, 7.0, 8.0] * 40,
        "bag": [["a"], [], ["b", "c"]] * 40,
        "wholes": [[1.0], [], [2.0, 3.0]] * 40,
        "views": pa.array([[1], [], [2, 3]] * 40, pa.list_(pa.int32())),
        "nested": [{"a": 1}] * 120,
        "map": pa.array([[("a", 1.0)]] * 120, pa.map_(pa.string(), pa.float32())),
        "scores": [[0.5], [], [0.25, 1.0]] * 40,
        "is_new": [True, False, None] * 40,
        "big": pa.array([2**64, 5, None] * 40, pa.decimal128(38, 0)),
        "took": pa.array([1, 2, 3] * 40, pa.duration("s")),
    }

    assert draft(tmp_path, write_parquet(tmp_path, columns)) == {
        "label": "label",
        "timestamp": "when",
        "categorical": {
            "user_id": {"values": "integer"},
            "is_new": {"values": "integer"},
            "big": {},
        },
        "multi": {"bag": {}, "wholes": {"values": "integer"}, "views": {"values": "integer"}},
        "split": {"by": "timestamp", **SHARES},
    }


@pytest.mark.parametrize(
    ("value", "form", "seconds"),
    [
        ("14102101", "%y%m%d%H", 1413853200),
        ("20241021", "%Y%m%d", 1729468800),
        ("20241021030405", "%Y%m%d%H%M%S", 1729479845),
        ("2024102103", "%Y%m%d%H", 1729479600),
        ("1700000000000", "ms", 1700000000),
        ("1700000000", "", 1700000000),
        ("2024-10-21 03:04:05", "", 1729479845),
        ("2024-10-21T03:04:05Z", "", 1729479845),
    ],
)
def test_forms_of_times(tmp_path, value, form, seconds):
    path = write_csv(tmp_path, clicks(hour=[value] * 200))

    tree = draft(tmp_path, path)

    assert (tree["timestamp"], tree.get("timestamp_format", "")) == ("hour", form)
    assert rows_of(path, tree, tmp_path)["times"] == [seconds] * 200


@pytest.mark.parametrize("text", ["03.04.2025 10:00", "01/15/2025", "15 Jan 2025", "10:00"])
def test_text_that_looks_like_times_is_left_to_the_user(tmp_path, text):
    tree = draft(tmp_path, clicks(seen=[text, text.replace("1", "2")] * 100))

    assert (list(tree["categorical"]), "timestamp" in tree) == (["ad"], False)
    assert "timestamp_format" in (tmp_path / "schema.toml").read_text()


@pytest.mark.parametrize("values", [["10.0.0.1", "10.0.0.2"], ["v1.2.3", "v1"], ["007", "10"]])
def test_text_with_digits_is_a_name(tmp_path, values):
    assert draft(tmp_path, clicks(seen=values * 100))["categorical"]["seen"] == {}


@pytest.mark.parametrize(
    ("texts", "is_bag"),
    [(["['a', 'b']", "['b']"], False), (['{"a": 1}', "{}"], False), (["[a],b", "b"], True)],
)
def test_lists_as_python_writes_them_are_not_split(tmp_path, texts, is_bag):
    columns = clicks(tags=[texts[row % 7 % 2] for row in ROWS])
    tree = draft(tmp_path, write_csv(tmp_path, columns, ";"))

    assert ("tags" in tree.get("multi", {})) == is_bag


@pytest.mark.parametrize("name", ["User-ID", "user id", " USER_ID ", "userId", "visitorid"])
def test_known_names_may_be_written_in_other_ways(tmp_path, name):
    assert draft(tmp_path, clicks(**{name: list(range(20)) * 10}))["group"] == name


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ([0, 0, 3, 0], "> 0"),  # with ">= 0" every row would be a positive
        ([1, 4, 5, 4], ">= 4"),
        ([123456789, 123456791, 123456793, 123456791], ">= 123456791"),  # with all digits
        (["no", "yes", "no", "no"], "== yes"),
    ],
)
def test_a_rule_is_drafted_for_a_named_label(tmp_path, values, rule):
    tree = draft(tmp_path, {"bought": values * 50, "ad": ADS}, "--label", "bought")

    assert tree["positive"] == rule
    assert set(rows_of(tmp_path / "a.csv", tree, tmp_path)["label"]) == {0, 1}


LINES = "1,5,a\n0,6,b\n" * 99


@pytest.mark.parametrize("text", [LINES, "1,1,a\n" + LINES])
def test_a_file_without_a_line_of_names_is_seen(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_text(text)

    assert "--no-header" in refused("inspect", path)
    tree = draft(tmp_path, path, "--no-header", "click", "user", "ad")

    assert (tree["names"], tree["label"]) == (["click", "user", "ad"], "click")
    assert len(rows_of(path, tree, tmp_path)["label"]) == text.count("\n")


def pairs(num_users=50, num_rows=2000, **columns):
    """Users in turns, whose items are in no order."""
    draw = random.Random(0)
    items = [draw.randrange(100) for _ in range(num_rows)]
    return {"user": [row % num_users for row in range(num_rows)], "item": items, **columns}


def by_user(columns, key=None):
    """The rows of each user together, in the order of `key`."""
    rows = sorted(zip(*columns.values(), strict=True), key=lambda row: (row[0], key and row[1]))
    return dict(zip(columns, zip(*rows, strict=True), strict=True))


RECENT = {"recent": {"of": "item"}}


@pytest.mark.parametrize(
    ("columns", "split", "history"),
    [
        (pairs(), {"by": "last_one_out"}, RECENT),
        (by_user(pairs()), {"by": "last_one_out"}, RECENT),
        (by_user(pairs(), "item"), {"by": "random", **SHARES}, None),
        (by_user(pairs(time=range(2000)), "item"), {"by": "last_one_out"}, RECENT),
        (
            pairs(split=["train"] * 1500 + ["test"] * 500),
            {"by": "column", "column": "split", "train": ["train"], "test": ["test"]},
            None,
        ),
    ],
    ids=["in turns", "by user", "by user and item", "with times", "a column of the split"],
)
def test_pairs_without_a_label_are_judged_by_what_comes_last(tmp_path, columns, split, history):
    if "time" in columns:
        columns = columns | {"time": [1_700_000_000 + time for time in columns["time"]]}

    tree = draft(tmp_path, columns)

    assert (tree["group"], tree["negatives"]["item"]) == ("user", "item")
    assert (tree["split"], tree.get("history")) == (split, history)


def test_columns_of_the_item_change_with_it(tmp_path):
    columns = pairs()
    genres = [item % 7 for item in columns["item"]]
    prices = [item / 4 for item in columns["item"]]
    ages = [user % 3 for user in columns["user"]]

    tree = draft(tmp_path, columns | {"genre": genres, "price": prices, "age": ages})

    assert tree["negatives"]["item_columns"] == ["genre"]
    assert list(tree["categorical"]) == ["user", "item", "genre", "age"]


def test_one_kind_of_event_is_predicted_and_histories_list_the_others(tmp_path):
    draw = random.Random(2)
    kinds = draw.choices(["view", "cart", "buy"], [0.9, 0.09, 0.01], k=2000)
    columns = pairs(event=kinds, timestamp=[1_700_000_000 + row for row in range(2000)])

    tree = draft(tmp_path, columns)
    in_order = sorted(zip(*columns.values(), strict=True), key=lambda row: row[2])

    assert tree["filter"] == {"event": ["cart"]}  # users buy too rarely
    assert tree["history"] == {
        "recent": {"of": "item"},
        "recent_buy": {"of": "item", "where": {"event": ["buy"]}},
        "recent_view": {"of": "item", "where": {"event": ["view"]}},
    }
    assert tree["split"] == {"by": "last_one_out"}
    ordered = dict(zip(columns, zip(*in_order, strict=True), strict=True))
    assert draft(tmp_path, ordered) == tree


def test_sessions_have_no_table(tmp_path):
    columns = pairs(num_users=300)
    columns["session"] = sorted(columns.pop("user"))

    tree = draft(tmp_path, columns)

    assert (tree["group"], list(tree["categorical"])) == ("session", ["item"])
    assert (tree["split"], tree["history"]) == ({"by": "last_one_out"}, RECENT)


def test_data_without_a_label_needs_a_group_and_an_item(tmp_path):
    columns = pairs()
    columns = {"who": columns["user"], "what": columns["item"]}

    assert "--group" in refused("inspect", write_csv(tmp_path, columns))
    columns["rating"] = [row % 5 for row in range(len(columns["who"]))]
    tree = draft(tmp_path, columns, "--group", "who", "--item", "what")

    assert (tree["group"], tree["negatives"]["item"]) == ("who", "what")
    assert "rating" not in str(tree)


@pytest.mark.parametrize("order", ["click", "user"])
def test_rows_that_stand_together_are_divided_at_random(tmp_path, order):
    columns = {"click": [row % 4 // 3 for row in range(2000)], **pairs()}
    rows = sorted(zip(*columns.values(), strict=True), key=lambda row: row[order == "user"])
    ordered = dict(zip(columns, zip(*rows, strict=True), strict=True))

    assert draft(tmp_path, columns)["split"] == {"by": "fraction", **SHARES}
    assert draft(tmp_path, ordered)["split"] == {"by": "random", **SHARES}


def test_all_parts_of_a_large_file_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.datasets.tabular.read._SAMPLE_BYTES", 1 << 15)
    kinds = [f"kind {row // 10_000}" for row in range(100_000)]
    text = ['two\nlines, "quoted"'.replace('"', '""') if row % 9 == 0 else "x" for row in ROWS]
    columns = {"click": [row % 3 % 2 for row in range(100_000)], "kind": kinds}
    plain = write_csv(tmp_path, columns | {"text": text * 500})
    packed = tmp_path / "b.csv.gz"
    with pa.CompressedOutputStream(packed, "gzip") as out:
        out.write(plain.read_bytes())
    grouped = write_parquet(tmp_path, columns, row_group_size=2000)

    for path in (plain, packed, grouped):
        assert "text, 10 different values" in recsys("inspect", path)


@pytest.mark.parametrize("name", ["", "/x", "x\ny = 1"])
def test_a_column_whose_name_a_schema_refuses_is_not_read(tmp_path, name):
    path = write_parquet(tmp_path, {"label": [0, 1], "c": ["a", "b"], name: [1, 2]})

    assert list(draft(tmp_path, path)["categorical"]) == ["c"]
