"""A few kills of one run; `make crash` makes two hundred of ten runs."""

import json
import os

import pytest

from tests.forks import Fork
from tests.train.crash import main

IS_STRESS = os.environ.get("HYPOTHESIS_PROFILE") == "stress"
NUM_KILLS, NUM_SAMPLES = (5, 60_000) if IS_STRESS else (2, 12_000)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_run_that_is_killed_more_than_once_ends_with_the_model_of_an_unkilled_one(tmp_path):
    file = tmp_path / "crash.json"

    words = [
        *("--runs", "1", "--kills", str(NUM_KILLS)),
        *("--samples", str(NUM_SAMPLES), "--json", str(file)),
    ]
    fork = Fork(main, words)
    _, said = fork.end()

    assert fork.process.exitcode == 0, said
    [run] = json.loads(file.read_text())["runs"]
    assert run["difference"] == 0
    assert run["is_history_equal"]
    assert run["kills"] == NUM_KILLS
    assert run["after_first_checkpoint"] >= NUM_KILLS - 1
