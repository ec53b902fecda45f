import gzip
import io
import re
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.cli import main
from recsys.datasets.tabular.reading import text_files
from recsys.datasets.tabular.reading.files import TableFiles
from recsys.datasets.tabular.reading.quotes import QuoteCheck
from recsys.datasets.tabular.schemas.schema import Schema
from recsys.errors import DatasetFormatError

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


def has_good_quotes(text):
    """Whether each field that begins with a quote ends with one."""
    quoted, plain = rb'"(?:[^"]|"")*+"', rb'(?!")[^,\r\n]*+'
    field = b"(?:" + quoted + b"|" + plain + b")"
    return re.fullmatch(field + rb"(?:[,\r\n]" + field + b")*+", text) is not None


@given(text=st.text('"""a,\r\n', max_size=30), sizes=st.lists(st.integers(1, 9), min_size=30))
def test_quotes_are_followed_through_blocks_of_any_size(text, sizes):
    check = QuoteCheck(io.BytesIO(text.encode()), "a.csv", ",", '"')
    is_refused = pytest.raises(DatasetFormatError, match="quote")
    with nullcontext() if has_good_quotes(text.encode()) else is_refused:
        for size in [*sizes, -1, -1, -1]:  # the last one finds the end
            check.read(size)


def test_a_byte_order_mark_comes_before_the_first_field():
    check = QuoteCheck(io.BytesIO('\ufeff"a"b'.encode()), "a.csv", ",", '"')
    with pytest.raises(DatasetFormatError, match=r"a\.csv, line 1: "):
        check.read()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("block_bytes", [8 << 20, 32])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_field_that_takes_in_other_rows_is_refused(
    tmp_path, monkeypatch, end, block_bytes, is_packed
):
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", block_bytes)
    lines = ["0,plain"] * 20 + ['1,"red', "0,blue", '1,"hat', "0,x"]
    path = write(tmp_path, *lines, end=end)
    if is_packed:
        packed = tmp_path / "a.csv.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path = packed
    with pytest.raises(DatasetFormatError, match=rf"{path.name}, line 22: .*'hat'.* line 24;"):
        texts_of(path)


def test_a_quote_that_is_not_closed_in_a_block_is_named_by_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 64)
    path = write(tmp_path, *["0,plain"] * 20, '1,"red', *["0,plain"] * 20_000)
    with pytest.raises(DatasetFormatError, match=r"a\.csv, line 22: .* never closed"):
        texts_of(path)


@pytest.mark.parametrize("shift", range(8))
def test_line_breaks_in_quotes_may_lie_on_the_border_of_blocks(tmp_path, monkeypatch, shift):
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 32)
    texts = ["a" * shift, *["b\r\nc", "\r\n\r\n", "d\r"] * 20]
    path = write(tmp_path, *[f'0,"{text}"' for text in texts], end="\r\n")
    assert texts_of(path) == [text or None for text in texts]


def test_quotes_that_are_values_stay(tmp_path):
    lines = ['1,"a ""b"", c"', '0,5" pipe', '1,""', '"0","x"', '1,"two\nlines"', '0,"""q"""']
    expected = ['a "b", c', '5" pipe', None, "x", "two\nlines", '"q"']
    assert texts_of(write(tmp_path, *lines)) == expected


def test_without_quoting_quotes_are_text(tmp_path):
    path = write(tmp_path, '1,"red', "0,blue", '1,"hat"', '0,""', '1,5" x')
    assert texts_of(path, quote="") == ['"red', "blue", '"hat"', '""', '5" x']
    path = write(tmp_path, '1,"red', '7,"blue')
    with pytest.raises(DatasetFormatError, match=r"a\.csv, line 3, column 'y': a label must be"):
        texts_of(path, quote="")


def test_another_character_may_quote(tmp_path):
    path = write(tmp_path, "1,'a, b'", "0,it's", '1,"x')
    assert texts_of(path, quote="'") == ["a, b", "it's", '"x']


def test_inspect_takes_files_without_quoting(tmp_path, capsys):
    path = write(tmp_path, '1,"red', "0,blue", '1,"red', "0,blue")
    assert main(["inspect", str(path)]) == 2
    assert 'recsys inspect: --quote ""' in capsys.readouterr().err
    assert main(["inspect", str(path), "--quote", "", "--label", "y"]) == 0
    assert 'quote = ""\n' in capsys.readouterr().out
