"""Which optimizers a pipeline steps, and which models and optimizers it refuses."""

import pytest
import torch
from torch import nn

import recsys
from recsys.pipeline import LookAhead, Sequential, TrainPipeline

BATCHES = [torch.arange(8).view(4, 2) + number for number in range(6)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(500, 4, mode="sum", sparse=True)
        self.top = nn.Linear(4, 1)

    def forward(self, ids):
        loss = self.top(self.bag(ids)).square().mean()
        return loss, loss.detach()


@pytest.fixture
def made():
    """An accelerated model, and the optimizers of its rows and of its dense part."""
    model = Model()
    rows = torch.optim.SGD(model.bag.parameters(), lr=0.1)
    dense = torch.optim.SGD(model.top.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=rows, always=True)
    return model, rows, dense


def moves_rows(model, optimizers):
    before = model.bag.weight.detach().clone()
    for _ in TrainPipeline(model, optimizers).steps(BATCHES[:1]):
        pass
    return not torch.equal(model.bag.weight, before)


@pytest.mark.parametrize("is_dense_given", [True, False])
def test_an_optimizer_that_accelerate_was_given_and_the_pipeline_was_not_is_named(
    made, is_dense_given
):
    model, _, dense = made

    with pytest.warns(UserWarning, match=r"lacks the SGD that .*, so its parameters are never"):
        has_moved = moves_rows(model, dense if is_dense_given else None)

    assert not has_moved


class Hidden:
    """Of another class, as TorchRec's wrappers are; nobody knows what it has."""

    def __init__(self, optimizer):
        self.zero_grad, self.step = optimizer.zero_grad, optimizer.step


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Hidden])
def test_one_that_is_given_or_only_evaluates_is_not_warned_of(made, wrap):
    model, rows, dense = made

    assert not moves_rows(model.eval(), None)
    assert moves_rows(model.train(), [dense, wrap(rows)])


def test_only_the_iterator_ends_the_data():
    model = Model()
    rates = iter(range(3))
    model.top.weight.register_hook(lambda gradient: gradient * next(rates))
    pipeline = TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1))
    iterator = iter(BATCHES)
    for _ in range(3):
        pipeline.progress(iterator)

    with pytest.raises(RuntimeError, match="a training step raised StopIteration"):
        pipeline.progress(iterator)


@pytest.mark.parametrize("budget", [5000, None])
@pytest.mark.parametrize("accelerates_again", [False, True])
@pytest.mark.parametrize("schedule", [LookAhead(2), Sequential()])
def test_a_model_that_was_restored_needs_a_new_pipeline(schedule, accelerates_again, budget):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    pipeline = TrainPipeline(model, optimizer, schedule=schedule, ids=lambda ids: {"bag": ids})
    iterator = iter(BATCHES)
    pipeline.progress(iterator)
    recsys.restore(model)
    if accelerates_again:
        recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)

    with pytest.raises(ValueError, match="'bag' is another module"):
        list(pipeline.steps(iterator))
