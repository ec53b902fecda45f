"""An ablation that is killed half-way repeats nothing when it is run again."""

import os
import signal
import time

import pytest

from recsys.ablate import ablate, load_ablation
from recsys.train.checkpoint import newest
from recsys.train.run_folder import RunFolder
from recsys.train.trainer import train
from tests import forks

TEXT = """
[ablate]
seeds = [0]

[[ablate.variations]]
name = "first"

[[ablate.variations]]
name = "long"
batch_size = 8
epochs = 2
checkpoint.every_steps = 100
"""


@pytest.mark.outside_ci
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_killed_ablation_leaves_finished_cells_alone_and_resumes_the_half_one(
    small_settings, tmp_path
):
    (tmp_path / "ablation.toml").write_text(TEXT)
    out = tmp_path / "out"
    half = RunFolder(out / "cells" / "long-seed0")
    settings = [*small_settings, "--set", "num_threads=1"]

    config = load_ablation(tmp_path / "ablation.toml", settings[1::2])

    def run_the_first(config, run_dir, **options):
        if run_dir == half.path:
            raise KeyboardInterrupt
        return train(config, run_dir, **options)

    ablate(config, out, show_progress=False, run_cell=run_the_first)
    command = forks.command("ablate", tmp_path / "ablation.toml", *settings, "--run", out)
    try:
        while newest(half.checkpoints_folder) is None:
            assert command.process.is_alive()
            time.sleep(0.02)
    finally:
        os.killpg(command.process.pid, signal.SIGKILL)
    command.end()  # with the process that trains
    assert command.process.exitcode == -signal.SIGKILL

    assert not half.record_file.exists()
    finished = out / "cells" / "first-seed0"
    before = contents_of(finished)
    tables = {line.split(",")[0] for line in (out / "table.csv").read_text().splitlines()[1:]}
    assert tables == {"first"}  # what was done when it was killed
    ran = []

    def count_and_train(config, run_dir, **options):
        ran.append((run_dir.name, options.get("resume", False)))
        return train(config, run_dir, **options)

    record = ablate(config, out, show_progress=False, run_cell=count_and_train)
    expected = train(config.cells[1].config, tmp_path / "unkilled", show_progress=False)

    assert ran == [("long-seed0", True)]
    assert contents_of(finished) == before
    assert record["status"] == "finished"
    run = record["cells"][1]["run"]
    assert len(run["resumed"]) == 1
    assert run["throughput"]["num_samples"] == 2 * 1800
    assert run["metrics"] == expected["metrics"]


def contents_of(folder):
    """Every file: its path, its inode, when it was written, and its bytes."""
    return {
        file: (file.stat().st_ino, file.stat().st_mtime_ns, file.read_bytes())
        for file in folder.rglob("*")
        if file.is_file()
    }
