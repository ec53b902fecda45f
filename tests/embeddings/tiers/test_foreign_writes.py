"""Writes to tiered tables, and to their state, that do not go through the module.

`tests/users.py` makes such writes at random; here are the errors by name.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    TableConfig,
)
from recsys.errors import ConflictingWrite

NUM_ROWS, DIM = 400, 4


def make_bag(optimizer, **options):
    torch.manual_seed(0)
    return HotColdEmbeddingBag(NUM_ROWS, DIM, mode="sum", optimizer=optimizer, **options)


def train(module, num_steps=5):
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        ids = torch.randint(0, NUM_ROWS, (8, 4), generator=generator)
        module(ids).square().sum().backward()


KEPT = {
    "detach": lambda module: module.weight.detach(),
    "slice": lambda module: module.weight.detach()[3:90],
    "data": lambda module: module.weight.data,
    "view of data": lambda module: module.weight.data.view(-1)[17:],
    "state_dict": lambda module: module.state_dict()["weight"],
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("num_steps_before", [0, 5])
def test_a_kept_tensor_written_to_while_slots_are_newer_is_an_error(keep, num_steps_before):
    tiered = make_bag(SGD(lr=0.5), budget=6000)
    train(tiered, num_steps_before)
    kept = keep(tiered)
    train(tiered)

    kept.clamp_(-0.1, 0.1)

    for use in (train, lambda module: module.state_dict(), lambda module: module.weight.sum()):
        with pytest.raises(ConflictingWrite, match="'weight'"):
            use(tiered)
    with torch.no_grad(), pytest.raises(ConflictingWrite):
        tiered(torch.tensor([[0]]))


def test_a_collection_names_the_table_and_goes_on_from_a_checkpoint():
    tables = [
        TableConfig(name=name, num_embeddings=300, embedding_dim=4) for name in ("users", "goods")
    ]
    tiered = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.5), budget=6000)
    ids = JaggedIds.from_one_hot(["users", "goods"], torch.arange(20).view(2, 10))
    saved = copy.deepcopy(tiered.state_dict())
    kept = tiered.table_weights()[1].detach()
    tiered(ids).values().sum().backward()

    kept.zero_()

    with pytest.raises(ConflictingWrite, match="'goods'"):
        tiered(ids)
    tiered.load_state_dict(saved)
    for name, value in tiered.state_dict().items():
        assert torch.equal(value, saved[name])


def test_state_written_to_in_place_counts_once_it_was_written_back_and_else_is_an_error():
    modules = [make_bag(Adagrad(lr=0.1), budget=budget) for budget in (None, 6000)]
    for module in modules:
        train(module)
        module.row_optimizer.state_dict()  # writes state back
        module.row_optimizer.state[module.weight]["momentum1"].mul_(4)
        train(module)
    assert torch.equal(modules[0].weight, modules[1].weight)

    train(modules[1])
    modules[1].row_optimizer.state[modules[1].weight]["momentum1"].mul_(4)
    with pytest.raises(ConflictingWrite, match="'weight'"):
        train(modules[1])


class Another(nn.Module):
    """A model whose `other` is on the memory of its table."""

    def __init__(self, kind):
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, DIM, sparse=True)
        rows = self.table.weight.detach()
        if kind == "frozen":
            self.other = nn.Embedding.from_pretrained(rows)
        elif kind == "parameter":
            self.other = nn.Parameter(rows[3:])
        else:
            self.register_buffer("other", rows.T)
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.lazy = nn.LazyLinear(2)


def two_parameters():
    rows = torch.randn(NUM_ROWS, DIM)
    return nn.ModuleDict(
        {name: nn.Embedding.from_pretrained(rows, freeze=False) for name in ("table", "other")}
    )


@pytest.mark.parametrize(
    "make",
    [two_parameters, *(partial(Another, kind) for kind in ("frozen", "parameter", "buffer"))],
)
def test_memory_that_is_not_a_tables_alone_is_refused_with_a_budget(make, tmp_path):
    model = make()
    kind = type(model.get_submodule("table"))

    for more in ({}, {"cold_tier": "file", "cold_path": tmp_path / "rows"}):
        with pytest.raises(ValueError, match=r"'table'.*'other|'other'.*'table'"):
            recsys.accelerate(model, optimizer=SGD(lr=0.5), budget=6000, **more)

    assert type(model.get_submodule("table")) is kind
    assert not (tmp_path / "rows").exists()
