"""What converting a model refuses: what is done, the error, and the name that it gives."""

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import SGD, HotColdEmbeddingBag
from recsys.errors import BudgetTooSmall, ConfigError


class Model(nn.Module):
    """Two tables and a layer."""

    def __init__(self):
        super().__init__()
        self.users = nn.EmbeddingBag(700, 4, mode="sum", sparse=True)
        self.goods = nn.EmbeddingBag(550, 4, mode="sum", sparse=True)
        self.top = nn.Linear(4, 1)

    def forward(self, ids):
        return self.top(self.users(ids) + self.goods(ids))


def is_accelerated():
    model = Model()
    recsys.accelerate(model, optimizer=SGD(lr=0.1))
    return model


def accelerate(make, **options):
    """Accelerate a model by a torch optimizer of its parameters."""
    model = Model()
    recsys.accelerate(model, optimizer=make(model.parameters()), always=True, **options)


def accelerate_by_two():
    model = Model()
    optimizers = [torch.optim.SGD([each.weight], lr=0.1) for each in (model.users, model.goods)]
    recsys.accelerate(model, optimizer=optimizers, budget="1KiB")


def estimate(**options):
    recsys.estimate(Model(), **({"optimizer": SGD(lr=0.1)} | options))


def verify(model=None, **options):
    model = Model() if model is None else model
    arguments = {
        "batches": [torch.arange(6).reshape(3, 2)],
        "loss": lambda each, ids: each(ids).sum(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    recsys.verify(model, **(arguments | options))


REFUSALS = [
    ("a text", lambda: recsys.accelerate("model"), TypeError, "model"),
    ("a bare bag", lambda: recsys.accelerate(Model().users), ValueError, "from_torch"),
    ("no tables", lambda: recsys.accelerate(nn.Linear(2, 2)), ValueError, "nn.EmbeddingBag"),
    ("no modules", lambda: recsys.accelerate(nn.ModuleList()), ValueError, "nn.EmbeddingBag"),
    ("twice", lambda: recsys.accelerate(is_accelerated()), ValueError, "'users'"),
    (
        "nothing to restore",
        lambda: recsys.restore(nn.ModuleList([nn.Linear(2, 2)])),
        ValueError,
        "nn.EmbeddingBag",
    ),
    ("no optimizers", lambda: accelerate(lambda _: []), TypeError, "empty list"),
    (
        "lazy Adam with weight decay",
        lambda: accelerate(torch.optim.AdamW, lazy_adam=True),
        ValueError,
        "weight_decay",
    ),
    ("a budget of two optimizers", accelerate_by_two, ValueError, "budget"),
    ("estimate, many bytes", lambda: estimate(budget="many"), ConfigError, "budget"),
    ("estimate, few bytes", lambda: estimate(budget="5000"), BudgetTooSmall, "budget"),
    ("estimate, a tape", lambda: estimate(cold_tier="tape"), ConfigError, "cold_tier"),
    ("estimate, no budget", lambda: estimate(cold_tier="file"), ConfigError, "budget"),
    ("estimate, no files", lambda: estimate(cold_path="rows"), ConfigError, "cold_path"),
    ("estimate, a class", lambda: estimate(optimizer=torch.optim.SGD), TypeError, "optimizer"),
    ("estimate, a text", lambda: recsys.estimate("model"), TypeError, "model"),
    ("estimate, accelerated", lambda: recsys.estimate(is_accelerated()), ValueError, "restore"),
    (
        "estimate, no tables",
        lambda: recsys.estimate(nn.Linear(2, 2)),
        ValueError,
        "nn.EmbeddingBag",
    ),
    (
        "estimate, tables of recsys",
        lambda: recsys.estimate(
            HotColdEmbeddingBag(700, 8, optimizer=SGD(lr=0.1)), optimizer=SGD(lr=0.1)
        ),
        ValueError,
        "recsys",
    ),
    ("verify, no batches", lambda: verify(batches=[]), ValueError, "batches"),
    ("verify, losses", lambda: verify(loss=lambda each, ids: each(ids)), RuntimeError, "scalar"),
    ("verify, None", lambda: verify(optimizer=None), TypeError, "optimizer"),
    ("verify, recsys's", lambda: verify(optimizer=SGD(lr=0.1)), TypeError, "optimizer"),
    ("verify, a name", lambda: verify(optimizer="sgd"), TypeError, "optimizer"),
    ("verify, an iterator", lambda: verify(optimizer=iter([])), TypeError, "optimizer"),
    ("verify, accelerated", lambda: verify(is_accelerated()), ValueError, "recsys.restore"),
]


@pytest.mark.parametrize(
    ("act", "error", "name"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_it_is_refused_by_name(act, error, name):
    with pytest.raises(error) as raised:
        act()

    assert name in str(raised.value)
