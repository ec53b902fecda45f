"""Variations compared with a baseline, in pairs of cells with equal seeds."""

from statistics import stdev

import pytest

from recsys.report import column_title, format_ablation, make_differences, make_rows

T_OF_TWO_PAIRS = 12.7062  # 97.5 % quantile with one degree of freedom
CONFIG = {
    "target_auc": 0.0,
    "target_split": "test",
    "baseline": "none",
    "variations": {"none": {}, "drop": {}},
    "base": {},
}


def cell_of(variation, seed, *, status="finished", seconds=10.0, auc=0.7, **metrics):
    return {
        "name": f"{variation}-seed{seed}",
        "variation": variation,
        "seed": seed,
        "seconds_to_target_auc": None,
        "run": {
            "status": status,
            "data": {"name": "clicks"},
            "metrics": {"test": {"auc": auc, "logloss": 0.5, **metrics}, "validation": None},
            "throughput": {
                "train_seconds": seconds,
                "samples_per_second": 100.0,
                "num_samples": 1000,
            },
        },
    }


def record_of(cells, config):
    return {
        "status": "finished",
        "config": config,
        "cells": cells,
        "num_cells": len(cells),
        "environment": {},
        "rows": make_rows(cells, config),
        "differences": make_differences(cells, config),
    }


def entry_of(found, metric):
    (entry,) = [each for each in found if each["metric"] == metric]
    return entry


def test_cells_are_compared_with_the_baseline_of_their_own_seed():
    cells = [
        cell_of("none", 0, auc=0.70),
        cell_of("drop", 0, auc=0.69),
        cell_of("none", 1, auc=0.80),
        cell_of("drop", 1, auc=0.78),
    ]

    entry = entry_of(make_differences(cells, CONFIG), "auc")

    assert (entry["variation"], entry["baseline"], entry["seeds"]) == ("drop", "none", [0, 1])
    assert entry["values"] == pytest.approx([-0.01, -0.02])
    half = T_OF_TWO_PAIRS * stdev([-0.01, -0.02]) / 2**0.5
    found = [entry[key] for key in ("mean", "low", "high")]
    assert found == pytest.approx([-0.015, -0.015 - half, -0.015 + half], rel=1e-4)


@pytest.mark.parametrize(("num_pairs", "t"), [(3, 4.30265), (4, 3.18245), (10, 2.26216)])
def test_the_interval_is_that_of_students_t(num_pairs, t):
    aucs = [0.6 + 0.01 * seed**2 for seed in range(num_pairs)]
    cells = [cell_of("none", seed, auc=0.6) for seed in range(num_pairs)]
    cells += [cell_of("drop", seed, auc=auc) for seed, auc in enumerate(aucs)]

    entry = entry_of(make_differences(cells, CONFIG), "auc")

    assert entry["high"] - entry["mean"] == pytest.approx(t * stdev(aucs) / num_pairs**0.5, 1e-5)


def test_times_and_rates_have_ratios_and_qualities_differences():
    cells = [
        cell_of("none", 0, seconds=10.0),
        cell_of("none", 1, seconds=20.0),
        cell_of("drop", 0, seconds=8.0),
        cell_of("drop", 1, seconds=10.0),
    ]

    found = make_differences(cells, CONFIG)

    ratio = entry_of(found, "train_seconds")
    assert ratio["values"] == [0.8, 0.5]
    assert ratio["mean"] == pytest.approx(0.4**0.5)
    assert ratio["low"] < 0.5
    assert ratio["high"] > 0.8
    ratios = {each["metric"] for each in found if each["kind"] == "ratio"}
    assert ratios == {"train_seconds", "throughput", "num_trained"}


@pytest.mark.parametrize(
    ("aucs", "others", "winner"),
    [
        ([0.71, 0.711], [0.65, 0.85], "drop"),
        ([0.69, 0.689], [], "none"),
        ([0.69, 0.689], [0.5, 0.85], None),
        ([0.75, 0.66], [], None),
        ([0.71], [], None),
    ],
)
def test_a_variation_wins_if_the_interval_of_its_auc_lies_above_the_baseline(aucs, others, winner):
    found = {"none": [0.7 for _ in aucs], "drop": aucs, "wide": others}
    cells = [
        cell_of(name, seed, auc=auc) for name, of in found.items() for seed, auc in enumerate(of)
    ]
    config = CONFIG | {"seeds": list(range(len(aucs))), "variations": {key: {} for key in found}}

    verdict, *_ = format_ablation(record_of(cells, config)).split("\n")

    assert verdict.startswith(f"{winner or 'No variation'} won")


def test_baselines_of_rankings_are_lines_of_the_table_once_for_each_data_set():
    ranking = {"recall_at_k": 0.3, "item_knn_recall_at_k": 0.25, "popularity_recall_at_k": 0.125}
    cells = [cell_of(name, seed, **ranking) for seed in (0, 1) for name in ("none", "drop")]

    record = record_of(cells, CONFIG | {"seeds": [0, 1], "base": {"eval": {"ranking_k": 5}}})
    header, *found = format_ablation(record | {"differences": []}).split("\n")[2:]

    assert "| test recall at 5 |" in header
    assert found[-2:] == [
        "| item_knn on clicks | - | - | 0.2500 | - |",
        "| popularity on clicks | - | - | 0.1250 | - |",
    ]


def test_a_cell_that_diverged_leaves_its_pair_without_a_value_and_one_pair_has_no_interval():
    cells = [cell_of(name, seed, auc=0.7) for seed in (0, 1) for name in ("none", "drop")]
    cells[0]["run"]["status"] = "diverged"

    entry = entry_of(make_differences(cells, CONFIG), "auc")

    assert entry["values"] == [None, 0.0]
    assert (entry["mean"], entry["low"], entry["num_pairs"]) == (0.0, None, 1)


def test_seeds_that_only_one_of_two_variations_has_are_left_out():
    cells = [cell_of("none", 0), cell_of("drop", 0), cell_of("none", 1), cell_of("drop", 2)]

    assert entry_of(make_differences(cells, CONFIG), "auc")["seeds"] == [0]
    assert make_differences(cells[2:], CONFIG) == []


def test_what_only_some_cells_measured_has_rows():
    cells = [cell_of("none", 0), cell_of("drop", 0)]
    cells[1]["run"]["metrics"]["test"] |= {"gauc": 0.61, "recall_at_k": 0.123}
    cells[1]["run"]["skipped"] = {"share_skipped": 0.2, "share_lookups_left_out": 0.0}
    cells[1]["run"]["throughput"]["num_trained_samples"] = 800
    cells[1]["run"]["tiers"] = {
        **{"hot_bytes": 2**20, "fetched_bytes": 2**21, "written_back_bytes": 2**20},
        **{"lookup_hit_rate": 0.9, "unique_hit_rate": 0.5},
    }

    means = {(row["variation"], row["metric"]): row["mean"] for row in make_rows(cells, CONFIG)}

    expected = {"gauc": 0.61, "recall_at_k": 0.123, "skipped_share": 0.2, "num_trained": 800}
    expected |= {"fast_memory_mib": 1, "moved_mib": 3, "lookup_hit_rate": 0.9}
    assert {metric: means["drop", metric] for metric in expected} == expected
    assert means["none", "gauc"] is None
    assert ("drop", "updates_left_out_share") not in means


def test_columns_are_named_after_the_part_that_was_evaluated():
    title = column_title("seconds_to_target_auc", CONFIG | {"target_auc": 0.7})

    assert title == "seconds to test AUC 0.7"
