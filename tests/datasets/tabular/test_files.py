import csv
import gzip
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.datasets.tabular.read import TableFiles
from recsys.datasets.tabular.schema import Schema
from recsys.errors import DatasetFormatError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SCHEMA = Schema.from_dict(
    {
        "label": "click",
        "group": "user",
        "timestamp": "ts",
        "weight": "w",
        "dense": {"price": {}},
        "categorical": {"site": {}, "item": {"values": "integer"}},
        "multi": {"tags": {"split": "|"}, "sizes": {"split": " ", "values": "integer"}},
    }
)
HEADER = "click,user,ts,w,price,site,item,tags,sizes"
LINES = (
    '1,u1,2014-10-21,1,0.5,"a, b",7,x|y,1 2',
    'false,u2,2014-10-21 01:00:00,2.5,,,,"",',
    "0.0,u1,1970-01-01T00:00:01.9,0,nan,ü,-3,||z,3",
)
ROWS = [
    {
        "price": 0.5,
        "site": "a, b",
        "item": 7,
        "tags": ["x", "y"],
        "sizes": [1, 2],
        "click": 1,
        "user": "u1",
        "ts": 1413849600,
        "w": 1.0,
    },
    {
        "price": None,
        "site": None,
        "item": None,
        "tags": None,
        "sizes": None,
        "click": 0,
        "user": "u2",
        "ts": 1413853200,
        "w": 2.5,
    },
    {
        "price": None,
        "site": "ü",
        "item": -3,
        "tags": ["z"],
        "sizes": [3],
        "click": 0,
        "user": "u1",
        "ts": 1,
        "w": 0.0,
    },
]


def rows_of(path, schema=SCHEMA, **options):
    files = TableFiles([path], schema, **options)
    names = [*schema.dense, *schema.value_columns]
    names = {name: name for name in names} | schema.roles
    rows = [row for batch in files.batches() for row in batch.to_pylist()]
    return [{names[meaning]: value for meaning, value in row.items()} for row in rows]


def write(folder, *lines, name="a.csv"):
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def simple(**keys):
    return Schema.from_dict({"label": "y", "categorical": {"c": {}}, **keys})


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_csv_gives_the_types_of_the_schema(tmp_path, end, line_break):
    path = tmp_path / "a.csv"
    path.write_bytes((line_break.join([HEADER, *LINES]) + end).encode())
    assert rows_of(path) == ROWS


def test_tsv_gz_and_zst_and_a_byte_order_mark_give_the_same(tmp_path):
    text = "\n".join([HEADER, *LINES])
    tabs = text.replace(",", "\t").replace('"a\t b"', '"a, b"').encode("utf-8-sig")
    plain = tmp_path / "a.tsv"
    plain.write_bytes(tabs)
    zipped = tmp_path / "b.tsv.gz"
    zipped.write_bytes(gzip.compress(tabs[:50]) + gzip.compress(tabs[50:]))
    zst = tmp_path / "c.tsv.zst"
    with pa.CompressedOutputStream(zst, "zstd") as out:
        out.write(tabs)
    for path in (plain, zipped, zst):
        assert rows_of(path) == ROWS


def test_parquet_of_the_same_values_gives_the_same(tmp_path):
    table = pa.table(
        {
            "ignored": [1, 2, 3],
            "click": pa.array([True, False, False]),
            "user": pa.array(["u1", "u2", "u1"]).dictionary_encode(),
            "ts": pa.array([1413849600000, 1413853200000, 1999], pa.timestamp("ms")),
            "w": pa.array([1, 2.5, 0], pa.float32()),
            "price": pa.array([0.5, None, float("nan")], pa.float32()),
            "site": pa.array(["a, b", "", "ü"], pa.large_string()),
            "item": pa.array([7, None, -3], pa.int16()),
            "tags": pa.array([["x", "y"], None, ["", None, "z"]]),
            "sizes": pa.array([[1, 2], None, [3]], pa.large_list(pa.int32())),
        }
    )
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=2)
    assert rows_of(path) == ROWS


def test_a_column_that_all_files_lack_may_be_optional(tmp_path):
    path = write(tmp_path, "c", "x")
    files = TableFiles([path], simple(), optional=["y"])
    assert files.columns == ("c",)
    assert [batch.to_pylist() for batch in files.batches()] == [[{"c": "x"}]]


@pytest.mark.parametrize("keys", [{}, {"positive": ">= 1"}])
@pytest.mark.parametrize(("lines", "labels"), [(["1,x", ",x", "0,x"], [1, -1, 0]), ([",x"], [-1])])
def test_labels_of_an_optional_column_may_be_missing(tmp_path, keys, lines, labels):
    path = write(tmp_path, "y,c", *lines)
    found = rows_of(path, simple(**keys), optional=["y"])
    assert [row["y"] for row in found] == labels
    with pytest.raises(DatasetFormatError, match="column 'y'"):
        rows_of(path, simple(**keys))


def test_files_may_be_read_without_their_hashes(tmp_path, monkeypatch):
    monkeypatch.setattr("recsys.datasets.tabular.read.hashlib", None)
    write(tmp_path, "y,c", "1,b", name="1.csv")
    pq.write_table(pa.table({"c": ["p"], "y": [1]}), tmp_path / "2.parquet")
    files = TableFiles([tmp_path], simple(), with_hash=False)
    assert [batch.column("c").to_pylist() for batch in files.batches()] == [["b"], ["p"]]
    for source in files.sources:
        size = (tmp_path / source["name"]).stat().st_size
        assert (source["sha256"], source["num_bytes"]) == ("", size)


def test_files_are_read_in_order_and_hashed(tmp_path):
    first = write(tmp_path, "y,c", "1,b", name="2.csv")
    second = write(tmp_path, "c,y", "a,0", name="1.csv")
    pq.write_table(pa.table({"c": ["p"], "y": [1]}), tmp_path / "3.parquet")
    for paths, expected in (([first, second], "ba"), ([tmp_path], "abp")):
        files = TableFiles(paths, simple())
        batches = list(files.batches())
        assert "".join(row["c"] for batch in batches for row in batch.to_pylist()) == expected
        for source in files.sources:
            content = (tmp_path / source["name"]).read_bytes()
            assert source["sha256"] == hashlib.sha256(content).hexdigest()
            assert (source["num_bytes"], source["num_rows"]) == (len(content), 1)


def test_a_rule_makes_labels_of_numbers(tmp_path):
    path = write(tmp_path, "y,c", "4,a", "3.5,b")
    assert [row["y"] for row in rows_of(path, simple(positive=">= 4"))] == [1, 0]


def test_text_that_means_missing_is_named_in_the_schema(tmp_path):
    path = write(tmp_path, "y,c,d", "1,NA,NA", "1,x,2")
    found = rows_of(path, simple(dense={"d": {}}, missing_values=["NA"]))
    assert [(row["c"], row["d"]) for row in found] == [(None, None), ("x", 2.0)]
    assert [row["c"] for row in rows_of(path, simple())] == ["NA", "x"]


def test_text_that_means_missing_is_missing_in_a_bag(tmp_path):
    path = write(tmp_path, "y,c,n", "1,NA|a|NA,NA", "0,b||c,1|NA|3", "1,NA|NA,2")
    bags = {"c": {"split": "|"}, "n": {"split": "|", "values": "integer"}}
    found = rows_of(path, simple(categorical={}, multi=bags, missing_values=["NA", "?"]))
    assert [row["c"] for row in found] == [["a"], ["b", "c"], []]
    assert [row["n"] for row in found] == [None, [1, 3], [2]]
    found = rows_of(path, simple(categorical={}, multi={"c": {"split": "|"}}))
    assert found[0]["c"] == ["NA", "a", "NA"]


def test_a_column_of_booleans_may_split_and_be_integers(tmp_path):
    split = {"by": "column", "column": "is_train", "train": [True], "test": [False]}
    schema = simple(split=split, categorical={"c": {"values": "integer"}})
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"y": [1, 0], "c": [True, None], "is_train": [True, False]}), path)
    assert schema.split.train == ("true",)
    rows = [(row["is_train"], row["c"]) for row in rows_of(path, schema)]
    assert rows == [(0, 1), (1, None)]


def test_integers_become_the_nearest_floats_in_csv_and_parquet(tmp_path):
    path = write(tmp_path, "y,w,d", f"{2**60 + 1},{2**30 + 1},{2**60 + 1}")
    pq.write_table(
        pa.table({"y": [2**60 + 1], "w": [2**30 + 1], "d": [2**60 + 1]}), tmp_path / "b.parquet"
    )
    schema = Schema.from_dict({"label": "y", "positive": "> 4", "weight": "w", "dense": {"d": {}}})
    expected = [{"d": float(2**60), "y": 1, "w": float(2**30)}]
    assert rows_of(path, schema) == rows_of(tmp_path / "b.parquet", schema) == expected


TEXT = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["", '"', '""', "a\nb", "\n", "\r\n", ",", "NA", " x ", "|", "a|b", "é", "\ufeff", "\x00", "0"]
)
WHOLE = st.integers(-(2**63), 2**63 - 1)
RECORDS = st.fixed_dictionaries(
    {
        "y": st.sampled_from([0, 1]),
        "text": st.none() | TEXT,
        "number": st.none() | WHOLE,
        "dense": st.none() | st.floats(allow_nan=False, allow_infinity=False, width=32),
        "bag": st.none() | st.lists(TEXT.filter(lambda text: "|" not in text), max_size=3),
        "last": st.none() | TEXT,
    }
)


RECORDS_NAMES = ("y", "text", "number", "dense", "bag", "last")


@settings(deadline=None, max_examples=min(100, 2 * settings().max_examples))
@given(records=st.lists(RECORDS, min_size=1, max_size=6), delimiter=st.sampled_from(",;\t"))
def test_csv_and_parquet_of_the_same_rows_are_equal(tmp_path_factory, records, delimiter):
    schema = Schema.from_dict(
        {
            "label": "y",
            "delimiter": delimiter,
            "dense": {"dense": {}},
            "categorical": {"text": {}, "number": {"values": "integer"}, "last": {}},
            "multi": {"bag": {"split": "|"}},
        }
    )
    folder = tmp_path_factory.mktemp("table")
    with (folder / "a.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, RECORDS_NAMES, delimiter=delimiter)
        writer.writeheader()
        for record in records:
            bag = record["bag"]
            writer.writerow({**record, "bag": None if bag is None else "|".join(bag)})
    types = [pa.int8(), pa.string(), pa.int64(), pa.float64(), pa.list_(pa.string()), pa.string()]
    table = pa.Table.from_pylist(records, pa.schema(list(zip(RECORDS_NAMES, types, strict=True))))
    pq.write_table(table, folder / "b.parquet")

    expected = [
        {
            "dense": record["dense"],
            "text": record["text"] or None,
            "number": record["number"],
            "last": record["last"] or None,
            "bag": [value for value in record["bag"] or () if value],
            "y": record["y"],
        }
        for record in records
    ]
    for name in ("a.csv", "b.parquet"):
        found = rows_of(folder / name, schema)
        assert [{**row, "bag": row["bag"] or []} for row in found] == expected


def test_parquet_text_in_dictionaries_and_plain_is_the_same_text(tmp_path):
    texts = [None if row % 7 == 0 else f"value {row % 11}" for row in range(3000)]
    names = [f"name {row}" for row in range(3000)]
    path = tmp_path / "a.parquet"
    table = pa.table({"y": [row % 2 for row in range(3000)], "c": texts, "d": names})
    pq.write_table(table, path, row_group_size=1000)
    found = rows_of(path, simple(categorical={"c": {}, "d": {}}))
    assert [(row["c"], row["d"]) for row in found] == list(zip(texts, names, strict=True))


@pytest.mark.parametrize("name", ["A.CSV", "A.TSV", "A.TSV.GZ", "A.Csv.Zst", "A.PARQUET", "A.PQ"])
def test_capital_suffixes_mean_what_small_ones_do(tmp_path, name):
    path, small = tmp_path / name, name.lower()
    if small.endswith((".parquet", ".pq")):
        pq.write_table(pa.table({"y": [1], "c": ["x"]}), path)
    else:
        text = b"y\tc\n1\tx\n" if ".tsv" in small else b"y,c\n1,x\n"
        if small.endswith(".gz"):
            text = gzip.compress(text)
        path.write_bytes(text)
        if small.endswith(".zst"):
            with pa.CompressedOutputStream(path, "zstd") as out:
                out.write(text)
    for named in (path, tmp_path):
        assert rows_of(named, simple()) == [{"c": "x", "y": 1}]


@pytest.mark.parametrize(
    "name",
    [".b.csv", "_b.csv", ".ipynb_checkpoints/b.csv", "_temporary/0/b.csv", "days/.old/b.csv"],
)
def test_a_folder_leaves_hidden_files_and_folders_out(tmp_path, name):
    folder = tmp_path / ".data"  # a folder that is named is read, hidden or not
    (folder / name).parent.mkdir(parents=True)
    write(folder, "y,c", "1,x", name=name)
    (folder / "days").mkdir(exist_ok=True)
    write(folder, "y,c", "1,seen", name="days/a.csv")
    assert rows_of(folder, simple()) == [{"c": "seen", "y": 1}]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", ["UTC", "Europe/Amsterdam", "+05:30"])
def test_times_of_parquet_with_a_zone_are_seconds_of_utc(tmp_path, unit, zone):
    ticks = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    times = pa.array([1_700_000_000 * ticks + ticks // 2, -ticks], pa.timestamp(unit, zone))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"y": [0, 1], "c": ["x", "x"], "t": times}), path)
    found = rows_of(path, simple(timestamp="t"))
    assert [row["t"] for row in found] == [1_700_000_000, -1]


def test_a_large_row_group_is_read_in_pieces(tmp_path, monkeypatch):
    num_rows = 1 << 20
    values = np.random.default_rng(0).random(num_rows)
    table = pa.table({"y": np.ones(num_rows, np.int8), "d": values})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=num_rows, use_dictionary=False, compression="none")
    monkeypatch.setattr("recsys.datasets.tabular.read._LARGE_GROUP_BYTES", 1 << 20)
    del table
    before, most, found = pa.total_allocated_bytes(), 0, []
    for batch in TableFiles([path], Schema.from_dict({"label": "y", "dense": {"d": {}}})).batches():
        most = max(most, pa.total_allocated_bytes() - before)
        found.append(batch.column("d").to_numpy().copy())
    assert (np.concatenate(found) == values).all()
    assert most < values.nbytes / 2


def test_lists_of_all_kinds_are_lists(tmp_path):
    columns = {
        "views": pa.array([["a"], None, ["b", "c"]], pa.list_view(pa.string())),
        "fixed": pa.array([["a", "b"]] * 3, pa.list_(pa.string(), 2)),
        "whole": pa.array([[1.0, 2.0], None, [3.0]], pa.list_(pa.float64())),
    }
    pq.write_table(pa.table({"y": [1, 0, 1], **columns}), tmp_path / "a.parquet")
    keys = {"views": {}, "fixed": {}, "whole": {"values": "integer"}}
    found = rows_of(tmp_path / "a.parquet", simple(categorical={}, multi=keys))
    expected = [array.to_pylist() for array in columns.values()]
    assert [[row[name] for row in found] for name in columns] == expected


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_file_without_a_line_of_names_is_read_by_the_names_of_the_schema(tmp_path, end):
    path = tmp_path / "a.csv"
    path.write_text("\n1,x,5\n\n0,z,7" + end)
    found = rows_of(path, simple(names=["y", "c", "d"]))
    assert found == [{"c": "x", "y": 1}, {"c": "z", "y": 0}]
    path.write_text("1,x,5\n\n0,z,?" + end)
    with pytest.raises(DatasetFormatError, match="line 3, column 'd'"):
        rows_of(path, simple(names=["y", "c", "d"], dense={"d": {}}))


def test_patterns_and_urls_name_files(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    texts = {f"day={day}/{part}.csv": f"y,c\n1,{day}{part}\n" for day in "12" for part in "ab"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        memory.pipe(f"/tables/{name}", text.encode())
    pq.write_table(pa.table({"y": [0], "c": ["p"]}), tmp_path / "c.parquet")
    memory.pipe("/tables/c.parquet", (tmp_path / "c.parquet").read_bytes())
    for place in (str(tmp_path), "memory://tables"):
        for pattern, values in (
            ("day=*/a.csv", ["1a", "2a"]),
            ("day=2", ["2a", "2b"]),
            ("c.parquet", ["p"]),
            ("day=1/a.csv", ["1a"]),
        ):
            found = rows_of(f"{place}/{pattern}", simple())
            assert [row["c"] for row in found] == values
    with pytest.raises(FileNotFoundError, match="no"):
        rows_of(tmp_path / "no*.csv", simple())


def test_integers_beyond_63_bits_may_be_groups(tmp_path):
    users = pa.array([2**63, 5], pa.uint64())
    pq.write_table(pa.table({"y": [0, 1], "c": ["a", "b"], "u": users}), tmp_path / "a.parquet")
    found = rows_of(tmp_path / "a.parquet", simple(group="u"))
    assert [row["u"] for row in found] == [str(2**63), "5"]


def test_decimals_of_whole_numbers_are_integers(tmp_path):
    whole = pa.array([7, None], pa.decimal128(38, 0))
    columns = {"y": [0, 1], "c": whole, "n": pa.array([[1], [2]], pa.list_(whole.type))}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    integers = {"values": "integer"}
    found = rows_of(
        tmp_path / "a.parquet", simple(categorical={"c": integers}, multi={"n": integers})
    )
    assert [(row["c"], row["n"]) for row in found] == [(7, [1]), (None, [2])]
