"""Ablations whose cells are processes: killed, interrupted, failing."""

import json
import multiprocessing
import os
import signal
import time

import pytest

from recsys.ablate import _train_apart, ablate, load_ablation
from recsys.errors import ConfigError
from recsys.train.trainer import train
from tests import forks

pytestmark = pytest.mark.slow


@pytest.fixture
def start_ablation(tmp_path, small_settings):
    """Starts a long cell, of an ablation whose short one is done; waits until it trains."""
    file, folder = tmp_path / "ablation.toml", tmp_path / "out"
    settings = [setting for setting in small_settings[1::2] if "num_samples" not in setting]
    settings.append("num_threads=1")

    def start(num_samples):
        file.write_text(
            f"[ablate]\nseeds = [0]\n[ablate.grid]\nsynthetic.num_samples = [2100, {num_samples}]\n"
        )

        def run_the_short_one(config, run_dir, **options):
            if config.synthetic.num_samples == num_samples:
                raise KeyboardInterrupt
            return train(config, run_dir, **options)

        config = load_ablation(file, settings)
        ablate(config, folder, show_progress=False, run_cell=run_the_short_one)
        options = [part for setting in settings for part in ("--set", setting)]
        command = forks.command("ablate", file, "--run", folder, *options)
        history = folder / "cells" / f"synthetic.num_samples={num_samples}-seed0" / "history.jsonl"
        give_up = time.monotonic() + 300
        while not history.is_file():
            assert command.process.is_alive(), command.end()
            assert time.monotonic() < give_up
            time.sleep(0.02)
        return command, load_ablation(file, settings), folder

    return start


def test_an_ablation_that_is_killed_goes_on_where_it_was(start_ablation):
    command, config, folder = start_ablation(35_000)
    short, long = (folder / "cells" / cell.name for cell in config.cells)

    command.process.kill()
    command.end()
    was_half_way = not (long / "run.json").exists()
    before = (short / "run.json").read_bytes(), (short / "run.json").stat().st_mtime_ns
    ran = []

    def count_and_train(config, run_dir, *, show_progress):
        ran.append(run_dir)
        return train(config, run_dir, show_progress=show_progress)

    record = ablate(config, folder, show_progress=False, run_cell=count_and_train)

    assert ran == ([long] if was_half_way else [])
    assert ((short / "run.json").read_bytes(), (short / "run.json").stat().st_mtime_ns) == before
    assert record["status"] == "finished"
    assert [cell["run"]["throughput"]["num_samples"] for cell in record["cells"]] == [
        1800,
        30_000,
    ]


@pytest.mark.outside_ci
def test_ctrl_c_at_a_terminal_ends_the_cell_behind_its_step_and_tabulates_the_others(
    start_ablation,
):
    command, config, folder = start_ablation(300_000)  # more than are trained before the signal
    short, long = (folder / "cells" / cell.name for cell in config.cells)

    os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does: all of the foreground
    _, said = command.end()

    assert command.process.exitcode == 130, said
    assert "Traceback" not in said
    assert json.loads((long / "run.json").read_text())["status"] == "interrupted"
    record = json.loads((folder / "ablate.json").read_text())
    assert [cell["name"] for cell in record["cells"]] == [short.name]
    assert (folder / "report.html").is_file()


def test_sigterm_ends_a_cell_with_a_checkpoint_from_which_it_continues(start_ablation):
    command, config, folder = start_ablation(35_000)
    _, long = (folder / "cells" / cell.name for cell in config.cells)

    for _ in range(2):
        command.process.terminate()
    _, said = command.end()
    was_half_way = json.loads((long / "run.json").read_text())["status"] == "interrupted"
    has_checkpoint = (long / "checkpoints" / "LAST").exists()
    resumed = []

    def train_here(config, run_dir, *, resume=False, show_progress):
        resumed.append(resume)
        return train(config, run_dir, resume=resume, show_progress=show_progress)

    record = ablate(config, folder, show_progress=False, run_cell=train_here)

    assert "Traceback" not in said
    if was_half_way:  # always, unless the machine stood still until the cell was done
        assert command.process.exitcode == 130
        assert has_checkpoint
        assert resumed == [True]
        assert len(record["cells"][1]["run"]["resumed"]) == 1
    assert record["status"] == "finished"
    assert record["cells"][1]["run"]["throughput"]["num_samples"] == 30_000
    assert not (long / "checkpoints").exists()


def test_an_error_of_the_process_is_raised_here(small_config, tmp_path):
    config = small_config("synthetic.num_samples=8")

    with pytest.raises(ConfigError, match="validation part is empty: of 8 samples, train"):
        _train_apart(config, tmp_path / "run", show_progress=False)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_process_that_dies_is_told_of(small_config, tmp_path, monkeypatch):
    config = small_config()
    start = multiprocessing.get_context("spawn").Process.start

    def start_and_kill(process):
        start(process)
        process.kill()

    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", start_and_kill)

    with pytest.raises(ChildProcessError, match=r"with exit code -9: .*lack of memory"):
        _train_apart(config, tmp_path / "run", show_progress=False)
