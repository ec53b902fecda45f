from datetime import datetime

import pytest

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


@pytest.mark.parametrize("zone", ["EST", "CET", "MEZ"])
def test_text_that_names_another_zone_is_refused(tmp_path, zone):
    path = write_times(tmp_path / "a.csv", ["30.03.2025 01:59 UTC", f"30.03.2025 01:59 {zone}"])

    with pytest.raises(DatasetFormatError, match=f"line 3, column 't': .* UTC or GMT.*{zone}'; "):
        times_of(path, timestamp_format="%d.%m.%Y %H:%M %Z")


def test_the_name_of_a_zone_may_follow_its_offset(tmp_path):
    path = write_times(tmp_path / "a.csv", ["30.03.2025 01:59 +0100 CET"])

    assert times_of(path, timestamp_format="%d.%m.%Y %H:%M %z %Z") == [1743296340]


def test_old_times_of_parquet_may_be_far_away(tmp_path):
    days = [datetime(2025, 1, 1), datetime(9999, 12, 31), datetime(1066, 10, 14)]
    table = pa.table({"y": [0, 1, 1], "c": list("aba"), "t": pa.array(days, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)

    epoch = datetime(1970, 1, 1)
    assert times_of(tmp_path / "a.parquet") == [(day - epoch).total_seconds() for day in days]


def test_a_list_is_no_label(tmp_path):
    pq.write_table(
        pa.table({"y": [[0], [1]], "c": list("ab"), "t": [1, 2]}), tmp_path / "a.parquet"
    )

    with pytest.raises(DatasetFormatError, match=r"'y': a label must be 0, 1, .*got list<.*; take"):
        times_of(tmp_path / "a.parquet")
