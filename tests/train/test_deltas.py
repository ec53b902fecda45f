"""Whole models and deltas of checkpoints; random ones are in `checkpoint/machine.py`."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from recsys import load_checkpoint
from tests.commands import recsys, refused
from tests.train.checkpoint.trainings import Training, require_equal, save_and_wait

TABLE = "small.embedding_bags.t0.weight"
WHOLE = ("--to", "safetensors", "--checkpoint")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with five checkpoints, the model of each, the file of the first, and all deltas.

    All tests share them: a test that saves more checkpoints does so in a copy.
    """
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.toml").touch()
    files, models, training = folder.with_name("files"), {}, Training()
    with training.saved(folder / "checkpoints") as checkpoints:
        for number in range(1, 6):
            for step in range(2):
                training.step(number * 10 + step, most=5 * number)
            save_and_wait(checkpoints)
            models[number], _ = training.snapshot()
            what = ("--since", number - 1) if number > 1 else (*WHOLE, "last")
            recsys("export", folder, *what, "--out", files / str(number))
    return SimpleNamespace(folder=folder, models=models, files=files)


def test_a_delta_has_changed_rows_only_and_says_from_where_to_where(run):
    with safe_open(run.files / "3", "pt") as opened:
        metadata = opened.metadata()
        rows, values = opened.get_tensor(f"{TABLE}.rows"), opened.get_tensor(TABLE)

    assert (metadata["since"], metadata["checkpoint"]) == ("2", "3")
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert rows.max() < 15
    assert torch.equal(values, run.models[3][TABLE][rows])


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ([1, 3], "3: "),
        ([1, 2, 4], "4: "),
        ([1, 3, 2], "3: "),
        ([2, 3], "2: "),
    ],
)
def test_deltas_that_do_not_follow_each_other_are_refused_by_name(run, tmp_path, numbers, named):
    files = [run.files / str(number) for number in numbers]

    assert named in refused("apply", *files, "--out", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_deltas_of_another_training_and_of_one_that_went_back_are_refused(run, tmp_path):
    """Checkpoint 5 is given up, and the run goes on from 4."""
    folder = shutil.copytree(run.folder, tmp_path / "run")
    again, other = Training(seed=1), tmp_path / "other"
    load_checkpoint(folder / "checkpoints", **again.parts, number=4)
    with again.saved(folder / "checkpoints", after=4) as checkpoints:
        again.step(90)
        checkpoints.save()
    with Training(seed=1).saved(other / "checkpoints") as checkpoints:
        save_and_wait(checkpoints)
        save_and_wait(checkpoints)
    (other / "config.toml").touch()
    to_4 = [run.files / str(number) for number in (1, 2, 3, 4)]

    for since in (5, 9):
        error = refused("export", folder, "--since", since, "--out", tmp_path / "none")
        assert f"checkpoint {since}" in error
    recsys("export", folder, "--since", 4, "--out", tmp_path / "since 4")
    recsys("export", other, "--since", 1, "--out", tmp_path / "of other")
    recsys("apply", *to_4, tmp_path / "since 4", "--out", tmp_path / "six")

    require_equal(load_file(tmp_path / "six"), again.snapshot()[0])
    after_5 = (*to_4, run.files / "5", tmp_path / "since 4")
    assert "since 4: " in refused("apply", *after_5, "--out", tmp_path / "none")
    of_other = (run.files / "1", tmp_path / "of other")
    assert "of other: " in refused("apply", *of_other, "--out", tmp_path / "none")


def test_files_of_others_are_refused_by_name(run, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "plain")
    (tmp_path / "text").write_text("hello")
    for name, header in (
        ("numbers", {"__metadata__": {"checkpoint": 3}}),
        ("below 0", {"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}),
    ):
        text = json.dumps(header).encode().ljust(200)
        (tmp_path / name).write_bytes((200).to_bytes(8, "little") + text + bytes(4))

    for name in ("plain", "text", "numbers", "below 0"):
        files = (run.files / "1", tmp_path / name)
        assert f"{name}: " in refused("apply", *files, "--out", tmp_path / "applied")
        assert not (tmp_path / "applied").exists()
    in_order = (run.files / "1", run.files / "2")
    assert str(run.files / "1") in refused("apply", *in_order, "--out", run.files / "1")


def test_a_server_needs_no_library_to_apply_a_delta(run):
    """As the docs show it: numpy and the layout of safetensors files."""
    content = (run.files / "2").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    table = load_file(run.files / "1")[TABLE].numpy()

    def tensor(name, dtype):
        begin, end = header[name]["data_offsets"]
        data = content[8 + length + begin : 8 + length + end]
        return np.frombuffer(data, dtype).reshape(header[name]["shape"])

    table[tensor(f"{TABLE}.rows", "<i8")] = tensor(TABLE, "<f4")

    assert torch.equal(torch.from_numpy(table), run.models[2][TABLE])
