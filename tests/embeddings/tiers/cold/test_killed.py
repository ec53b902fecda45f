"""A process that trains on the file tier and is killed: its folder is whole, or it is refused."""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recsys.errors import ColdTierDirty
from recsys.pipeline import LookAhead, TrainPipeline

PROGRAM = Path(__file__).with_name("training_to_kill.py")
TRAINING = SimpleNamespace(**runpy.run_path(str(PROGRAM)))


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@pytest.fixture(scope="module")
def trainings():
    """The process whose forks train."""
    command = [sys.executable, PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, bufsize=1) as process:
        yield process


@pytest.fixture
def kill(trainings, tmp_path):
    """Start a training, and kill it once it has made so many steps."""

    def run(num_steps, *options):
        arguments = str(tmp_path / "rows"), str(tmp_path / "checkpoint.pt"), *options
        trainings.stdin.write(f"{json.dumps(arguments)}\n")
        child, *made = islice(trainings.stdout, 1 + num_steps)
        os.kill(int(child), signal.SIGKILL)
        ended = next(line for line in trainings.stdout if line.startswith("ended"))
        assert made[-1] == f"{num_steps}\n"
        assert ended == f"ended with -{signal.SIGKILL.value}\n"
        return tmp_path / "rows"

    return run


def bytes_in(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def train(model, first, num_steps):
    pipeline = TrainPipeline(model, None, schedule=LookAhead(1))
    for _ in islice(pipeline.steps(TRAINING.batches(first)), num_steps):
        pass
    pipeline.detach()


def train_resident(num_steps):
    model = TRAINING.Model()
    for batch in islice(TRAINING.batches(), num_steps):
        loss, _ = model(batch)
        loss.backward()
    return model


def require_equal(expected, found):
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    states = [each.embeddings.row_optimizer.state_dict()["state"] for each in (expected, found)]
    for table, known in states[0].items():
        for name, value in known.items():
            assert torch.equal(torch.as_tensor(states[1][table][name]), torch.as_tensor(value))


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 7, 20])  # 20: behind a sync, and rows written back since
def test_a_folder_killed_in_the_middle_is_refused_and_rebuilt_from_a_checkpoint(
    kill, tmp_path, num_steps
):
    folder = kill(num_steps)
    left = bytes_in(folder)
    assert json.loads(left["arrays.json"])["is_dirty"]

    with pytest.raises(ColdTierDirty) as refused:
        TRAINING.in_files(folder)

    said = str(refused.value)
    assert said.startswith(f"{folder}: the process that used it ended before all rows were written")
    assert f"delete {folder}, build the module again" in said
    assert "load a checkpoint (load_state_dict)" in said
    assert "train from the start" in said
    refused.value.__traceback__ = None
    gc.collect()
    assert bytes_in(folder) == left  # as it was, for whoever wants to look at it

    if num_steps > TRAINING.CHECKPOINT_AT:
        rebuilt = TRAINING.in_files(tmp_path / "new rows")
        checkpoint = torch.load(tmp_path / "checkpoint.pt")
        rebuilt.load_state_dict(checkpoint["model"])
        rebuilt.embeddings.row_optimizer.load_state_dict(checkpoint["rows"])
        train(rebuilt, TRAINING.CHECKPOINT_AT, 9)
        require_equal(train_resident(TRAINING.CHECKPOINT_AT + 9), rebuilt)


@pytest.mark.slow
def test_a_folder_killed_behind_a_sync_is_whole_and_goes_on(kill):
    folder = kill(TRAINING.SYNC_AT, "--stop-there")
    assert not json.loads((folder / "arrays.json").read_text())["is_dirty"]

    reopened = TRAINING.in_files(folder)

    require_equal(train_resident(TRAINING.SYNC_AT), reopened)
    train(reopened, TRAINING.SYNC_AT, 5)
    require_equal(train_resident(TRAINING.SYNC_AT + 5), reopened)
