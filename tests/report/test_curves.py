"""Curves of pages, looked at before they are drawn."""

import json

import pytest
from matplotlib.figure import Figure

from recsys.ablate import ablate
from recsys.report import write_report

pytestmark = pytest.mark.usefixtures("whole_pictures")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are made into pictures."""
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: found.append(figure))
    return found


@pytest.fixture
def figure_of_run(drawn, train_once, small_config, tmp_path):
    """The figure of a run with another history."""

    def draw(history):
        train_once(small_config("num_threads=1"), tmp_path / "run")
        lines = [json.dumps(entry) + "\n" for entry in history]
        (tmp_path / "run" / "history.jsonl").write_text("".join(lines))
        write_report(tmp_path / "run")
        return drawn[-1]

    return draw


def test_training_is_smoothed_without_being_shifted(figure_of_run):
    history = [
        {"num_samples": 100_000 * step, "train_loss": 0.7 - 0.01 * step + 0.2 * (step % 2)}
        for step in range(20)
    ]
    history = [
        entry | {"train_auc": 0.5 if not step else None} for step, entry in enumerate(history)
    ]
    history[0]["validation"] = {"logloss": 0.6, "auc": 0.7, "recall_at_k": 0.1}
    history[0]["validation"] |= {"item_knn_recall_at_k": 0.2}

    loss, auc, recall = figure_of_run(history).axes  # NDCG has no value

    smooth, validation = loss.lines
    inner = smooth.get_ydata()[4:-4]
    assert inner == pytest.approx([0.8 - 0.01 * step for step in range(4, 16)], abs=0.03)
    assert validation.get_xydata().tolist() == [[0, 0.6]]
    assert auc.lines[0].get_ydata()[0] == 0.5
    assert recall.lines[0].get_color() == validation.get_color() != smooth.get_color()
    assert loss.xaxis.get_major_formatter()(2_000_000) == "2 M"


@pytest.mark.parametrize(("metric", "title"), [("auc", "AUC"), ("recall_at_k", "recall at k")])
def test_a_variation_is_the_mean_of_its_cells_as_far_as_all_were_evaluated(
    metric, title, drawn, ablation, train_once, tmp_path
):
    curves = [
        ("a,b=1", [{"num_samples": 10, metric: 0.5}, {"num_samples": 20, metric: 0.6}]),
        ("a,b=1", [{"num_samples": 14, metric: 0.7}]),
        ("one", []),
    ]
    config = ablation("[ablate]\nseeds = [0, 1, 2]\n[[ablate.variations]]\nname = 'base'\n")
    record = ablate(config, tmp_path / "out", show_progress=False, run_cell=train_once)
    for cell, (variation, curve) in zip(record["cells"], curves, strict=True):
        cell |= {"variation": variation, "curve": curve}
    (tmp_path / "out" / "ablate.json").write_text(json.dumps(record))

    write_report(tmp_path / "out")

    (axis,) = drawn[-1].axes
    assert axis.get_ylabel() == title
    assert [line.get_xydata().tolist() for line in axis.lines] == [[[12, 0.6]], []]
    (legend,) = drawn[-1].legends
    assert [text.get_text() for text in legend.get_texts()] == ["a,b=1", "one"]
