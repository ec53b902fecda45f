import gzip

import pytest

from recsys.datasets.tabular.encoding.file_encoder import Encoder
from recsys.datasets.tabular.guessing.guess import guess_schema
from recsys.datasets.tabular.prepare import prepare_table
from recsys.datasets.tabular.reading.files import TableFiles
from recsys.datasets.tabular.reading.paths import find_files
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


@pytest.mark.parametrize(
    ("value", "hint"),
    [("7.0", r'by \.astype\("Int64"\) before to_csv'), ("7.5", "change the schema")],
)
def test_integers_that_pandas_wrote_as_floats_are_told_how_to_become_integers(
    tmp_path, value, hint
):
    path = tmp_path / "a.csv"
    path.write_text(f"c,y\n3,1\n{value},0\n")
    integers = {"categorical": {"c": {"values": "integer"}}}

    with pytest.raises(DatasetFormatError, match=rf"line 3, column 'c': .* '{value}'; .*{hint}"):
        read(path, **integers)


@pytest.mark.parametrize("text", ["c,y\nu,1\nü,0\n", "c,y,ü\nu,1,2\n"])
def test_a_latin_1_file_is_told_how_to_become_utf_8(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("latin1"))
    message = (
        r"a\.csv, line [13].* UTF-8; convert the file, by `iconv -f latin1 -t utf-8 OLD > NEW`"
    )
    with pytest.raises(DatasetFormatError, match=message):
        read(path)
    with pytest.raises(DatasetFormatError, match=message):
        guess_schema([path])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("a.json", "not JSON; read it by pandas.read_json"),
        ("a.JSONL.gz", "not JSON; read it by pandas.read_json"),
        ("a.csv.bz2", "plain, .gz or .zst; unpack it$"),
        ("a.zip", "plain, .gz or .zst; unpack it$"),
    ],
)
def test_a_file_of_another_kind_is_not_told_to_be_renamed(tmp_path, name, hint):
    path = tmp_path / name
    path.write_bytes(b"{}")
    with pytest.raises(ConfigError, match=f"a table must be CSV, TSV or Parquet, {hint}"):
        read(path)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_utf_16_file_is_told_how_to_become_utf_8(tmp_path, encoding):
    path = tmp_path / "a.csv"
    path.write_bytes("\ufeffc,y\nu,1\n".encode(encoding))
    for reads in (lambda: read(path), lambda: guess_schema([path])):
        with pytest.raises(DatasetFormatError, match=r"must be UTF-8; .* from utf-16 "):
            reads()


def damaged(text):
    return gzip.compress(text)[:-20]


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("a.csv.gz", lambda text: text, "it is not gzip, as its name says: rename it without .gz"),
        (
            "a.csv.zst",
            lambda text: text,
            "it is not zstd, as its name says: rename it without .zst",
        ),
        ("a.csv.gz", damaged, "the gzip data is damaged or cut short: fetch or compress the file"),
        (  # the header can be read
            "a.csv.gz",
            lambda text: damaged(text + b"".join(b"%d,1\n" % number for number in range(100_000))),
            "the gzip data is damaged or cut short: fetch or compress the file",
        ),
    ],
)
def test_a_compressed_file_that_cannot_be_read_has_a_way_out(tmp_path, name, content, hint):
    path = tmp_path / name
    path.write_bytes(content(b"c,y\n" + b"u,1\n" * 50))
    with pytest.raises(DatasetFormatError, match=rf"{name}.*{hint}"):
        read(path)


@pytest.mark.parametrize(
    ("column", "found", "hint"),
    [
        ("price", "prize", "did you mean 'prize'"),
        ("user_id", "userid", "did you mean 'userid'"),
        ("click", "clicks_30d", "correct the schema"),
        ("site", "item", "correct the schema"),
    ],
)
def test_only_a_name_that_is_close_is_meant(tmp_path, column, found, hint):
    path = tmp_path / "a.csv"
    path.write_text(f"y,{found}\n1,2\n")
    with pytest.raises(DatasetFormatError, match=hint):
        read(path, categorical={column: {}})


def test_files_like_a_store_are_not_told_to_correct_a_schema(tmp_path):
    (tmp_path / "a.csv").write_text("y,c\n" + "1,u\n0,v\n" * 10)
    (tmp_path / "b.csv").write_text("y,d\n1,u\n")
    prepare_table([tmp_path / "a.csv"], tmp_path / "store", schema())

    with pytest.raises(DatasetFormatError, match="store was made of files with it; add it, or"):
        prepare_table([tmp_path / "b.csv"], tmp_path / "other", like=tmp_path / "store")
    with (
        Encoder(tmp_path / "store") as encoder,
        pytest.raises(DatasetFormatError, match="the model has it as a feature; add it, or"),
    ):
        encoder.open_files([tmp_path / "b.csv"])


def test_a_file_whose_lines_are_not_split_is_told_to_have_tabs(tmp_path):
    path = tmp_path / "ratings.txt"
    path.write_text("1::1193::5::978300760\n1::661::3::978302109\n")
    with pytest.raises(ConfigError, match=r"got '::'; replace it in the file by a tab"):
        schema(delimiter="::")


def test_empty_lines_may_stand_above_the_names(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\n\nc,y\n\nu,1\nv,2\n")
    assert read(path, positive=">= 1") == [[{"c": "u", "y": 1}, {"c": "v", "y": 1}]]
    with pytest.raises(DatasetFormatError, match=r"a\.csv, line 6, column 'y'"):
        read(path)


def test_a_file_and_its_compressed_copy_are_not_read_together(tmp_path, monkeypatch):
    text = b"c,y\nu,1\n"
    (tmp_path / "a.csv").write_bytes(text)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text))
    with pytest.raises(ConfigError, match=r"a\.csv\.gz and .*a\.csv must be two tables, .* leave"):
        read(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"a\.csv\.gz and .*a\.csv must be two tables"):
        find_files(["a.csv", tmp_path / "a.csv.gz"])
    (tmp_path / "more").mkdir()
    (tmp_path / "a.csv.gz").rename(tmp_path / "more" / "a.csv.gz")
    assert len(read(tmp_path)) == 2


def test_a_column_in_the_name_of_a_folder_is_told_to_be_in_the_file(tmp_path):
    folder = tmp_path / "c=u"
    folder.mkdir()
    (folder / "a.csv").write_text("d,y\nu,1\n")
    with pytest.raises(DatasetFormatError, match=r"must have column 'c', .*; names of folders are"):
        read(tmp_path)
