"""Several processes that save together: here threads of one."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from recsys.errors import CheckpointError
from recsys.train.checkpoint import Checkpoints
from recsys.train.checkpoint.format import PieceWriter, read_manifest
from recsys.train.checkpoint.restore import Contents, Share, restore
from tests.train.checkpoint.trainings import load, make_training, require_equal

WORLD = 2


class Group:
    """A collective of threads."""

    def __init__(self):
        self.barrier, self.values = threading.Barrier(WORLD), [None] * WORLD

    def gather(self, rank, value):
        self.barrier.wait(20)
        self.values[rank] = value
        self.barrier.wait(20)
        found = list(self.values)
        self.barrier.wait(20)
        return found


def shares(training):
    """Shares of two processes, of which the second has no rows."""
    group = Group()
    layout = {
        key: [(0, len(value)), (0, 0)]
        for key, value in training.model.state_dict().items()
        if key.startswith("tables.")
    }
    return [
        Share(rank, WORLD, layout, lambda value, rank=rank: group.gather(rank, value))
        for rank in range(WORLD)
    ]


def without_tables(training):
    """What the second process has of a training."""
    model = torch.nn.Module()
    model.top = training.model.top
    model.register_buffer("count", training.model.count)
    return SimpleNamespace(model=model, optimizers=training.optimizers[:1])


def on_both(*calls):
    """Call a function on each rank at the same time."""
    with ThreadPoolExecutor(WORLD) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def group(tmp_path):
    """A training of two processes, and what saves it."""
    training = make_training()
    models = [training, without_tables(training)]
    checkpoints = on_both(
        *(
            lambda each=each, share=share: Checkpoints(
                tmp_path, model=each.model, optimizers=each.optimizers, share=share
            )
            for each, share in zip(models, shares(training), strict=True)
        )
    )
    yield SimpleNamespace(training=training, checkpoints=checkpoints)
    for each in checkpoints:
        each.close()


def save(group, step):
    """A step and a checkpoint after it; the newest complete one that the first process knows."""
    group.training.step(step)
    torch.manual_seed(step)
    on_both(*(each.save for each in group.checkpoints))
    return on_both(*(each.wait for each in group.checkpoints))[0]


def test_one_process_continues_what_two_have_saved(group, tmp_path):
    for step in (1, 2, 3):
        assert save(group, step) == step

    assert tuple(read_manifest(tmp_path).pieces) == (
        *("full-00000001", "full-00000001-1", "delta-00000001", "delta-00000001-1"),
        *("delta-00000002", "delta-00000002-1", "delta-00000003", "delta-00000003-1"),
    )
    again = make_training(seed=1)
    load(again, tmp_path)
    require_equal(again.numbers(), group.training.numbers())
    group.checkpoints[0].close()
    group.checkpoints[1].close()
    with Checkpoints(
        tmp_path, model=again.model, optimizers=again.optimizers, after=3
    ) as checkpoints:
        again.step(4)
        checkpoints.save()
    third = make_training(seed=2)
    load(third, tmp_path)
    require_equal(third.numbers(), again.numbers())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_one_process_cannot_write_is_one_of_none(
    group, tmp_path, monkeypatch, rank
):
    write, failing = PieceWriter.finish, [False]

    def fail(self):
        if failing[0] and self.path.name.endswith("-1") == bool(rank):
            raise OSError("the disk is full")
        write(self)

    monkeypatch.setattr(PieceWriter, "finish", fail)
    assert save(group, 1) == 1
    failing[0] = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert save(group, 2) == 1
    assert any("the disk is full" in str(each.message) for each in caught)
    failing[0] = False
    assert save(group, 3) == 3

    again = make_training(seed=1)
    load(again, tmp_path)
    require_equal(again.numbers(), group.training.numbers())


def test_each_process_continues_with_its_own_rows(group, tmp_path):
    save(group, 1)
    first, second = make_training(seed=1), without_tables(make_training(seed=2))
    of_first, of_second = shares(first)

    restore(tmp_path, Contents(first.model, first.optimizers, of_first))
    restore(tmp_path, Contents(second.model, second.optimizers, of_second))

    require_equal(first.numbers(), group.training.numbers())
    assert torch.equal(second.model.top.weight, first.model.top.weight)


def test_a_damaged_piece_of_one_process_is_named(group, tmp_path):
    save(group, 1)
    save(group, 2)
    (tmp_path / "delta-00000002-1" / "state.pt").write_bytes(b"")

    with pytest.raises(CheckpointError, match=r"delta-00000002-1.*load checkpoint 1 "):
        load(make_training(), tmp_path)
