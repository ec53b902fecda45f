"""Five kills of one run; `make crash` makes two hundred of ten runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CRASH = Path(__file__).with_name("crash.py")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_run_that_is_killed_five_times_ends_with_the_model_of_an_unkilled_one(tmp_path):
    file = tmp_path / "crash.json"

    subprocess.run(
        [sys.executable, CRASH, "--runs", "1", "--kills", "5", "--json", file],
        check=True,
        timeout=300,
    )

    [run] = json.loads(file.read_text())["runs"]
    assert run["difference"] == 0
    assert run["is_history_equal"]
    assert run["kills"] == 5
    assert run["after_first_checkpoint"] >= 4
