import pytest

from recsys.report.ablation_columns import column_notes, shown_metrics, spread_notes
from recsys.report.ablation_metrics import format_number
from recsys.report.ablation_table import (
    format_ablation,
    format_evaluations,
    format_outcomes,
    make_rows,
)
from recsys.report.paired import make_differences, paired_cells
from tests.report.test_paired import CONFIG, cell_of


def record_of(cells, **config):
    seeds = sorted({cell["seed"] for cell in cells})
    config = {**CONFIG, "seeds": seeds, "eval_every_samples": None, "base": {}, **config}
    for cell in cells:
        cell["run"]["environment"] = {"commit": "1"}
    return {
        "config": config,
        "cells": cells,
        "num_cells": len(cells),
        "rows": make_rows(cells, config),
        "differences": make_differences(cells, config),
    }


def test_what_is_equal_in_all_cells_is_said_below_the_table_and_has_no_column():
    cells = [
        cell_of(name, seed, auc=0.7 + 0.01 * seed + 0.001 * len(name))
        for seed in (0, 1, 2)
        for name in ("none", "drop")
    ]
    cells[1]["run"]["throughput"]["train_seconds"] = 11.0

    record = record_of(cells)

    assert shown_metrics(record) == ["auc", "logloss", "train_time", "throughput"]
    equal = (
        "Equal in all cells: samples trained on 1,000; samples seen, skipped ones included 1,000."
    )
    assert column_notes(record) == [equal]
    printed = format_ablation(record)
    assert equal in printed
    assert printed.count("samples trained on") == 1
    assert "Every mean is over 3 of 3 cells." in printed
    assert "runs" not in printed.splitlines()[0]
    header, _ = paired_cells(record)
    assert header == [
        "test AUC",
        "test logloss",
        "seconds of training, ratio",
        "samples/s, ratio",
    ]


def test_a_metric_that_no_cell_has_is_named_below_the_table_and_has_no_column():
    cells = [cell_of("none", 0), cell_of("drop", 0, auc=None)]
    cells[0]["run"]["metrics"]["test"]["auc"] = None
    config = {"target_auc": 0.9, "target_split": "test", "eval_every_samples": 100}
    for cell in cells:
        cell["run"]["config"] |= {"eval": {"every_steps": 1}, "batch_size": 100}
        cell["run"]["throughput"]["num_steps"] = 10

    record = record_of(cells, **config, baseline=None)

    assert shown_metrics(record) == ["logloss", "throughput"]
    assert column_notes(record) == [
        "No cell has a value of: test AUC, seconds to test AUC 0.9.",
        "Equal in all cells: seconds of training 10.0; samples trained on 1,000; samples seen, "
        "skipped ones included 1,000.",
    ]


@pytest.mark.parametrize(
    ("every_steps", "num_steps", "expected"),
    [
        (5, 10, "one is made every 500 samples"),
        (9, 10, "one is made every 900 samples"),
        (9, 8, "one is made every 900 samples"),  # a fifth of its samples was skipped
        (10, 10, "the only one is made after the last step"),
        (10, 8, "the only one is made after the last step"),
        (11, 10, "the only one is made after the last step"),
    ],
)
def test_what_is_said_of_evaluations_goes_by_the_samples_seen(every_steps, num_steps, expected):
    cells = [cell_of("none", 0), cell_of("drop", 0)]
    for cell in cells:
        cell["run"]["config"] |= {"eval": {"every_steps": every_steps}, "batch_size": 100}
        cell["run"]["throughput"]["num_steps"] = num_steps

    record = record_of(cells, target_auc=0.9, target_split="test", eval_every_samples=100)

    assert format_evaluations(record) == expected


def test_a_table_without_any_value_keeps_its_columns():
    cells = [cell_of("none", 0, status="diverged"), cell_of("drop", 0, status="diverged")]

    record = record_of(cells, baseline=None)

    assert shown_metrics(record) == ["auc", "logloss", "throughput"]
    assert column_notes(record) == []


def test_a_cell_that_diverged_is_named_and_brings_no_column_back():
    cells = [cell_of("none", 0), cell_of("drop", 0), cell_of("none", 1, status="diverged")]

    record = record_of(cells)

    assert shown_metrics(record) == ["auc", "logloss", "throughput"]
    assert "samples seen, skipped ones included 1,000" in column_notes(record)[0]
    diverged = "1 of 3 cells diverged and have no value: none-seed1."
    assert format_outcomes(record) == [diverged]
    assert diverged in format_ablation(record)


def test_a_finished_cell_without_a_value_is_not_equal_to_the_others():
    cells = [cell_of("none", 0), cell_of("drop", 0), cell_of("drop", 1)]
    for cell in cells[1:]:
        cell["run"]["skipped"] = {"share_skipped": 0.2}

    assert "skipped_share" in shown_metrics(record_of(cells))


def test_cells_that_stopped_early_are_counted_with_where_they_ended():
    cells = [cell_of("none", seed, num_samples=1000 * (1 + seed)) for seed in (0, 1, 2)]
    for cell in cells[1:]:
        cell["run"]["stopped_early"] = {"step": 5}

    record = record_of(cells)

    told = "2 of 3 cells stopped early, after 2,000 to 3,000 samples."
    assert format_outcomes(record) == [told]
    assert told in format_ablation(record)
    assert format_outcomes(record_of(cells[:2])) == [
        "1 of 2 cells stopped early, after 2,000 samples."
    ]
    assert format_outcomes(record_of(cells[:1])) == []


def test_the_standard_error_of_an_auc_is_told_and_that_two_seeds_say_little():
    cells = [cell_of("none", seed) for seed in (0, 1)]
    for cell, error in zip(cells, (0.002, 0.0031), strict=True):
        cell["run"]["metrics"]["test"]["auc_standard_error"] = error

    two, one = record_of(cells), record_of(cells[:1])

    error, warning = spread_notes(two)
    assert error.startswith("The test AUC of one cell has a standard error of 0.0020 to 0.0031:")
    assert warning.startswith("Two seeds: a spread or an interval of two values says little;")
    assert warning in format_ablation(two)
    assert spread_notes(one) == [error.replace(" to 0.0031", "")]
    lines = format_ablation(one).splitlines()
    assert lines[0].split() == ["mean"]


@pytest.mark.parametrize(
    ("mean", "std", "shown"),
    [(6 << 20, 40_000, "0.0"), (6 << 20, 700 << 10, "0.7"), (600 << 10, 40_000, "0.038")],
)
def test_a_deviation_has_as_many_digits_as_its_mean(mean, std, shown):
    assert format_number("fast_memory", std, mean=mean) == shown
    assert format_number("auc", 0.00123, mean=0.7) == "0.0012"


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(0, "0.0"), (40_000, "0.0381"), (600 << 10, "0.586"), (6 << 20, "6.0")]
)
def test_small_fast_memory_is_not_rounded_to_nothing(num_bytes, shown):
    assert format_number("fast_memory", num_bytes) == shown
    if 0 < num_bytes < 2**20:
        assert format_number("moved_bytes", num_bytes, sign=True) == f"+{shown}"
