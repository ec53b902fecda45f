import tomllib

import pytest

from recsys.cli import main
from recsys.datasets.tabular.guessing.guess import guess_schema
from recsys.datasets.tabular.reading.files import TableFiles
from recsys.datasets.tabular.schemas.schema import Schema
from recsys.errors import ConfigError

pytest.importorskip("pyarrow")


def write_csv(folder, name="a.csv", **columns):
    lines = [columns, *zip(*columns.values(), strict=True)]
    path = folder / name
    path.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    return path


def clicks(**labels):
    """12 rows of users and items, and columns that may be labels."""
    return {"user_id": [1, 1, 2] * 4, "item_id": [4, 5, 6, 7] * 3, **labels}


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("clicked", ["yes", "no", "no"], "values no, yes"),
        ("Label", [0, 1, 2], "values 0, 1, 2"),
        ("y_flag", [0, 1, 1], "values 0, 1"),
        ("bought", ["n", "y", "y"], "values n, y"),
    ],
)
def test_a_draft_without_a_label_names_columns_that_may_be_it(
    tmp_path, capsys, name, values, shown
):
    path = write_csv(tmp_path, **clicks(**{name: values * 4, "colour": ["red", "blue"] * 6}))
    with pytest.warns(UserWarning, match="no column is known to be the label") as caught:
        assert main(["inspect", str(path)]) == 0
    printed = capsys.readouterr().out
    warning = (
        "no column is known to be the label, and without a label every row counts as a positive; "
        f"this column may be the label: {name!r} ({shown}); if so, name it by --label COLUMN"
    )
    assert [str(each.message) for each in caught] == [warning]
    comment = printed.split("\n\n")[0]
    assert " ".join(line.removeprefix("# ") for line in comment.splitlines()) == (
        f"WARNING: {warning}"
    )
    assert "negatives" in Schema.from_dict(tomllib.loads(printed)).as_dict()


def test_many_columns_that_may_be_the_label_are_named_by_their_names_first(tmp_path):
    flags = {f"flag{number}": [0, 1] * 6 for number in range(9)}
    path = write_csv(tmp_path, **clicks(**flags, target=["a", "b", "c"] * 4))
    (warning,) = guess_schema([path]).warnings
    assert "one of these columns may be the label: 'target' (values a, b, c), 'flag0'" in warning
    assert ("flag3" in warning, "flag4" in warning) == (True, False)


def test_a_draft_says_that_no_column_may_be_the_label(tmp_path):
    (warning,) = guess_schema([write_csv(tmp_path, **clicks())]).warnings
    assert "if a column is the label, name it by --label COLUMN" in warning


def test_a_column_with_another_role_is_no_likely_label(tmp_path):
    path = write_csv(tmp_path, **clicks(y_flag=[0, 1] * 6, target=[1, 2] * 6))
    guess = guess_schema([path], ignore=["y_flag"])
    assert ("y_flag" in guess.warnings[0], "target" in guess.warnings[0]) == (False, True)


def test_a_draft_with_a_label_has_no_warning(tmp_path):
    path = write_csv(tmp_path, **clicks(label=[0, 1] * 6, y_flag=[0, 1] * 6))
    guess = guess_schema([path])
    assert (guess.schema.label, guess.warnings) == ("label", ())


def test_an_error_without_a_label_names_a_column_that_may_be_it(tmp_path):
    path = write_csv(tmp_path, a=["x", "y", "y"], clicked=["yes", "no", "no"])
    with pytest.raises(ConfigError, match=r"--label COLUMN \('clicked' has values no, yes\), or"):
        guess_schema([path])


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        (["No", "Yes", "No"], "== Yes"),
        (["converted", "no", "no"], "== converted"),
        (["buy", "not now", "buy"], "== not now"),
        ([0, 0, 3], "> 0"),  # with ">= 0" every row would be a positive
        ([1, 4, 5], ">= 4"),
    ],
)
def test_a_rule_is_drafted_for_a_named_label(tmp_path, values, rule):
    path = write_csv(tmp_path, **clicks(bought=values * 4))
    guess = guess_schema([path], label="bought")
    assert guess.schema.positive == rule
    assert "guess" in guess.role_reasons["label"]
    assert Schema.from_dict(tomllib.loads(guess.to_toml())) == guess.schema
    assert {
        row["bought"]
        for batch in TableFiles([path], guess.schema).batches()
        for row in batch.to_pylist()
    } == {0, 1}


@pytest.mark.parametrize("values", [["a", "b", "c"], ["'a'", "b", "b"], ["01", "x", "x"]])
def test_no_rule_is_drafted_for_other_text(tmp_path, values):
    path = write_csv(tmp_path, **clicks(bought=values * 4))
    with pytest.raises(ConfigError, match=r'found values .* such as positive = "== yes"'):
        guess_schema([path], label="bought")


def test_a_drafted_rule_keeps_to_one_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('c,bought\nx,yes\nx,"n\no"\ny,yes\n')
    with pytest.raises(ConfigError, match=r"found values 'n\\no', yes"):
        guess_schema([path], label="bought")


@pytest.mark.parametrize(("name", "value"), [("label", "0"), ("label", "true"), ("rating", "5")])
def test_a_label_of_one_value_is_warned_of(tmp_path, name, value):
    guess = guess_schema([write_csv(tmp_path, **clicks(**{name: [value] * 12}))])
    (warning,) = guess.warnings
    assert warning.startswith(f"label {name!r} has one value in the first 12 rows, {value}, and a")
    assert guess.to_toml().startswith(f"# WARNING: label {name!r} has one value")


def test_a_label_without_a_value_in_some_rows_is_warned_of(tmp_path):
    path = write_csv(tmp_path, **clicks(rating=[5, "", 3, 1, "", 2, 4, 1, 1, 5, 3, 2]))
    (warning,) = guess_schema([path]).warnings
    assert warning == (
        "label 'rating' has no value in 2 of the first 12 rows, and `recsys prepare` refuses such "
        "rows; fill them in, leave them out, or name another column by --label COLUMN"
    )
