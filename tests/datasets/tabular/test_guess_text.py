"""Guesses about text: times in many forms, and numbers of which some cannot be read."""

import pytest

from recsys.datasets.tabular.guessing.guess import guess_schema
from recsys.datasets.tabular.reading.files import TableFiles
from tests.datasets.tabular.test_guess import write_csv

pytest.importorskip("pyarrow")

LABELS = [0, 1, 1] * 10
ADS = ["a", "b", "b"] * 10


def clicks(name, values):
    return {"click": LABELS, "ad": ADS, name: values}


@pytest.mark.parametrize(
    "values", [["03.04.2025 10:00"], ["01/15/2025", "16/15/2025"], ["15 Jan 2025"], ["10:00"]]
)
def test_times_that_are_no_iso_text_are_left_to_the_user(tmp_path, values):
    guess = guess_schema([write_csv(tmp_path, clicks("seen", (values * 30)[:30]))])

    assert list(guess.schema.columns) == ["ad", "click"]
    assert "'seen': looks like times; to read them, set timestamp" in guess.to_toml()


@pytest.mark.parametrize("values", [["10.0.0.1", "10.0.0.2"], ["news|film", "film"], ["v1.2.3"]])
def test_text_that_is_no_times_is_not_taken_for_them(tmp_path, values):
    guess = guess_schema([write_csv(tmp_path, clicks("seen", (values * 30)[:30]))])

    assert "times" not in guess.to_toml()


def test_of_several_columns_of_times_the_finest_is_taken(tmp_path):
    days = [f"2024-01-{1 + row % 5:02}" for row in range(30)]
    times = [f"2025-01-15 10:{row:02}:00" for row in range(30)]
    columns = clicks("signed_up", days) | {"seen": times, "born": days}

    guess = guess_schema([write_csv(tmp_path, columns)])

    assert guess.schema.timestamp == "seen"
    assert guess.reasons["born"] == "times; one column of times is read"


@pytest.mark.parametrize("kind", ["time64", "duration"])
def test_times_of_a_day_and_durations_are_no_timestamp(tmp_path, kind):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values = pa.array(range(30), pa.int64()).cast(getattr(pa, kind)("us"))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(clicks("took", values)), path)

    guess = guess_schema([path])

    assert guess.schema.timestamp == ""
    assert guess.reasons["took"].startswith("its type is neither")
    assert sum(batch.num_rows for batch in TableFiles([path], guess.schema).batches()) == 30


@pytest.mark.parametrize(
    ("texts", "is_bag"),
    [(["['a', 'b']", "['b']"], False), (['{"a": 1}', "{}"], False), (["[a],b", "b"], True)],
)
def test_lists_as_python_writes_them_are_not_split(tmp_path, texts, is_bag):
    path = tmp_path / "a.csv"
    path.write_text("click;tags\n" + "".join(f"{row % 2};{texts[row % 2]}\n" for row in range(30)))

    guess = guess_schema([path])

    assert list(guess.schema.multi if is_bag else guess.schema.categorical) == ["tags"]


def test_a_group_of_text_in_parts_that_repeat_is_not_split(tmp_path):
    names = [f"{'AB'[row % 2]} {'CDE'[row % 3]}" for row in range(30)]

    guess = guess_schema([write_csv(tmp_path, clicks("user_id", names))])

    assert guess.schema.group == "user_id"
    assert list(guess.schema.categorical) == ["ad", "user_id"]


@pytest.mark.parametrize("name", ["User-ID", "user id", " USER_ID "])
def test_known_names_may_be_written_with_spaces_and_hyphens(tmp_path, name):
    guess = guess_schema([write_csv(tmp_path, clicks(name, list(range(10)) * 3))])

    assert guess.schema.group == name


def test_nan_in_a_column_of_numbers_is_missing(tmp_path):
    fees = [f"{row}.5" for row in range(27)] + ["nan", "NaN", ""]
    guess = guess_schema([write_csv(tmp_path, clicks("fee", fees))])

    assert guess.reasons["fee"].endswith(", 10.0% missing")
