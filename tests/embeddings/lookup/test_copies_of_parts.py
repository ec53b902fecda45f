"""A copy or a pickle of a whole model trains on as it does; one of a part has plain tables."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import HotColdEmbeddingBag, HotColdEmbeddingBagCollection, TableConfig
from recsys.embeddings.optimizer import SGD, Adagrad, Adam

NUM_ROWS, DIM, NUM_TABLES = 1000, 16, 8
TABLE_BYTES = 4 * NUM_ROWS * DIM
OVERHEAD_BYTES = 20_000
BAG_IDS = torch.tensor([[1, 2], [2, 2]])
FEATURES = [f"t{number}" for number in range(NUM_TABLES)]
IDS = JaggedIds.from_one_hot(FEATURES, torch.arange(2 * NUM_TABLES).reshape(NUM_TABLES, 2))


def pickled(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def unpickled(thing):
    return torch.load(io.BytesIO(pickled(thing)), weights_only=False)


COPIES = [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing)), unpickled]
each_copy = pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle", "torch.save"])
each_optimizer = pytest.mark.parametrize(
    "name", ["torch's SGD", "torch's Adagrad", "SGD", "Adagrad", "Adam", "none"]
)


def accelerated(name, **options):
    """Bags, and what steps them; None where rows move in backward."""
    torch.manual_seed(0)
    options = {"mode": "sum", "sparse": True} | options
    model = nn.ModuleList(nn.EmbeddingBag(NUM_ROWS, DIM, **options) for _ in range(NUM_TABLES))
    formula = {"SGD": SGD(lr=0.1), "Adagrad": Adagrad(lr=0.1), "Adam": Adam(lr=0.1)}.get(name)
    optimizer = None
    if formula is None:
        kind = torch.optim.SGD if name == "torch's SGD" else torch.optim.Adagrad
        optimizer = kind(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=formula if name == "none" else formula or optimizer)
    return model, optimizer


def step(bags, optimizer):
    if optimizer is not None:
        optimizer.zero_grad()
    sum(bag(BAG_IDS).square().sum() for bag in bags).backward()
    if optimizer is not None:
        optimizer.step()


PART = "a copy of a part of the tables that one recsys optimizer updates"
updated_here = pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])


@each_optimizer
def test_a_bag_out_of_an_accelerated_model_is_pickled_alone(name):
    model, optimizer = accelerated(name)
    step(model, optimizer)

    state_bytes = {"Adagrad": TABLE_BYTES, "Adam": 2 * TABLE_BYTES}.get(name, 0)
    assert len(pickled(model[0])) < TABLE_BYTES + state_bytes + OVERHEAD_BYTES


@each_copy
@updated_here
def test_a_copied_part_has_plain_tables_says_so_once_and_leaves_the_rest_alone(name, copied):
    model, _ = accelerated(name)
    step(model, None)

    part = copied(nn.ModuleList(model[:3]))
    before = [bag.weight.detach().clone() for bag in model]
    own = torch.optim.SGD(part.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(part, own)

    assert [PART in str(each.message) for each in caught] == [True] * 3
    for bag, old in zip(model, before, strict=True):
        assert torch.equal(bag.weight, old)
    for number, bag in enumerate(part):
        assert type(bag.weight) is nn.Parameter
        assert bag.row_updater is None
        plain = nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True, _weight=before[number])
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(2):
            step([plain], theirs)
        torch.testing.assert_close(bag.weight, plain.weight, rtol=1e-6, atol=1e-7)


@each_copy
@pytest.mark.parametrize("name", ["torch's SGD", "torch's Adagrad", "none"])
def test_a_copied_bag_trains_on_by_torchs_optimizer(name, copied):
    model, optimizer = accelerated(name)
    step(model, optimizer)

    part = copied(model[3])
    own = type(optimizer)(part.parameters(), lr=0.1)
    own.load_state_dict(
        {
            "state": {0: copy.deepcopy(optimizer.state_dict()["state"].get(3, {}))},
            "param_groups": own.state_dict()["param_groups"],
        }
    )
    before = [bag.weight.detach().clone() for bag in model]
    for _ in range(2):
        step([part], own)
    unmoved = [torch.equal(bag.weight, old) for bag, old in zip(model, before, strict=True)]
    for _ in range(2):
        step(model, optimizer)

    assert all(unmoved)
    torch.testing.assert_close(part.weight.detach(), model[3].weight.detach(), rtol=1e-6, atol=1e-7)


@each_copy
def test_a_part_is_looked_up_and_copied_on(copied):
    model, _ = accelerated("SGD")

    part = copied(copied(model[3]))

    with pytest.warns(UserWarning, match=PART):
        assert torch.equal(part(BAG_IDS), model[3](BAG_IDS))
    assert torch.equal(copied(part)(BAG_IDS), model[3](BAG_IDS))


@each_copy
def test_a_collection_out_of_an_accelerated_model_says_that_it_is_a_part(copied):
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)

    def build(kind, config, name):
        return kind([config(name=name, num_embeddings=9, embedding_dim=4, feature_names=["f"])])

    ids = torchrec.KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    model = nn.ModuleList(
        [
            build(torchrec.EmbeddingBagCollection, torchrec.EmbeddingBagConfig, "a"),
            build(torchrec.EmbeddingCollection, torchrec.EmbeddingConfig, "b"),
        ]
    )
    recsys.accelerate(model, optimizer=SGD(lr=0.1))

    for number, module in enumerate(model):
        part = copied(module)
        with pytest.warns(UserWarning, match=PART):
            found = part(ids)
        expected = module(ids)
        if number == 0:
            assert torch.equal(found.values(), expected.values())
        else:
            assert torch.equal(found["f"].values(), expected["f"].values())
        assert part.row_updater is None
    whole = copied(model)
    assert all(each.row_updater is not None for each in whole)


@each_copy
@each_optimizer
def test_a_copied_model_trains_on_as_the_original(name, copied):
    model, optimizer = accelerated(name)
    step(model, optimizer)

    twin, its_optimizer = copied((model, optimizer))
    for _ in range(2):
        step(model, optimizer)
        step(twin, its_optimizer)

    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert mine is not theirs
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-6, atol=1e-7)


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


def test_an_accelerated_model_is_pickled_without_the_optimizer_that_moves_it():
    model, optimizer = accelerated("torch's Adagrad")
    step(model, optimizer)

    assert len(pickled(model)) < NUM_TABLES * (TABLE_BYTES + OVERHEAD_BYTES)


def test_tied_bags_stay_tied_in_a_copy():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum") for _ in range(3)])
    model[2].weight = model[0].weight
    recsys.accelerate(model, optimizer=Adagrad(lr=0.1))
    step(model, None)

    twin = copy.deepcopy(model)
    for each in (model, twin):
        step(each, None)

    assert twin[0].weight is twin[2].weight
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    twin.load_state_dict(copy.deepcopy(twin.state_dict()), assign=True)
    with pytest.raises(ValueError, match="its Parameter was replaced"):
        step(twin, None)


def collection(optimizer, **options):
    torch.manual_seed(0)
    tables = [
        TableConfig(name=name, num_embeddings=NUM_ROWS, embedding_dim=DIM) for name in FEATURES
    ]
    return HotColdEmbeddingBagCollection(tables, optimizer=optimizer, **options)


@pytest.mark.parametrize("optimizer", [None, Adagrad(lr=0.1)], ids=["torch's", "ours"])
def test_a_table_out_of_a_collection_is_pickled_alone(optimizer):
    module = collection(optimizer)
    module(IDS).values().sum().backward()
    module.zero_grad()

    part = module.embedding_bags["t3"]

    assert len(pickled(part)) < TABLE_BYTES + OVERHEAD_BYTES
    assert type(unpickled(part)) is nn.EmbeddingBag


@each_copy
@pytest.mark.parametrize("optimizer", [Adagrad(lr=0.1), Adam(lr=0.1)], ids=["Adagrad", "Adam"])
def test_a_copied_collections_optimizer_is_its_own_at_once(optimizer, copied):
    module = collection(optimizer, auto_apply=False)
    module(IDS).values().sum().backward()
    module.row_optimizer.step()

    twin = copied(module)

    [group] = twin.row_optimizer.param_groups
    assert [id(each) for each in group["params"]] == [id(each) for each in twin.parameters()]
    states = [each.row_optimizer.state_dict()["state"] for each in (twin, module)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    twin(IDS).values().sum().backward()
    group["lr"] = 0.0
    twin.row_optimizer.step()
    assert all(map(torch.equal, twin.parameters(), module.parameters()))


def test_a_shallow_copy_is_the_same_table():
    module = HotColdEmbeddingBag(5, 4, mode="sum", optimizer=SGD(lr=0.5))

    other = copy.copy(module)
    before = module.weight.detach().clone()
    other(BAG_IDS).sum().backward()
    module(BAG_IDS).sum().backward()

    counts = torch.bincount(BAG_IDS.flatten(), minlength=5).unsqueeze(1)
    assert other.weight is module.weight
    torch.testing.assert_close(module.weight.detach(), before - counts)


def test_a_torchrec_collection_out_of_an_accelerated_model_is_pickled_alone():
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)

    def build(name):
        config = torchrec.EmbeddingBagConfig(
            name=name, num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=["f"]
        )
        return torchrec.EmbeddingBagCollection([config])

    ids = torchrec.KeyedJaggedTensor.from_lengths_sync(
        ["f"], torch.tensor([1, 2, 2]), torch.tensor([2, 1])
    )
    model = nn.ModuleList([build("a"), build("b")])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer)

    part = unpickled(model[1])
    own = torch.optim.SGD(part.parameters(), lr=0.1)
    for module, stepped in ((model[1], optimizer), (part, own)):
        module(ids).values().square().sum().backward()
        stepped.step()

    assert len(pickled(model[1])) < TABLE_BYTES + OVERHEAD_BYTES
    [weight], [expected] = part.parameters(), model[1].parameters()
    torch.testing.assert_close(weight.detach(), expected.detach())


@pytest.mark.parametrize("num_copies", [1, 2])
def test_an_optimizer_that_was_copied_alone_says_so(num_copies):
    module = collection(Adagrad(lr=0.1))
    state = module.row_optimizer.state_dict()

    alone = module.row_optimizer
    for _ in range(num_copies):
        alone = copy.deepcopy(alone)

    for use in (alone.step, alone.state_dict, lambda: alone.load_state_dict(state)):
        with pytest.raises(RuntimeError, match="it was copied without its module"):
            use()
    together, its_own = copy.deepcopy((module, module.row_optimizer))
    assert together.row_optimizer is its_own
    its_own.step()
