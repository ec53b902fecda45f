"""A copy or a pickle of a module or a model has plain tables with all rows, and no optimizer."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import (
    HotColdEmbedding,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    TableConfig,
)
from recsys.embeddings.optimizer import SGD, Adagrad
from recsys.embeddings.tiers.slots import Slots

NUM_ROWS, DIM, NUM_TABLES = 1000, 16, 4
TABLE_BYTES = 4 * NUM_ROWS * DIM
OVERHEAD_BYTES = 20_000
BAG_IDS = torch.tensor([[1, 2], [2, 2]])
FEATURES = [f"t{number}" for number in range(NUM_TABLES)]
IDS = JaggedIds.from_one_hot(FEATURES, torch.arange(2 * NUM_TABLES).reshape(NUM_TABLES, 2))
TIERS = {
    "resident": {},
    "host": {"budget": "40KiB"},
    "file": {"budget": "40KiB", "cold_tier": "file"},
}


def pickled(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def unpickled(thing):
    return torch.load(io.BytesIO(pickled(thing)), weights_only=False)


COPIES = [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing)), unpickled]
each_copy = pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle", "torch.save"])
each_tier = pytest.mark.parametrize("tier", TIERS)
each_optimizer = pytest.mark.parametrize("name", ["torch's SGD", "torch's Adagrad", "SGD", "none"])


def options_of(tier, folder):
    return TIERS[tier] | ({"cold_path": folder} if tier == "file" else {})


def tables():
    return [TableConfig(name=name, num_embeddings=NUM_ROWS, embedding_dim=DIM) for name in FEATURES]


MODULES = {
    "bag": lambda **more: HotColdEmbeddingBag(NUM_ROWS, DIM, mode="sum", **more),
    "embedding": lambda **more: HotColdEmbedding(NUM_ROWS, DIM, **more),
    "pooled": lambda **more: HotColdEmbeddingBagCollection(tables(), **more),
    "sequence": lambda **more: HotColdEmbeddingCollection(tables(), **more),
}


def loss_of(module):
    found = module(BAG_IDS if isinstance(module, nn.EmbeddingBag | nn.Embedding) else IDS)
    if isinstance(found, dict):
        return sum(each.values().square().sum() for each in found.values())
    return (found if isinstance(found, torch.Tensor) else found.values()).square().sum()


def rows_of(module):
    return [weight.detach().clone() for weight in module.parameters()]


@each_copy
@each_tier
@pytest.mark.parametrize("kind", MODULES)
def test_a_copy_has_plain_tables_with_all_rows_and_leaves_the_original_alone(
    kind, tier, copied, tmp_path
):
    torch.manual_seed(0)
    module = MODULES[kind](optimizer=Adagrad(lr=0.1), **options_of(tier, tmp_path))
    for _ in range(3):
        loss_of(module).backward()

    twin = copied(module)
    before = rows_of(module)
    assert all(map(torch.equal, rows_of(twin), before))
    loss_of(twin).backward()

    assert all(type(weight) is nn.Parameter for weight in twin.parameters())
    assert twin.row_optimizer is None
    assert twin.row_updater is None
    assert not twin.tiers()
    assert all(map(torch.equal, rows_of(twin), before))
    assert all(weight.grad is not None for weight in twin.parameters())
    assert all(map(torch.equal, rows_of(module), before))
    loss_of(module).backward()
    assert not any(map(torch.equal, rows_of(module), before))


def accelerated(name, **options):
    """Bags, and what steps them; None where rows are updated in backward."""
    torch.manual_seed(0)
    model = nn.ModuleList(
        nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True) for _ in range(NUM_TABLES)
    )
    optimizer = None
    if name.startswith("torch's") or name == "none":
        kind = torch.optim.SGD if name == "torch's SGD" else torch.optim.Adagrad
        optimizer = kind(model.parameters(), lr=0.1)
    given = {"none": None, "SGD": SGD(lr=0.1)}.get(name, optimizer)
    recsys.accelerate(model, optimizer=given, **options, always=True)
    return model, optimizer


def step(bags, optimizer):
    if optimizer is not None:
        optimizer.zero_grad()
    sum(bag(BAG_IDS).square().sum() for bag in bags).backward()
    if optimizer is not None:
        optimizer.step()


@each_copy
@pytest.mark.parametrize("name", ["torch's SGD", "torch's Adagrad", "none"])
def test_a_copy_of_model_and_optimizer_trains_on_by_torchs_optimizer(name, copied):
    model, optimizer = accelerated(name)
    step(model, optimizer)

    twin, its_optimizer = copied((model, optimizer))
    for _ in range(2):
        step(model, optimizer)
        step(twin, its_optimizer)

    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert mine is not theirs
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-6, atol=1e-7)


@each_copy
@each_tier
def test_a_copy_that_is_accelerated_again_continues_to_the_last_bit(copied, tier, tmp_path):
    model, optimizer = accelerated("torch's Adagrad", **options_of(tier, tmp_path))
    step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())

    twin = copied(model)
    recsys.restore(twin)
    its_optimizer = torch.optim.Adagrad(twin.parameters(), lr=0.1)
    its_optimizer.load_state_dict(state)
    recsys.accelerate(twin, optimizer=its_optimizer, **options_of(tier, tmp_path), always=True)
    for _ in range(2):
        step(model, optimizer)
        step(twin, its_optimizer)

    assert all(map(torch.equal, rows_of(twin), rows_of(model)))


@each_optimizer
def test_a_copy_of_a_part_can_be_restored(name):
    model, optimizer = accelerated(name)
    step(model, optimizer)

    part = nn.ModuleList([copy.deepcopy(model[3])])
    recsys.restore(part)

    assert type(part[0]) is nn.EmbeddingBag
    assert type(part[0].weight) is nn.Parameter
    assert torch.equal(part[0].weight, model[3].weight)
    assert type(model[3]) is HotColdEmbeddingBag


@each_optimizer
def test_a_bag_out_of_an_accelerated_model_is_pickled_alone(name):
    model, optimizer = accelerated(name)
    step(model, optimizer)

    assert len(pickled(model[0])) < TABLE_BYTES + OVERHEAD_BYTES
    assert len(pickled(model)) < NUM_TABLES * (TABLE_BYTES + OVERHEAD_BYTES)


def test_a_table_out_of_a_collection_is_pickled_alone():
    module = MODULES["pooled"](optimizer=Adagrad(lr=0.1))
    loss_of(module).backward()

    part = module.embedding_bags["t3"]

    assert len(pickled(part)) < TABLE_BYTES + OVERHEAD_BYTES
    assert type(unpickled(part)) is nn.EmbeddingBag


def test_a_copy_has_no_slots():
    model, _ = accelerated("SGD", budget="40KiB")
    gc.collect()
    before = sum(isinstance(each, Slots) for each in gc.get_objects())

    twin = copy.deepcopy(model)
    gc.collect()

    assert not twin[0].tiers()
    assert sum(isinstance(each, Slots) for each in gc.get_objects()) == before > 0


def test_tied_bags_stay_tied_in_a_copy():
    model = nn.ModuleList([nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum") for _ in range(3)])
    model[2].weight = model[0].weight
    recsys.accelerate(model, optimizer=Adagrad(lr=0.1))

    twin = copy.deepcopy(model)

    assert twin[0].weight is twin[2].weight


def test_a_shallow_copy_is_the_same_table():
    module = HotColdEmbeddingBag(5, 4, mode="sum", optimizer=SGD(lr=0.5))

    other = copy.copy(module)
    before = module.weight.detach().clone()
    other(BAG_IDS).sum().backward()
    module(BAG_IDS).sum().backward()

    counts = torch.bincount(BAG_IDS.flatten(), minlength=5).unsqueeze(1)
    assert other.weight is module.weight
    torch.testing.assert_close(module.weight.detach(), before - counts)


def test_a_copy_warns_where_a_copied_optimizer_would_update_by_another_rule():
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with pytest.warns(UserWarning, match="lazy_adam"):
        recsys.accelerate(model, optimizer=optimizer, lazy_adam=True, always=True)

    with pytest.warns(UserWarning, match="which a copy of the optimizer updates by its own rule"):
        copy.deepcopy((model, optimizer))
