from datetime import datetime

import pytest

from recsys.datasets.tabular.reading.date_forms import are_iso_times
from recsys.datasets.tabular.reading.files import TableFiles
from recsys.datasets.tabular.schemas.schema import Schema
from recsys.errors import DatasetFormatError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SCHEMA = Schema.from_dict({"label": "y", "timestamp": "t", "categorical": {"c": {}}})


def times_of(path, **keys):
    schema = Schema.from_dict(SCHEMA.as_dict() | keys)
    return [
        time for batch in TableFiles([path], schema).batches() for time in batch["t"].to_pylist()
    ]


def write_times(path, times):
    path.write_text("y,c,t\n" + "".join(f"1,x,{time}\n" for time in times))
    return path


@pytest.mark.parametrize("zone", ["UTC", "GMT", "Z"])
def test_text_may_name_the_zone_utc(tmp_path, zone):
    path = write_times(tmp_path / "a.csv", [f"30.03.2025 01:59 {zone}"])

    assert times_of(path, timestamp_format="%d.%m.%Y %H:%M %Z") == [1743299940]


def test_the_name_of_a_zone_may_follow_its_offset(tmp_path):
    path = write_times(tmp_path / "a.csv", ["30.03.2025 01:59 +0100 CET"])

    assert times_of(path, timestamp_format="%d.%m.%Y %H:%M %z %Z") == [1743296340]


@pytest.mark.parametrize(
    ("form", "last", "after"),
    [
        ("%d.%m.%Y", "29.02.2024", "30.02.2024"),
        ("%d.%m.%Y", "30.4.2025", "31.4.2025"),
        ("%Y%m%d", "20250301", "20250229"),
        ("%b %d %Y %I:%M %p", "March 1 2025 1:05 PM", "February 29 2025 1:05 PM"),
        ("%e/%m/%Y", "1/3/2025", "29/2/2025"),
        ("%F %T", "2025-03-01 10:30:29", "2025-02-29 10:30:29"),
        ("%D %R", "06/30/25 10:30", "06/31/25 10:30"),
        ("%d/%b/%y %H:%M:%S %Z", "30/JUN/25 09:05:00 UTC", "31/JUN/25 09:05:00 UTC"),
    ],
)
def test_a_day_that_its_month_does_not_have_is_refused(tmp_path, form, last, after):
    same = form.replace("%e", "%d").replace("%F", "%Y-%m-%d").replace("%D", "%m/%d/%y")
    same = same.replace("%T", "%H:%M:%S").replace("%R", "%H:%M")
    expected = datetime.strptime(last.replace("March", "Mar"), same) - datetime(1970, 1, 1)
    good = write_times(tmp_path / "good.csv", [last])
    bad = write_times(tmp_path / "bad.csv", [last, after])

    assert times_of(good, timestamp_format=form) == [expected.total_seconds()]
    with pytest.raises(DatasetFormatError, match=r"line 3, column 't': .* a day of its month"):
        times_of(bad, timestamp_format=form)


@pytest.mark.parametrize("day", range(1, 5))
@pytest.mark.parametrize("form", ["%d.%m.%Y %H:%M", "%y%m%d%H", "%m/%d/%y %I:%M:%S %p"])
def test_the_first_days_of_a_month_are_read(tmp_path, day, form):
    days = [datetime(2000 + number, month, day, 5) for number in range(3) for month in range(1, 13)]
    texts = [each.strftime(form) for each in days]
    path = write_times(tmp_path / "a.csv", texts)

    epoch = datetime(1970, 1, 1)
    expected = [(datetime.strptime(each, form) - epoch).total_seconds() for each in texts]
    assert times_of(path, timestamp_format=form) == expected


@pytest.mark.parametrize(
    ("form", "good", "short"),
    [
        ("%m%d%Y", 12312025, 1152025),  # of January 15, not of November 5
        ("%d%m%Y", 31122025, 1012025),
        ("%y%m%d%H", 14102100, 9010100),  # not of 1990
        ("%m%d%y", 123124, 10225),
    ],
)
def test_digits_that_have_lost_a_zero_are_refused(tmp_path, form, good, short):
    path, bad = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    pq.write_table(pa.table({"y": [1], "c": ["x"], "t": [good]}), path)
    pq.write_table(pa.table({"y": [1, 0], "c": ["x", "x"], "t": [good, short]}), bad)
    since = datetime.strptime(str(good), form) - datetime(1970, 1, 1)

    assert times_of(path, timestamp_format=form) == [since.total_seconds()]
    with pytest.raises(
        DatasetFormatError, match=f"row 1, .* with all digits .*, got {short}; .* leading zeros"
    ):
        times_of(bad, timestamp_format=form)


def test_hours_and_minutes_that_touch_need_no_leading_zero(tmp_path):
    path = write_times(tmp_path / "a.csv", ["15.1.2025 0930", "15.1.2025 930"])

    assert times_of(path, timestamp_format="%d.%m.%Y %H%M") == [1736933400] * 2


@pytest.mark.parametrize("zone", ["", "Z", "+00:00"])
def test_iso_text_may_have_nanoseconds(tmp_path, zone):
    times = [f"2025-01-15T10:00:00.123456789{zone}", f"2025-01-15T10:00:01{zone}"]

    assert are_iso_times(pa.array(times))
    assert times_of(write_times(tmp_path / "a.csv", times)) == [1736935200, 1736935201]


def test_old_times_of_parquet_may_be_far_away(tmp_path):
    days = [datetime(2025, 1, 1), datetime(9999, 12, 31), datetime(1066, 10, 14)]
    table = pa.table({"y": [0, 1, 1], "c": list("aba"), "t": pa.array(days, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)

    epoch = datetime(1970, 1, 1)
    assert times_of(tmp_path / "a.parquet") == [(day - epoch).total_seconds() for day in days]
