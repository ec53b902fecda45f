"""Guesses about text: times in many forms, and numbers of which some cannot be read."""

import warnings

import numpy as np
import pytest

from recsys.datasets.tabular.guessing.guess import guess_schema
from recsys.datasets.tabular.prepare import prepare_table
from recsys.datasets.tabular.reading.files import TableFiles

pytest.importorskip("pyarrow")

LABELS = [0, 1, 1] * 10
ADS = ["a", "b", "b"] * 10


def write_csv(folder, columns, name="a.csv"):
    lines = [columns, *zip(*columns.values(), strict=True)]
    path = folder / name
    path.write_text("".join(",".join(f'"{each}"' for each in line) + "\n" for line in lines))
    return path


def clicks(name, values):
    return {"click": LABELS, "ad": ADS, name: values}


@pytest.mark.parametrize(
    ("form", "last"),
    [
        ("%m/%d/%Y %H:%M", "01/15/2025 10:00"),
        ("%d.%m.%Y %H:%M", "15.01.2025 10:00"),
        ("%d/%m/%Y", "15/01/2025"),
        ("%d/%b/%Y:%H:%M:%S %z", "15/Jan/2025:12:00:00 +0200"),
        ("%Y-%m-%d %I:%M:%S %p", "2025-01-15 10:00:00 AM"),
        (" %Y-%m-%d %H:%M:%S", " 2025-01-15 10:00:00"),
        ("%Y/%m/%d %H:%M", "2025/01/15 10:00"),
        ("%d %b %Y %H:%M", "15 Jan 2025 10:00"),
    ],
)
def test_text_that_is_times_of_one_form_becomes_the_timestamp(tmp_path, form, last):
    # The first day may be read in either order; the last one may not.
    first = last.replace("15", "03")
    path = write_csv(tmp_path, clicks("seen", [first] * 25 + [last] * 5))

    guess = guess_schema([path])

    assert (guess.schema.timestamp, guess.schema.timestamp_format) == ("seen", form)
    assert guess.schema.as_dict()["split"]["by"] == "timestamp"
    assert not guess.schema.multi
    assert not guess.warnings
    prepare_table([path], tmp_path / "store", guess.schema)
    times = np.fromfile(tmp_path / "store" / "times.bin", "<i8")
    assert times.max() - times.min() == 12 * 24 * 3600
    assert times.max() == 1736899200 + (10 * 3600 if ":" in form else 0)  # 2025-01-15


@pytest.mark.parametrize(
    ("values", "doubt"),
    [
        (["03.04.2025 10:00"], "may be first: %m.%d.%Y %H:%M or %d.%m.%Y %H:%M; to split"),
        (["01/15/2025", "15/01/2025"], "looks like times, but not all of one known form; to split"),
        (["01/15/1970", "01/16/1970"], "looks like times, but not all of one known form; to split"),
        (["10:00", "11:30"], "looks like times, but not all of one known form; to split"),
    ],
)
def test_text_that_may_be_times_is_left_to_the_user(tmp_path, values, doubt):
    path = write_csv(tmp_path, clicks("seen", (values * 30)[:30]))

    guess = guess_schema([path])

    assert not guess.schema.timestamp
    assert "seen" not in guess.schema.columns
    assert doubt in guess.reasons["seen"]
    assert len(guess.warnings) == 1
    assert "column 'seen'" in guess.warnings[0]


def test_times_in_doubt_are_no_warning_beside_a_timestamp(tmp_path):
    path = write_csv(tmp_path, {**clicks("seen", ["03.04.2025"] * 30), "time": ["2025-01-15"] * 30})

    guess = guess_schema([path])

    assert guess.schema.timestamp == "time"
    assert not guess.warnings


@pytest.mark.parametrize("values", [["10.0.0.1", "10.0.0.2"], ["news|film", "film"], ["v1.2.3"]])
def test_text_that_is_no_times_is_not_taken_for_them(tmp_path, values):
    guess = guess_schema([write_csv(tmp_path, clicks("seen", (values * 30)[:30]))])

    assert "times" not in guess.to_toml().replace("times as", "")


def test_of_several_columns_of_times_the_finest_is_taken_and_the_others_are_named(tmp_path):
    days = [f"2024-01-{1 + row % 5:02}" for row in range(30)]
    times = [f"2025-01-15 10:{row:02}:00" for row in range(30)]
    columns = clicks("signed_up", days) | {"seen": times, "born": days}

    guess = guess_schema([write_csv(tmp_path, columns)])

    assert guess.schema.timestamp == "seen"
    others = "times; other columns of times: 'signed_up', 'born'"
    assert guess.role_reasons["timestamp"] == others


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


def test_guessing_forms_of_times_warns_of_nothing(tmp_path):
    path = write_csv(tmp_path, clicks("seen", ["15.01.2025"] * 30))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert guess_schema([path]).schema.timestamp == "seen"
