"""`recsys train` with Slipstream's published policy."""

import signal

import pytest

from recsys.errors import BudgetTooSmall, ConfigError
from recsys.pipeline.model_tables import ModelTables
from recsys.pipeline.skip.paper import PaperClassifier
from recsys.train.build import build_model, choose_plan, open_source
from tests.train import resumed_runs
from tests.train.budgets import fast_memory_of

SETTINGS = (
    *resumed_runs.SETTINGS,
    "synthetic.num_samples=2100",
    "batch_size=32",
    "budget=32KiB",
    "optimizer.name=sgd",
    "schedule.fae.rate=100",
    "schedule.fae.adaptive=false",
    "skip.paper.first_snapshot=5",
    "skip.paper.window_share=0.2",
    "skip.paper.sample_share=0.1",
    "skip.paper.tolerance=0.6",
)


def test_a_run_says_what_it_has_dropped_and_why(small_config, tmp_path):
    record = resumed_runs.run(small_config(*SETTINGS), tmp_path / "run")

    skipped = record["skipped"]
    assert record["schedule"]["name"] == "fae"
    assert 0 < record["schedule"]["hot_sample_share"] < 1
    assert skipped["num_seen"] == 2 * 1800
    assert 0 < skipped["num_skipped"] < skipped["num_seen"]
    first, second = skipped["paper"]["decisions"]
    assert (first["epoch"], second["epoch"]) == (0, 1)
    assert first["threshold"] > 0
    assert sum(first["num_stale_rows"].values()) <= first["num_hot_rows"]


@pytest.mark.outside_ci
def test_a_run_continues_as_if_it_had_not_stopped(small_config, tmp_path, stop_at):
    config = small_config(*SETTINGS)
    resumed_runs.run(config, tmp_path / "whole")

    # In the window and after the decision, in both epochs.
    stops = [(46, signal.SIGINT), (52, None), (100, signal.SIGINT), (107, None)]
    resumed_runs.run_and_resume(config, tmp_path / "run", stops, stop_at)

    resumed_runs.require_same_run(config, tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("budget", [32768, 40960])
def test_the_budget_pays_for_the_snapshot(small_config, optimizer, budget):
    config = small_config(*SETTINGS, f"budget='{budget}'", f"optimizer.name={optimizer}")
    source = open_source(config)
    plan = choose_plan(config, source)
    model, _ = build_model(config, source, plan)
    tables = ModelTables(model, None)
    classifier = PaperClassifier(config.skip.settings(0), model, tables, "skip", 0)

    of_tables = fast_memory_of(model, config)

    assert 0 < plan.num_pinned == len(classifier._hot_rows)
    assert of_tables + classifier.num_bytes <= budget


@pytest.mark.parametrize(
    ("setting", "error", "name"),
    [("budget=16KiB", BudgetTooSmall, "budget"), ("plan=plan.npz", ConfigError, "plan")],
)
def test_a_budget_that_is_too_small_and_a_plan_are_refused(small_config, setting, error, name):
    config = small_config(*SETTINGS, setting)

    with pytest.raises(error, match=name):
        choose_plan(config, open_source(config))
