import pytest

from recsys.datasets.tabular.reading.files import TableFiles
from recsys.datasets.tabular.schemas.schema import Schema
from recsys.errors import DatasetFormatError

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


@pytest.mark.parametrize(("header", "hint"), [("d", "correct the schema"), ("e,f;g", "correct")])
def test_a_file_whose_delimiter_is_right_is_not_told_of_the_key(tmp_path, header, hint):
    path = tmp_path / "a.csv"
    path.write_text(f"{header}\n")
    with pytest.raises(DatasetFormatError, match=rf"must have column 'c', has .*; {hint}"):
        read(path)
