"""When the checkpoints of a run are written, and when one is complete."""

import pytest

from recsys.config import CheckpointConfig
from recsys.train.checkpoint import save_checkpoint
from recsys.train.loop.run_checkpoints import RunCheckpoints
from tests.train.checkpoint.trainings import make_training

STATE = {"progress": {"num_steps": 1, "num_samples": 12}}


@pytest.mark.parametrize(("after", "expected"), [(1, [2]), (None, [2])])
def test_only_checkpoints_of_this_run_are_told(tmp_path, after, expected):
    training = make_training()
    save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)
    checkpoints = RunCheckpoints(
        CheckpointConfig(every_steps=2, every_seconds=0),
        tmp_path,
        training.model,
        training.optimizers,
        after,
    )
    assert not checkpoints.is_due(1)  # makes the folder
    checkpoints.save(STATE)
    checkpoints.end()

    assert [each["number"] for each in checkpoints.newly_complete()] == expected
