"""Journey 6: variations and seeds, killed half-way, to one table and one page."""

import json
import os
import signal
import time

import pytest

from tests import forks
from tests.commands import options, recsys
from tests.journeys.journey import SYNTHETIC, auc_of

CONFIG = """
[ablate]
seeds = [0, 1]

[[ablate.variations]]
name = "resident"

[[ablate.variations]]
name = "tiered"
budget = "40KiB"
"""
CELLS = {(name, seed) for name in ("resident", "tiered") for seed in (0, 1)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
def test_a_killed_ablation_goes_on_to_one_table_and_one_page(tmp_path):
    config, folder, run = tmp_path / "ablate.toml", tmp_path / "ablation", tmp_path / "run"
    config.write_text(CONFIG)
    settings = options(*SYNTHETIC, "epochs=2")
    words = ("ablate", config, "--run", folder, *settings)

    first = forks.command(*words)
    while first.process.is_alive() and not finished(folder):
        time.sleep(0.01)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.end()
    before = {file: file.stat().st_mtime_ns for file in finished(folder)}
    second = forks.command(*words)
    printed, errors = second.end()
    recsys("train", "synthetic:criteo-kaggle", "--run", run, *settings, "--set", "seed=1")

    assert (first.process.exitcode, second.process.exitcode) == (-signal.SIGKILL, 0), errors
    cells = json.loads((folder / "ablate.json").read_text())["cells"]
    found = {(cell["variation"], cell["seed"]): cell["run"]["metrics"]["test"] for cell in cells}
    assert found.keys() == CELLS
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert len(before) < len(CELLS)
    assert found["resident", 1]["auc"] == auc_of(run)
    for seed in (0, 1):
        assert found["tiered", seed] == found["resident", seed]
    page = (folder / "report.html").read_text()
    for name, _ in CELLS:
        assert name in printed
        assert name in page


def finished(folder):
    """The records of the cells that have ended."""
    return list(folder.glob("cells/*/run.json"))
