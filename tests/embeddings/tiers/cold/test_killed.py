"""A process that trains on the file tier and is killed: its folder is whole, or it is refused."""

import gc
import json
import os
import signal
from itertools import islice

import pytest
import torch

from recsys.errors import ColdTierDirty
from recsys.pipeline import LookAhead, TrainPipeline
from tests.embeddings.tiers.cold import training_to_kill
from tests.forks import Fork

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@pytest.fixture
def kill(tmp_path):
    """Start a training, and kill it once it has made so many steps."""

    def run(num_steps, *options):
        arguments = str(tmp_path / "rows"), str(tmp_path / "checkpoint.pt"), *options
        fork = Fork(training_to_kill.main, *arguments)
        made = list(islice(fork.lines(), num_steps))
        fork.process.kill()
        _, said = fork.end()
        assert made[-1] == f"{num_steps}\n", said
        assert fork.process.exitcode == -signal.SIGKILL
        return tmp_path / "rows"

    return run


def bytes_in(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def train(model, first, num_steps):
    pipeline = TrainPipeline(model, None, schedule=LookAhead(1))
    for _ in islice(pipeline.steps(training_to_kill.batches(first)), num_steps):
        pass
    pipeline.detach()


def train_resident(num_steps):
    model = training_to_kill.Model()
    for batch in islice(training_to_kill.batches(), num_steps):
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
        training_to_kill.in_files(folder)

    said = str(refused.value)
    assert said.startswith(f"{folder}: the process that used it ended before all rows were written")
    assert f"delete {folder}, build the module again" in said
    assert "load a checkpoint (load_state_dict)" in said
    assert "train from the start" in said
    refused.value.__traceback__ = None
    gc.collect()
    assert bytes_in(folder) == left  # as it was, for whoever wants to look at it

    if num_steps > training_to_kill.CHECKPOINT_AT:
        rebuilt = training_to_kill.in_files(tmp_path / "new rows")
        checkpoint = torch.load(tmp_path / "checkpoint.pt")
        rebuilt.load_state_dict(checkpoint["model"])
        rebuilt.embeddings.row_optimizer.load_state_dict(checkpoint["rows"])
        train(rebuilt, training_to_kill.CHECKPOINT_AT, 9)
        require_equal(train_resident(training_to_kill.CHECKPOINT_AT + 9), rebuilt)


@pytest.mark.slow
def test_a_folder_killed_behind_a_sync_is_whole_and_goes_on(kill):
    folder = kill(training_to_kill.SYNC_AT, "--stop-there")
    assert not json.loads((folder / "arrays.json").read_text())["is_dirty"]

    reopened = training_to_kill.in_files(folder)

    require_equal(train_resident(training_to_kill.SYNC_AT), reopened)
    train(reopened, training_to_kill.SYNC_AT, 5)
    require_equal(train_resident(training_to_kill.SYNC_AT + 5), reopened)
