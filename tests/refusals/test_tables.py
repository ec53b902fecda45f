"""Tables that cannot be read: what is in a file, and what the error names; or what is read."""

import gzip
import re
from functools import partial
from pathlib import Path

import pytest

from recsys.datasets import Schema, prepare_table
from recsys.errors import ConfigError, DatasetFormatError, MissingDependency
from tests.commands import refused
from tests.datasets.tabular.decoded import rows_of

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TREE = {"label": "y", "categorical": {"c": {}}, "dense": {"d": {}}}
INTEGERS = TREE | {"categorical": {"c": {"values": "integer"}}}
BAGS = TREE | {"categorical": {}, "multi": {"c": {"values": "integer"}}}
ANY = {"label": "y", "categorical": {"c": {}}}
DENSE = {"dense": {"d": {}}}
INTEGER = {"categorical": {"d": {"values": "integer"}}}
TIME = {**ANY, "timestamp": "d"}
SPLIT = {**ANY, "split": {"by": "column", "column": "c", "train": ["x"], "test": ["z"]}}
HEAD = b"y,c,d\n1,a,0.5\n"
MANY = HEAD + b"0,b,1.5\n" * 200_000
ROW = {"y": [1, 0], "c": ["a", "b"], "d": [0.5, 1.5]}


def parquet(**columns):
    out = pa.BufferOutputStream()
    pq.write_table(pa.table({**ROW, **columns}), out, row_group_size=1, store_schema=False)
    return out.getvalue().to_pybytes()


def csv(*rows):
    return "\n".join(["y,c,d", *rows, ""]).encode()


def both(place, name):
    return f"(?s)(?=.*{re.escape(place)})(?=.*{re.escape(name)})"


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
REFUSED = [
    # what, name of the file, its bytes, keys of the schema, what the error names
    ("an empty file", "a.csv", b"", TREE, "a.csv"),
    ("empty lines alone", "a.csv", b"\n\r\n\n", TREE, "a.csv"),
    ("a quote that is never closed", "a.csv", HEAD + b'0,"b,1\n0,c,2\n', TREE, "line 3"),
    ("one never closed in a large file", "a.csv", HEAD + b'0,"b' + MANY, TREE, "line 3"),
    ("text after a closing quote", "a.csv", HEAD + b'0,"b"c,1\n', TREE, "line 3"),
    ("a quote closed three lines later", "a.csv", HEAD + b'0,"b\n1\n2\n,"c,1\n', TREE, "line 3"),
    ("quotes in a file of inches", "a.csv", HEAD + b'0,"5" wide,1\n', TREE, "line 3"),
    ("a short line", "a.csv", HEAD + b"0,b\n", TREE, "line 3"),
    ("a long line", "a.csv", HEAD + b"0,b,1,2\n", TREE, "line 3"),
    ("a short line far down", "a.csv", MANY + b"0,b\n", TREE, "line 200003"),
    ("a short line after lines in quotes", "a.csv", HEAD + b'0,"\n\n",1\n0,b\n', TREE, "line 6"),
    ("a semicolon file", "a.csv", b"y;c;d\n1;a;0.5\n", TREE, "'y;c;d'"),
    ("two delimiters", "a.csv", HEAD + b"0;b;1\n", TREE, "line 3"),
    ("Latin-1 far down", "a.csv", MANY + b"0,caf\xe9,1\n", TREE, "line 200003, column 'c'"),
    ("Latin-1 in the names", "a.csv", b"y,c,d,\xe9\n1,a,0.5,1\n", TREE, "line 1"),
    ("UTF-16", "a.csv", HEAD.decode().encode("utf-16"), TREE, "line 1"),
    ("text among numbers", "a.csv", HEAD + b"0,b,?\n", TREE, "line 3, column 'd': .*'\\?'"),
    ("a decimal comma", "a.csv", HEAD + b'0,b,"1,5"\n', TREE, "line 3, column 'd': .*'1,5'"),
    ("infinity", "a.csv", HEAD + b"0,b,1e999\n", TREE, "line 3, column 'd': .*inf"),
    ("an integer beyond 64 bits", "a.csv", b"y,c,d\n1,1,1\n0,9223372036854775808,1\n", INTEGERS,
     "line 3, column 'c': .*'9223372036854775808'"),
    ("integers as pandas writes them", "a.csv", b"y,c,d\n1,1.0,1\n", INTEGERS, "Int64"),
    ("a label of 2", "a.csv", HEAD + b"2,b,1\n", TREE, "line 3, column 'y': .*'2'"),
    ("no label", "a.csv", HEAD + b",b,1\n", TREE, "line 3, column 'y'"),
    ("names that are equal", "a.csv", b"y,c,d,c\n1,a,1,b\n", TREE, "'c' 2 times"),
    ("names with spaces", "a.csv", b"y, c, d\n1,a,1\n", TREE, "has 'y', ' c', ' d'"),
    ("names of another case", "a.csv", b"Y,C,D\n1,a,1\n", TREE, "has 'Y', 'C', 'D'"),
    ("no line of names", "a.csv", b"1,a,0.5\n0,b,1.5\n", TREE, "has '1', 'a', '0.5'"),
    ("gzip that is cut", "a.csv.gz", gzip.compress(MANY)[:-2000], TREE, "a.csv.gz"),
    ("plain text named .gz", "a.csv.gz", HEAD, TREE, "a.csv.gz"),
    ("gzip named .csv", "a.csv", gzip.compress(HEAD), TREE, "line 1"),
    ("Parquet that is cut", "a.parquet", parquet()[:-50], TREE, "a.parquet"),
    ("CSV named .parquet", "a.parquet", HEAD, TREE, "a.parquet"),
    ("lists in Parquet as one value", "a.parquet", parquet(c=[["a"], ["b"]]), TREE, "column 'c'"),
    ("lists of lists", "a.parquet", parquet(c=[[[1]], [[2]]]), BAGS, "column 'c'"),
    ("a map", "a.parquet",
     parquet(c=pa.array([[(1, 2.0)]] * 2, pa.map_(pa.int8(), pa.float32()))), BAGS, "column 'c'"),
    ("lists of parts of numbers", "a.parquet", parquet(c=[[1.5], [2.0]]), BAGS, "'c': .*1.5"),
    ("a struct", "a.parquet", parquet(d=[{"a": 1}] * 2), TREE, "column 'd'"),
    ("true and false as text", "a.parquet", parquet(c=[True, False]), TREE, "column 'c'"),
    ("names alone", "a.csv", b"y,c,d\n", TREE, "row"),
    ("a label after lines", "a.csv", csv("1,x,1", "", '0,"a\nb",1', "7,x,1"), TREE,
     "line 6, .*'y'"),
    ("after a very long field", "a.csv", csv("1,x,1", "1,x,1", f"1,{'x' * 200_000},1", "7,x,1"),
     TREE, r"row 3 \(from 0\), column 'y'"),
    ("no group", "a.csv", csv("1,x,1", "0,,1"), {**ANY, "group": "c"}, "line 3, column 'c'"),
    ("no part", "a.csv", csv("1,x,1", "0,,1"), SPLIT, "line 3, column 'c'"),
    ("a quote of another column", "a.csv", csv("1,a,b", '1,a,"b', "1,a,b"), ANY, "line 3: a"),
    ("a quote at the end", "a.csv", b'y,c\n1,"a\n', ANY, "a.csv, line 2: a"),
    *[(f"after a quote {line}", "a.csv", b"y,c\n1,x\n" + line, ANY, "a.csv, line 3: a field")
      for line in (b'1,"a"b', b'1,"a" ', b'"1"2,x', b'1,"a"b,c,d')],
    ("no delimiter", "a.csv", HEAD, ANY | {"multi": {"d": {}}}, "set split"),
    ("a mean of nothing", "a.csv", csv("1,a,", "0,b,"),
     TREE | {"dense": {"d": {"missing": "mean"}}}, "column 'd'"),
    ("no Parquet", "a.parquet", b"PAR1 no", TREE, "a.parquet"),
    ("names of Parquet", "a.parquet", parquet(cafe=[1, 2]).replace(b"cafe", b"caf\xff"), TREE,
     "a.parquet"),
    ("lists as labels", "a.parquet", parquet(y=[[0], [1]]), TREE, "'y'"),
    *[(f"times of {kind}", "a.parquet", parquet(d=pa.array([2.0**24] * 2, kind)), TIME,
       "column 'd'") for kind in ("float32", "float16")],
    *[(f"{value} by {keys}", "a.csv", csv(f"1,x,{first}", f"1,x,{value}"), {**ANY, **keys},
       both("a.csv, line 3, column 'd'", name)) for keys, first, value, name in VALUES],
    *[(f"{value} by {keys}", "a.parquet", parquet(d=[first, value]), {**ANY, **keys},
       "row group 1, row 0, column 'd'") for keys, first, value, _ in VALUES],
    *[(f"the time {value} as {form}", "a.csv", csv(f"1,x,{first}", f"1,x,{value}"),
       {**TIME, "timestamp_format": form}, "line 3, column 'd'")
      for form, first, value in (
        ("%d.%m.%Y %H:%M UTC", "30.03.2025 01:59 UTC", "30.03.2025 01:59 EST"),
        ("%d.%m.%Y %H:%M UTC", "30.03.2025 01:59 UTC", "30.03.2025 01:59 CET"),
        ("%d.%m.%Y", "03.01.2025", "2025-01-03T19:00:00Z"),
      )],
]  # fmt: skip
READ = [
    # what, its bytes, the values of c
    ("a byte order mark", b"\xef\xbb\xbf" + HEAD, ["a"]),
    ("CRLF", HEAD.replace(b"\n", b"\r\n"), ["a"]),
    ("carriage returns alone", HEAD.replace(b"\n", b"\r"), ["a"]),
    ("mixed ends of lines", HEAD + b"0,b,1\r\n1,c,2\r0,d,3", ["a", "b", "c", "d"]),
    ("no end of the last line", HEAD + b"0,b,1", ["a", "b"]),
    ("empty lines", b"\n\n" + HEAD.replace(b"\n", b"\n\n") + b"\n0,b,1\n\n", ["a", "b"]),
    ("a NUL in a value", HEAD + b"0,b\0c,1\n", ["a", "b\0c"]),
    ("an empty column", b"y,c,d\n1,,0.5\n0,,1\n", [None, None]),
    ("a column of nan", b"y,c,d\n1,a,nan\n0,b,NaN\n", ["a", "b"]),
    ("odd names", b'y,c,d,"a ""b"", .c\n#",\n1,a,0.5,x,z\n', ["a"]),
    ("quotes within a value", HEAD + b'0,5" wide,1\n', ["a", '5" wide']),
    ("a very long value", HEAD + b"0," + b"x" * 500_000 + b",1\n", ["a", "x" * 500_000]),
]


def prepare(files):
    prepare_table(files, "store", Schema.from_dict(ANY))


def schema_of(data):
    Path("a.toml").write_bytes(data)
    Schema.from_toml("a.toml")


SETTINGS = [
    ("another suffix", lambda: prepare(["a.doc"]), "a.doc"),
    ("a file named twice", lambda: prepare(["a.csv"] * 2), "a.csv"),
    ("no file", lambda: prepare([]), "files"),
    ("no list", lambda: prepare("a.csv"), "files"),
    ("a URL of no kind", lambda: prepare(["nothing://bucket/a.csv"]), "fsspec"),
    ("no schema", lambda: Schema.from_toml("no.toml"), "no.toml"),
    ("a folder as a schema", lambda: Schema.from_toml("."), "schema"),
    *[
        (f"a schema of {data}", partial(schema_of, data), "a.toml")
        for data in (b"label = ", b'label = "y"', b"label = '\xff'")
    ],
]


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "tree", "named"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_a_malformed_file_is_refused_by_name(name, data, tree, named):
    Path(name).write_bytes(data)

    with pytest.raises((DatasetFormatError, ConfigError), match=named):
        prepare_table([name], "store", Schema.from_dict(tree))

    assert not Path("store").exists()


@pytest.mark.parametrize(("data", "values"), [case[1:] for case in READ], ids=[c[0] for c in READ])
def test_an_odd_file_is_read(tmp_path, data, values):
    (tmp_path / "a.csv").write_bytes(data)

    assert rows_of(tmp_path / "a.csv", TREE, tmp_path)["c"] == values


@pytest.mark.parametrize(
    ("act", "name"), [case[1:] for case in SETTINGS], ids=[case[0] for case in SETTINGS]
)
def test_files_and_schemas_are_refused_by_name(act, name):
    Path("a.csv").write_bytes(HEAD)
    Path("a.doc").write_bytes(HEAD)

    with pytest.raises((ConfigError, MissingDependency)) as raised:
        act()

    assert name in str(raised.value)


def test_a_folder_without_tables_and_a_name_of_no_schema_are_refused():
    Path("a.csv").write_bytes(HEAD)
    Path("empty").mkdir()

    assert "avazu" in refused("prepare", "table", "a.csv", "--schema", "avasu", "--out", "store")
    with pytest.raises(FileNotFoundError, match="empty"):
        prepare(["empty"])
