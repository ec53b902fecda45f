"""Tables that cannot be read: what is in a file, and the place or name that the error gives."""

import functools
import gzip

import pytest

from recsys.datasets.tabular.encode import DenseRule, Moments
from recsys.datasets.tabular.read import TableFiles
from recsys.datasets.tabular.schema import Schema, find_schema
from recsys.errors import ConfigError, DatasetFormatError, MissingDependency

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ANY = {"categorical": {"c": {}}}


def read(path, keys=ANY, **options):
    files = TableFiles([path], Schema.from_dict({"label": "y", **keys}), **options)
    return [batch.to_pylist() for batch in files.batches()]


def read_bytes(folder, data, keys=ANY, name="a.csv"):
    (folder / name).write_bytes(data)
    read(folder / name, keys)


def lines(*lines, keys=ANY, header="y,c"):
    """Reads a text file of these lines."""
    data = "\n".join([header, *lines, ""]).encode()
    return functools.partial(read_bytes, data=data, keys=keys)


def parquet(folder, keys=ANY, **columns):
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=1)
    read(folder / "a.parquet", keys)


def column(kind, keys, *values):
    """Reads a column of these values, in a file of a kind."""
    if kind == "csv":
        return lines(*(f"1,x,{value}" for value in values), keys=keys, header="y,c,d")
    columns = {"y": [1] * len(values), "c": ["x"] * len(values), "d": list(values)}
    return functools.partial(parquet, keys=keys, **columns)


def damaged_names(folder):
    file = folder / "a.parquet"
    pq.write_table(pa.table({"y": [1], "cafe": ["x"]}), file, store_schema=False)
    read_bytes(folder, file.read_bytes().replace(b"cafe", b"caf\xff"), name="a.parquet")


def schema_of(folder, data):
    (folder / "a.toml").write_bytes(data)
    Schema.from_toml(folder / "a.toml")


def named_twice(folder):
    (folder / "a.csv").write_text("y,c\n1,x\n")
    TableFiles([folder / "a.csv"] * 2, Schema.from_dict({"label": "y", **ANY}))


def no_mean():
    DenseRule.of("x", "none", "mean", Moments())


WHOLE = gzip.compress(b"y,c\n" + b"".join(b"1,%d\n" % (i * i) for i in range(5000)))
DENSE = {"dense": {"d": {}}}
INTEGER = {"categorical": {"d": {"values": "integer"}}}
TIME = {**ANY, "timestamp": "d"}
SPLIT = {**ANY, "split": {"by": "column", "column": "c", "train": ["x"], "test": ["z"]}}
VALUES = [
    (DENSE, "1", "z", "'z'"),
    (DENSE, "1", "inf", "inf"),
    ({"dense": {"d": {"missing": "error"}}}, "1", "", "missing"),
    ({"categorical": {"d": {"missing": "error"}}}, "2", "", "missing"),
    (INTEGER, "2", "3.5", "'3.5'"),
    (INTEGER, "2", "9" * 19, "'9999999999999999999'"),
    ({"multi": {"d": {"values": "integer", "split": "|"}}}, "1", "1|x", "'1|x'"),
    ({**ANY, "weight": "d"}, "1", "-1", "-1"),
    (TIME, "1", "yesterday", "'yesterday'"),
    (TIME, "1", "1414540800000", "timestamp_format"),
    ({**TIME, "timestamp_format": "%y%m%d%H"}, "14102100", "1410x", "'1410x'"),
    ({**ANY, "group": "d"}, "2", "", "None"),
]
REFUSALS = [
    ("a short line", lines("1,x", "1"), "a.csv, line 3"),
    ("a label", lines("1,x", "", '0,"a\nb"', "7,x"), "a.csv, line 6, column 'y'"),
    ("no label", lines("1,x", ",x"), "a.csv, line 3, column 'y'"),
    (
        "after a very long field",
        lines("1,x", "1,x", f"1,{'x' * 200_000}", "7,x"),
        "row 3 (from 0), column 'y'",
    ),
    ("a group", lines("1,x", "0,", keys={**ANY, "group": "c"}), "line 3, column 'c'"),
    ("a split", lines("1,x", "0,", keys=SPLIT), "line 3, column 'c'"),
    ("a quote in the last column", lines("1,a", '1,"a', "1,a"), "line 3: a"),
    ("a quote of another", lines("1,a,b", '1,a,"b', "1,a,b", header="y,c,z"), "line 3: a"),
    ("a quote at the end", lines('1,"a'), "a.csv, line 2: a"),
    *[
        (f"after a quote {line}", lines("1,x", line), "a.csv, line 3: a field")
        for line in ('1,"a"b', '1,"a" ', '"1"2,x', '1,"a"b,c,d')
    ],
    ("an empty file", functools.partial(read_bytes, data=b""), "a.csv"),
    ("cut", functools.partial(read_bytes, data=WHOLE[:5000], name="b.csv.gz"), "b.csv.gz"),
    ("no gzip", functools.partial(read_bytes, data=b"y,c\n", name="b.csv.gz"), "b.csv.gz"),
    ("no UTF-8", functools.partial(read_bytes, data=b"y,c\n1,x\n1,\xff\n"), "column 'c'"),
    ("names", functools.partial(read_bytes, data=b"y,c,\xff\n1,x,1\n"), "UTF-8"),
    ("no Parquet", functools.partial(read_bytes, data=b"PAR1 no", name="a.parquet"), "a.parquet"),
    ("names of Parquet", damaged_names, "a.parquet"),
    ("another column", lines("1,x", header="y,cc"), "column 'c'"),
    ("equal names", lines("1,x,x", header="y,c,c"), "'c' 2 times"),
    ("no delimiter", lines("1,a", keys={"multi": {"c": {}}}), "set split"),
    ("a mean of nothing", lambda _: no_mean(), "column 'x'"),
    ("truth", functools.partial(parquet, y=[1, 0], c=[True, None]), "bool"),
    ("lists as labels", functools.partial(parquet, y=[[0], [1]], c=list("ab")), "'y'"),
    *[
        (
            f"times of {kind}",
            lambda folder, kind=kind: parquet(
                folder, TIME, y=[1], c=["x"], d=pa.array([2.0**24], kind)
            ),
            "column 'd'",
        )
        for kind in ("float32", "float16")
    ],
    *[
        (f"{keys} of {value} in {kind}", column(kind, keys, first, value), place + ", column 'd'")
        for kind, place in (("csv", "a.csv, line 3"), ("parquet", "row group 1, row 0"))
        for keys, first, value, _ in VALUES
    ],
    *[
        (f"{keys} names {value}", column("csv", keys, first, value), name)
        for keys, first, value, name in VALUES
    ],
    *[
        (
            f"the time {value} as {form}",
            column("csv", {**TIME, "timestamp_format": form}, first, value),
            "line 3, column 'd'",
        )
        for form, first, value in (
            ("%d.%m.%Y %H:%M UTC", "30.03.2025 01:59 UTC", "30.03.2025 01:59 EST"),
            ("%d.%m.%Y %H:%M UTC", "30.03.2025 01:59 UTC", "30.03.2025 01:59 CET"),
            ("%d.%m.%Y", "03.01.2025", "2025-01-03T19:00:00Z"),
        )
    ],
]
SETTINGS = [
    ("another suffix", lambda folder: read_bytes(folder, b"y,c\n", name="a.doc"), "a.doc"),
    ("a file named twice", named_twice, "a.csv"),
    ("no file", lambda _: TableFiles([], Schema.from_dict({"label": "y", **ANY})), "files"),
    ("a URL of no kind", lambda _: read("nothing://bucket/a.csv"), "fsspec"),
    ("no list", lambda _: TableFiles("a.csv", Schema.from_dict({"label": "y", **ANY})), "files"),
    ("no schema", lambda folder: Schema.from_toml(folder / "a.toml"), "a.toml"),
    ("a folder as a schema", Schema.from_toml, "schema"),
    *[
        (f"a schema of {data}", functools.partial(schema_of, data=data), "a.toml")
        for data in (b"label = ", b'label = "y"', b"label = '\xff'")
    ],
    ("a name of no schema", lambda _: find_schema("avasu"), "avazu"),
]


@pytest.mark.parametrize(
    ("act", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_a_table_is_refused_by_name(tmp_path, act, name):
    with pytest.raises(DatasetFormatError) as raised:
        act(tmp_path)

    assert name in str(raised.value)


@pytest.mark.parametrize(
    ("act", "name"), [case[1:] for case in SETTINGS], ids=[case[0] for case in SETTINGS]
)
def test_files_and_schemas_are_refused_by_name(tmp_path, act, name):
    with pytest.raises((ConfigError, MissingDependency)) as raised:
        act(tmp_path)

    assert name in str(raised.value)


def test_a_folder_without_tables_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=tmp_path.name):
        read(tmp_path)
