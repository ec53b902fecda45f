"""Runs that skip, and FAE's schedule: what they record; a resumed one is the uninterrupted one."""

import os
import signal
from itertools import pairwise

import pytest

from recsys.errors import BudgetTooSmall, ConfigError
from tests.train.resumed_runs import (
    before_each,
    history,
    last_state,
    load_model,
    require_equal,
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
    "subsample": (*WINDOWS, *GUARD),
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
TIERED = ("synthetic.table_sizes=[9, 7, 1, 900]", "budget=24KiB", "schedule.lookahead.depth=3")
FAE = ("schedule=fae", "budget='5000'", "batch_size=16", "num_threads=1")


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


@pytest.mark.slow(but=("freeze_rows, two tiers",))
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(skip_config, tmp_path, stop_at, case):
    policy, settings = CASES[case]
    config = skip_config(policy, *settings)
    expected = run(config, tmp_path / "whole")
    num_steps = expected["throughput"]["num_steps"]

    stops = [(5, None), (45, signal.SIGINT), (80, None), (num_steps - 1, None)]
    record = run_and_resume(config, tmp_path / "run", stops, stop_at)

    require_same_run(tmp_path / "run", tmp_path / "whole")
    require_equal(record["skipped"], expected["skipped"])
    states = [last_state(tmp_path / name)[-1]["pipeline"] for name in ("run", "whole")]
    require_equal(*(state["skipping"] for state in states))
    skipped = expected["skipped"]
    assert skipped["policy"]["name"] == policy
    assert (skipped["num_skipped"] > 0) == (policy not in ("observe", "freeze_rows"))
    assert (skipped["share_lookups_left_out"] > 0.01) == (policy == "freeze_rows")


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
    observed = history(tmp_path / "observe")
    for line in observed:
        assert line.pop("num_trained_samples") == line["num_samples"]
    assert observed == history(tmp_path / "plain")
    assert record["metrics"] == plain["metrics"]


def test_what_is_planned_by_steps_goes_by_the_samples_seen(skip_config, tmp_path):
    record = run(skip_config("random_drop", *PLANNED), tmp_path / "run")

    skipped, throughput = record["skipped"], record["throughput"]
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


def test_learning_rates_go_by_the_samples_seen(skip_config, tmp_path, monkeypatch):
    found = []

    def note(trainer):
        found.append((trainer.progress.num_samples, trainer.optimizers[0].param_groups[0]["lr"]))

    before_each(monkeypatch, "recsys.train.trainer:Trainer._set_rates", note)
    settings = ("epochs=1", "lr_schedule.decay=linear", "checkpoint.every_steps=0")
    run(skip_config("random_drop", *settings), tmp_path / "run")

    for (seen, _), (_, rate) in pairwise(found):
        assert rate == pytest.approx(0.1 * (1 - (57 if seen == 1800 else seen // 32) / 57))


@pytest.mark.parametrize(
    ("setting", "error", "name"),
    [("budget=5KiB", BudgetTooSmall, "budget"), ("plan=plan.npz", ConfigError, "plan")],
)
def test_a_budget_that_is_too_small_and_a_plan_are_refused_by_the_published_policy(
    skip_config, tmp_path, setting, error, name
):
    with pytest.raises(error, match=name):
        run(skip_config("paper", setting), tmp_path / "run")


def test_the_published_policy_records_its_decisions(skip_config, tmp_path):
    skipped = run(skip_config("paper", "epochs=2"), tmp_path / "run")["skipped"]

    first, second = skipped["paper"]["decisions"]
    assert (first["epoch"], second["epoch"]) == (0, 1)
    assert sum(first["num_stale_rows"].values()) <= first["num_hot_rows"]


@pytest.mark.parametrize(
    ("settings", "is_adaptive"),
    [(("schedule.fae.rate=8", "epochs=4"), True), ((), False)],
)
def test_the_validation_loss_steers_the_rate_of_fae_unless_it_is_fixed(
    small_config, tmp_path, settings, is_adaptive
):
    adaptive = f"schedule.fae.adaptive={str(is_adaptive).lower()}"
    found = run(small_config(*FAE, *settings, adaptive), tmp_path / "run")["schedule"]

    assert (found["name"], 0 < found["hot_sample_share"] < 1) == ("fae", True)
    if is_adaptive:
        assert found["num_swaps"] > 3
        assert found["rate"] != 8
    else:
        assert (found["rate"], found["num_swaps"]) == (50.0, 0)


def test_where_all_rows_fit_all_samples_are_hot(small_config, tmp_path):
    with pytest.warns(UserWarning, match="no cold tier is needed"):
        record = run(small_config(*FAE, "budget=1MiB"), tmp_path / "run")

    assert record["schedule"]["hot_sample_share"] == 1
    assert load_model(tmp_path / "run")
