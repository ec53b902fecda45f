"""An accelerated model in code that `torch.compile` compiles, beside the plain one."""

import copy

import pytest
import torch
from torch import nn

import recsys

# Dynamo looks whether its inputs have a gradient, and hides what torch says to that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

NUM_ROWS, DIM = 300, 4
BUDGET = 4 * NUM_ROWS + 4 * DIM * NUM_ROWS  # the row map, and half of the rows with their state


class Scores(nn.Module):
    """Looks items up, and reads their table."""

    def __init__(self):
        super().__init__()
        self.items = nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True)
        self.top = nn.Linear(DIM, DIM)

    def forward(self, ids):
        return self.top(self.items(ids)).square().mean()


def runs(budget):
    """A plain model and an accelerated one, with their optimizers."""
    torch.manual_seed(0)
    plain = Scores()
    model = copy.deepcopy(plain)
    found = [(each, torch.optim.Adagrad(each.parameters(), lr=0.1)) for each in (plain, model)]
    recsys.accelerate(model, optimizer=found[1][1], budget=budget, always=True)
    return found


def ids(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, NUM_ROWS, (8, 3), generator=generator)


def train_step(model, optimizer, number):
    loss = model(ids(number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


budgets = pytest.mark.parametrize("budget", [None, BUDGET])


@budgets
def test_a_compiled_step_trains_as_a_plain_one(budget):
    (plain, theirs), (model, mine) = runs(budget)
    compiled = torch.compile(train_step, backend="eager")

    losses = [(train_step(plain, theirs, k), compiled(model, mine, k)) for k in range(4)]

    for expected, found in losses:
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict())


def scores(model, vectors):
    return vectors @ model.items.weight.T


@torch.no_grad()
def write(model):
    model.items.weight.mul_(0.5)
    model.items.weight[5] = 0


def write_data(model):
    model.items.weight.data.mul_(0.5)


@budgets
def test_compiled_code_reads_the_newest_rows(budget):
    pairs = runs(budget)
    read, vectors = torch.compile(scores, backend="aot_eager"), torch.randn(2, DIM)

    for number in range(3):
        (plain, _), (model, _) = pairs
        for each, optimizer in pairs:
            train_step(each, optimizer, number)
        with torch.no_grad():
            torch.testing.assert_close(read(model, vectors), scores(plain, vectors))


@budgets
@pytest.mark.parametrize("act", [write, write_data])
def test_compiled_code_writes_to_rows(act, budget):
    pairs = runs(budget)

    for number in range(2):
        for each, optimizer in pairs:
            train_step(each, optimizer, number)
        act(pairs[0][0])
        torch.compile(act, backend="eager")(pairs[1][0])

    (plain, _), (model, _) = pairs
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
