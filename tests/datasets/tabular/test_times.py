from datetime import datetime

import pytest

from recsys.datasets.tabular.read import TableFiles
from recsys.datasets.tabular.schema import Schema
from recsys.errors import DatasetFormatError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SCHEMA = Schema.from_dict({"label": "y", "timestamp": "t", "categorical": {"c": {}}})


def times_of(path, **keys):
    schema = Schema.from_dict(SCHEMA.as_dict() | keys)
    return [
        time
        for batch in TableFiles([path], schema).batches()
        for time in batch["/time"].to_pylist()
    ]


def write_times(path, times):
    path.write_text("y,c,t\n" + "".join(f"1,x,{time}\n" for time in times))
    return path


@pytest.mark.parametrize("zone", ["UTC", "GMT", "Z"])
def test_text_may_name_the_zone_utc(tmp_path, zone):
    path = write_times(tmp_path / "a.csv", [f"30.03.2025 01:59 {zone}"])

    assert times_of(path, timestamp_format=f"%d.%m.%Y %H:%M {zone}") == [1743299940]


def test_the_name_of_a_zone_may_follow_its_offset(tmp_path):
    path = write_times(tmp_path / "a.csv", ["30.03.2025 01:59 +0100 CET"])

    assert times_of(path, timestamp_format="%d.%m.%Y %H:%M %z %Z") == [1743296340]


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
    with pytest.raises(DatasetFormatError, match=f"row 1, column 't'.*{short}"):
        times_of(bad, timestamp_format=form)


@pytest.mark.parametrize("zone", ["", "Z", "+00:00"])
def test_iso_text_may_have_nanoseconds(tmp_path, zone):
    times = [f"2025-01-15T10:00:00.123456789{zone}", f"2025-01-15T10:00:01{zone}"]

    assert times_of(write_times(tmp_path / "a.csv", times)) == [1736935200, 1736935201]


def test_old_times_of_parquet_may_be_far_away(tmp_path):
    days = [datetime(2025, 1, 1), datetime(9999, 12, 31), datetime(1066, 10, 14)]
    table = pa.table({"y": [0, 1, 1], "c": list("aba"), "t": pa.array(days, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)

    epoch = datetime(1970, 1, 1)
    assert times_of(tmp_path / "a.parquet") == [(day - epoch).total_seconds() for day in days]
