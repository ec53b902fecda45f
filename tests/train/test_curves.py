"""Pictures, looked at before they are drawn."""

import errno
import os
from pathlib import Path

import pytest

from recsys.config import load_config
from recsys.train.run_files.curves import (
    draw_run,
    draw_variations,
    plot_curves,
)
from recsys.train.run_files.run_folder import RunFolder


@pytest.fixture
def figures(monkeypatch):
    """The figures that are made into pictures."""
    found = []
    monkeypatch.setattr(
        "recsys.train.run_files.curves.as_png", lambda figure: found.append(figure) or b""
    )
    return found


def test_on_a_full_disk_the_error_names_the_file_and_none_is_half(figures, tmp_path, monkeypatch):
    folder = RunFolder.create(tmp_path / "run", load_config(None, [], data="store"))
    folder.append_history({"num_samples": 1, "train_loss": 1.0, "train_auc": None})
    before = sorted(folder.path.iterdir())

    def fill(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fill)

    with pytest.raises(OSError, match=r"No space left on device: '.*curves\.png'"):
        plot_curves(folder)
    assert sorted(folder.path.iterdir()) == before


def test_training_is_smoothed_without_being_shifted_or_bent(figures):
    losses = [0.7 - 0.01 * step for step in range(20)]
    history = [
        {"num_samples": 100_000 * step, "train_loss": loss, "train_auc": None if step else 0.5}
        for step, loss in enumerate(losses)
    ]
    history[0]["test"] = {"logloss": 0.6, "auc": 0.7}

    draw_run(history, "test")

    loss, auc = figures[0].axes
    raw, smooth, test = loss.lines
    assert raw.get_ydata().tolist() == losses
    assert smooth.get_ydata().tolist() == pytest.approx(losses)  # a line stays the line that it is
    assert test.get_xydata().tolist() == [[0, 0.6]]
    assert auc.lines[1].get_ydata()[0] == 0.5
    assert loss.xaxis.get_major_formatter()(2_000_000) == "2 M"


@pytest.mark.parametrize("losses", [[0.4792776506558009], [3.0] + 19 * [0.5]])
def test_losses_that_are_equal_have_a_height_in_the_picture(figures, losses):
    history = [
        {"num_samples": number, "train_loss": loss, "train_auc": None}
        for number, loss in enumerate(losses)
    ]

    draw_run(history, "test")  # a warning would be an error

    low, high = figures[0].axes[0].get_ylim()
    assert low < losses[-1] < high


def test_a_run_of_one_report_is_drawn_whole(figures):
    history = [{"num_samples": 5, "train_loss": 1.2, "train_auc": 0.5}]
    history.append({"num_samples": 5, "test": {"logloss": 2.8, "auc": 0.5}})

    draw_run(history, "test")

    low, high = figures[0].axes[0].get_ylim()
    assert low < 1.2
    assert high > 2.8
    _, training, _ = figures[0].axes[0].lines
    assert training.get_marker() == "o"  # a line of one point has no length


def test_a_run_that_ended_in_a_loss_that_is_not_finite_has_a_picture(figures):
    history = [
        {"num_samples": step, "train_loss": loss, "train_auc": None}
        for step, loss in enumerate([0.7, 0.6, None])  # as a run on a GPU leaves it
    ]

    draw_run(history, "test")

    low, high = figures[0].axes[0].get_ylim()
    assert low < 0.6 < 0.7 < high


def test_reports_that_jump_are_drawn_as_their_mean(figures):
    history = [
        {"num_samples": step, "train_loss": 0.4 + 0.2 * (step % 2), "train_auc": 0.5}
        for step in range(40)
    ]

    draw_run(history, "test")

    smooth = figures[0].axes[0].lines[1].get_ydata()[5:-5]
    assert smooth.max() - smooth.min() < 0.05


def test_a_variation_is_the_mean_of_its_cells_as_far_as_all_were_evaluated(figures):
    cells = [
        ("a,b=$1$", [{"num_samples": 10, "auc": 0.5}, {"num_samples": 20, "auc": 0.6}]),
        ("a,b=$1$", [{"num_samples": 14, "auc": 0.7}]),
        ("_one", []),
    ]

    draw_variations(cells)

    (axis,) = figures[0].axes
    assert [line.get_xydata().tolist() for line in axis.lines] == [[[12, 0.6]]]
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["a,b=$1$", "_one"]
    assert draw_variations(cells[2:]) is None
