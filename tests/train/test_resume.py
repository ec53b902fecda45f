"""A run that was stopped and continued is the uninterrupted run, to the last bit."""

import json
import os
import signal
import time

import pytest
import torch

from tests.train.resumed_runs import (
    CASES,
    SETTINGS,
    TIERED,
    before_each,
    require_same_run,
    run,
    run_and_resume,
)

NOT_TRAINING = ("binding", "compile_seconds", "evaluate_seconds")
LONG = ("synthetic.num_samples=2100",)


@pytest.mark.slow(but=("file", "rates"))
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(small_config, tmp_path, stop_at, case):
    config = small_config(*SETTINGS, *CASES[case])
    num_steps = run(config, tmp_path / "whole")["throughput"]["num_steps"]

    stops = [(7, None), (13, signal.SIGINT), (num_steps // 2 + 6, None), (num_steps - 1, None)]
    record = run_and_resume(config, tmp_path / "run", stops, stop_at)

    require_same_run(tmp_path / "run", tmp_path / "whole")
    assert [each["step"] for each in record["resumed"]] == [
        4,
        13,
        (num_steps // 2 + 6) // 4 * 4,
        (num_steps - 1) // 4 * 4,
    ]


CHANGES = {
    "no budget": (TIERED, ("budget=",)),
    "a budget": (("batch_size=64",), ("budget=24KiB",)),
    "rows in files": (TIERED, ("cold_tier=file", "budget=32KiB")),
    "rows in memory": ((*TIERED, "cold_tier=file"), ("cold_tier=host",)),
    "another schedule": (TIERED, ("schedule=sequential",)),
    "checkpoints by time": (TIERED, ("checkpoint.every_seconds=0.02", "checkpoint.every_steps=0")),
}


@pytest.mark.slow(but=("rows in memory",))
@pytest.mark.parametrize("change", CHANGES)
def test_where_rows_lie_and_when_they_are_fetched_may_change(
    small_config, tmp_path, stop_at, change
):
    before, changed = CHANGES[change]
    config = small_config(*SETTINGS, *before)
    other = small_config(*SETTINGS, *before, *changed)
    run(config, tmp_path / "whole")

    stops = [(13, signal.SIGTERM), (22, None)]
    run_and_resume(config, tmp_path / "run", stops, stop_at, other, config)

    require_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("every", ["every_seconds=0.01", "every_seconds=0"])
def test_checkpoints_change_no_number_of_a_run(small_config, tmp_path, every):
    case = (*SETTINGS, *CASES["lookahead"])
    run(small_config(*case, "checkpoint.every_steps=0"), tmp_path / "without")

    record = run(small_config(*case, f"checkpoint.{every}"), tmp_path / "with")

    assert not (tmp_path / "without" / "checkpoints").exists()
    assert record["checkpoints"]["num_saved"] >= 2
    require_same_run(tmp_path / "with", tmp_path / "without", has_checkpoints=False)


def test_rows_that_are_copied_slowly_are_those_of_the_checkpoint(
    small_config, tmp_path, stop_at, monkeypatch
):
    config = small_config(*SETTINGS)
    run(config, tmp_path / "whole")

    writes = "recsys.train.checkpoint.format:PieceWriter.write_rows"
    before_each(monkeypatch, writes, lambda *_: time.sleep(0.05))  # longer than a step
    run_and_resume(config, tmp_path / "run", [(7, None)], stop_at)

    require_same_run(tmp_path / "run", tmp_path / "whole")


def test_the_record_of_a_resumed_run_covers_the_whole_run(small_config, tmp_path, stop_at):
    config = small_config(*SETTINGS, *TIERED, *LONG)
    whole = run(config, tmp_path / "whole")

    record = run_and_resume(config, tmp_path / "run", [(13, signal.SIGINT)], stop_at)

    assert record["resumed"] == [{"step": 13, "checkpoint": 4}]
    assert whole["resumed"] == []
    assert record["checkpoints"]["num_saved"] > 0
    assert record["throughput"]["num_samples"] == whole["throughput"]["num_samples"] == 3600
    stalls = record["stalls"]
    seconds = [value for key, value in stalls.items() if key not in NOT_TRAINING]
    assert sum(seconds) == pytest.approx(record["throughput"]["train_seconds"])
    assert stalls["checkpoint_seconds"] > 0
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["train_seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert record["tiers"]["fetched_bytes"] >= whole["tiers"]["fetched_bytes"]
    assert record["tiers"]["num_lookups"] == whole["tiers"]["num_lookups"]


def test_a_resumed_run_keeps_the_number_of_threads_that_was_chosen_for_it(
    small_config, tmp_path, stop_at, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    busy = iter([len(os.sched_getaffinity(0)), 0])
    monkeypatch.setattr("recsys._support.machine._busy_cores", lambda: next(busy))
    config = small_config(*SETTINGS, "num_threads=0")

    record = run_and_resume(config, tmp_path / "run", [(13, signal.SIGINT)], stop_at)

    chosen = record["threads"]
    assert chosen["num_threads"] == torch.get_num_threads() == 1
    assert chosen["chosen_by"] == "the run so far"


@pytest.mark.slow(but=("as it was",))
@pytest.mark.parametrize(
    "changed",
    [(), ("schedule=sequential",), ("schedule=hotline",)],
    ids=["as it was", "sequential", "hotline"],
)
def test_mini_batches_that_waited_at_a_stop_count_once(small_config, tmp_path, stop_at, changed):
    config = small_config(
        *SETTINGS, *TIERED, "schedule.lookahead.depth=3", "checkpoint.every_steps=1"
    )
    other = small_config(*SETTINGS, *TIERED, *(changed or ["schedule.lookahead.depth=3"]))
    whole = run(config, tmp_path / "whole")

    stops = [(5, None), (6, None), (13, signal.SIGINT)]
    record = run_and_resume(config, tmp_path / "run", stops, stop_at, config, other, other)

    assert [each["step"] for each in record["resumed"]] == [4, 5, 13]
    assert record["tiers"]["num_lookups"] == whole["tiers"]["num_lookups"]
