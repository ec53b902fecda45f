"""Runs that skip: what they record, and that a resumed one is the uninterrupted one."""

import json
import os
import signal

import pytest
from safetensors.torch import load_file

from recsys.config import replace
from recsys.embeddings import StalenessTracker
from recsys.errors import BudgetTooSmall, ConfigError
from recsys.train.build import open_source
from tests.train.budgets import fast_memory_of
from tests.train.resumed_runs import (
    Progress,
    build_model,
    history,
    last_state,
    require_same,
    require_same_run,
    run,
    run_and_resume,
)

# 57 full steps an epoch; rows become stale after 2 windows of 34 steps.
SETTINGS = (
    "synthetic.table_sizes=[9, 7, 1, 12]",
    "batch_size=32",
    "epochs=3",
    "optimizer.name=adagrad",
    "checkpoint.every_steps=7",
    "checkpoint.every_seconds=0",
    "num_threads=1",
)
WINDOWS = (
    "share=0.4",
    "staleness.window=34",
    "staleness.min_updates=2",
    "staleness.patience=1",
    "staleness.count_every=1",
    "staleness.max_rows=60",
)
GUARD = ("guard.every=50", "guard.steps=12")
POLICIES = {
    "observe": WINDOWS,
    "drop_input": (*WINDOWS, *GUARD),
    "freeze_rows": (*WINDOWS, *GUARD),
    "subsample": (*WINDOWS, *GUARD, "seed=3"),
    "importance": ("share=0.4", "warm_up=0", *GUARD),
    "random_drop": ("share=0.4",),
    "paper": (
        "first_snapshot=8",
        "window_share=0.1",
        "sample_share=0.5",
        "highest_threshold=1.0",
    ),
}
NEEDS = {
    "paper": (
        "synthetic.table_sizes=[9, 7, 1, 900]",
        "budget=24KiB",
        "schedule.fae.rate=100",
        "schedule.fae.adaptive=false",
    ),
}
WITHOUT_ROWS = ("importance", "random_drop", "paper")
TIERED = ("synthetic.table_sizes=[9, 7, 1, 900]", "budget=24KiB", "schedule.lookahead.depth=3")


@pytest.fixture
def skip_config(small_config):
    def build(policy, *settings):
        keys = (f"skip.{policy}.{key}" for key in POLICIES[policy])
        return small_config(*SETTINGS, *NEEDS.get(policy, ()), *keys, *settings)

    return build


# With two tiers, a policy that leaves samples out, one that leaves rows out, and one by importance;
# `make stress` has all. `test_skipping.py` resumes pipelines with two tiers and every policy.
IN_TWO_TIERS = ("drop_input", "freeze_rows", "importance")
if os.environ.get("HYPOTHESIS_PROFILE") == "stress":
    IN_TWO_TIERS = tuple(policy for policy in POLICIES if policy != "paper")
CASES = {policy: (policy, ()) for policy in POLICIES} | {
    f"{policy}, two tiers": (policy, TIERED) for policy in IN_TWO_TIERS
}


@pytest.mark.in_ci("freeze_rows, two tiers")
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(skip_config, tmp_path, stop_at, case):
    policy, settings = CASES[case]
    config = skip_config(policy, *settings)
    expected = run(config, tmp_path / "whole")
    num_steps = expected["throughput"]["num_steps"]

    stops = [(5, None), (45, signal.SIGINT), (80, None), (num_steps - 1, None)]
    record = run_and_resume(config, tmp_path / "run", stops, stop_at)

    require_same_run(config, tmp_path / "run", tmp_path / "whole")
    require_same(record["skipped"], expected["skipped"])
    states = [last_state(config, tmp_path / name)[1]["pipeline"] for name in ("run", "whole")]
    require_same(*(state["skipping"] for state in states))
    has_skipped = expected["skipped"]["num_skipped"] > 0
    assert has_skipped == (policy in ("drop_input", "subsample", *WITHOUT_ROWS))


@pytest.mark.outside_ci
@pytest.mark.parametrize("policy", ["drop_input", "freeze_rows"])
def test_where_rows_lie_and_when_they_are_fetched_may_change(
    skip_config, tmp_path, stop_at, policy
):
    config = skip_config(policy, *TIERED)
    run(config, tmp_path / "whole")

    stops = [(45, signal.SIGTERM), (90, None)]
    others = ("budget=28KiB", "schedule.lookahead.depth=6"), ("budget=", "schedule=")
    changed = [skip_config(policy, *TIERED, *other) for other in others]
    run_and_resume(config, tmp_path / "run", stops, stop_at, *changed)

    require_same_run(config, tmp_path / "run", tmp_path / "whole")


def test_the_budget_pays_for_the_tracker(skip_config):
    config = skip_config("drop_input", *TIERED)
    model, _ = build_model(config, open_source(config))
    tracker = StalenessTracker(model, config.skip.staleness.settings())

    assert 0 <= 24 * 1024 - fast_memory_of(model, config) - tracker.num_bytes < 100
    with pytest.raises(BudgetTooSmall, match="max_rows"):
        build_model(replace(config, budget="2KiB"), open_source(config))


PLANNED = (
    "lr_schedule.warmup_steps=9",
    "lr_schedule.decay=cosine",
    "eval.every_steps=10",
    "checkpoint.every_steps=0",
)


def test_a_run_that_skips_nothing_is_the_run_without_skipping(skip_config, small_config, tmp_path):
    plain = run(small_config(*SETTINGS, *PLANNED), tmp_path / "plain")
    record = run(skip_config("observe", *PLANNED), tmp_path / "observe")

    assert plain["skipped"] is None
    assert "num_trained_samples" not in plain["throughput"]
    observed = history(tmp_path / "observe")
    for line in observed:
        assert line.pop("num_trained_samples") == line["num_samples"]
    assert observed == history(tmp_path / "plain")
    assert record["metrics"] == plain["metrics"]
    counts = {key: plain["throughput"][key] for key in ("num_samples", "num_steps")}
    assert counts.items() <= record["throughput"].items()


def test_what_is_planned_by_steps_goes_by_the_samples_seen(skip_config, tmp_path):
    record = run(skip_config("random_drop", *PLANNED), tmp_path / "run")

    skipped, throughput = record["skipped"], record["throughput"]
    assert record["status"] == "finished"
    assert throughput["num_samples"] == skipped["num_seen"] == 5400
    assert throughput["num_trained_samples"] == 5400 - skipped["num_skipped"]
    assert 0.37 < skipped["share_skipped"] < 0.43
    assert throughput["num_steps"] < 0.65 * 171
    lines = history(tmp_path / "run")
    evaluated = [line["num_samples"] for line in lines if "validation" in line]
    # An evaluation follows the step that reaches or passes each tenth full step.
    assert [seen // 320 for seen in evaluated[:5]] == [1, 2, 3, 4, 5]
    assert evaluated[-1] == 5400
    reports = [line for line in lines if "train_loss" in line]
    assert 50 < len(reports) <= 100
    assert reports[-1]["num_trained_samples"] == throughput["num_trained_samples"]


def test_learning_rates_go_by_the_samples_seen(skip_config, small_config, tmp_path, monkeypatch):
    rates = []
    add = Progress.add

    def add_and_note(progress, *step):
        rates.append((progress.num_samples, optimizers[0].param_groups[0]["lr"]))
        add(progress, *step)

    optimizers = []
    build = build_model

    def build_and_note(*arguments):
        model, found = build(*arguments)
        optimizers[:] = found
        return model, found

    monkeypatch.setattr(Progress, "add", add_and_note)
    monkeypatch.setattr("recsys.train.trainer.build_model", build_and_note)
    settings = ("epochs=1", "lr_schedule.decay=linear", "checkpoint.every_steps=0")
    run(skip_config("random_drop", *settings), tmp_path / "run")

    for seen, rate in rates:
        full_steps = 57 if seen == 1800 else seen // 32
        assert rate == pytest.approx(0.1 * (1 - full_steps / 57))


@pytest.mark.in_ci("share")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("share=0.3", r"drop_input\.share 0\.3: it was trained with 0\.4"),
        ("guard.logloss=0.1", r"cannot continue with skip\.drop_input\.guard\.logloss 0\.1"),
        ("staleness.min_updates=3", r"skip\.drop_input\.staleness\.min_updates 3"),
    ],
)
def test_what_is_skipped_may_not_change_on_resume(skip_config, tmp_path, stop_at, setting, message):
    stop_at((10, signal.SIGINT))
    run(skip_config("drop_input"), tmp_path / "run")

    config = skip_config("drop_input", f"skip.drop_input.{setting}")
    with pytest.raises(ConfigError, match=message):
        run(config, tmp_path / "run", resume=True)


@pytest.mark.outside_ci
def test_a_run_that_skips_is_continued_for_more_epochs(skip_config, tmp_path):
    run(skip_config("drop_input", "epochs=2"), tmp_path / "run")

    record = run(skip_config("drop_input"), tmp_path / "run", resume=True)

    assert record["skipped"]["num_seen"] == 5400
    expected = run(skip_config("drop_input"), tmp_path / "whole")
    require_same(record["skipped"], expected["skipped"])
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("run", "whole")]
    require_same(*models)


@pytest.mark.in_ci("freeze_rows")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_tells_what_it_has_skipped(skip_config, tmp_path, policy):
    run(skip_config(policy, "checkpoint.every_steps=0"), tmp_path / "run")

    skipped = json.loads((tmp_path / "run" / "run.json").read_text())["skipped"]
    assert skipped["policy"]["name"] == policy
    assert (skipped["share_lookups_left_out"] > 0.01) == (policy == "freeze_rows")
