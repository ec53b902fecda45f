"""Without a budget, `accelerate` leaves to PyTorch what PyTorch trains faster."""

import copy

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import SGD


class Tables(nn.Module):
    """Tables of one kind, and a linear layer."""

    def __init__(self, num_tables, num_rows=50, *, sparse=True, kind=nn.Embedding):
        super().__init__()
        self.tables = nn.ModuleList(kind(num_rows, 4, sparse=sparse) for _ in range(num_tables))
        self.top = nn.Linear(4, 1)

    def forward(self, ids):
        return self.top(sum(table(ids[:, None]).flatten(1) for table in self.tables))


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def train(model, optimizer):
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randint(0, 50, (9,), generator=generator)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("model", "optimizer", "is_left"),
    [
        ({"num_tables": 1}, sgd, True),
        ({"num_tables": 23}, sgd, True),
        ({"num_tables": 24}, sgd, False),
        ({"num_tables": 2, "sparse": False}, sgd, True),
        ({"num_tables": 30, "sparse": False}, sgd, True),
        ({"num_tables": 2, "num_rows": 1 << 16, "sparse": False}, sgd, False),
        ({"num_tables": 1}, adagrad, True),
        ({"num_tables": 2}, adagrad, False),
        ({"num_tables": 2, "sparse": False}, adagrad, True),
        ({"num_tables": 1, "num_rows": 1 << 14, "sparse": False}, adagrad, False),
    ],
)
def test_what_pytorch_trains_faster_is_left_to_it(kind, model, optimizer, is_left):
    model = Tables(**model, kind=kind)

    result = recsys.accelerate(model, optimizer=optimizer(model))

    assert (not result.replacements) == is_left
    assert len(result.left_alone) == is_left * len(model.tables)
    assert all((type(each) is kind) == is_left for each in model.tables)


def test_tables_that_are_left_train_as_before_beside_tables_that_are_taken():
    torch.manual_seed(0)
    plain = nn.ModuleDict({"few": Tables(1), "many": Tables(2)})
    ours = copy.deepcopy(plain)

    def optimizers(model):
        return [sgd(model["few"]), adagrad(model["many"])]

    def run(model, of_model):
        for each, optimizer in zip(model.values(), of_model, strict=True):
            train(each, optimizer)

    of_plain, of_ours = optimizers(plain), optimizers(ours)
    result = recsys.accelerate(ours, optimizer=of_ours)
    run(plain, of_plain)
    run(ours, of_ours)

    assert list(result.replacements) == ["many.tables.0", "many.tables.1"]
    assert list(result.left_alone) == ["few.tables.0"]
    assert torch.equal(ours["few"].tables[0].weight, plain["few"].tables[0].weight)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())
    recsys.restore(ours)
    run(plain, of_plain)
    run(ours, of_ours)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


def test_a_table_of_two_modules_is_left_in_both_or_in_none():
    model = nn.ModuleDict({"few": Tables(1), "many": Tables(2)})
    model["few"].tables[0].weight = model["many"].tables[0].weight

    result = recsys.accelerate(model, optimizer=adagrad(model["many"]))

    assert len(result.replacements) == 3
    assert not result.left_alone


@pytest.mark.filterwarnings("ignore")  # all rows fit the budget; lazy_adam is another rule
@pytest.mark.parametrize(
    "arguments",
    [
        {"budget": "64KiB"},
        {"optimizer": SGD(lr=0.1)},
        {"lazy_adam": True},
        {"always": True},
    ],
)
def test_what_asks_for_recsys_takes_every_table(arguments):
    model = Tables(1)
    optimizer = sgd(model)
    if "lazy_adam" in arguments:
        model.tables[0].sparse = False
        optimizer = torch.optim.Adam(model.parameters())

    result = recsys.accelerate(model, **({"optimizer": optimizer} | arguments))

    assert len(result.replacements) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", [sgd, adagrad, lambda _: None])
def test_separate_modules_on_cuda_are_left(optimizer):
    model = Tables(30).cuda()

    result = recsys.accelerate(model, optimizer=optimizer(model))

    assert not result.replacements
    assert all("launch for each module" in why for why in result.left_alone.values())
