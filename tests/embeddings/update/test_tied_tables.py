"""One Parameter in several modules: one optimizer moves it once, a second one is refused."""

import copy
import gc

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import HotColdEmbeddingBag, HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD, Adagrad

INDICES, OFFSETS = torch.tensor([0, 3, 3, 1]), torch.tensor([0, 2, 2])


def bag(**options):
    torch.manual_seed(0)
    return nn.EmbeddingBag(5, 4, **({"mode": "sum", "sparse": True} | options))


class Towers(nn.Module):
    """Two bags of one table; the second averages."""

    def __init__(self):
        super().__init__()
        self.left, self.right = bag(), bag(mode="mean")
        self.right.weight = self.left.weight

    def forward(self):
        return self.left(INDICES, OFFSETS) + self.right(INDICES[:2], OFFSETS[:2]).sum(0)


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam], ids=lambda k: k.__name__
)
def test_two_bags_of_one_table_train_as_in_plain_pytorch(kind):
    plain, ours = Towers(), Towers()
    optimizers = [kind(list(each.parameters()), lr=0.1) for each in (plain, ours)]
    recsys.accelerate(ours, optimizer=optimizers[1], always=True)

    for model, optimizer in zip((plain, ours), optimizers, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            model().square().sum().backward()
            optimizer.step()

    torch.testing.assert_close(ours.left.weight, plain.left.weight, rtol=1e-5, atol=1e-7)


SECONDS = {
    "from_torch": lambda bag: HotColdEmbeddingBag.from_torch(bag, optimizer=Adagrad(lr=0.1)),
    "from_torch without an optimizer": HotColdEmbeddingBag.from_torch,
    "accelerate": lambda bag: recsys.accelerate(nn.ModuleList([bag]), optimizer=SGD(lr=0.1)),
    "accelerate by torch's": lambda bag: recsys.accelerate(
        nn.ModuleList([bag]),
        optimizer=torch.optim.SGD(bag.parameters(), lr=0.1),
        always=True,
    ),
}


@pytest.mark.parametrize("second", SECONDS.values(), ids=SECONDS)
def test_a_second_optimizer_is_refused_and_the_first_goes_on(second):
    left, right = bag(), bag()
    right.weight = left.weight
    first = HotColdEmbeddingBag.from_torch(left, optimizer=Adagrad(lr=0.1))

    with pytest.raises(ValueError, match="already updated by another recsys optimizer"):
        second(right)

    before = first.weight.detach().clone()
    first(INDICES, OFFSETS).sum().backward()
    expected = before - 0.1 * (torch.bincount(INDICES, minlength=5) > 0).unsqueeze(1)
    torch.testing.assert_close(first.weight.detach(), expected)


def test_one_optimizer_given_to_two_models_of_one_table_is_refused():
    left, right = nn.ModuleList([bag()]), nn.ModuleList([bag()])
    right[0].weight = left[0].weight
    optimizer = torch.optim.Adagrad(left.parameters(), lr=0.1)
    recsys.accelerate(left, optimizer=optimizer, always=True)

    with pytest.raises(ValueError, match="table '0' is already updated by another recsys"):
        recsys.accelerate(right, optimizer=optimizer, always=True)

    assert type(right[0]) is nn.EmbeddingBag


def test_a_table_put_into_a_second_module_by_hand_is_refused_at_every_lookup():
    left, right = (
        HotColdEmbeddingBag(5, 4, mode="sum", optimizer=Adagrad(lr=0.1)) for _ in range(2)
    )
    right.weight = left.weight

    for _ in range(2):
        with pytest.raises(ValueError, match="table 'weight': its Parameter was replaced"):
            right(INDICES, OFFSETS)


def test_a_table_is_free_again_when_the_first_module_is_gone():
    left, right = bag(), bag()
    right.weight = left.weight
    first = HotColdEmbeddingBag.from_torch(left, optimizer=Adagrad(lr=0.1))
    del first

    second = HotColdEmbeddingBag.from_torch(right, optimizer=SGD(lr=0.5))

    before = second.weight.detach().clone()
    second(INDICES, OFFSETS).sum().backward()
    expected = before - 0.5 * torch.bincount(INDICES, minlength=5).unsqueeze(1)
    assert second.weight is left.weight
    torch.testing.assert_close(second.weight.detach(), expected)


def test_a_module_that_goes_late_takes_nothing_from_the_one_that_came_after():
    left, right = bag(), bag()
    right.weight = left.weight
    model = nn.ModuleList([left])
    recsys.accelerate(model, optimizer=SGD(lr=0.5))
    recsys.restore(model)
    second = HotColdEmbeddingBag.from_torch(right, optimizer=SGD(lr=0.5), auto_apply=False)

    del model
    gc.collect()
    second(INDICES, OFFSETS).sum().backward()

    assert second.weight.grad.to_dense()[:, 0].tolist() == [1, 1, 0, 2, 0]


@pytest.mark.parametrize("poolings", [("SUM", "SUM"), ("SUM", "MEAN")])
@pytest.mark.parametrize("optimizer", [None, Adagrad(lr=0.1)], ids=["torch's", "ours"])
def test_two_tables_of_a_torchrec_collection_may_be_one(optimizer, poolings):
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)

    def build():
        torch.manual_seed(0)
        collection = torchrec.EmbeddingBagCollection(
            [
                torchrec.EmbeddingBagConfig(
                    name=name,
                    num_embeddings=5,
                    embedding_dim=4,
                    feature_names=[f"f_{name}"],
                    pooling=torchrec.PoolingType[pooling],
                )
                for name, pooling in zip("ab", poolings, strict=True)
            ]
        )
        bags = collection.embedding_bags
        bags["b"].weight = bags["a"].weight
        return collection

    plain = build()
    ours = HotColdEmbeddingBagCollection.from_torchrec(build(), optimizer=optimizer)
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        ["f_a", "f_b"], torch.tensor([1, 2, 2, 3, 2]), torch.tensor([2, 1, 0, 2])
    )
    mine = ours.row_optimizer or torch.optim.Adagrad(ours.parameters(), lr=0.1)
    theirs = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for each, its_optimizer in ((plain, theirs), (ours, mine)):
        for _ in range(3):
            its_optimizer.zero_grad()
            each(features).values().square().sum().backward()
            its_optimizer.step()

    [weight], [expected] = ours.parameters(), plain.parameters()
    torch.testing.assert_close(weight.detach(), expected.detach(), rtol=1e-5, atol=1e-7)
    assert list(ours.state_dict()) == list(plain.state_dict())
    if optimizer is not None:
        assert list(mine.state_dict()["state"]) == ["embedding_bags.a.weight"]


def test_tables_that_are_one_no_more_are_refused():
    model = Towers()
    recsys.accelerate(model, optimizer=SGD(lr=0.1))

    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    assert model.left.weight is not model.right.weight
    with pytest.raises(ValueError, match="table 'left': its Parameter was replaced"):
        model()


@pytest.mark.parametrize("budget", [None, 8192])
def test_a_tied_bag_that_gets_a_table_of_its_own_is_refused_at_its_next_lookup(budget):
    model = nn.ModuleList(nn.EmbeddingBag(500, 4, mode="sum", sparse=True) for _ in range(2))
    model.append(nn.EmbeddingBag(500, 4, mode="sum", sparse=True))
    model[1].weight = model[0].weight
    nn.init.constant_(model[2].weight, 9.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recsys.accelerate(model, optimizer=optimizer, budget=budget, always=True)
    for each in model:  # all is known by now
        each(INDICES, OFFSETS).sum().backward()
    before, shared = model[2].weight.detach().clone(), model[0].weight

    model[1].weight = nn.Parameter(torch.ones(700, 4))

    for is_enabled in (True, False):
        with (
            torch.set_grad_enabled(is_enabled),
            pytest.raises(ValueError, match="its Parameter was replaced"),
        ):
            model[1](torch.tensor([600]), OFFSETS[:1])
    model[0](INDICES, OFFSETS)  # it has the table still
    model[1].weight = shared
    assert torch.equal(model[2].weight, before)
    model[1](INDICES, OFFSETS)
    optimizer.step()
    assert not torch.equal(model[2].weight, before)
