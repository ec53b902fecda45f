import numpy as np
import pytest

from recsys.report.summary import (
    format_little_learned,
    format_metrics,
    tabulate_hits,
    tabulate_tiers,
)
from recsys.train.metrics.metrics import evaluate_logits

TIERS = {
    "cold_tier": "host",
    "hot_bytes": 1024,
    "num_slots": 10,
    "num_rows": 320,
    "lookup_hit_rate": 0.9,
    "unique_hit_rate": 0.8,
    "fetched_bytes": 0,
    "written_back_bytes": 0,
    "exposed_fetch_seconds": 0.0,
}


def test_tables_are_listed_by_their_misses_with_the_share_of_each():
    tables = [
        {"name": "good", "num_rows": 20, "num_lookups": 1000, "num_hits": 975},
        {"name": "poor", "num_rows": 300, "num_lookups": 100, "num_hits": 25},
    ]

    assert tabulate_hits({**TIERS, "tables": tables}) == [
        ["poor", "300", "100", "25.0%", "75.0%"],
        ["good", "20", "1,000", "97.5%", "25.0%"],
    ]
    title, text = tabulate_tiers({**TIERS, "tables": tables}, "1KiB")[-1]
    assert (title, text) == ("missed most", "poor 75.0%, good 25.0% of all misses")


def test_a_run_without_misses_and_one_without_counts_name_no_table():
    tables = [{"name": "all", "num_rows": 20, "num_lookups": 10, "num_hits": 10}]

    for tiers in (TIERS, {**TIERS, "tables": []}, {**TIERS, "tables": tables}):
        assert [title for title, _ in tabulate_tiers(tiers, "1KiB")] == ["tiers", "hits", "moved"]
    assert tabulate_hits({**TIERS, "tables": tables}) == [["all", "20", "10", "100.0%", "-"]]
    assert tabulate_hits(None) == []


@pytest.mark.parametrize("label", [0, 1])
def test_a_split_with_one_label_is_named_below_its_metrics(label):
    logits = np.linspace(-1, 1, 8, dtype=np.float32)
    metrics = {
        "test": evaluate_logits(logits, np.full(8, label)).as_dict(),
        "validation": evaluate_logits(logits, np.arange(8) % 2).as_dict(),
    }

    *_, above, last = format_metrics(metrics).splitlines()

    assert last.startswith(f"test: all 8 labels are {label}; there is no auc")
    assert above.startswith("num samples")


def test_one_label_is_no_fault_where_items_are_ranked():
    values = evaluate_logits(np.ones(4, np.float32), np.ones(4)).as_dict()

    assert "labels are" not in format_metrics({"test": values | {"recall_at_k": 0.5}})


@pytest.mark.parametrize(
    ("entropy", "optimizer", "advice"),
    [
        (0.995, "sgd", "Try --set optimizer.name=adagrad --set optimizer.lr=0.03, or more epochs."),
        (0.995, "adagrad", "Try another optimizer.lr, or more epochs."),
        (0.9, "sgd", None),
    ],
)
def test_a_run_that_learned_nothing_is_not_advised_to_use_its_own_optimizer(
    entropy, optimizer, advice
):
    lines = format_little_learned({"test": {"normalized_entropy": entropy}}, optimizer)

    assert lines[-1:] == ([advice] if advice else [])


@pytest.mark.parametrize(
    ("train_loss", "advice"),
    [(0.4, "fits training samples alone, whose loss fell to 0.4000."), (0.7, "or more epochs.")],
)
def test_a_run_that_is_worse_than_the_mean_is_told_to_train_less_if_it_fits_training_samples(
    train_loss, advice
):
    metrics = {"test": {"normalized_entropy": 1.2, "logloss": 0.75}}
    history = [{"train_loss": 0.9}, {"train_loss": train_loss}, {"test": metrics["test"]}]

    _, what, way_out = format_little_learned(metrics, "adagrad", history)

    assert what.endswith("worse than the mean label for all (normalized entropy above 1).")
    assert way_out.endswith(advice)
