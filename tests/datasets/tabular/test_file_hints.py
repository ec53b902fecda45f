import pytest

from recsys.datasets.tabular.guessing.guess import guess_schema
from recsys.datasets.tabular.reading.files import TableFiles
from recsys.datasets.tabular.schemas.schema import Schema
from recsys.errors import ConfigError, DatasetFormatError

pytest.importorskip("pyarrow")


def schema(**keys):
    return Schema.from_dict({"label": "y", "categorical": {"c": {}}, **keys})


def read(path, **keys):
    return [batch.to_pylist() for batch in TableFiles([path], schema(**keys)).batches()]


@pytest.mark.parametrize(
    ("name", "delimiter", "keys", "key"),
    [
        ("a.csv", ";", {}, ";"),
        ("a.csv", "\t", {}, "\\t"),
        ("a.tsv", "|", {}, "|"),
        ("a.csv", ",", {"delimiter": ";"}, ","),
    ],
)
def test_a_file_with_another_delimiter_is_told_of_the_key(tmp_path, name, delimiter, keys, key):
    path = tmp_path / name
    path.write_text(f"c{delimiter}y\nu{delimiter}1\n")
    with pytest.raises(DatasetFormatError) as error:
        read(path, **keys)
    assert f'but has {delimiter!r}: set delimiter = "{key}" in the schema' in str(error.value)
    found = read(path, delimiter=delimiter)
    assert found == [[{"c": "u", "y": 1}]]


@pytest.mark.parametrize(
    ("header", "hint"),
    [("y,d", "correct the schema"), ("d", "if its first line is not the"), ("e,f;g", "if its")],
)
def test_a_file_whose_delimiter_is_right_is_not_told_of_the_key(tmp_path, header, hint):
    path = tmp_path / "a.csv"
    path.write_text(f"{header}\n")
    with pytest.raises(DatasetFormatError, match=rf"must have column 'c', has .*; {hint}"):
        read(path)


@pytest.mark.parametrize("text", ["c,y\nu,1\nü,0\n", "c,y,ü\nu,1,2\n"])
def test_a_latin_1_file_is_told_how_to_become_utf_8(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("latin1"))
    message = (
        r"a\.csv, line [13].* UTF-8; convert the file, .* `iconv -f latin1 -t utf-8 OLD > NEW`"
    )
    with pytest.raises(DatasetFormatError, match=message):
        read(path)
    with pytest.raises(DatasetFormatError, match=message):
        guess_schema([path])


@pytest.mark.parametrize("name", ["a.xlsx", "A.XLS", "a.ods"])
def test_a_spreadsheet_is_told_to_become_csv(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"not a spreadsheet; save it as CSV$"):
        read(path)
