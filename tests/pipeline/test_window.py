"""Each iterator has a window of its own, which no other iterator takes from or loses."""

import copy
import dataclasses
import gc
import weakref
from functools import partial

import pytest
import torch

from recsys.embeddings import Adagrad
from recsys.pipeline import LookAhead, Sequential, TrainPipeline
from tests.pipeline import small

BUDGET = 30_000  # of 830 rows and their state


@pytest.fixture
def batches():
    return [small.make_batch(small.TABLES, seed) for seed in range(12)]


@pytest.fixture
def pair():
    """A resident model and its optimizer; a tiered one and its pipeline."""

    def build(schedule):
        optimizer = Adagrad(lr=0.1)
        models = [small.Model(small.TABLES, optimizer, **each) for each in ({}, {"budget": BUDGET})]
        dense = [torch.optim.SGD(model.layer.parameters(), lr=0.1) for model in models]
        return models, dense[0], TrainPipeline(models[1], dense[1], schedule=schedule)

    return build


def progress(pipeline, iterator, count):
    return [pipeline.progress(iterator)[0].item() for _ in range(count)]


def test_an_iterator_that_is_dropped_takes_its_window_along(pair, batches):
    *_, pipeline = pair(LookAhead(2))
    kept = [weakref.ref(batch) for batch in batches]
    iterator = (batches.pop(0) for _ in range(len(batches)))
    progress(pipeline, iterator, 1)
    assert all(batch() is not None for batch in kept[1:3])

    del iterator
    gc.collect()

    assert all(batch() is None for batch in kept[:3])


@pytest.mark.parametrize("schedule", [Sequential(), LookAhead(3)], ids=str)
def test_windows_in_which_nothing_is_left_are_not_kept(pair, batches, schedule):
    models, _, pipeline = pair(schedule)
    progress(pipeline, iter(batches), len(batches))
    models[1].eval()
    with torch.no_grad():
        progress(pipeline, iter(batches), 2)
    assert small.run(pipeline, iter(())) == []

    assert not pipeline._windows._windows
    assert not pipeline._windows._owners


def test_an_exception_of_one_iterator_is_raised_by_that_one_in_its_turn(pair, batches):
    models, dense, pipeline = pair(LookAhead(3))

    def read():
        yield from batches[:3]
        raise OSError("the line is dead")

    broken, whole = read(), iter(batches[3:])
    losses = progress(pipeline, broken, 1)
    losses += progress(pipeline, whole, 2)
    losses += progress(pipeline, broken, 2)
    with pytest.raises(OSError, match="the line is dead"):
        pipeline.progress(broken)
    losses += small.run(pipeline, whole)

    order = [*batches[:1], *batches[3:5], *batches[1:3], *batches[5:]]
    assert losses == small.run_plain(models[0], dense, order)
    assert small.run(pipeline, broken) == []


def one_tensor(batches):
    """A loader that fills the same tensor again for each mini-batch."""
    labels = batches[0].labels.clone()
    for batch in batches:
        labels.copy_(batch.labels)
        yield dataclasses.replace(batch, labels=labels)


def ids_written_to(batches, part):
    ids = copy.deepcopy(batches[0].sparse_features)
    for batch in batches:
        getattr(ids, part)().add_(0)
        yield dataclasses.replace(batch, sparse_features=copy.copy(ids))


values_of_ids = partial(ids_written_to, part="values")
offsets_of_ids = partial(ids_written_to, part="offsets")


def two_tensors_in_turn(batches):
    return in_parts_of_a_tensor(batches, 2)


def in_parts_of_a_tensor(batches, num_parts=5):
    labels = torch.zeros(num_parts, len(batches[0].labels))
    for number, batch in enumerate(batches):
        part = labels[number % num_parts].copy_(batch.labels)
        yield dataclasses.replace(batch, labels=part)


@pytest.mark.parametrize("give", [one_tensor, two_tensors_in_turn, values_of_ids, offsets_of_ids])
def test_a_loader_that_overwrites_mini_batches_that_wait_is_refused_before_they_are_trained_on(
    pair, batches, give
):
    models, dense, pipeline = pair(LookAhead(2))
    before = copy.deepcopy(models[1].state_dict())

    with pytest.raises(RuntimeError, match="has filled an earlier mini-batch again, which still"):
        pipeline.progress(give(batches))

    for name, value in models[1].state_dict().items():
        assert torch.equal(value, before[name]), name
    losses = small.run(pipeline, iter(batches))
    assert losses == small.run_plain(models[0], dense, batches)


def test_a_loader_may_fill_parts_of_a_tensor_that_are_used(pair, batches):
    models, dense, pipeline = pair(LookAhead(2))

    losses = small.run(pipeline, in_parts_of_a_tensor(batches))

    assert losses == small.run_plain(models[0], dense, in_parts_of_a_tensor(batches))
    small.require_equal(*models)
