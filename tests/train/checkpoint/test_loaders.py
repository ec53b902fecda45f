"""Loaders of users, whose position a checkpoint holds while mini-batches wait in the pipeline."""

import pytest
import torch
from torch import nn

import recsys
from recsys.errors import ConfigError
from recsys.pipeline import LookAhead, RandomDrop, Sequential, TrainPipeline

NUM_BATCHES = 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(3000, 4, mode="sum", sparse=True)
        self.top = nn.Linear(4, 1)

    def forward(self, batch):
        ids, labels = batch
        logits = self.top(self.bag(ids)).squeeze(1)
        return (logits - labels).square().mean(), logits


class Untold:
    """A loader whose iterators, generators, have no `num_waiting`."""

    def __init__(self, batches):
        self.batches, self.next = batches, 0

    def __iter__(self):
        while self.next < len(self.batches):
            self.next += 1
            yield self.batches[self.next - 1]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Told(Untold):
    """A loader that is its own iterator and is told how many mini-batches wait."""

    num_waiting = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == len(self.batches):
            raise StopIteration
        self.next += 1
        return self.batches[self.next - 1]

    def state_dict(self):
        return {"next": self.next - self.num_waiting}


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randint(3000, (16, 2), generator=generator), torch.rand(16, generator=generator))
        for _ in range(NUM_BATCHES)
    ]


def build(loader, schedule, skip=None):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, budget="24KiB")
    pipeline = TrainPipeline(
        model, optimizer, ids=lambda batch: {"bag": batch[0]}, schedule=schedule, skip=skip
    )
    return {"model": model, "optimizers": optimizer, "pipeline": pipeline, "loader": loader}


def train(run, most=NUM_BATCHES):
    losses = []
    for loss, _ in run["pipeline"].steps(run["loader"]):
        losses.append(loss.item())
        if len(losses) == most:
            break
    return losses


CASES = [(LookAhead(2), None), (Sequential(), RandomDrop(share=0.3))]


@pytest.mark.parametrize(("schedule", "skip"), CASES)
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_loader_that_counts_waiting_mini_batches_is_not_saved(
    batches, schedule, skip, is_inside, tmp_path
):
    run = build(Untold(batches), schedule, skip)
    message = "loader: the Untold may count . mini-batches as used that wait in the pipeline"

    steps = run["pipeline"].steps(run["loader"])
    for _ in range(4):
        next(steps)
    if not is_inside:  # the mini-batches that wait are dropped, and still count as used
        steps.close()

    with pytest.raises(ConfigError, match=message):
        recsys.save_checkpoint(tmp_path, **run)
    recsys.save_checkpoint(tmp_path, **{**run, "loader": None})


@pytest.mark.parametrize(("schedule", "skip"), CASES)
def test_such_a_loader_is_saved_once_nothing_waits(batches, schedule, skip, tmp_path):
    run = build(Untold(batches), schedule, skip)
    train(run)

    recsys.save_checkpoint(tmp_path, **run)
    assert recsys.load_checkpoint(tmp_path, **run) is None
    assert run["pipeline"].num_untold == 0


@pytest.mark.parametrize(("schedule", "skip"), CASES)
def test_a_loader_with_num_waiting_resumes_at_the_exact_mini_batch(
    batches, schedule, skip, tmp_path
):
    expected = train(build(Told(batches), schedule, skip))

    run = build(Told(batches), schedule, skip)
    losses = train(run, 5)
    recsys.save_checkpoint(tmp_path, **run)
    again = build(Told(batches), schedule, skip)
    recsys.load_checkpoint(tmp_path, **again)

    assert losses + train(again) == expected
