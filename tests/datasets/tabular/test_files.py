"""What is read of files of every kind, as the store that is made of them has it."""

import gzip
import hashlib
from datetime import datetime

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from recsys.datasets import Schema, Store, prepare_table
from recsys.errors import DatasetFormatError
from tests.datasets.tabular.decoded import rows_of

TREE = {
    "label": "click",
    "group": "user",
    "timestamp": "ts",
    "weight": "w",
    "dense": {"price": {}},
    "categorical": {"site": {}, "item": {"values": "integer"}},
    "multi": {"tags": {"split": "|"}, "sizes": {"split": " ", "values": "integer"}},
}
HEADER = "click,user,ts,w,price,site,item,tags,sizes"
LINES = (
    '1,u1,2014-10-21,1,0.5,"a, b",7,x|y,1 2',
    'false,u2,2014-10-21 01:00:00,2.5,,,,"",',
    "0.0,u1,1970-01-01T00:00:01.9,0,nan,ü,-3,||z,3",
)
ROWS = {
    "label": [1, 0, 0],
    "site": ["a, b", None, "ü"],
    "item": [7, None, -3],
    "tags": [["x", "y"], [], ["z"]],
    "sizes": [[1, 2], [], [3]],
    "price": [0.5, 0.0, 0.0],
    "times": [1413849600, 1413853200, 1],
    "weights": [1.0, 2.5, 0.0],
    "groups": [0, 1, 0],
}
SMALL = {"label": "y", "categorical": {"c": {}}}


def write(folder, *lines, name="a.csv"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_parquet(folder, **columns):
    path = folder / "a.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_csv_gives_the_types_of_the_schema(tmp_path, end, line_break):
    (tmp_path / "a.csv").write_bytes((line_break.join([HEADER, *LINES]) + end).encode())

    assert rows_of(tmp_path / "a.csv", TREE, tmp_path) == ROWS


def test_tsv_gz_and_zst_and_a_byte_order_mark_give_the_same(tmp_path):
    text = "\n".join([HEADER, *LINES])
    tabs = text.replace(",", "\t").replace('"a\t b"', '"a, b"').encode("utf-8-sig")
    plain, zipped, zst = (tmp_path / name for name in ("a.tsv", "b.TSV.GZ", "c.Tsv.zst"))
    plain.write_bytes(tabs)
    zipped.write_bytes(gzip.compress(tabs[:50]) + gzip.compress(tabs[50:]))
    with pa.CompressedOutputStream(zst, "zstd") as out:
        out.write(tabs)

    for path in (plain, zipped, zst):
        assert rows_of(path, TREE, tmp_path) == ROWS


def test_parquet_of_the_same_values_gives_the_same(tmp_path):
    path = write_parquet(
        tmp_path,
        ignored=[1, 2, 3],
        click=pa.array([True, False, False]),
        user=pa.array(["u1", "u2", "u1"]).dictionary_encode(),
        ts=pa.array([1413849600000, 1413853200000, 1999], pa.timestamp("ms")),
        w=pa.array([1, 2.5, 0], pa.float32()),
        price=pa.array([0.5, None, float("nan")], pa.float32()),
        site=pa.array(["a, b", "", "ü"], pa.large_string()),
        item=pa.array([7, None, -3], pa.int16()),
        tags=pa.array([["x", "y"], None, ["", None, "z"]]),
        sizes=pa.array([[1, 2], None, [3]], pa.large_list(pa.int32())),
    )

    assert rows_of(path, TREE, tmp_path) == ROWS


INTEGERS = {"c": {"values": "integer"}}
WHOLE = pa.array([7, None], pa.decimal128(38, 0))
ZONES = [
    pa.array([1_700_000_000 * ticks + ticks // 2, -ticks], pa.timestamp(unit, zone))
    for unit, ticks in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9))
    for zone in ("UTC", "Europe/Amsterdam", "+05:30")
]


@pytest.mark.parametrize(
    ("keys", "columns", "expected"),
    [
        ({"categorical": INTEGERS}, {"c": WHOLE}, {"c": [7, None]}),
        ({"categorical": INTEGERS}, {"c": [True, None]}, {"c": [1, None]}),
        (
            {"categorical": {}, "multi": INTEGERS},
            {"c": pa.array([[1], [2]], pa.list_(WHOLE.type))},
            {"c": [[1], [2]]},
        ),
        (
            {"categorical": {}, "multi": INTEGERS},
            {"c": pa.array([[1.0, 2.0], None], pa.list_(pa.float64()))},
            {"c": [[1, 2], []]},
        ),
        (
            {"categorical": {}, "multi": {"c": {}}},
            {"c": pa.array([["a"], ["b", "c"]], pa.list_view(pa.string()))},
            {"c": [["a"], ["b", "c"]]},
        ),
        (
            {"categorical": {}, "multi": {"c": {}}},
            {"c": pa.array([["a", "b"]] * 2, pa.list_(pa.string(), 2))},
            {"c": [["a", "b"]] * 2},
        ),
        *[({"timestamp": "t"}, {"t": each}, {"times": [1_700_000_000, -1]}) for each in ZONES],
        ({"group": "u"}, {"u": pa.array([2**63, 5], pa.uint64())}, {"groups": [0, 1]}),
        (
            {"weight": "w", "dense": {"d": {}}},
            {"w": [2**30 + 1, 0], "d": [2**60 + 1, 0]},
            {"weights": [float(2**30), 0], "d": [float(2**60), 0]},
        ),
        (
            {
                "split": {"by": "column", "column": "c", "train": [True], "test": [False]},
                "categorical": {"d": {"values": "integer"}},
            },
            {"c": [True, True], "d": [3, 4]},
            {"d": [3, 4]},
        ),
    ],
)
def test_types_of_parquet_are_read_by_the_schema(tmp_path, keys, columns, expected):
    columns = {"y": [0, 1], "c": ["x", "x"]} | columns

    found = rows_of(write_parquet(tmp_path, **columns), SMALL | keys, tmp_path)

    assert {name: found[name] for name in expected} == expected


def test_files_are_read_in_order_and_hashed(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.datasets.tabular.read._CHUNK_BYTES", 64)
    folder = tmp_path / "files"
    first = write(folder, "y,c", "1,b", name="2.csv")
    second = write(folder, "c,y", "a,0", name="1.csv")
    write_parquet(folder, c=["p"], y=[1])

    assert rows_of([first, second], SMALL, tmp_path)["c"] == ["b", "a"]
    assert rows_of(folder, SMALL, tmp_path)["c"] == ["a", "b", "p"]
    prepare_table([folder], tmp_path / "store", Schema.from_dict(SMALL))
    for source in Store(tmp_path / "store").meta["sources"]:
        content = (folder / source["name"]).read_bytes()
        assert source["sha256"] == hashlib.sha256(content).hexdigest()
        assert (source["num_bytes"], source["num_rows"]) == (len(content), 1)


def test_text_that_means_missing_is_named_in_the_schema(tmp_path):
    path = write(tmp_path, "y,c,d,n,m", "1,NA,NA,1|NA|3,NA|a|NA", "0,x,2,NA|NA,b||c")
    bags = {"n": {"split": "|", "values": "integer"}, "m": {"split": "|"}}
    tree = SMALL | {"dense": {"d": {}}, "multi": bags, "missing_values": ["NA", "?"]}

    found = rows_of(path, tree, tmp_path)

    assert (found["c"], found["d"]) == ([None, "x"], [0.0, 2.0])
    assert (found["n"], found["m"]) == ([[1, 3], []], [["a"], ["b", "c"]])
    assert rows_of(path, SMALL, tmp_path)["c"] == ["NA", "x"]


def test_a_folder_leaves_hidden_files_and_folders_out(tmp_path):
    folder = tmp_path / ".data"  # a folder that is named is read, hidden or not
    hidden = (".b.csv", "_b.csv", ".ipynb_checkpoints/b.csv", "_temporary/0/b.csv")
    for name in (*hidden, "days/.old/b.csv"):
        write(folder, "y,c", "1,x", name=name)
    write(folder, "y,c", "1,seen", name="days/a.csv")

    assert rows_of(folder, SMALL, tmp_path)["c"] == ["seen"]


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_file_without_a_line_of_names_is_read_by_the_names_of_the_schema(tmp_path, end):
    path, names = tmp_path / "a.csv", {"names": ["y", "c", "d"]}
    path.write_text("\n1,x,5\n\n0,z,7" + end)
    assert rows_of(path, SMALL | names, tmp_path) == {"label": [1, 0], "c": ["x", "z"]}

    path.write_text("1,x,5\n\n0,z,?" + end)
    with pytest.raises(DatasetFormatError, match="line 3, column 'd'"):
        rows_of(path, SMALL | names | {"dense": {"d": {}}}, tmp_path)


def test_patterns_and_urls_name_files(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for name in (f"day={day}/{part}.csv" for day in "12" for part in "ab"):
        path = write(tmp_path, "y,c", f"1,{name[4]}{name[6]}", name=name)
        memory.pipe(f"/tables/{name}", path.read_bytes())
    memory.pipe("/tables/a.parquet", write_parquet(tmp_path, y=[0], c=["p"]).read_bytes())
    for place in (str(tmp_path), "memory://tables"):
        for pattern, values in (
            ("day=*/a.csv", ["1a", "2a"]),
            ("day=2", ["2a", "2b"]),
            ("a.parquet", ["p"]),
            ("day=1/a.csv", ["1a"]),
        ):
            assert rows_of(f"{place}/{pattern}", SMALL, tmp_path)["c"] == values
    with pytest.raises(FileNotFoundError, match="no"):
        rows_of(tmp_path / "no*.csv", SMALL, tmp_path)


DAYS = [
    datetime(2000 + year, month, day, 5)
    for year in (0, 1)
    for month in range(1, 13)
    for day in range(1, 5)
]
SECONDS = [int((day - datetime(1970, 1, 1)).total_seconds()) for day in DAYS]


@pytest.mark.parametrize(
    ("form", "texts", "seconds"),
    [
        *[
            (form, [day.strftime(form) for day in DAYS], SECONDS)
            for form in ("%d.%m.%Y %H:%M", "%y%m%d%H", "%m/%d/%y %I:%M:%S %p")
        ],
        *[
            (f"%d.%m.%Y %H:%M {zone}", [f"30.03.2025 01:59 {zone}"], [1743299940])
            for zone in ("UTC", "GMT", "Z")
        ],
        ("%d.%m.%Y %H:%M %z %Z", ["30.03.2025 01:59 +0100 CET"], [1743296340]),
        *[
            (
                "",
                [f"2025-01-15T10:00:00.123456789{zone}", f"2025-01-15T10:00:01{zone}"],
                [1736935200, 1736935201],
            )
            for zone in ("", "Z", "+00:00")
        ],
        ("ms", ["1414540800999", "-1"], [1414540800, -1]),
    ],
)
def test_times_are_read_by_their_form(tmp_path, form, texts, seconds):
    path = write(tmp_path, "y,c,t", *(f"{place % 2},x,{text}" for place, text in enumerate(texts)))
    keys = {"timestamp": "t"} | ({"timestamp_format": form} if form else {})

    assert rows_of(path, SMALL | keys, tmp_path)["times"] == seconds


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
    tree = SMALL | {"timestamp": "t", "timestamp_format": form}
    since = datetime.strptime(str(good), form) - datetime(1970, 1, 1)

    found = rows_of(write_parquet(tmp_path, y=[1], c=["x"], t=[good]), tree, tmp_path)
    assert found["times"] == [since.total_seconds()]
    bad = write_parquet(tmp_path, y=[1, 0], c=["x", "x"], t=[good, short])
    with pytest.raises(DatasetFormatError, match=f"row 1, column 't'.*{short}"):
        rows_of(bad, tree, tmp_path)


def test_old_times_of_parquet_may_be_far_away(tmp_path):
    days = [datetime(2025, 1, 1), datetime(9999, 12, 31), datetime(1066, 10, 14)]
    table = pa.table({"y": [0, 1, 1], "c": list("aba"), "t": pa.array(days, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)

    found = rows_of(tmp_path / "a.parquet", SMALL | {"timestamp": "t"}, tmp_path)
    assert found["times"] == [(day - datetime(1970, 1, 1)).total_seconds() for day in days]
