"""Journey 4: a run that is killed at any moment ends as one that is not."""

import os
import random
import signal
import time

import pytest

from tests import forks
from tests.commands import options, recsys
from tests.journeys.journey import SYNTHETIC, history_of, num_lines, record_of, require_equal

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")

RECIPE = options(*SYNTHETIC, "epochs=7", "checkpoint.every_steps=7", "checkpoint.every_seconds=0")
TRAIN = ("train", "synthetic:criteo-kaggle", *RECIPE)
# What changes with each attempt: the first begins the run, the last one ends it.
SAME = [[], [], [], []]
OTHERS = [
    [],
    ["budget=40KiB", "schedule=lookahead"],
    ["budget=30KiB", "cold_tier=file", "schedule=sequential"],
    ["budget=", "cold_tier=host", "schedule="],
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts."""
    run = tmp_path_factory.mktemp("whole") / "run"
    recsys(*TRAIN, "--run", run)
    return run


def kill_after(process, run, line, seconds):
    """SIGKILL, so many seconds after a run has written this line of its history."""
    while process.is_alive() and num_lines(run) < line:
        time.sleep(0.001)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("attempts", "seed"), [(SAME, 0), (OTHERS, 1)], ids=["same", "others"])
def test_a_killed_run_ends_with_the_model_of_an_unkilled_one(whole, tmp_path, attempts, seed):
    run, chance = tmp_path / "run", random.Random(seed)
    lines = [begin + chance.randrange(15) for begin in (1, 31, 61)]

    for changed, line in zip(attempts, lines, strict=False):
        attempt = forks.command(*TRAIN, *options(*changed), "--run", run, "--resume")
        kill_after(attempt.process, run, line, chance.uniform(0, 0.02))
        attempt.end()
        assert attempt.process.exitcode == -signal.SIGKILL
    recsys(*TRAIN, *options(*attempts[-1]), "--run", run, "--resume")

    require_equal(run, whole)
    assert record_of(run)["metrics"] == record_of(whole)["metrics"]
    steps, expected = ([line["step"] for line in history_of(folder)] for folder in (run, whole))
    assert steps == expected
