import csv
import gzip
import io
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.datasets.tabular import read
from recsys.datasets.tabular.read import TableFiles
from recsys.datasets.tabular.schema import Schema
from recsys.errors import DatasetFormatError
from tests.commands import recsys, refused

pytest.importorskip("pyarrow")


def schema_of(**keys):
    return Schema.from_dict({"label": "y", "categorical": {"c": {}}, **keys})


def texts_of(path, **keys):
    batches = TableFiles([path], schema_of(**keys)).batches()
    return [row["c"] for batch in batches for row in batch.to_pylist()]


def write(folder, *lines, end="\n"):
    path = folder / "a.csv"
    path.write_bytes("".join(line + end for line in ("y,c", *lines)).encode())
    return path


@settings(deadline=None, max_examples=2 * settings().max_examples)
@given(text=st.text('"""a,\r\n', max_size=30), num_rows=st.sampled_from([0, *range(20, 40)]))
def test_text_is_read_as_by_pythons_strict_reader_or_refused(tmp_path_factory, text, num_rows):
    path = tmp_path_factory.mktemp("table") / "a.csv"
    text = "y,c\n" + "1,x\n" * num_rows + text
    path.write_bytes(text.encode())
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    except csv.Error:
        rows = [[]]
    is_good = all(len(row) == 2 for row in rows)
    schema = Schema.from_dict({"label": "z", "categorical": {"y": {}, "c": {}}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "_BLOCK_BYTES", 48)
        with nullcontext() if is_good else pytest.raises(DatasetFormatError):
            batches = list(TableFiles([path], schema, optional=["z"]).batches())
            found = [[row["y"], row["c"]] for batch in batches for row in batch.to_pylist()]
            assert found == [[value or None for value in row] for row in rows[1:]]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("block_bytes", [8 << 20, 32])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_field_that_takes_in_other_rows_is_refused(
    tmp_path, monkeypatch, end, block_bytes, is_packed
):
    monkeypatch.setattr(read, "_BLOCK_BYTES", block_bytes)
    lines = ["0,plain"] * 20 + ['1,"red', "0,blue", '1,"hat', "0,x"]
    path = write(tmp_path, *lines, end=end)
    if is_packed:
        packed = tmp_path / "a.csv.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path = packed
    with pytest.raises(DatasetFormatError, match=rf"{path.name}, line 22: "):
        texts_of(path)


@pytest.mark.parametrize(
    ("quote", "lines", "expected"),
    [
        (
            '"',
            ['1,"a ""b"", c"', '0,5" pipe', '1,""', '"0","x"', '1,"two\nlines"', '0,"""q"""'],
            ['a "b", c', '5" pipe', None, "x", "two\nlines", '"q"'],
        ),
        (
            "",
            ['1,"red', "0,blue", '1,"hat"', '0,""', '1,5" x'],
            ['"red', "blue", '"hat"', '""', '5" x'],
        ),
        ("'", ["1,'a, b'", "0,it's", '1,"x'], ["a, b", "it's", '"x']),
    ],
)
def test_quotes_that_are_values_stay(tmp_path, quote, lines, expected):
    assert texts_of(write(tmp_path, *lines), quote=quote) == expected


def test_inspect_takes_files_without_quoting(tmp_path):
    path = write(tmp_path, '1,"red', "0,blue", '1,"red', "0,blue")

    assert '--quote ""' in refused("inspect", path)
    assert 'quote = ""\n' in recsys("inspect", path, "--quote", "", "--label", "y")
