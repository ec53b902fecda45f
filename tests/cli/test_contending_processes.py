"""Two processes that write to one place at a time: one does its work, and the place is whole."""

import json
import subprocess
import sys

from safetensors.torch import load_file

from recsys.datasets.store import Store
from recsys.train.run_files.run_folder import RunFolder
from recsys.train.trainer import train

# Imports take seconds, so both processes wait after them, and begin together.
START = """
import sys
import recsys.datasets.criteo.kaggle, recsys.train.exports.export, recsys.train.trainer
from recsys.cli import main

print(flush=True)
sys.stdin.readline()
sys.exit(main(sys.argv[1:]))
"""


def run_both(*commands):
    """The exit statuses of two commands that begin together, and what they say on stderr."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    errors = [process.communicate()[1] for process in processes]
    return [process.returncode for process in processes], errors


def test_of_two_that_prepare_one_store_one_is_refused(raw_line, tmp_path):
    raw, out = tmp_path / "raw.txt", tmp_path / "out" / "store"
    lines = (raw_line(str(n % 2), ["1"] * 13, [f"{n % 7:x}"] * 26) for n in range(2000))
    raw.write_text("\n".join(lines))
    command = ["prepare", "criteo-kaggle", raw, "--out", out]

    statuses, errors = run_both(command, command)

    assert sorted(statuses) == [0, 2], errors
    told = errors[statuses.index(2)]
    assert "exists already" in told or "was created by another program meanwhile" in told
    assert Store(out).num_samples == 2000
    assert list(out.parent.iterdir()) == [out]


def test_of_two_that_train_in_one_folder_one_is_refused(small_settings, tmp_path):
    folder = tmp_path / "run"
    command = ["train", "synthetic:criteo-kaggle", "--run", folder, *small_settings, "--set"]

    statuses, errors = run_both([*command, "seed=1"], [*command, "seed=2"])

    assert sorted(statuses) == [0, 2], errors
    told = errors[statuses.index(2)]
    assert "another `recsys train` is at work in" in told or "is not empty" in told
    seed = 1 + statuses.index(0)
    assert json.loads((folder / "run.json").read_text())["config"]["seed"] == seed
    assert RunFolder(folder).read_config().seed == seed


def test_two_that_export_one_file_leave_a_whole_one(small_config, tmp_path):
    train(small_config(), tmp_path / "run", show_progress=False)
    out = tmp_path / "out" / "model.safetensors"
    command = ["export", tmp_path / "run", "--to", "safetensors", "--out", out]

    statuses, errors = run_both(command, command)

    assert 0 in statuses, errors
    for status, told in zip(statuses, errors, strict=True):
        assert status == 0 or "exists already" in told or "is writing it" in told
    assert load_file(out).keys() == load_file(tmp_path / "run" / "model.safetensors").keys()
    assert list(out.parent.iterdir()) == [out]
