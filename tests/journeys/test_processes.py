"""Journey 7: several processes, by `torchrun` and by TorchRec's `DistributedModelParallel`."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("torchrec")

from tests.commands import options, recsys
from tests.journeys import ranks
from tests.journeys.journey import SYNTHETIC, auc_of, num_lines, record_of, require_equal

SAVES = ("checkpoint.every_steps=9", "checkpoint.every_seconds=0")
# Adagrad divides a first gradient by its own size: one near zero, summed in another order, moves a
# number by the whole rate, up or down.
RECIPE = options(*SYNTHETIC, *SAVES, "optimizer.name=sgd", "epochs=4")
TRAIN = ("train", "synthetic:criteo-kaggle", *RECIPE)
BUDGET = options("budget=24KiB", "cold_tier=file")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two processes that `torchrun` starts."""
    run = tmp_path_factory.mktemp("whole") / "run"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--")
    ended = subprocess.run(
        [sys.executable, *torchrun, "recsys", *TRAIN, "--run", run, "--resume"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return run


def train_on_two(run, *more):
    ranks.on_ranks(ranks.command, [*TRAIN, "--run", str(run), "--resume", *more])


def require_close(run, other):
    """Require two models to be equal but for the order in which floats were summed."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, other))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_budget_on_each_process_changes_no_bit(whole, tmp_path):
    train_on_two(tmp_path / "run", *BUDGET)

    require_equal(tmp_path / "run", whole)
    assert auc_of(tmp_path / "run") == auc_of(whole)


def test_killed_processes_are_continued_by_as_many_or_by_one(whole, tmp_path):
    run = tmp_path / "run"
    started = ranks.start(ranks.command, [*TRAIN, "--run", str(run), *BUDGET])
    while all(rank.process.is_alive() for rank in started) and num_lines(run) < 40:
        time.sleep(0.002)  # until some checkpoints are complete
    for rank in started:
        os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in started:
        rank.end()
    assert [rank.process.exitcode for rank in started] == [-signal.SIGKILL] * 2
    by_one = shutil.copytree(run, tmp_path / "by_one")

    train_on_two(run)
    recsys(*TRAIN, "--run", by_one, "--resume")

    assert len(record_of(by_one)["resumed"]) == 1
    require_equal(run, whole)
    require_close(by_one, whole)


def test_a_run_of_one_process_is_continued_by_two(tmp_path):
    run = tmp_path / "run"
    recsys(*TRAIN, "--run", run, *options("epochs=2"))
    by_two = shutil.copytree(run, tmp_path / "by_two")

    recsys(*TRAIN, "--run", run, "--resume")
    train_on_two(by_two, *BUDGET)

    require_close(by_two, run)


def test_a_program_of_torchrec_trains_tables_in_two_tiers(tmp_path):
    tiers = {"budget": "12KiB", "cold_tier": "file", "cold_path": str(tmp_path / "rows")}
    for name, exchange, given in (
        ("resident", "rows", {}),
        ("tiered", "rows", tiers),
        ("pooled", "pooled", {}),
    ):
        ranks.on_ranks(ranks.sharded, tmp_path / name, exchange, given)

    for rank in range(ranks.WORLD):
        resident, tiered, pooled = (
            torch.load(tmp_path / f"{name}-{rank}") for name in ("resident", "tiered", "pooled")
        )
        assert 0 < tiered.pop("hits") < 1
        for key, value in tiered.items():
            assert torch.equal(value, resident[key]), key
            torch.testing.assert_close(pooled[key], value, rtol=1e-4, atol=1e-5, msg=key)
