"""Writes to tiered tables, and to their state, that do not go through the module."""

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


def bags(optimizer=None, **options):
    """The same bag twice: resident, and tiered."""
    found = []
    for budget in (None, 6000):
        torch.manual_seed(0)
        found.append(
            HotColdEmbeddingBag(
                NUM_ROWS,
                DIM,
                mode="sum",
                optimizer=optimizer or SGD(lr=0.5),
                budget=budget,
                **options,
            )
        )
    return found


def train(module, num_steps=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
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
each_kept = pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)


@each_kept
@pytest.mark.parametrize("when", ["before the first lookup", "between steps"])
def test_a_kept_tensor_written_to_while_slots_are_newer_is_an_error(keep, when):
    _, tiered = bags()
    kept = keep(tiered) if when == "before the first lookup" else None
    train(tiered)
    if kept is None:
        kept = keep(tiered)
        train(tiered)

    kept.clamp_(-0.1, 0.1)

    for use in (train, lambda module: module.state_dict(), lambda module: module.weight.sum()):
        with pytest.raises(ConflictingWrite, match="'weight'"):
            use(tiered)
    with torch.no_grad(), pytest.raises(ConflictingWrite):
        tiered(torch.tensor([[0]]))


@pytest.mark.parametrize("both", [False, True])
def test_a_collection_names_the_table_and_loads_tables_one_by_one(both):
    tables = [
        TableConfig(name=name, num_embeddings=300, embedding_dim=4) for name in ("users", "goods")
    ]
    torch.manual_seed(0)
    tiered = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.5), budget=6000)
    ids = JaggedIds.from_one_hot(["users", "goods"], torch.arange(20).view(2, 10))
    saved = copy.deepcopy(tiered.state_dict())
    kept = [weight.detach() for weight in tiered.table_weights()]
    tiered(ids).values().sum().backward()

    kept[1].zero_()

    with pytest.raises(ConflictingWrite, match="'goods'"):
        tiered(ids)
    if both:
        kept[0].zero_()
    tiered.load_state_dict(saved)
    for name, value in tiered.state_dict().items():
        assert torch.equal(value, saved[name])
    tiered(ids).values().sum().backward()


@pytest.mark.parametrize("is_saved", [False, True])
def test_state_written_to_in_place_counts_or_is_an_error(is_saved):
    modules = bags(Adagrad(lr=0.1))
    for module in modules:
        train(module)
        if is_saved:
            module.row_optimizer.state_dict()  # writes state back
        module.row_optimizer.state[module.weight]["momentum1"].mul_(4)

    if not is_saved:
        with pytest.raises(
            ConflictingWrite,
            match="'weight'",
        ):
            train(modules[1])
        return
    for module in modules:
        train(module, seed=1)
    assert torch.equal(modules[0].weight, modules[1].weight)
    states = [module.row_optimizer.state_dict()["state"]["weight"] for module in modules]
    assert torch.equal(states[0]["momentum1"], states[1]["momentum1"])


READS = {
    "state_dict": lambda module: module.state_dict(),
    "state_dict of the model": lambda module: nn.ModuleList([module]).state_dict(),
    "norm": lambda module: module.weight.norm(),
    "clone": lambda module: module.weight.clone(),
    "index": lambda module: module.weight[torch.tensor([3, 5])],
    "equal": lambda module: torch.equal(module.weight, module.weight),
    "optimizer": lambda module: module.row_optimizer.state_dict(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_finds_the_newest_rows_and_leaves_them_in_fast_memory(read):
    resident, tiered = bags(Adagrad(lr=0.1))
    train(resident)
    train(tiered)
    last = torch.arange(16).view(4, 4)
    for module in (resident, tiered):
        module(last).square().sum().backward()

    read(tiered)

    assert torch.equal(tiered.state_dict()["weight"], resident.weight)
    for module in (resident, tiered):
        module(last).square().sum().backward()
    assert torch.equal(tiered.weight, resident.weight)


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
    rows = [
        each.weight for each in model.children() if isinstance(each, nn.Embedding | nn.EmbeddingBag)
    ]
    optimizer = torch.optim.SGD([each for each in rows if each.requires_grad], lr=0.5)
    kind = type(model.get_submodule("table"))

    for more in ({}, {"cold_tier": "file", "cold_path": tmp_path / "rows"}):
        with pytest.raises(ValueError, match=r"'table'.*'other|'other'.*'table'"):
            recsys.accelerate(model, optimizer=optimizer, budget=6000, **more)

    assert type(model.get_submodule("table")) is kind
    assert not (tmp_path / "rows").exists()


def many_bags(num_tables, budget):
    torch.manual_seed(0)
    model = nn.ModuleList(
        nn.EmbeddingBag(NUM_ROWS, DIM, padding_idx=NUM_ROWS - 1, sparse=True)
        for _ in range(num_tables)
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    return model, optimizer


@each_kept
def test_a_write_to_a_table_without_newer_rows_is_seen_by_its_next_lookup(keep):
    model, optimizer = many_bags(2, "10KiB")
    ids = torch.arange(8, 20).view(4, 3)
    sum(bag(ids).sum() for bag in model).backward()
    optimizer.step()
    kept = keep(model[0])
    model[0](ids)

    model[1](ids).sum().backward()
    kept.fill_(0.25)
    model[1](ids)
    optimizer.step()

    assert model[0](ids).eq(0.25).all()
