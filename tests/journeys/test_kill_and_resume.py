"""Journey 4: a run that is killed at any moment ends as one that is not."""

import os
import random
import signal
import time

import pytest

from tests import forks
from tests.journeys.journey import SYNTHETIC, history_of, options, record_of, recsys, require_equal

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")

RECIPE = options(*SYNTHETIC, "epochs=12", "checkpoint.every_steps=7", "checkpoint.every_seconds=0")
TRAIN = ("train", "synthetic:criteo-kaggle", *RECIPE)
# What changes with each attempt: the first begins the run, the last one ends it.
SAME = [[], [], [], []]
OTHERS = [
    [],
    ["budget=40KiB", "schedule.name=lookahead"],
    ["budget=30KiB", "cold_tier=file", "schedule.name=sequential"],
    ["budget=", "cold_tier=host", "schedule.name="],
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts."""
    run = tmp_path_factory.mktemp("whole") / "run"
    recsys(*TRAIN, "--run", run)
    return run


def size_of(file):
    return file.stat().st_size if file.exists() else 0


def kill_at(process, run, chance):
    """SIGKILL at a random moment after the process's first report."""
    history = run / "history.jsonl"
    before = size_of(history)
    while process.is_alive() and size_of(history) <= before:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.4))
    os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("attempts", "seed"), [(SAME, 0), (OTHERS, 1)], ids=["same", "others"])
def test_a_killed_run_ends_with_the_model_of_an_unkilled_one(whole, tmp_path, attempts, seed):
    run, chance, num_kills = tmp_path / "run", random.Random(seed), 0

    for changed in attempts[:-1]:
        attempt = forks.command(*TRAIN, *options(*changed), "--run", run, "--resume")
        kill_at(attempt.process, run, chance)
        attempt.end()
        num_kills += attempt.process.exitcode == -signal.SIGKILL
    recsys(*TRAIN, *options(*attempts[-1]), "--run", run, "--resume")

    assert num_kills == len(attempts) - 1
    require_equal(run, whole)
    assert record_of(run)["metrics"] == record_of(whole)["metrics"]
    steps, expected = ([line["step"] for line in history_of(folder)] for folder in (run, whole))
    assert steps == expected
