"""One Parameter in several modules: one optimizer moves it once, a second one is refused."""

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import SGD, Adagrad, HotColdEmbeddingBag, HotColdEmbeddingBagCollection

IDS, OFFSETS = torch.tensor([0, 3, 3, 1]), torch.tensor([0, 2, 2])
COUNTS = torch.bincount(IDS, minlength=5).unsqueeze(1)


def tied_bags(count=2):
    torch.manual_seed(0)
    bags = [nn.EmbeddingBag(5, 4, mode="sum", sparse=True) for _ in range(count)]
    bags[1].weight = bags[0].weight
    return nn.ModuleList(bags)


def step_of(module):
    """What a step of a sum subtracts."""
    before = module.weight.detach().clone()
    module(IDS, OFFSETS).sum().backward()
    return before - module.weight.detach()


SECONDS = {
    "from_torch": lambda bag: HotColdEmbeddingBag.from_torch(bag, optimizer=Adagrad(lr=0.1)),
    "from_torch without an optimizer": HotColdEmbeddingBag.from_torch,
    "accelerate": lambda bag: recsys.accelerate(nn.ModuleList([bag]), optimizer=SGD(lr=0.1)),
    "accelerate by torch's": lambda bag: recsys.accelerate(
        nn.ModuleList([bag]), optimizer=torch.optim.SGD(bag.parameters(), lr=0.1), always=True
    ),
}


@pytest.mark.parametrize("second", SECONDS.values(), ids=SECONDS)
def test_a_second_optimizer_is_refused_until_the_first_module_is_gone(second):
    left, right = tied_bags()
    first = HotColdEmbeddingBag.from_torch(left, optimizer=Adagrad(lr=0.1))

    with pytest.raises(ValueError, match="already updated by another recsys optimizer"):
        second(right)

    torch.testing.assert_close(step_of(first), 0.1 * (COUNTS > 0).expand(5, 4))
    del first
    again = HotColdEmbeddingBag.from_torch(right, optimizer=SGD(lr=0.5))
    assert again.weight is left.weight
    torch.testing.assert_close(step_of(again), (0.5 * COUNTS).expand(5, 4))


@pytest.mark.parametrize("poolings", [("SUM", "SUM"), ("SUM", "MEAN")])
@pytest.mark.parametrize("optimizer", [None, Adagrad(lr=0.1)], ids=["torch's", "ours"])
def test_two_tables_of_a_torchrec_collection_may_be_one(optimizer, poolings):
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        configs = [
            torchrec.EmbeddingBagConfig(
                name=name,
                num_embeddings=5,
                embedding_dim=4,
                feature_names=[f"f_{name}"],
                pooling=torchrec.PoolingType[pooling],
            )
            for name, pooling in zip("ab", poolings, strict=True)
        ]
        made.append(torchrec.EmbeddingBagCollection(configs))
        made[-1].embedding_bags["b"].weight = made[-1].embedding_bags["a"].weight
    plain = made[0]
    ours = HotColdEmbeddingBagCollection.from_torchrec(made[1], optimizer=optimizer)
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        ["f_a", "f_b"], torch.tensor([1, 2, 2, 3, 2]), torch.tensor([2, 1, 0, 2])
    )
    mine = ours.row_optimizer or torch.optim.Adagrad(ours.parameters(), lr=0.1)
    theirs = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for module, its_optimizer in ((plain, theirs), (ours, mine)):
        for _ in range(3):
            its_optimizer.zero_grad()
            module(features).values().square().sum().backward()
            its_optimizer.step()

    [weight], [expected] = ours.parameters(), plain.parameters()
    torch.testing.assert_close(weight.detach(), expected.detach(), rtol=1e-5, atol=1e-7)
    assert list(ours.state_dict()) == list(plain.state_dict())
    if optimizer is not None:
        assert list(mine.state_dict()["state"]) == ["embedding_bags.a.weight"]


@pytest.mark.filterwarnings("ignore:tables .* used in the cold tier")
@pytest.mark.parametrize("budget", [None, 150])
def test_a_tied_bag_that_gets_a_table_of_its_own_is_refused_at_its_next_lookup(budget):
    model = tied_bags(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    for module in model:  # all is known by now
        module(IDS, OFFSETS).sum().backward()
    before, shared = model[2].weight.detach().clone(), model[0].weight

    model[1].weight = nn.Parameter(torch.ones(700, 4))

    for is_enabled in (True, False):
        with (
            torch.set_grad_enabled(is_enabled),
            pytest.raises(ValueError, match="its Parameter was replaced"),
        ):
            model[1](torch.tensor([600]), OFFSETS[:1])
    model[0](IDS, OFFSETS)  # it has the table still
    model[1].weight = shared
    model[1](IDS, OFFSETS)
    optimizer.step()
    assert not torch.equal(model[2].weight, before)
