"""Two processes that write to one place at a time: one does its work, and the place is whole."""

import json
import sys

from safetensors.torch import load_file

from recsys.cli import main
from recsys.datasets.store import Store
from recsys.train.run_folder import RunFolder
from recsys.train.trainer import train
from tests.forks import Fork, server_of_forks


def run_both(*commands):
    """The exit statuses of two commands that begin together, and what they say on stderr."""
    together = server_of_forks().Barrier(len(commands))
    forks = [Fork(main_after, together, [*map(str, command)]) for command in commands]
    errors = [fork.end()[1] for fork in forks]
    return [fork.process.exitcode for fork in forks], errors


def main_after(barrier, words):
    barrier.wait()
    sys.exit(main(words))


def test_of_two_that_prepare_one_store_one_is_refused(raw_line, tmp_path):
    raw, out = tmp_path / "raw.txt", tmp_path / "out" / "store"
    lines = (raw_line(str(n % 2), ["1"] * 13, [f"{n % 7:x}"] * 26) for n in range(2000))
    raw.write_text("\n".join(lines) + "\n")
    command = ["prepare", "criteo-kaggle", raw, "--out", out]

    statuses, errors = run_both(command, command)

    assert sorted(statuses) == [0, 2], errors
    told = errors[statuses.index(2)]
    assert "exists already" in told
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
