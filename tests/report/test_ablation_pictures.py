"""Pictures of an ablation, looked at before they are drawn."""

import pytest
from matplotlib.colors import to_hex

from recsys.pipeline.stalls import STAGES
from recsys.report.ablation_pictures import (
    STAGE_COLORS,
    draw_memory,
    draw_quality,
    draw_stages,
    memory_points,
    stage_shares,
)
from recsys.train.run_files.curves import COLORS, draw_shares
from tests.report.test_paired import cell_of

TABLE_BYTES = 1000 * 16 * 4 * 2  # adagrad keeps a number beside each of the row


@pytest.fixture
def figures(monkeypatch):
    """The figures that are made into pictures."""
    found = []
    monkeypatch.setattr(
        "recsys.train.run_files.curves.as_png", lambda figure: found.append(figure) or b""
    )
    return found


def run_of(variation, *, faster=1.0, steps=(0, 1, 2), auc=0.5, end=None, is_finished=True):
    """A run that is evaluated at some steps, and at its end if `end` is the AUC there."""
    entries = [
        {"num_samples": step, "train_seconds": step / faster, "test": {"auc": auc + step / 10}}
        for step in steps
    ]
    if end is not None:
        entries.append({**entries[-1], "test": {"auc": end}, "validation": None})
    return variation, [*entries, {"num_samples": 9, "train_seconds": 9.0}], is_finished


def thick_lines(figure):
    lines = [line for line in figure.axes[0].lines if line.get_linewidth() > 1]
    return [line.get_xydata().round(9).tolist() for line in lines]


def tiered(variation, seed, *, speed, budget=None, hot_bytes=None, **keys):
    """A cell with a budget, or with every row resident."""
    cell = cell_of(variation, seed, samples_per_second=speed)
    cell["run"]["config"] |= {
        "budget": budget or "",
        "seed": seed,
        "schedule": {"name": "lookahead", "depth": 2},
        "model": {"embedding_dim": 16},
        "optimizer": {"name": "adagrad"},
        **keys,
    }
    cell["run"]["data"] = {"table_sizes": {"t": 1000}}
    cell["run"]["tiers"] = hot_bytes and {"hot_bytes": hot_bytes}
    return cell


def record_of(cells, **variations):
    return {"cells": cells, "config": {"variations": variations}}


def test_a_variation_has_one_thick_line_the_mean_of_its_runs(figures):
    runs = [run_of("_base"), run_of("other"), run_of("_base", faster=0.5, auc=0.6)]

    draw_quality(runs, "test")

    over_samples, over_seconds = figures[0].axes
    thick = [line for line in over_seconds.lines if line.get_linewidth() > 1]
    assert [line.get_xydata().round(9).tolist() for line in thick] == [
        [[0, 0.55], [1.5, 0.65], [3.0, 0.75]],
        [[0, 0.5], [1, 0.6], [2, 0.7]],
    ]
    thin = [line.get_xydata().round(9).tolist() for line in over_seconds.lines[:2]]
    assert thin == [[[0, 0.5], [1, 0.6], [2, 0.7]], [[0, 0.6], [2, 0.7], [4, 0.8]]]
    assert over_samples.lines[2].get_xdata().tolist() == [0, 1, 2]
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["_base", "other"]


def test_a_mean_goes_as_far_as_all_runs_have_evaluations(figures):
    early = run_of("a", steps=[0, 1], end=0.9)
    whole = run_of("a", steps=[0, 1, 2], auc=0.6, end=0.95)

    draw_quality([early, whole], "test")

    assert thick_lines(figures[0]) == [[[0, 0.55], [1, 0.65]]]
    assert [len(line.get_xdata()) for line in figures[0].axes[0].lines[:2]] == [3, 4]


def test_seeds_that_skip_other_samples_have_a_mean(figures):
    runs = [run_of("a", steps=[4, 7, 12]), run_of("a", steps=[3, 8, 12], auc=0.6)]

    draw_quality(runs, "test")

    assert thick_lines(figures[0]) == [[[3.5, 0.9], [7.5, 1.3], [12, 1.75]]]


def test_runs_that_were_evaluated_at_other_times_have_no_mean(figures):
    draw_quality([run_of("b", steps=[2, 4]), run_of("b", steps=[1, 2, 3, 4])], "test")

    assert thick_lines(figures[0]) == []


def test_evaluations_at_the_end_are_averaged_apart(figures):
    runs = [run_of("a", steps=[1, 2], end=0.8), run_of("a", steps=[1, 2], auc=0.6, end=0.9)]

    draw_quality(runs, "test")

    assert thick_lines(figures[0]) == [[[1, 0.65], [2, 0.75], [2, 0.85]]]


def test_a_run_that_diverged_is_a_thin_line_and_in_no_mean(figures):
    finished = [run_of("a"), run_of("a", auc=0.6)]
    diverged = [run_of(name, steps=[0], auc=0.1, is_finished=False) for name in ("a", "b")]

    draw_quality([*finished, *diverged], "test")

    assert thick_lines(figures[0]) == [[[0, 0.55], [1, 0.65], [2, 0.75]]]
    lengths = [len(line.get_xdata()) for line in figures[0].axes[0].lines]
    assert lengths == [3, 3, 1, 3, 1]


def test_runs_without_an_evaluation_in_common_have_no_mean(figures):
    draw_quality([run_of("a", steps=[1]), run_of("a", steps=[2])], "test")

    assert thick_lines(figures[0]) == []


def test_no_two_variations_look_alike_and_the_runs_of_one_do(figures):
    names = [f"v{number}" for number in range(25)]

    draw_quality([run_of(name) for name in [*names, *names]], "test")

    lines = [
        (line.get_color(), line.get_linestyle(), line.get_linewidth() > 1)
        for line in figures[0].axes[0].lines
    ]
    looks = [look[:2] for look in lines if look[2]]
    assert len(set(looks)) == 25
    assert [look[:2] for look in lines if not look[2]] == [look for look in looks for _ in range(2)]
    handles = figures[0].legends[0].legend_handles
    assert [(handle.get_color(), handle.get_linestyle()) for handle in handles] == looks
    assert {color for color, _ in looks} == set(COLORS)


def test_runs_without_an_evaluation_have_no_picture(figures):
    assert draw_quality([run_of("a")], "validation") is None
    assert draw_quality([("a", [], True)], "test") is None
    assert not figures


def test_speed_is_that_of_the_same_seed_with_every_row_resident():
    half, tenth = TABLE_BYTES // 2, TABLE_BYTES // 10
    cells = [
        *(tiered("resident", seed, speed=100.0 * (1 + seed)) for seed in (0, 1)),
        *(
            tiered("small", seed, speed=speed, budget="1KiB", hot_bytes=tenth)
            for seed, speed in ((0, 50.0), (1, 160.0))
        ),
        tiered("large", 1, speed=180.0, budget="9KiB", hot_bytes=half),
    ]
    keys = {"small": {"budget": "1KiB"}, "large": {"budget": "9KiB"}}

    found = memory_points(record_of(cells, resident={}, **keys))

    assert found == {
        "as the base configuration": [
            (0.1, pytest.approx(0.65), 0.5, 0.8),
            (0.5, pytest.approx(0.9), 0.9, 0.9),
        ]
    }


def test_only_what_is_configured_as_a_resident_variation_has_a_point():
    hot = {"budget": "1KiB", "hot_bytes": TABLE_BYTES // 4}
    fae = {"schedule": {"name": "fae", "rate": 1}}
    cells = [
        tiered("resident", 0, speed=100.0),
        tiered("torch", 0, speed=10.0, embeddings="torch"),
        tiered("fae", 0, speed=90.0, **hot, **fae),
        tiered("bf16", 0, speed=95.0, precision="bf16", **hot),
    ]
    keys = {"fae": {"budget": "1KiB", "schedule.name": "fae", "schedule.rate": 1}}

    record = record_of(cells, resident={}, torch={}, bf16={"precision": "bf16"}, **keys)

    assert memory_points(record) == {"fae, rate 1": [(0.25, 0.9, 0.9, 0.9)]}
    assert draw_memory(record_of(cells[:2], resident={}, torch={})) is None


def test_lines_that_would_have_one_name_are_named_by_their_whole_keys():
    lr, dense_lr = {"optimizer": {"name": "adagrad", "lr": 0.1}}, {"dense_optimizer": {"lr": 0.1}}
    hot = {"budget": "1KiB", "hot_bytes": TABLE_BYTES // 4}
    cells = [
        tiered("resident", 0, speed=100.0, **lr),
        tiered("rows", 0, speed=90.0, **hot, **lr),
        tiered("resident dense", 0, speed=200.0, **dense_lr),
        tiered("dense", 0, speed=100.0, **hot, **dense_lr),
    ]
    record = record_of(
        cells,
        **{"resident": {}, "resident dense": {}},
        rows={"optimizer.lr": 0.1, "budget": "1KiB"},
        dense={"dense_optimizer.lr": 0.1, "budget": "1KiB"},
    )

    assert memory_points(record) == {
        "optimizer.lr 0.1": [(0.25, 0.9, 0.9, 0.9)],
        "dense_optimizer.lr 0.1": [(0.25, 0.5, 0.5, 0.5)],
    }


@pytest.mark.usefixtures("whole_pictures")
def test_a_name_is_no_formula():
    name = "data=a$x_{$b"

    assert draw_quality([run_of(name)], "test")


def test_a_bar_of_stages_is_the_time_of_all_seeds_without_evaluation(figures):
    cells = [cell_of("a", 0), cell_of("a", 1), cell_of("b", 0), cell_of("c", 0, status="diverged")]
    seconds = [(1.0, 3.0), (1.0, 5.0), (0.0, 2.0), (9.0, 9.0)]
    for cell, (load, forward) in zip(cells, seconds, strict=True):
        cell["run"]["stalls"] = {
            "load_seconds": load,
            "forward_seconds": forward,
            "evaluate_seconds": 7.0,
            "checkpoint_seconds": 0.0,
            "binding": "forward",
        }
    record = record_of(cells, a={}, b={}, c={})

    draw_stages(record)

    assert stage_shares(record) == {
        "a": {"load": 0.2, "forward": 0.8, "checkpoint": 0.0},
        "b": {"load": 0.0, "forward": 1.0, "checkpoint": 0.0},
    }
    (axis,) = figures[0].axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a", "b"]
    bars = [(bar.get_x(), bar.get_width(), to_hex(bar.get_facecolor())) for bar in axis.patches]
    load, forward = (STAGE_COLORS[stage].lower() for stage in ("load", "forward"))
    assert bars == [(0, 0.2, load), (0.2, 0.8, forward), (0, 0, load), (0, 1, forward)]
    assert [text.get_text() for text in axis.texts] == ["20%", "80%", "100%"]
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert legend == ["load", "forward"]  # without the stage that no variation has


@pytest.mark.parametrize(
    "names",
    [
        [f"optimizer.name=adagrad,optimizer.lr={lr},schedule.name=lookahead" for lr in (1, 2, 3)],
        ["long" * 50, "b"],
    ],
)
def test_long_names_are_whole_in_the_pictures_and_leave_them_room(figures, names):
    draw_quality([run_of(name) for name in names], "test")
    cells = [cell_of(name, 0) for name in names]
    for cell in cells:
        cell["run"]["stalls"] = {"forward_seconds": 1.0}
    draw_stages(record_of(cells))
    draw_shares({name: [(0.5, 1.0, 0.9, 1.1)] for name in names})

    for figure in figures:
        figure.draw_without_rendering()  # a warning, as of axes without room, is an error
        axis = figure.axes[0]
        legend = (figure.legends or [axis.get_legend()])[0]
        texts = [*legend.get_texts(), *axis.get_yticklabels()]
        ends = [text.get_window_extent() for text in texts]
        assert min(each.x0 for each in ends) >= 0
        assert max(each.x1 for each in ends) <= figure.bbox.x1
        assert axis.bbox.width > figure.bbox.width / 3
    quality, stages, shares = figures
    for text, name in zip(quality.legends[0].get_texts(), names, strict=True):
        assert "".join(text.get_text().split()) == name
    for text, name in zip(stages.axes[0].get_yticklabels(), names, strict=True):
        assert "".join(text.get_text().split()) == name
    for text, name in zip(shares.axes[0].get_legend().get_texts(), names, strict=True):
        assert "".join(text.get_text().split()) == name


def test_every_stage_has_a_colour_of_its_own():
    assert set(STAGE_COLORS) == set(STAGES)
    assert len(set(STAGE_COLORS.values())) == len(STAGES)
