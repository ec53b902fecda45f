"""A loader and a pipeline together say the exact next sample to train on, at any depth."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recsys.batch import Batch, JaggedIds
from recsys.datasets import BatchLoader
from recsys.embeddings import SGD, HotColdEmbeddingBagCollection, TableConfig
from recsys.pipeline import FAE, Auto, HotColdLoader, LookAhead, Sequential, TrainPipeline

NUM_EPOCHS = 3
TABLE = TableConfig(name="number", num_embeddings=200, embedding_dim=4)


class Numbered:
    """A source whose samples say their own number."""

    num_dense = 1
    fingerprint = "numbered"

    def __init__(self, num_samples):
        self.num_samples = num_samples
        self.table_sizes = {"number": 200}
        self.splits = {"train": range(num_samples), "test": range(1), "validation": range(1)}

    def read(self, samples):
        numbers = torch.from_numpy(samples)
        ids = JaggedIds.from_one_hot(["number"], numbers.unsqueeze(0))
        return Batch(numbers.unsqueeze(1).float(), ids, torch.zeros(len(samples)))

    def describe(self):
        return {}


class Model(nn.Module):
    """Notes which samples it is trained on."""

    def __init__(self):
        super().__init__()
        self.embeddings = HotColdEmbeddingBagCollection([TABLE], optimizer=SGD(lr=0.1), budget=2600)
        self.trained = []

    def forward(self, batch):
        self.trained.append(numbers(batch))
        return self.embeddings(batch.sparse_features).values().square().mean(), None


def numbers(batch):
    return batch.sparse_features.values().tolist()


def make_pipeline(depth):
    schedule = LookAhead(depth) if depth else Sequential()
    model = Model()
    return model, TrainPipeline(model, None, schedule=schedule)


def plain(loader):
    """The samples of every mini-batch of all epochs, and the loader's state after each."""
    batches, states = [], []
    while loader.epoch < NUM_EPOCHS:
        for batch in loader:
            batches.append(numbers(batch))
            states.append(loader.state_dict())
    return batches, states


def require_the_same_at_every_stop(make_loader, depth, stops, is_resumed):
    """Training that stops after some of its steps and goes on, beside a plain loop.

    `is_resumed` says of each stop whether training goes on with a new loader and pipeline, and the
    state of the old loader, or with the same ones.
    """
    expected, states = plain(make_loader())
    model, pipeline = make_pipeline(depth)
    loader, trained = make_loader(), []
    while loader.epoch < NUM_EPOCHS:
        for _ in pipeline.steps(loader):
            trained.append(model.trained[-1])
            assert loader.state_dict() == states[len(trained) - 1]
            if len(trained) in stops:
                break
        else:
            continue
        assert loader.state_dict() == states[len(trained) - 1]
        if is_resumed[stops.index(len(trained))]:
            state = json.loads(json.dumps(loader.state_dict()))
            model, pipeline = make_pipeline(depth)
            loader = make_loader()
            loader.load_state_dict(state)

    assert trained == expected


@pytest.mark.filterwarnings("ignore:schedule=LookAhead")
@given(
    num_samples=st.integers(1, 50),
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    depth=st.integers(0, 5),
    stops=st.lists(st.integers(1, 40), max_size=5, unique=True),
    is_resumed=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_training_stopped_anywhere_and_resumed_is_the_plain_run(
    num_samples, batch_size, shuffle, drop_last, depth, stops, is_resumed
):
    def make_loader():
        return BatchLoader(
            Numbered(num_samples),
            "train",
            batch_size,
            shuffle=shuffle,
            seed=1,
            drop_last=drop_last and batch_size <= num_samples,
        )

    require_the_same_at_every_stop(make_loader, depth, stops, is_resumed)


@pytest.mark.filterwarnings("ignore:schedule=LookAhead")
@given(
    is_hot=st.lists(st.booleans(), min_size=1, max_size=50),
    batch_size=st.integers(1, 9),
    rate=st.sampled_from([10, 50, 100]),
    depth=st.integers(0, 5),
    stops=st.lists(st.integers(1, 40), max_size=5, unique=True),
    is_resumed=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_so_is_training_on_hot_and_cold_mini_batches_that_wait_for_no_loss(
    is_hot, batch_size, rate, depth, stops, is_resumed
):
    def make_loader():
        source, fae = Numbered(len(is_hot)), FAE(rate=rate, is_adaptive=False)
        return HotColdLoader(source, "train", batch_size, np.array(is_hot), fae)

    require_the_same_at_every_stop(make_loader, depth, stops, is_resumed)


def make_loader(num_samples=40, source=Numbered):
    return BatchLoader(source(num_samples), "train", 5, shuffle=False)


@pytest.mark.parametrize("is_closed", [True, False])
def test_an_iterator_that_is_closed_or_dropped_leaves_the_position_of_training(is_closed):
    model, pipeline = make_pipeline(4)
    loader = make_loader()
    batches = iter(loader)
    for _ in range(6):  # the loader has handed out the last one
        pipeline.progress(batches)

    if is_closed:
        batches.close()
        with pytest.raises(StopIteration):  # those that wait are the next iteration's
            pipeline.progress(batches)
    else:
        del batches
    for _ in pipeline.steps(loader):
        pass

    assert model.trained == [list(range(n, n + 5)) for n in range(0, 40, 5)]
    assert loader.epoch == 1


HOT = [number % 3 == 0 for number in range(60)]


def make_fae_loader(**constants):
    return HotColdLoader(Numbered(60), "train", 5, np.array(HOT), FAE(rate=25, **constants))


@pytest.mark.parametrize("schedule", [LookAhead(1), Auto()], ids=["1", "auto"])
def test_a_loader_that_waits_for_losses_is_not_read_ahead(schedule):
    model = Model()
    pipeline = TrainPipeline(model, None, schedule=schedule)
    loader = make_fae_loader()
    state = loader.state_dict()

    for train in (pipeline.progress, lambda batches: next(pipeline.steps(batches))):
        with pytest.raises(ValueError, match=r"=True\) .* use schedule=Sequential\(\) and no"):
            train(iter(loader))
    with pytest.raises(ValueError, match=r"takes mini-batches ahead, but HotColdLoader with FAE"):
        next(pipeline.steps(loader))

    assert loader.state_dict() == state
    assert model.trained == []
    model.eval()
    with torch.no_grad():
        pipeline.progress(iter(loader))  # which takes no mini-batch ahead
