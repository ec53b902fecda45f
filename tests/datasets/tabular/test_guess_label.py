import tomllib

import pytest

from recsys.cli import main
from recsys.datasets.tabular.guessing.guess import guess_schema
from recsys.datasets.tabular.reading.files import TableFiles
from recsys.datasets.tabular.schemas.schema import Schema
from recsys.errors import ConfigError
from tests.datasets.tabular.test_guess import write_csv

pytest.importorskip("pyarrow")


def clicks(**labels):
    """12 rows of users and items, and columns that may be labels."""
    return {"user_id": [1, 1, 2] * 4, "item_id": [4, 5, 6, 7] * 3, **labels}


def test_a_draft_without_a_label_warns_of_it(tmp_path, capsys):
    path = write_csv(tmp_path, clicks(colour=["red", "blue"] * 6))
    assert main(["inspect", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# WARNING: no column is known to be the label")
    assert "negatives" in Schema.from_dict(tomllib.loads(printed)).as_dict()


def test_a_draft_with_a_label_has_no_warning(tmp_path):
    path = write_csv(tmp_path, clicks(label=[0, 1] * 6, y_flag=[0, 1] * 6))
    guess = guess_schema([path])
    assert guess.schema.label == "label"
    assert "WARNING" not in guess.to_toml()


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ([0, 0, 3], "> 0"),  # with ">= 0" every row would be a positive
        ([1, 4, 5], ">= 4"),
    ],
)
def test_a_rule_is_drafted_for_a_named_label(tmp_path, values, rule):
    path = write_csv(tmp_path, clicks(bought=values * 4))
    guess = guess_schema([path], label="bought")
    assert guess.schema.positive == rule
    assert "guess" in guess.role_reasons["label"]
    assert Schema.from_dict(tomllib.loads(guess.to_toml())) == guess.schema
    assert {
        row["bought"]
        for batch in TableFiles([path], guess.schema).batches()
        for row in batch.to_pylist()
    } == {0, 1}


def test_no_rule_is_drafted_for_text(tmp_path):
    path = write_csv(tmp_path, clicks(bought=["no", "yes", "no"] * 4))
    with pytest.raises(ConfigError, match=r'found text; .* rule for text: positive = "== yes"'):
        guess_schema([path], label="bought")
