"""Ablations whose cells are processes: interrupted, failing, killed."""

import json
import multiprocessing
import os
import signal
import time

import pytest

from tests import forks
from tests.commands import recsys, refused


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_cell_after_its_step_and_it_is_continued(
    small_settings, tmp_path, number
):
    file, folder = tmp_path / "ablation.toml", tmp_path / "out"
    file.write_text("[ablate]\nseeds = [0]\n[ablate.grid]\nsynthetic.num_samples = [2100, 35000]\n")
    small = [each for each in small_settings[1::2] if "num_samples" not in each]
    settings = [part for each in (*small, "num_threads=1") for part in ("--set", each)]
    short, long = (
        folder / "cells" / f"synthetic.num_samples={size}-seed0" for size in (2100, 35_000)
    )
    command = forks.command("ablate", file, "--run", folder, *settings)
    while not (long / "history.jsonl").is_file():
        assert command.process.is_alive(), command.end()
        time.sleep(0.02)

    if number == signal.SIGINT:
        os.killpg(command.process.pid, number)  # as a terminal does: all of the foreground
    else:
        os.kill(command.process.pid, number)
    _, said = command.end()

    assert "Traceback" not in said
    was_half_way = json.loads((long / "run.json").read_text())["status"] == "interrupted"
    if was_half_way:  # always, unless the machine stood still until the cell was done
        assert command.process.exitcode == 130
        assert any((long / "checkpoints").glob("0*.json"))
        cells = json.loads((folder / "ablate.json").read_text())["cells"]
        assert [cell["name"] for cell in cells] == [short.name]
        assert (folder / "report.html").is_file()
    recsys("ablate", file, "--run", folder, *settings)
    record = json.loads((folder / "ablate.json").read_text())
    assert record["status"] == "finished"
    found = record["cells"][1]["run"]
    assert found["throughput"]["num_samples"] == 30_000
    assert len(found["resumed"]) == was_half_way
    assert not (long / "checkpoints").exists()


def test_a_process_that_fails_or_dies_is_reported(small_settings, tmp_path, monkeypatch):
    file = tmp_path / "ablation.toml"
    file.write_text("[ablate]\nseeds = [0]\n[ablate.grid]\nsynthetic.num_samples = [8]\n")
    small = [each for each in small_settings[1::2] if "num_samples" not in each]
    settings = [part for each in small for part in ("--set", each)]
    process = multiprocessing.get_context("spawn").Process
    start = process.start

    def start_and_kill(started):
        start(started)
        started.kill()

    assert "validation part" in refused("ablate", file, "--run", tmp_path / "a", *settings)
    file.write_text(file.read_text().replace("[8]", "[2100]"))
    monkeypatch.setattr(process, "start", start_and_kill)
    assert "exit code -9" in refused("ablate", file, "--run", tmp_path / "b", *settings)
