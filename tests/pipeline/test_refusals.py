"""What a pipeline refuses: arguments, restored models, and an end that is not the data's."""

import pytest
import torch
from torch import nn

import recsys
from recsys.pipeline import LookAhead, Sequential, TrainPipeline


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(500, 4, mode="sum", sparse=True)
        self.layer = nn.Linear(4, 1)

    def forward(self, ids):
        loss = self.layer(self.bag(ids)).square().mean()
        return loss, loss.detach()


BUDGET = 5000
BATCHES = [torch.arange(8).view(4, 2) + number for number in range(6)]


def accelerated(budget=BUDGET):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    return model, optimizer


class ScheduledSGD(torch.optim.SGD):
    """Takes its learning rates from an iterator."""

    rates = iter(())

    def step(self, closure=None):
        self.param_groups[0]["lr"] = next(self.rates)
        return super().step(closure)


@pytest.mark.parametrize("place", ["optimizer", "gradient hook"])
def test_only_the_iterator_ends_the_data(place):
    model = Model()
    optimizer = ScheduledSGD(model.parameters(), lr=0.1)
    optimizer.rates = iter([0.1] * (3 if place == "optimizer" else 6))
    gradients = iter(range(3 if place == "gradient hook" else 6))
    model.layer.weight.register_hook(lambda gradient: gradient * (next(gradients) + 1))
    pipeline, iterator = TrainPipeline(model, optimizer), iter(BATCHES)
    for _ in range(3):
        pipeline.progress(iterator)

    with pytest.raises(RuntimeError, match="a training step raised StopIteration"):
        pipeline.progress(iterator)


@pytest.mark.filterwarnings("ignore:schedule=.* has no effect:UserWarning")
@pytest.mark.parametrize("budget", [BUDGET, None])
@pytest.mark.parametrize("accelerates_again", [False, True])
@pytest.mark.parametrize("schedule", [LookAhead(2), Sequential()])
def test_a_model_that_was_restored_needs_a_new_pipeline(schedule, accelerates_again, budget):
    model, optimizer = accelerated(budget)
    pipeline = TrainPipeline(model, optimizer, schedule=schedule, ids=lambda ids: {"bag": ids})
    iterator = iter(BATCHES)
    pipeline.progress(iterator)
    recsys.restore(model)
    if accelerates_again:
        recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)

    with pytest.raises(ValueError, match="'bag' is another module"):
        list(pipeline.steps(iterator))


@pytest.mark.filterwarnings("ignore:schedule=.* has no effect:UserWarning")
@pytest.mark.parametrize("schedule", [None, LookAhead(2)])
def test_a_model_that_gets_a_budget_after_its_pipeline_needs_a_new_one(schedule):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = TrainPipeline(model, optimizer, schedule=schedule, ids=lambda ids: {"bag": ids})
    recsys.accelerate(model, optimizer=optimizer, budget=BUDGET, always=True)
    before = model.bag.weight.detach().clone()

    for _ in range(2):
        with pytest.raises(ValueError, match=r"rows of 'bag' .* build the TrainPipeline after rec"):
            pipeline.progress(iter(BATCHES))
    assert torch.equal(model.bag.weight, before)


def test_a_model_that_is_accelerated_without_a_budget_keeps_its_pipeline():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = TrainPipeline(model, optimizer)
    recsys.accelerate(model, optimizer=optimizer, always=True)

    assert len(list(pipeline.steps(BATCHES))) == len(BATCHES)
