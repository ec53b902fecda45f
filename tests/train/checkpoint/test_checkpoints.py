"""Checkpoints are restored exactly; what is damaged or of another model is refused by name."""

import os
import random
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from recsys import Checkpoints, HotColdEmbeddingBag, load_checkpoint, save_checkpoint
from recsys.embeddings import SGD
from recsys.errors import CheckpointError
from tests.train.checkpoint.trainings import (
    Training,
    full_disk,
    manifest_of,
    require_equal,
    require_restores,
)

priority = partial(os.getpriority, os.PRIO_PROCESS)


@pytest.mark.parametrize("tier", ["resident", "host"])
def test_gradients_of_the_weights_before_are_dropped(tier, tmp_path):
    training = Training("adagrad", tier)
    training.step(0)
    save_checkpoint(tmp_path, **training.parts)
    expected = training.snapshot()
    step, training.optimizers[-1].step = training.optimizers[-1].step, lambda: None
    training.step(1)  # rows of a table are not updated, so their gradients wait
    training.optimizers[-1].step = step

    load_checkpoint(tmp_path, **training.parts)
    for optimizer in training.optimizers:
        optimizer.step()

    assert all(parameter.grad is None for parameter in training.model.parameters())
    require_equal(training.snapshot(), expected)


def test_random_states_continue(tmp_path):
    training = Training()
    save_checkpoint(tmp_path, **training.parts)
    expected = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002

    load_checkpoint(tmp_path, **training.parts)

    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]  # noqa: NPY002


def test_a_full_disk_warns_and_the_next_checkpoint_has_all_rows(tmp_path, monkeypatch):
    training = Training("adagrad", "host")
    with training.saved(tmp_path) as checkpoints:
        training.step(1)
        checkpoints.save(state=1)
        checkpoints.wait()
        training.step(2)
        with monkeypatch.context() as patch:
            patch.setattr("recsys.train.checkpoint.format.PieceWriter.write_rows", full_disk)
            checkpoints.save(state=2)
            with pytest.warns(UserWarning, match=r"complete one is 1 .*No space left"):
                assert checkpoints.wait() == 1
        assert load_checkpoint(tmp_path, **Training().parts) == 1
        training.step(3, most=5)
        checkpoints.save(state=3)

    assert checkpoints.describe()["num_failed"] == 1
    require_restores(training, tmp_path)


def test_rows_that_change_after_a_save_are_not_in_its_copy_of_every_row(tmp_path, monkeypatch):
    training = Training()
    # The writing thread begins late.
    monkeypatch.setattr("recsys.train.checkpoint.save.require_space", lambda *_: time.sleep(0.2))
    with training.saved(tmp_path) as checkpoints:
        checkpoints.save()
        training.write(0, seed=0)

    require_restores(Training(), tmp_path)


def test_the_thread_that_writes_starts_no_threads_of_torch_beside_those_of_training(tmp_path):
    torch.set_num_threads(2)
    bag = HotColdEmbeddingBag(2**16, 16, optimizer=SGD(lr=0.1))
    with Checkpoints(tmp_path, model=bag) as checkpoints:
        checkpoints.save()
        # Threads have the priority of the one that starts them, which is lower.
        lower = {
            int(task.name)
            for task in Path("/proc/self/task").iterdir()
            if priority(int(task.name)) > priority(0)
        }
        writing = [one for one in threading.enumerate() if "recsys-checkpoints" in one.name]

    assert lower == {thread.native_id for thread in writing}


def test_too_little_space_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    with pytest.raises(OSError, match="are needed, and 1000 B are free"):
        save_checkpoint(tmp_path, **Training().parts)


@pytest.fixture
def two(tmp_path):
    """The folder of two checkpoints, by two objects: they have no file in common."""
    training = Training()
    for number in (1, 2):
        training.step(number)
        save_checkpoint(tmp_path, **training.parts, state=number)
    return tmp_path


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:], lambda data: data[:-1], None],
    ids=["flipped", "cut", "missing"],
)
def test_a_damaged_file_changes_nothing_and_offers_the_older_one(two, damage):
    pieces = list(manifest_of(two, 2)["pieces"])
    again = Training(seed=1)
    before = again.snapshot()
    for path in [path for name in pieces for path in (two / name).iterdir()]:
        if path.name == "state.pt" and path.parent.name != pieces[-1]:
            continue  # that of an older delta is not needed
        content = path.read_bytes()
        path.unlink() if damage is None else path.write_bytes(damage(content))

        with pytest.raises(
            CheckpointError, match=f"{path.parent.name}/{path.name}.*load checkpoint 1 "
        ):
            load_checkpoint(two, **again.parts)

        require_equal(again.snapshot(), before)
        path.write_bytes(content)
    assert load_checkpoint(two, **again.parts, number=1) == 1


def another_shape():
    other = Training()
    other.model.top = torch.nn.Linear(20, 2)
    return other.parts


def another_group():
    other = Training()
    other.optimizers[0].add_param_group({"params": torch.nn.Parameter(torch.ones(1))})
    return other.parts


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (another_shape, r"top\.bias"),
        (another_group, "optimizer 0"),
        (lambda: {"model": Training().model}, "optimizer 0"),
        (lambda: Training("adam").parts, "optimizer"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(two, parts, name):
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(two, **parts())


@pytest.mark.parametrize("place", ["file", "run", "empty"])
def test_what_is_no_folder_of_checkpoints_is_refused(tmp_path, place):
    save_checkpoint(tmp_path / "run" / "checkpoints", **Training().parts)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()

    with pytest.raises(CheckpointError, match=place):
        load_checkpoint(tmp_path / place, **Training().parts)


def test_only_files_of_checkpoints_are_deleted(tmp_path):
    training, others = Training(), ["delta-1", "film.partial", "full-images", "notes.json"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "00000007.json.partial").touch()
    (tmp_path / "full-00000001").mkdir()
    training.saved(tmp_path).close()

    assert sorted(path.name for path in tmp_path.iterdir()) == others
