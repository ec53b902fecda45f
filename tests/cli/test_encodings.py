"""Output on terminals, and in files, whose encoding is not UTF-8."""

import io
from contextlib import redirect_stdout

import pytest

from recsys.cli import main
from recsys.datasets.tabular.schema import Schema


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "clicks.csv"
    rows = [f"{row % 2},{'Köln' if row % 3 else 'Ulm'}\n" for row in range(30)]
    file.write_text("".join(["label,größe\n", *rows]), encoding="utf-8")
    return file


def output_of(*arguments, encoding):
    """What a command writes to a standard output in this encoding."""
    written = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(written, encoding=encoding, write_through=True)):
        assert main([str(argument) for argument in arguments]) == 0
        return written.getvalue()


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_drafted_schema_is_utf_8_on_every_terminal(encoding, table, tmp_path):
    (tmp_path / "schema.toml").write_bytes(output_of("inspect", table, encoding=encoding))

    schema = Schema.from_toml(tmp_path / "schema.toml")
    assert list(schema.categorical) == ["größe"]


def test_letters_that_a_terminal_lacks_are_printed_as_escapes(table, tmp_path):
    schema = tmp_path / "schema.toml"
    schema.write_text('label = "label"\n[categorical."größe"]\n', encoding="utf-8")
    arguments = ["prepare", "table", table, "--schema", schema, "--out", tmp_path / "für"]

    assert rb"f\xfcr: 30 rows" in output_of(*arguments, encoding="ascii")
