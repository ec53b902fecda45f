import warnings

import pytest
from tqdm import tqdm

from recsys.cli import main
from recsys.datasets.tabular.prepare import prepare_table
from recsys.datasets.tabular.schemas.schema import Schema

pytest.importorskip("pyarrow")

EMPTY = "part has no sample, and training needs samples in each part; [split] has "


@pytest.fixture
def prepare(tmp_path):
    """Prepares rows with labels, and returns the warnings of the report."""

    def prepare(split, labels, name="store", **keys):
        lines = [f"{label},a{row % 3},{row},{row // 5}" for row, label in enumerate(labels)]
        (tmp_path / "a.csv").write_text("\n".join(["click,ad,time,fold", *lines]) + "\n")
        tree = {"label": "click", "timestamp": "time", "categorical": {"ad": {}}, "split": split}
        schema = Schema.from_dict(tree | keys)
        return prepare_table([tmp_path / "a.csv"], tmp_path / name, schema).warnings

    return prepare


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ({"by": "fraction", "test": 0, "validation": "1/4"}, {"test": "test = 0;"}),
        (
            {"by": "random", "test": "1/4", "validation": "1/1000"},
            {"validation": "validation = '1/1000';"},
        ),
        (
            {"by": "timestamp", "test_from": 1000},
            {"test": "test_from = 1000;", "validation": "test_from = 1000;"},
        ),
        (
            {"by": "timestamp", "test_from": 10, "validation_from": 1000},
            {"validation": "validation_from = 1000;"},
        ),
        (
            {"by": "column", "column": "fold", "train": ["0", "1", "2"], "test": ["3"]}
            | {"validation": ["9"]},
            {"validation": "validation = ['9'];"},
        ),
    ],
)
def test_an_empty_part_is_told_with_the_key_that_made_it(prepare, split, expected):
    found = prepare(split, [0, 1] * 10)

    assert len(found) == len(expected)
    for warning, (part, key) in zip(found, expected.items(), strict=True):
        assert warning.startswith(f"the {part} {EMPTY}{key}")


def test_a_part_with_one_label_is_told(prepare):
    split = {"by": "fraction", "test": "1/4", "validation": "1/4"}

    found = prepare(split, [0, 1] * 5 + [1] * 5 + [0] * 5)

    assert [warning.partition(", and")[0] for warning in found] == [
        "label 'click' is 1 in all 5 rows of the test part",
        "label 'click' is 0 in all 5 rows of the validation part",
    ]
    assert "[split] has test = '1/4'" in found[0]


def test_parts_with_both_labels_are_not_told_of(prepare):
    split = {"by": "fraction", "test": "1/4", "validation": "1/4"}

    assert prepare(split, [0, 1] * 10) == ()


def test_a_label_with_one_value_is_told_once(prepare):
    with pytest.warns(UserWarning, match="rows of the training part") as told:
        found = prepare({"by": "fraction", "test": "1/4", "validation": "1/4"}, [1] * 20)

    assert len(told) == 1
    assert found == ()


@pytest.mark.parametrize("weights", [[0] * 15 + [1] * 5, [0] * 14 + [1] + [0] * 5])
def test_a_training_part_without_a_weight_above_0_is_told(tmp_path, weights):
    lines = [f"{row % 2},a{row % 3},{weight}" for row, weight in enumerate(weights)]
    (tmp_path / "a.csv").write_text("\n".join(["click,ad,weight", *lines]) + "\n")
    split = {"by": "fraction", "test": "1/8", "validation": "1/8"}  # the last 5 rows of 20
    tree = {"label": "click", "weight": "weight", "categorical": {"ad": {}}, "split": split}

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        prepare_table([tmp_path / "a.csv"], tmp_path / "store", Schema.from_dict(tree))

    message = "weight 'weight' is 0 in all rows of the training part, and rows with a weight of 0"
    found = [str(each.message).startswith(message) for each in told]
    assert found == ([True] if not any(weights[:15]) else [])


def test_the_command_warns(tmp_path):
    (tmp_path / "a.csv").write_text("click,ad\n0,a\n1,b\n0,a\n1,b\n")
    (tmp_path / "s.toml").write_text('label = "click"\n[categorical.ad]\n')
    files = [str(tmp_path / "a.csv"), "--schema", str(tmp_path / "s.toml")]

    with pytest.warns(UserWarning, match="has no sample") as told:
        assert main(["prepare", "table", *files, "--out", str(tmp_path / "store")]) == 0

    assert [str(each.message).partition(" =")[0] for each in told] == [
        f"the test {EMPTY}test",
        f"the validation {EMPTY}validation",
    ]


def test_no_progress_bar_is_drawn_where_a_warning_is_printed(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("click,ad\n1,a\n1,b\n")
    (tmp_path / ".store.12345678").mkdir()  # as a killed preparation leaves it
    schema = Schema.from_dict({"label": "click", "categorical": {"ad": {}}})
    bars = []

    def look(*_):
        bars.append([bar for bar in tqdm._instances if bar.desc.startswith("prepare")])

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", look)
        prepare_table([tmp_path / "a.csv"], tmp_path / "store", schema, show_progress=True)

    assert bars == [[], []]
