import re
from statistics import fmean, stdev

import pytest

from recsys.ablate.run import ablate, late_quality
from recsys.report.ablation_metrics import column_title
from recsys.report.ablation_table import format_ablation, make_rows
from recsys.report.paired import make_differences, paired_note
from recsys.train.trainer import train
from tests.report.test_page import Page

T_OF_TWO_PAIRS = 12.7062  # 97.5 % quantile with one degree of freedom


def cell_of(variation, seed, *, status="finished", seconds=10.0, auc=0.7, **throughput):
    return {
        "name": f"{variation}-seed{seed}",
        "variation": variation,
        "seed": seed,
        "seconds_to_target_auc": None,
        "run": {
            "status": status,
            "config": {"embeddings": "recsys"},
            "metrics": {"test": {"auc": auc, "logloss": 0.5}, "validation": None},
            "throughput": {
                "train_seconds": seconds,
                "samples_per_second": 100.0,
                "num_samples": 1000,
                **throughput,
            },
            "skipped": None,
        },
    }


CONFIG = {
    "target_auc": None,
    "target_split": None,
    "baseline": "none",
    "variations": {"none": {}, "drop": {}},
}


def entry_of(found, metric, kind="difference"):
    (entry,) = [each for each in found if (each["metric"], each["kind"]) == (metric, kind)]
    return entry


def test_cells_are_compared_with_the_baseline_of_their_own_seed():
    cells = [
        cell_of("none", 0, auc=0.70),
        cell_of("drop", 0, auc=0.69),
        cell_of("none", 1, auc=0.80),
        cell_of("drop", 1, auc=0.78),
    ]

    entry = entry_of(make_differences(cells, CONFIG), "auc")

    assert (entry["variation"], entry["baseline"], entry["unit"]) == ("drop", "none", "1")
    assert entry["seeds"] == [0, 1]
    assert entry["values"] == pytest.approx([-0.01, -0.02])
    assert entry["num_pairs"] == 2
    assert entry["mean"] == pytest.approx(-0.015)
    half = T_OF_TWO_PAIRS * stdev([-0.01, -0.02]) / 2**0.5
    assert (entry["low"], entry["high"]) == pytest.approx((-0.015 - half, -0.015 + half), rel=1e-4)


def test_times_and_rates_have_ratios_too_and_qualities_have_not():
    cells = [
        cell_of("none", 0, seconds=10.0),
        cell_of("none", 1, seconds=20.0),
        cell_of("drop", 0, seconds=8.0),
        cell_of("drop", 1, seconds=10.0),
    ]

    found = make_differences(cells, CONFIG)

    ratio = entry_of(found, "train_time", "ratio")
    assert ratio["values"] == [0.8, 0.5]
    assert ratio["mean"] == pytest.approx(0.4**0.5)
    assert ratio["low"] < 0.5
    assert ratio["high"] > 0.8
    assert entry_of(found, "train_time")["values"] == [-2000.0, -10000.0]
    assert {each["metric"] for each in found if each["kind"] == "ratio"} == {
        "train_time",
        "throughput",
        "num_trained",
    }


def test_samples_trained_on_leave_skipped_ones_out():
    cells = [
        cell_of("none", 0, num_samples=1000),
        cell_of("drop", 0, num_samples=1000, num_trained_samples=800),
    ]
    cells[1]["run"]["skipped"] = {"share_skipped": 0.2, "num_checked": 400, "num_stale": 100}

    found = make_differences(cells, CONFIG)
    rows = {(row["variation"], row["metric"]): row["mean"] for row in make_rows(cells, CONFIG)}

    assert entry_of(found, "num_trained", "ratio")["mean"] == pytest.approx(0.8)
    assert entry_of(found, "num_seen")["mean"] == 0
    assert rows["drop", "skipped_share"] == 0.2
    assert rows["none", "skipped_share"] is None
    assert rows["drop", "stale_share"] == 0.25


def test_frozen_rows_have_the_share_of_updates_left_out():
    cells = [cell_of("drop", 0), cell_of("none", 0)]
    for cell, policy in zip(cells, ("freeze_rows", "drop_input"), strict=True):
        cell["run"]["skipped"] = {
            "policy": {"name": policy},
            "share_skipped": 0.0,
            "share_lookups_left_out": 0.3 if policy == "freeze_rows" else 0.0,
        }

    rows = {(row["variation"], row["metric"]): row["mean"] for row in make_rows(cells, CONFIG)}

    assert rows["drop", "updates_left_out_share"] == 0.3
    assert rows["none", "updates_left_out_share"] is None


def test_one_pair_has_a_difference_and_no_interval():
    found = make_differences([cell_of("none", 3), cell_of("drop", 3, auc=0.6)], CONFIG)

    entry = entry_of(found, "auc")
    assert entry["mean"] == pytest.approx(-0.1)
    assert (entry["low"], entry["high"], entry["num_pairs"]) == (None, None, 1)


def test_a_cell_that_diverged_leaves_its_pair_without_a_value():
    cells = [cell_of(name, seed, auc=0.7) for seed in (0, 1) for name in ("none", "drop")]
    cells[0]["run"]["status"] = "diverged"

    entry = entry_of(make_differences(cells, CONFIG), "auc")

    assert entry["values"] == [None, 0.0]
    assert (entry["num_pairs"], entry["seeds"]) == (1, [0, 1])


def test_seeds_that_only_one_of_two_variations_has_are_left_out():
    cells = [cell_of("none", 0), cell_of("drop", 0), cell_of("none", 1), cell_of("drop", 2)]

    assert entry_of(make_differences(cells, CONFIG), "auc")["seeds"] == [0]
    assert make_differences(cells[2:], CONFIG) == []


@pytest.mark.outside_ci
@pytest.mark.usefixtures("whole_pictures")
def test_differences_are_recorded_printed_and_on_the_page(ablation, tmp_path):
    config = ablation("""
        [ablate]
        seeds = [0, 1]
        baseline = "slow"
        [[ablate.variations]]
        name = "slow"
        [[ablate.variations]]
        name = "fast"
        optimizer.lr = 0.5
    """)

    record = ablate(config, tmp_path / "out", show_progress=False, run_cell=train)

    assert record["config"]["baseline"] == "slow"
    metrics = {
        cell["name"]: cell["run"]["metrics"]["test"] | cell["run"]["throughput"]
        for cell in record["cells"]
    }
    for metric, key in (
        ("auc", "auc"),
        ("logloss", "logloss"),
        ("normalized_entropy", "normalized_entropy"),
        ("calibration", "calibration"),
        ("throughput", "samples_per_second"),
    ):
        expected = [
            metrics[f"fast-seed{seed}"][key] - metrics[f"slow-seed{seed}"][key] for seed in (0, 1)
        ]
        entry = entry_of(record["differences"], metric)
        assert entry["values"] == pytest.approx(expected)
        assert entry["mean"] == pytest.approx(fmean(expected))
    entry = entry_of(record["differences"], "auc")
    shown = [f"{entry[key]:+.5f}" for key in ("mean", "low", "high")]
    printed = format_ablation(record)
    assert "Against slow, in pairs of equal seeds: mean of the differences" in printed
    (line,) = [line for line in printed.splitlines() if re.search(r"test AUC +diff", line)]
    assert line.split()[-3:] == shown
    assert "Every line is of 2 of 2 pairs." in printed
    page = Page(tmp_path / "out" / "report.html")
    _, paired, *_ = page.tables
    assert paired[0][:3] == ["variation", "test AUC", "test logloss"]
    assert paired[1][:2] == ["fast", f"{shown[0]}\n{shown[1]} to {shown[2]}"]
    assert "seconds of training, ratio" in paired[0]
    assert "95 % interval by Student's t" in " ".join("".join(page.text).split())


def test_an_ablation_without_a_baseline_has_no_more_keys_than_before(ablation, tmp_path):
    config = ablation("[ablate]\nseeds = [0]\n[[ablate.variations]]\nname = 'base'\n")

    record = ablate(config, tmp_path / "out", show_progress=False, run_cell=train)

    assert list(record) == [
        "command",
        "status",
        "environment",
        "config",
        "num_cells",
        "cells",
        "rows",
    ]
    assert list(record["config"]) == [
        "seeds",
        "target_auc",
        "target_split",
        "eval_every_samples",
        "variations",
        "base",
    ]
    assert list(record["cells"][0]) == [
        "name",
        "variation",
        "seed",
        "seconds_to_target_auc",
        "samples_to_target_auc",
        "eval_every_samples",
        "run",
    ]
    assert [row["metric"] for row in record["rows"]] == [
        "auc",
        "logloss",
        "validation_auc",
        "normalized_entropy",
        "calibration",
        "train_time",
        "throughput",
        "num_trained",
        "num_seen",
        "fast_memory",
    ]


def test_quality_of_popular_samples_is_tabulated_where_it_was_measured(ablation, tmp_path):
    config = ablation("[ablate]\nseeds = [0]\n[ablate.grid]\neval.popular_share = [0.0, 0.4]\n")

    record = ablate(config, tmp_path / "out", show_progress=False, run_cell=train)

    means = {(row["variation"], row["metric"]): row["mean"] for row in record["rows"]}
    measured = record["cells"][1]["run"]["metrics"]["test_popular"]
    for name in ("auc", "logloss", "calibration"):
        assert means["eval.popular_share=0.4", f"popular_{name}"] == measured[name]
        assert means["eval.popular_share=0.0", f"popular_{name}"] is None
    assert "logloss of popular test samples" in format_ablation(record)


def test_quality_of_groups_and_rankings_is_tabulated_where_it_was_measured():
    cells = [cell_of("none", 0), cell_of("drop", 0)]
    measured = {"gauc": 0.61, "recall_at_k": 0.123, "ndcg_at_k": 0.045}
    cells[1]["run"]["metrics"]["test"] |= measured
    config = {**CONFIG, "baseline": None, "base": {"eval": {"ranking_k": 5}}}

    rows = make_rows(cells, config)

    means = {(row["variation"], row["metric"]): row["mean"] for row in rows}
    for name, value in measured.items():
        assert means["drop", name] == value
        assert means["none", name] is None
    assert column_title("recall_at_k", config) == "test recall at 5"
    assert column_title("ndcg_at_k", CONFIG) == "test NDCG at 20"


def test_late_quality_is_the_mean_of_the_evaluations_in_the_last_part():
    def entry(num_samples, auc, split="validation"):
        return {"num_samples": num_samples, split: {"auc": auc, "logloss": 1 - (auc or 1)}}

    history = [
        entry(100, 0.1),
        entry(299, 0.2),
        entry(300, 0.5),
        {"num_samples": 310, "train_loss": 0.3},
        entry(350, 0.9, "test"),
        entry(350, None),
        entry(400, 0.7),
    ]

    found = late_quality(history, "validation", 0.25)

    assert found == {
        "split": "validation",
        "num_evaluations": 3,
        "auc": pytest.approx(0.6),
        "logloss": pytest.approx((0.5 + 0.0 + 0.3) / 3),
    }
    assert late_quality(history, "train", 0.25) is None
    assert late_quality([], "test", 0.25) is None


def test_a_step_that_early_stopping_ended_at_counts_once_in_the_late_mean():
    def entry(num_samples, auc):
        return {"num_samples": num_samples, "test": {"auc": auc, "logloss": auc}}

    history = [entry(300, 0.5), entry(400, 0.6), entry(400, 0.7)]  # the last one is of all samples

    found = late_quality(history, "test", 0.25)

    assert found["num_evaluations"] == 2
    assert found["auc"] == found["logloss"] == pytest.approx(0.6)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7, 0.9])
def test_the_evaluation_at_the_beginning_of_the_last_part_counts(share):
    history = [
        {"num_samples": 1000 * number, "test": {"auc": 0.7, "logloss": 0.5}}
        for number in range(1, 21)
    ]

    found = late_quality(history, "test", share)

    assert found["num_evaluations"] == round(20 * share) + 1


def test_the_mean_over_the_last_part_of_training_is_tabulated(ablation, tmp_path):
    config = ablation(
        "eval.every_steps = 4\n[ablate]\nseeds = [0]\nlate_share = 0.5\n"
        "[[ablate.variations]]\nname = 'base'\n"
    )

    record = ablate(config, tmp_path / "out", show_progress=False, run_cell=train)

    (cell,) = record["cells"]
    assert cell["late"]["num_evaluations"] == 3  # after steps 8, 12 and 15
    means = {row["metric"]: row["mean"] for row in record["rows"]}
    assert means["late_auc"] == cell["late"]["auc"]
    printed = format_ablation(record)
    assert "validation AUC, last 50 % of training" in printed
    assert "validation logloss, last 50 % of training" in printed


def test_the_heading_of_the_late_mean_names_the_part_that_was_evaluated():
    config = CONFIG | {"late_share": 0.25, "base": {"eval": {"split": "test"}}}

    def title(**more):
        return column_title("late_auc", config | more)

    assert title() == "test AUC, last 25 % of training"
    assert title(base={}) == "validation AUC, last 25 % of training"
    assert title(base={}, target_split="test") == "test AUC, last 25 % of training"
    differing = {"none": {}, "drop": {"eval.split": "validation"}}
    assert title(variations=differing) == "test or validation AUC, last 25 % of training"


def test_the_comparison_says_what_its_interval_is_for():
    cells = [cell_of("none", 0), cell_of("drop", 0)]
    record = {"config": CONFIG, "cells": cells}

    said = "The interval is for other seeds on the same data, not for other data"
    assert paired_note(record).endswith(f"{said}.")
    cells[0]["run"]["metrics"]["test"]["auc_standard_error"] = 0.002
    assert paired_note(record).endswith(f"{said}; for that, see the standard error of one AUC.")


def test_the_validation_auc_at_the_end_of_a_run_has_a_column_where_it_was_measured():
    cells = [cell_of("none", 0), cell_of("drop", 0)]
    assert "validation_auc" not in {row["metric"] for row in make_rows(cells, CONFIG)}
    for cell, auc in zip(cells, (0.61, 0.63), strict=True):
        cell["run"]["metrics"]["validation"] = {"auc": auc, "logloss": 0.5}

    rows = {(row["variation"], row["metric"]): row["mean"] for row in make_rows(cells, CONFIG)}

    assert (rows["none", "validation_auc"], rows["drop", "validation_auc"]) == (0.61, 0.63)
    entry = entry_of(make_differences(cells, CONFIG), "validation_auc")
    assert entry["mean"] == pytest.approx(0.02)
    assert column_title("validation_auc", CONFIG) == "validation AUC"


def test_the_page_names_the_cells_that_each_commit_ran(ablation, tmp_path):
    text = "[ablate]\nseeds = [0, 1]\n[[ablate.variations]]\nname = 'base'\n"

    def train_with_commit(config, run_dir, *, show_progress):
        train(config, run_dir, show_progress=show_progress)
        file = run_dir / "run.json"
        commit = f'"commit": "{config.seed}23456789abcdef"'
        lines = [
            f"    {commit}," if line.startswith('    "commit": ') else line
            for line in file.read_text().splitlines()
        ]
        file.write_text("\n".join(lines).replace('"dirty": true', '"dirty": false'))

    record = ablate(
        ablation(text), tmp_path / "out", show_progress=False, run_cell=train_with_commit
    )

    told = ["commit 023456789a ran base-seed0", "commit 123456789a ran base-seed1"]
    assert all(line in format_ablation(record).splitlines() for line in told)
    page = "".join(Page(tmp_path / "out" / "report.html").text)
    assert all(line in page for line in told)
