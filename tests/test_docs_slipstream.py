"""The tables and the plot of skipping, from files of results."""

import json
import runpy
import sys

import pytest

from recsys.ablate.run import ablate
from recsys.report.paired import make_differences
from recsys.train.trainer import train
from tests.doc_tables import cells_of

# The runs are too short for a row to become stale; the tables do not depend on it.
pytestmark = pytest.mark.filterwarnings("ignore:nothing is skipped")

ABLATION = """
eval.popular_share = 0.4
eval.every_steps = 4
synthetic.preference_changes = [900]
[ablate]
seeds = [0, 1]
baseline = "none"
late_share = 0.5
[[ablate.variations]]
name = "none"
[[ablate.variations]]
name = "drop_input-0.2"
skip.policy = "drop_input"
skip.share = 0.2
skip.guard.every = 0
[[ablate.variations]]
name = "random_drop-0.2"
skip.policy = "random_drop"
skip.share = 0.2
[[ablate.variations]]
name = "random_drop-0.4"
skip.policy = "random_drop"
skip.share = 0.4
"""


@pytest.fixture
def tables(pytestconfig, monkeypatch):
    folder = pytestconfig.rootpath / "docs" / "benchmarks"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return runpy.run_path(str(folder / "tables_of_slipstream.py"))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Loads an ablation and keeps its results once for all tests."""
    return tmp_path_factory.mktemp("slipstream") / "slipstream.json"


@pytest.fixture
def file(ablation, results, tmp_path):
    ablate(
        ablation(ABLATION), tmp_path / "out", results=results, show_progress=False, run_cell=train
    )
    return results


def paired(record, baseline="none"):
    found = make_differences(record["cells"], record["config"] | {"baseline": baseline})
    return {(each["variation"], each["metric"], each["kind"]): each for each in found}


def shown(entry, form="+.5f"):
    return f"{entry['mean']:{form}} ({entry['low']:{form}} to {entry['high']:{form}})"


def test_the_table_of_policies_has_values_of_none_and_differences_of_the_others(tables, file):
    record = json.loads(file.read_text())
    found = paired(record)
    runs = [cell["run"] for cell in record["cells"]]

    caption, header, none, *others = cells_of(tables["skipping_table"](str(file)))

    assert caption.startswith("1,800 training samples of synthetic:criteo-kaggle, tested on 150; ")
    assert f"commit {runs[0]['environment']['commit'][:10]}. The line of none" in caption
    assert header[:3] == ["policy", "share", "left out"]
    auc = sum(run["metrics"]["test"]["auc"] for run in runs[:1] + runs[4:5]) / 2
    assert none[:3] + none[6:7] == ["none", "", "", f"{auc:.4f}"]
    assert [line[:2] for line in others] == [
        ["drop_input", "0.2"],
        ["random_drop", "0.2"],
        ["random_drop", "0.4"],
    ]
    skipped = [run["skipped"]["share_skipped"] for run in (runs[2], runs[6])]
    trained = [run["throughput"]["num_trained_samples"] for run in (runs[2], runs[6])]
    line = others[1]
    assert line[2] == f"{50 * sum(skipped):.1f} %"
    assert line[3] == f"{sum(trained) / 2:,.0f}"
    ratio = found["random_drop-0.2", "train_time", "ratio"]
    low, middle, high = (1 / ratio[key] for key in ("high", "mean", "low"))
    assert line[5] == f"**{middle:.3f} ({low:.3f} to {high:.3f})**"
    for metric, cell in zip(
        ("auc", "logloss", "normalized_entropy", "calibration"), line[6:], strict=True
    ):
        assert cell == shown(found["random_drop-0.2", metric, "difference"])


def test_policies_are_compared_with_random_dropping_at_their_own_share(tables, file):
    record = json.loads(file.read_text())
    found = paired(record, "random_drop-0.2")

    _, header, *lines = cells_of(tables["random_table"](str(file)))

    (line,) = lines
    assert header[:3] == ["policy", "share", "times faster (95 %)"]
    assert line[:2] == ["drop_input", "0.2"]
    assert line[3] == shown(found["drop_input-0.2", "auc", "difference"])


def test_popular_samples_have_a_table_of_their_own(tables, file):
    record = json.loads(file.read_text())
    popular = record["cells"][0]["run"]["metrics"]["test_popular"]

    caption, _, none, *others = cells_of(tables["popular_table"](str(file)))

    assert f"of 40 % of the training samples ({popular['num_samples']:,} samples)" in caption
    other = record["cells"][4]["run"]["metrics"]["test_popular"]
    assert none[2] == f"{(popular['auc'] + other['auc']) / 2:.4f}"
    entry = paired(record)["random_drop-0.4", "popular_logloss", "difference"]
    assert others[2][3] == shown(entry)


def test_the_table_of_changing_preferences_is_about_the_end_of_training(tables, file):
    record = json.loads(file.read_text())

    caption, header, none, *others = cells_of(tables["late_table"](str(file)))

    assert "Preferences change after 900 samples; 3 evaluations on the validation part" in caption
    assert "in the last 50 % of the training" in caption
    assert header[2] == "validation AUC, last 50 % of training"
    late = [record["cells"][number]["late"]["auc"] for number in (0, 4)]
    assert none[2] == f"{sum(late) / 2:.4f}"
    assert others[1][2] == shown(paired(record)["random_drop-0.2", "late_auc", "difference"])


def test_a_file_of_unfinished_results_has_tables_that_say_so(tables, file, tmp_path):
    record = json.loads(file.read_text())
    record["cells"] = record["cells"][:3]
    record["cells"][1]["run"]["status"] = "diverged"
    part = tmp_path / "part.json"
    part.write_text(json.dumps(record))

    caption, _, *lines = cells_of(tables["skipping_table"](str(part)))

    assert caption.endswith("(95 % interval by Student's t).")
    assert "So far 3 of 8 cells were run." in caption
    assert [line[:2] for line in lines] == [["none", ""], ["random_drop", "0.2"]]
    difference = paired(record)["random_drop-0.2", "auc", "difference"]
    assert lines[1][6] == f"{difference['mean']:+.5f}"
    assert tables["random_table"](str(part))
    assert tables["popular_table"](str(part))
    assert tables["late_table"](str(part))


def test_the_plot_has_a_point_with_intervals_for_every_policy_and_share(tables, file, monkeypatch):
    record = json.loads(file.read_text())
    drawn = []

    def draw(points, **marks):
        drawn.append((points, marks))
        return b"\x89PNG"

    monkeypatch.setitem(tables["write_policies"].__globals__, "draw_policies", draw)

    tables["write_policies"](file)

    assert file.with_suffix(".png").read_bytes() == b"\x89PNG"
    ((points, marks),) = drawn
    assert marks == {"auc_band": 0.0005, "calibration_band": 0.01, "speedup": 1.2}
    assert {policy: [point["label"] for point in found] for policy, found in points.items()} == {
        "drop_input": ["0.2"],
        "random_drop": ["0.2", "0.4"],
    }
    point, found = points["random_drop"][1], paired(record)
    ratio = found["random_drop-0.4", "train_time", "ratio"]
    assert point["speedup"] == pytest.approx(
        (1 / ratio["mean"], 1 / ratio["high"], 1 / ratio["low"])
    )
    for metric in ("auc", "calibration"):
        entry = found["random_drop-0.4", metric, "difference"]
        assert point[metric] == (entry["mean"], entry["low"], entry["high"])


@pytest.mark.usefixtures("whole_pictures")
def test_the_plot_is_a_picture(tables, file):
    tables["write_policies"](file)

    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_table_without_its_file_says_that_it_is_not_measured(pytestconfig, tmp_path, monkeypatch):
    tables = runpy.run_path(str(pytestconfig.rootpath / "docs" / "benchmarks" / "tables.py"))
    read_record = tables["skipping_table"].__globals__["read_record"]
    monkeypatch.setitem(read_record.__globals__, "RECORDS", tmp_path)
    text = "<!-- table: slipstream_real -->\nold\n<!-- end -->\n"

    assert tables["with_tables"](text) == text.replace("old", "Not measured yet.")
