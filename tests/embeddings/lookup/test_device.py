"""Where tables may be: the CPU, CUDA, or nowhere yet (`meta`); said when a module is built."""

import pytest
import torch
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import HotColdEmbeddingBag, HotColdEmbeddingBagCollection, TableConfig
from recsys.embeddings.lookup.abstract_tables import device_of
from recsys.embeddings.lookup.table_group import TableGroup
from recsys.embeddings.optimizer import SGD

TABLES = [TableConfig(name="a", num_embeddings=5, embedding_dim=4)]
IDS = JaggedIds.from_one_hot(["a"], torch.tensor([[1, 2]]))
BAG_IDS = torch.tensor([[1], [2]])
each_optimizer = pytest.mark.parametrize("optimizer", [None, SGD(lr=0.1)], ids=["torch's", "ours"])


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
@each_optimizer
def test_the_cpu_is_a_device_by_any_name(device, optimizer):
    bag = HotColdEmbeddingBag(10, 4, device=device, optimizer=optimizer)
    collection = HotColdEmbeddingBagCollection(TABLES, device=device, optimizer=optimizer)

    assert (bag.weight.device.type, collection.device.type) == ("cpu", "cpu")


def test_without_an_optimizer_of_ours_the_device_is_torchs_matter():
    with pytest.raises((AssertionError, RuntimeError)) as theirs:
        nn.EmbeddingBag(10, 4, device="mps:7")
    with pytest.raises((AssertionError, RuntimeError)) as ours:
        HotColdEmbeddingBag(10, 4, device="mps:7")

    assert type(ours.value) is type(theirs.value)


def make_bag(optimizer, device=None):
    return HotColdEmbeddingBag(5, 4, mode="sum", device=device, optimizer=optimizer)


def make_collection(optimizer, device=None):
    return HotColdEmbeddingBagCollection(TABLES, device=device, optimizer=optimizer)


MAKES = [(make_bag, BAG_IDS), (make_collection, IDS)]
each_module = pytest.mark.parametrize(("make", "ids"), MAKES, ids=["bag", "collection"])


def values(pooled):
    return pooled if isinstance(pooled, torch.Tensor) else pooled.values()


@each_module
@each_optimizer
def test_a_module_without_memory_gets_it_later(make, ids, optimizer):
    module = make(optimizer, torch.device("meta"))
    [weight] = module.parameters()
    assert weight.is_meta

    module.to_empty(device="cpu").reset_parameters()
    [before] = [weight.detach().clone() for weight in module.parameters()]
    values(module(ids)).sum().backward()

    [weight] = module.parameters()
    expected = before.clone()
    if optimizer is not None:
        expected[1:3] -= 0.1
    assert torch.equal(weight.detach(), expected)


@each_module
def test_a_module_built_under_the_meta_device_takes_a_state_dict(make, ids):
    source = make(None)
    with torch.device("meta"):
        module = make(SGD(lr=0.1))

    module.load_state_dict(source.state_dict(), assign=True)

    assert torch.equal(values(module(ids)), values(source(ids)))


def test_skip_init_makes_modules_that_train():
    bag = nn.utils.skip_init(HotColdEmbeddingBag, 5, 4, mode="sum", optimizer=SGD(lr=0.1))
    collection = nn.utils.skip_init(HotColdEmbeddingBagCollection, TABLES, optimizer=SGD(lr=0.1))

    for module, ids in ((bag, BAG_IDS), (collection, IDS)):
        module.reset_parameters()
        [before] = [weight.detach().clone() for weight in module.parameters()]
        values(module(ids)).sum().backward()
        [weight] = module.parameters()
        torch.testing.assert_close(before[1:3] - weight.detach()[1:3], torch.full((2, 4), 0.1))


@pytest.mark.parametrize("num_tables", [1, 2])
def test_a_cold_tier_without_memory_is_refused_by_name(num_tables):
    tables = [
        TableConfig(name=f"t_{number}", num_embeddings=300, embedding_dim=4)
        for number in range(num_tables)
    ]

    with (
        torch.device("meta"),
        pytest.raises(ValueError, match="table 't_0': a cold tier needs rows in memory, got dev"),
    ):
        HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.1), budget=2500 * num_tables)


def test_rows_without_memory_that_fit_the_budget_get_it_later():
    tables = [TableConfig(name=name, num_embeddings=5, embedding_dim=4) for name in ("a", "b")]
    with torch.device("meta"), pytest.warns(UserWarning, match="no cold tier is needed"):
        module = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.1), budget="1GiB")

    module.to_empty(device="cpu").reset_parameters()

    assert {weight.device.type for weight in module.parameters()} == {"cpu"}


def test_a_model_computes_where_its_slots_are():
    """Its tables are in the host's memory, and come first among its parameters."""
    tiered = HotColdEmbeddingBag(100, 4, optimizer=SGD(lr=0.1), budget=1000)
    model = nn.Sequential(tiered, nn.Linear(4, 1))
    assert device_of(model) == torch.device("cpu")

    [tiers] = tiered.tiers()
    tiers.device = torch.device("meta")

    assert next(model.parameters()).device == torch.device("cpu")
    assert device_of(model) == torch.device("meta")
    assert device_of(nn.Linear(1, 1, device="meta")) == torch.device("meta")


def test_a_module_that_is_moved_between_lookup_and_backward_is_named(monkeypatch, device):
    """Another device stands in for the one that it is moved to."""
    module = nn.Sequential(nn.EmbeddingBag(1000, 4, mode="sum", sparse=True)).to(device)
    recsys.accelerate(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), always=True)
    pooled = module(torch.arange(8, device=device).unsqueeze(1))
    monkeypatch.setattr(TableGroup, "device", torch.device("meta"))

    with pytest.raises(
        RuntimeError, match=r"table '0': was looked up on .* moved to 'meta' .* backward before"
    ):
        pooled.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("budget", [None, "8KiB"])
def test_a_module_that_is_moved_to_the_cpu_between_lookup_and_backward_is_named(budget):
    module = nn.Sequential(nn.EmbeddingBag(1000, 4, mode="sum", sparse=True)).cuda()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    recsys.accelerate(module, optimizer=optimizer, budget=budget, always=True)
    ids = torch.arange(8).unsqueeze(1)
    pooled = module(ids.cuda())

    module.cpu()
    with pytest.raises(RuntimeError, match=r"table '0': was looked up on 'cuda:0' and moved to"):
        pooled.sum().backward()

    optimizer.zero_grad()
    module(ids).sum().backward()
    optimizer.step()
