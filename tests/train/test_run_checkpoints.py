"""When the checkpoints of a run are written, and when one is complete."""

import pytest

from recsys.config import CheckpointConfig
from recsys.train.checkpoint import newest, save_checkpoint
from recsys.train.loop.run_checkpoints import RunCheckpoints
from tests.train.checkpoint.trainings import make_training

STATE = {"progress": {"num_steps": 1, "num_samples": 12}}


@pytest.mark.parametrize(("after", "expected"), [(1, [1]), (None, [2])])
def test_an_abandoned_checkpoint_does_not_count_as_complete(tmp_path, after, expected):
    """A run may go back to one of several processes, while `checkpoints` has a newer one."""
    training, complete = make_training(), []
    save_checkpoint(tmp_path, model=training.model, optimizers=training.optimizers)
    checkpoints = RunCheckpoints(
        CheckpointConfig(every_steps=2, every_seconds=0),
        tmp_path,
        training.model,
        training.optimizers,
        after,
        0 if after else 1,
        when_complete=lambda: complete.append(newest(tmp_path)),
    )
    assert not checkpoints.is_due(1)  # makes the folder
    checkpoints.save(STATE)
    checkpoints.end()

    assert complete == expected
