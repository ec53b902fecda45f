"""Runs that skip: what they record, and that a resumed one is the uninterrupted one."""

import json
import os
import re
import runpy
import signal
from dataclasses import asdict
from html import escape
from pathlib import Path

import pytest
from safetensors.torch import load_file

from recsys.embeddings import Staleness
from recsys.embeddings.staleness.windows import thin_windows
from recsys.errors import ConfigError
from recsys.pipeline import DropInput
from recsys.report.page import write_report
from recsys.report.summary import format_run, format_skipping

SHARED = runpy.run_path(str(Path(__file__).with_name("resumed_runs.py")))
history = SHARED["history"]
last_state = SHARED["last_state"]
require_same = SHARED["require_same"]
require_same_run = SHARED["require_same_run"]
run = SHARED["run"]
run_and_resume = SHARED["run_and_resume"]
stop_at = SHARED["stop_at"]

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
    "skip.share=0.4",
    "skip.staleness.window=34",
    "skip.staleness.min_updates=2",
    "skip.staleness.patience=1",
    "skip.staleness.count_every=1",
    "skip.staleness.max_rows=60",
)
GUARD = ("skip.guard.every=50", "skip.guard.steps=12")
POLICIES = {
    "observe": WINDOWS,
    "drop_input": (*WINDOWS, *GUARD),
    "freeze_rows": (*WINDOWS, *GUARD),
    "subsample": (*WINDOWS, *GUARD, "skip.seed=3"),
    "importance": ("skip.share=0.4", "skip.importance.warm_up=0", *GUARD),
    "random_drop": ("skip.share=0.4",),
    "paper": (
        "synthetic.table_sizes=[9, 7, 1, 900]",
        "budget=24KiB",
        "schedule.name=fae",
        "schedule.rate=100",
        "schedule.adaptive=false",
        "skip.paper.first_snapshot=8",
        "skip.paper.window_share=0.1",
        "skip.paper.sample_share=0.5",
        "skip.paper.highest_threshold=1.0",
    ),
}
WITHOUT_ROWS = ("importance", "random_drop", "paper")
TIERED = ("synthetic.table_sizes=[9, 7, 1, 900]", "budget=24KiB", "schedule.depth=3")


@pytest.fixture
def skip_config(small_config):
    def build(policy, *settings):
        return small_config(*SETTINGS, f"skip.policy={policy}", *POLICIES[policy], *settings)

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
    if policy not in WITHOUT_ROWS:
        assert expected["skipped"]["num_stale"] > 0


@pytest.mark.in_ci("freeze_rows")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_advice_for_skipping_that_takes_the_most_time_names_keys_of_its_policy(
    skip_config, small_config, tmp_path, policy
):
    record = run(skip_config(policy, "checkpoint.every_steps=0"), tmp_path / "run")
    record["stalls"] |= {"binding": "skip", "skip_seconds": 1e6, "predicted": []}

    advice = format_run(record, tmp_path / "run").splitlines()[-1]

    values = {"skip.staleness.window": 100, "skip.staleness.count_every": 8}
    named = re.findall(r"skip\.[a-z_.]+", advice)
    assert named == (["skip.policy"] if policy in WITHOUT_ROWS else list(values))
    for key in set(named) & set(values):
        small_config(f"skip.policy={policy}", f"{key}={values[key]}")


@pytest.mark.outside_ci
@pytest.mark.parametrize("policy", ["drop_input", "freeze_rows"])
def test_where_rows_lie_and_when_they_are_fetched_may_change(
    skip_config, tmp_path, stop_at, policy
):
    config = skip_config(policy, *TIERED)
    run(config, tmp_path / "whole")

    stops = [(45, signal.SIGTERM), (90, None)]
    others = ("budget=28KiB", "schedule.depth=6"), ("budget=", "schedule.depth=0")
    changed = [skip_config(policy, *TIERED, *other) for other in others]
    run_and_resume(config, tmp_path / "run", stops, stop_at, *changed)

    require_same_run(config, tmp_path / "run", tmp_path / "whole")


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
    add = SHARED["Progress"].add

    def add_and_note(progress, *step):
        add(progress, *step)
        rates.append((progress.num_samples, optimizers[0].param_groups[0]["lr"]))

    optimizers = []
    build = SHARED["build_model"]

    def build_and_note(*arguments):
        model, found = build(*arguments)
        optimizers[:] = found
        return model, found

    monkeypatch.setattr(SHARED["Progress"], "add", add_and_note)
    monkeypatch.setattr("recsys.train.ranks.processes.build_model", build_and_note)
    settings = ("epochs=1", "lr_schedule.decay=linear", "checkpoint.every_steps=0")
    run(skip_config("random_drop", *settings), tmp_path / "run")

    for seen, rate in rates:
        full_steps = 57 if seen == 1800 else seen // 32
        assert rate == pytest.approx(0.1 * (1 - full_steps / 57))


@pytest.mark.in_ci("skip.share")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("skip.share=0.3", r"cannot continue with skip\.share 0\.3: it was trained with 0\.4"),
        ("skip.guard.auc=0.1", r"cannot continue with skip\.guard\.auc 0\.1"),
        ("skip.staleness.min_updates=3", r"cannot continue with skip\.staleness\.min_updates 3"),
        ("skip.policy=freeze_rows", r"cannot continue with skip\.policy 'freeze_rows'"),
    ],
)
def test_what_is_skipped_may_not_change_on_resume(skip_config, tmp_path, stop_at, setting, message):
    stop_at((10, signal.SIGINT))
    run(skip_config("drop_input"), tmp_path / "run")

    with pytest.raises(ConfigError, match=message):
        run(skip_config("drop_input", setting), tmp_path / "run", resume=True)


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
    record = run(skip_config(policy, "checkpoint.every_steps=0"), tmp_path / "run")

    skipped = json.loads((tmp_path / "run" / "run.json").read_text())["skipped"]
    assert skipped["policy"]["name"] == policy
    (first, *lines) = format_skipping(record["skipped"])
    trained = record["throughput"]["num_trained_samples"]
    asked = "" if policy == "paper" else ", asked for 40.0%"
    num_lookups = (skipped["staleness"] or {"num_lookups": 0})["num_lookups"]
    share = skipped["num_lookups_left_out"] / max(1, num_lookups)
    assert (0.01 < share < 1) == (policy == "freeze_rows")
    assert first[20:] == {
        "observe": "nothing by observe, which only measures; all 5,400 samples were trained on",
        "freeze_rows": f"{share:.1%} of the updates of {4 * 5400:,} lookups; all 5,400 samples "
        "were trained on",
    }.get(
        policy,
        f"{1 - trained / 5400:.1%} of 5,400 samples by {policy}{asked}; {trained:,} trained on",
    )
    assert first in format_run(record, tmp_path / "run")
    heads = [line[:20].strip() for line in lines]
    tracked = ["stale samples", "stale rows", "thawed", "tracker"]
    assert heads == {
        "observe": tracked,
        "importance": ["guard", "predictor"],
        "random_drop": [],
        "paper": ["stale samples", "epoch 1", "epoch 2", "epoch 3"],
    }.get(policy, [*tracked, "guard"])
    page = write_report(tmp_path / "run").read_text()
    assert escape(first) in page
    assert '<img alt="skipping" src="data:image/png;base64,iVBOR' in page


@pytest.mark.outside_ci
def test_a_page_of_a_run_without_skipping_says_nothing_of_it(small_config, tmp_path):
    run(small_config(*SETTINGS, "epochs=1"), tmp_path / "run")

    assert "What was skipped" not in write_report(tmp_path / "run").read_text()
    assert format_skipping(None) == []


def test_decisions_of_the_guard_are_told_newest_last():
    reasons = [{"samples": "skipped", "measure": "auc", "value": 0.6, "estimate": 0.7}]
    guard = {
        "num_windows": 9,
        "num_decisions": 300,
        "decisions": [
            {
                **{"from_step": 100 * number, "paused_until": 100 * number},
                **{"factor": 0.5, "reasons": reasons},
            }
            for number in range(7)
        ],
    }
    skipped = {
        "policy": {"name": "drop_input"},
        **{"num_seen": 10, "num_skipped": 0, "share_skipped": 0.0, "num_checked": 0},
        **{"num_stale": 0, "staleness": {"windows": []}, "guard": guard},
    }

    _, rows, head, *decisions = format_skipping(skipped)

    assert rows == "stale rows          none: no window of skip.staleness has ended"
    assert head == "guard               9 windows, decisions: 300; the last 5:"
    assert len(decisions) == 5
    assert decisions[-1].strip() == (
        "from mini-batch 600 on, the run skips 50% of the share that was asked for: auc of skipped "
        "samples is 0.6000 (estimate 0.7000)"
    )


@pytest.mark.parametrize(
    ("num_windows", "estimates", "text"),
    [
        (0, {}, "no window, so nothing was compared; lower skip.guard.every"),
        (1, {"auc": 0.7}, "1 window, so nothing was compared; lower skip.guard.every"),
        (2, {}, "2 windows, but too few labels of 0 or of 1 to compare; raise skip.guard.steps"),
        (2, {"auc": 0.7}, "2 windows, and nothing was skipped between them"),
    ],
)
def test_a_guard_that_compared_nothing_says_so(num_windows, estimates, text):
    guard = {"num_windows": num_windows, "num_decisions": 0, "decisions": []}
    skipped = {
        "policy": {"name": "paper"},
        **{"num_seen": 10, "num_skipped": 0, "share_skipped": 0.0, "num_checked": 0},
        **{"num_stale": 0, "staleness": None, "paper": {"decisions": []}},
        "guard": {**guard, "estimates": {"all": estimates, "skipped": {}}},
    }

    assert format_skipping(skipped) == [
        "skipped             0.0% of 10 samples by paper; 10 trained on",
        f"guard               {text}",
        "threshold           none: no epoch had a sample to find one on",
    ]


@pytest.mark.parametrize(
    "left_out", [{"num_skipped": 1}, {"num_lookups_left_out": 1, "share_lookups_left_out": 0.5}]
)
def test_a_guard_that_found_no_harm_says_so(left_out):
    estimates = {"all": {"auc": 0.7}, "skipped": {}}
    skipped = {
        "policy": {"name": "importance"},
        **{"num_seen": 10, "num_skipped": 0, "share_skipped": 0.1, "num_checked": 0},
        **{"num_stale": 0, "staleness": None},
        "guard": {"num_windows": 2, "num_decisions": 0, "decisions": [], "estimates": estimates},
    }

    assert format_skipping(skipped | left_out)[-1] == (
        "guard               2 windows, all inside the bands"
    )


def test_a_long_run_tells_how_many_windows_it_had_and_no_share_beside_a_threshold():
    policy = DropInput(staleness=Staleness(window=50, threshold=0.01), guard=None)
    windows = []
    for number in range(1, 1001):
        window = {"step": 50 * number, "threshold": 0.01, "stale_rows": {"t": 3}, "num_thawed": 2}
        windows = thin_windows([*windows, window], 50)
    assert len(windows) < 300
    skipped = {
        "policy": {"name": "drop_input", **asdict(policy)},
        **{"num_seen": 10, "num_skipped": 1, "share_skipped": 0.1, "num_checked": 0},
        **{"num_stale": 0, "staleness": {"windows": windows, "memory_bytes": 1}, "guard": None},
    }

    first, _, thawed, _ = format_skipping(skipped)

    assert first == "skipped             10.0% of 10 samples by drop_input; 9 trained on"
    assert thawed == "thawed              2,000 rows, in 1,000 windows"
