"""A disk that is full when rows in files change for the first time after they were whole."""

import errno
import gc
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from recsys.embeddings.tiers.cold import cold_files
from recsys.errors import TiersFailed
from recsys.train.checkpoint import load_checkpoint, save_checkpoint

TRAININGS = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("trainings.py"))))
make_training, require_equal = TRAININGS.make_training, TRAININGS.require_equal


def train(training, steps):
    for number in steps:
        training.step(number)


def test_training_ends_by_name_and_goes_on_from_the_checkpoint_once_there_is_space(
    tmp_path, monkeypatch
):
    expected, training = make_training(), make_training("file", tmp_path / "cold")
    train(expected, range(8))
    train(training, range(3))
    save_checkpoint(tmp_path / "saved", model=training.model, optimizers=training.optimizers)
    training.model.tables.sync()

    def is_full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    message = (
        rf"{tmp_path / 'cold'}: arrays.json must say .* \(No space left on device\); free some "
        "space .* build the model again and load a checkpoint$"
    )
    with monkeypatch.context() as full:
        full.setattr(cold_files, "appearing_whole", is_full)
        with pytest.raises(TiersFailed, match=message):
            train(training, range(3, 8))
    with pytest.raises(TiersFailed, match=message):
        train(training, [3])
    del training
    gc.collect()

    again = make_training("file", tmp_path / "cold", seed=1)
    load_checkpoint(tmp_path / "saved", model=again.model, optimizers=again.optimizers)
    train(again, range(3, 8))
    require_equal(again.numbers(), expected.numbers())
