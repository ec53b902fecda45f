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


QUARTERS = {"by": "fraction", "test": "1/4", "validation": "1/4"}
FOLDS = {"by": "column", "column": "fold", "train": ["0", "1", "2"], "test": ["3"]}
BOTH = [0, 1] * 10


@pytest.mark.parametrize(
    ("split", "labels", "expected"),
    [
        ({"by": "fraction", "test": 0, "validation": "1/4"}, BOTH, ["test = 0"]),
        (
            {"by": "random", "test": "1/4", "validation": "1/1000"},
            BOTH,
            ["validation = '1/1000'"],
        ),
        ({"by": "timestamp", "test_from": 1000}, BOTH, ["test_from = 1000"] * 2),
        (
            {"by": "timestamp", "test_from": 10, "validation_from": 1000},
            BOTH,
            ["validation_from = 1000"],
        ),
        (FOLDS | {"validation": ["9"]}, BOTH, ["validation = ['9']"]),
        (QUARTERS, [0, 1] * 5 + [1] * 5 + [0] * 5, ["5 rows of the test", "the validation"]),
        (QUARTERS, BOTH, []),
    ],
)
def test_a_part_without_samples_or_with_one_label_is_told(prepare, split, labels, expected):
    found = prepare(split, labels)

    for warning, name in zip(found, expected, strict=True):
        assert name in warning


def test_a_label_with_one_value_is_told_once(prepare):
    with pytest.warns(UserWarning, match="rows of the training part") as told:
        found = prepare(QUARTERS, [1] * 20)

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
