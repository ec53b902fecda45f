"""Restoring the checkpoints of processes that have saved together."""

from types import SimpleNamespace

import pytest
import torch

from recsys.errors import CheckpointError
from recsys.train.checkpoint import Checkpoints
from recsys.train.shards.folder import Shards
from recsys.train.shards.restore import restore_shards
from tests.train.checkpoint.test_lost_files import damage
from tests.train.checkpoint.trainings import make_training


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints of two processes; the second process has no rows."""
    training = make_training()
    layout = {
        f"{key}": [(0, len(value)), (0, 0)]
        for key, value in training.model.state_dict().items()
        if key.startswith("tables.")
    }
    shards = Shards.after(tmp_path, 0, layout)
    models = [training, SimpleNamespace(model=training.model.top, optimizers=[])]
    of_ranks = [
        Checkpoints(folder, model=each.model, optimizers=each.optimizers)
        for folder, each in zip(shards.folders, models, strict=True)
    ]
    for step in (1, 2):
        training.step(step)
        for rank, checkpoints in enumerate(of_ranks):
            torch.manual_seed(10 * step + rank)
            checkpoints.save(state={"progress": {"num_steps": step}})
    for checkpoints in of_ranks:
        checkpoints.close()
    return shards


def restore(shards, **more):
    training = make_training(seed=1)
    restore_shards(shards, 2, training.model, training.optimizers, **more)
    return training


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_continues_with_its_own_random_numbers(saved, rank):
    restore(saved, random_of=rank)

    torch.testing.assert_close(torch.initial_seed(), 20 + rank)


@pytest.mark.parametrize(
    ("piece", "offered"),
    [("delta-00000002", "checkpoint 1 is whole"), ("full-00000001", "no other checkpoint")],
)
def test_a_damaged_checkpoint_offers_one_that_is_whole_if_there_is_one(saved, piece, offered):
    damage(saved.folders[0] / piece / "block-00000.safetensors")

    with pytest.raises(CheckpointError, match=offered):
        restore(saved)
