"""Malformed files of tables: what is in each, and the class and name of the error; or what is read.

`python -m pytest tests/refusals/test_malformed_tables.py` with MALFORMED=FILE writes the messages
as a table.
"""

import gzip
import os
from pathlib import Path

import pytest

from recsys.datasets.tabular.read import TableFiles
from recsys.datasets.tabular.schema import Schema
from recsys.errors import ConfigError, DatasetFormatError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TREE = {
    "label": "y",
    "categorical": {"c": {}},
    "dense": {"d": {}},
}
INTEGERS = TREE | {"categorical": {"c": {"values": "integer"}}}
BAGS = TREE | {"categorical": {}, "multi": {"c": {"values": "integer"}}}
HEAD = b"y,c,d\n1,a,0.5\n"
MANY = HEAD + b"0,b,1.5\n" * 200_000
ROW = {"y": [1, 0], "c": ["a", "b"], "d": [0.5, 1.5]}


def parquet(**columns):
    out = pa.BufferOutputStream()
    pq.write_table(pa.table({**ROW, **columns}), out)
    return out.getvalue().to_pybytes()


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
    ("names alone", b"y,c,d\n", []),
]


def read(path, tree):
    batches = TableFiles([path], Schema.from_dict(tree)).batches()
    return [value for batch in batches for value in batch["c"].to_pylist()]


def note(what, told):
    """Add a line to the table that MALFORMED names."""
    if file := os.environ.get("MALFORMED"):
        with Path(file).open("a") as out:
            out.write(f"| {what} | {told} |\n")


@pytest.mark.parametrize(
    ("what", "name", "data", "tree", "named"), REFUSED, ids=[case[0] for case in REFUSED]
)
def test_a_malformed_file_is_refused_by_name(tmp_path, monkeypatch, what, name, data, tree, named):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)

    with pytest.raises((DatasetFormatError, ConfigError), match=named) as raised:
        read(name, tree)

    note(what, f"`{raised.type.__name__}: {raised.value}`".replace("|", "\\|"))


@pytest.mark.parametrize(("what", "data", "values"), READ, ids=[case[0] for case in READ])
def test_an_odd_file_is_read(tmp_path, what, data, values):
    (tmp_path / "a.csv").write_bytes(data)

    assert read(tmp_path / "a.csv", TREE) == values

    note(what, "read")
