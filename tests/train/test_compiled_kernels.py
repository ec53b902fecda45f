"""No kernel of skipping is compiled, or loaded, while the clock of a run is on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = ("synthetic.table_sizes=[9, 7, 1, 12]", "batch_size=32", "optimizer.name=adagrad")
POLICIES = {
    "freeze_rows": (
        "skip.share=0.4",
        "skip.staleness.window=34",
        "skip.staleness.min_updates=2",
        "skip.staleness.patience=1",
        "skip.staleness.count_every=1",
    ),
    "importance": ("skip.share=0.4", "skip.importance.warm_up=0"),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_step_compiles_no_kernel(small_settings, tmp_path, policy):
    settings = (*small_settings[1::2], *SETTINGS, "epochs=2", f"skip.policy={policy}")
    program = Path(__file__).with_name("compiled_kernels.py")
    command = [sys.executable, "-W", "ignore", program, tmp_path / "run"]
    found = subprocess.run(
        [*command, *settings, *POLICIES[policy]],
        check=True,
        capture_output=True,
        text=True,
    )

    assert json.loads(found.stdout.splitlines()[-1]) == []
    skipped = json.loads((tmp_path / "run" / "run.json").read_text())["skipped"]
    assert skipped["num_skipped"] + skipped["num_lookups_left_out"] > 0
