import copy
import re

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import SGD, Adagrad, HotColdEmbeddingBagCollection

INDICES, OFFSETS = torch.tensor([0, 3, 3, 1]), torch.tensor([0, 2, 2])


def bag(size=5, dim=2, **options):
    return nn.EmbeddingBag(size, dim, **({"mode": "sum", "sparse": True} | options))


class Holder(nn.Module):
    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **({"lr": 0.5} | options))


def step(model, optimizer):
    optimizer.zero_grad()
    sum(
        module(INDICES, OFFSETS).square().sum()
        for module in model.modules()
        if isinstance(module, nn.EmbeddingBag)
    ).backward()
    optimizer.step()


def kinds(model):
    return {name: type(module).__name__ for name, module in model.named_modules() if name}


def test_bags_are_found_at_any_depth_under_any_name():
    model = Holder(
        one=bag(),
        many=nn.ModuleList([bag(), nn.ModuleDict({"deep": bag()})]),
        dense=nn.Linear(2, 2),
    )

    result = recsys.accelerate(model, optimizer=sgd(model), always=True)

    assert list(result.replacements) == ["one", "many.0", "many.1.deep"]
    assert kinds(model) == {
        "one": "HotColdEmbeddingBag",
        "many": "ModuleList",
        "many.0": "HotColdEmbeddingBag",
        "many.1": "ModuleDict",
        "many.1.deep": "HotColdEmbeddingBag",
        "dense": "Linear",
    }


def test_a_module_used_in_two_places_is_exchanged_once_for_both():
    shared = bag()
    model = Holder(left=Holder(bag=shared), right=nn.ModuleList([shared]))

    result = recsys.accelerate(model)

    assert model.left.bag is model.right[0]
    assert list(result.replacements) == ["left.bag", "right.0"]


def test_parameters_keys_flags_and_hooks_are_kept():
    model = Holder(a=bag(), b=bag(padding_idx=-1, include_last_offset=True, mode="mean"))
    model.b.weight.requires_grad = False
    model.a.eval()
    calls = []
    handle = model.a.register_forward_hook(lambda *_: calls.append("forward"))
    weights, keys = [model.a.weight, model.b.weight], list(model.state_dict())

    recsys.accelerate(model, optimizer=sgd(model), always=True)
    model.a(INDICES, OFFSETS)
    handle.remove()
    model.a(INDICES, OFFSETS)

    assert model.a.weight is weights[0]
    assert model.b.weight is weights[1]
    assert list(model.state_dict()) == keys
    assert (model.a.training, model.b.training) == (False, True)
    assert model.b.weight.requires_grad is False
    assert repr(model.b) == "HotColdEmbeddingBag(5, 2, mode='mean', padding_idx=4)"
    assert calls == ["forward"]


def test_restore_puts_the_same_objects_back_with_rows_and_hooks_as_they_are():
    model = Holder(a=bag(), nested=nn.ModuleList([bag()]))
    originals = [model.a, model.nested[0]]
    before = model.a.weight.detach().clone()
    optimizer = sgd(model)
    recsys.accelerate(model, optimizer=optimizer, always=True)
    step(model, optimizer)
    moved = model.a.weight.detach().clone()
    model.eval()
    calls = []
    model.a.register_forward_hook(lambda *_: calls.append("forward"))

    result = recsys.restore(model)

    assert [model.a, model.nested[0]] == originals
    assert type(model.a.weight) is nn.Parameter
    assert not torch.equal(model.a.weight, before)
    assert torch.equal(model.a.weight, moved)
    assert model.a.training is False
    assert list(result.replacements.values()) == ["EmbeddingBag", "EmbeddingBag"]
    model.a(INDICES, OFFSETS)
    assert calls == ["forward"]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_restore_keeps_what_was_set_on_the_replacements():
    model = Holder(a=bag(), b=nn.Embedding(5, 2))
    recsys.accelerate(model, optimizer=sgd(model), always=True)
    called = []
    for each in (model.a, model.b):
        each.register_full_backward_hook(lambda module, *_: called.append(type(module)))
        each.max_norm, each.tag = 0.5, "mine"
    before = set(vars(bag())) | {"tag"}

    recsys.restore(model)
    (model.a(INDICES, OFFSETS).sum() + model.b(INDICES).sum()).backward()

    assert set(called) == {nn.EmbeddingBag, nn.Embedding}
    for each in (model.a, model.b):
        assert (each.max_norm, each.tag) == (0.5, "mine")
        assert float(each.weight.detach().norm(dim=1)[INDICES].max()) <= 0.5 + 1e-6
    assert set(vars(model.a)) == before


@pytest.mark.parametrize("budget", [None, "4KiB"])
def test_after_restore_the_optimizer_of_a_formula_still_has_the_state(budget):
    model = nn.Sequential(nn.EmbeddingBag(100, 8, mode="sum"))
    optimizer = recsys.accelerate(model, optimizer=Adagrad(lr=0.1), budget=budget).row_optimizer
    model(torch.tensor([[1, 2]])).sum().backward()
    expected = copy.deepcopy(optimizer.state_dict()["state"])

    recsys.restore(model)

    torch.testing.assert_close(optimizer.state_dict()["state"], expected)
    optimizer.zero_grad()
    optimizer.step()


REFUSED = {
    "momentum": (lambda model: sgd(model, momentum=0.9), r"'many\.0': .*momentum=0\.9"),
    "weight decay": (
        lambda model: torch.optim.Adagrad(model.parameters(), weight_decay=0.1),
        r"weight_decay=0\.1",
    ),
    "dense Adam": (
        lambda model: torch.optim.Adam(model.parameters()),
        r"'many\.0': .*lazy_adam=True",
    ),
    "Adam with weight decay": (
        lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
        r"'many\.0': .*amsgrad=False",
    ),
    "no table": (
        lambda model: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1),
        r"'many\.0': .* 0 of the given ones \(SGD\)",
    ),
    "twice": (lambda model: [sgd(model), sgd(model)], r"'many\.0': .*2 of the given"),
    "bad type": (lambda model: "sgd", "optimizer"),
    "bad type in a list": (lambda model: [sgd(model), "sgd"], "got 'sgd'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_optimizer_cannot_do_is_refused_before_anything_is_exchanged(case):
    model = Holder(many=nn.ModuleList([bag(), bag()]))
    make, message = REFUSED[case]

    with pytest.raises((ValueError, TypeError), match=message):
        recsys.accelerate(model, optimizer=make(model), always=True)

    assert kinds(model) == {
        "many": "ModuleList",
        "many.0": "EmbeddingBag",
        "many.1": "EmbeddingBag",
    }
    assert type(model.many[0].weight) is nn.Parameter


UNFIT = {
    "device": (lambda: bag(device="meta"), "table 'b': .*meta device"),
    "bfloat16": (lambda: bag(dtype=torch.bfloat16), "table 'b': .*bfloat16"),
    "float16": (lambda: bag(dtype=torch.float16), "table 'b': .*float16"),
    "strides": (lambda: bag(_weight=torch.rand(2, 5).t()), r"table 'b': .*strides \(1, 5\)"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_tables_that_cannot_be_worked_on_are_refused_alone_and_left_beside_others(case):
    make, message = UNFIT[case]
    alone, model = Holder(b=make()), Holder(a=bag(), b=make())

    with pytest.raises(ValueError, match=message):
        recsys.accelerate(alone)
    result = recsys.accelerate(model)

    assert kinds(alone) == {"b": "EmbeddingBag"}
    assert kinds(model) == {"a": "HotColdEmbeddingBag", "b": "EmbeddingBag"}
    assert re.search(message, result.left_alone["b"])


def test_a_class_of_its_own_is_left_alone_and_named():
    class Special(nn.EmbeddingBag):
        pass

    model = Holder(a=bag(), b=Special(5, 2))

    assert "Special" in recsys.accelerate(model).left_alone["b"]
    assert type(model.b) is Special


def test_a_formula_moves_rows_at_the_end_of_each_backward():
    model = Holder(a=bag(), b=bag(7))
    before = [model.a.weight.detach().clone(), model.b.weight.detach().clone()]

    result = recsys.accelerate(model, optimizer=SGD(lr=0.5))
    (model.a(INDICES, OFFSETS).sum() + model.b(INDICES, OFFSETS).sum()).backward()

    for weight, old in zip((model.a.weight, model.b.weight), before, strict=True):
        expected = old - 0.5 * torch.bincount(INDICES, minlength=len(old)).unsqueeze(1)
        torch.testing.assert_close(weight.detach(), expected)
    [settings] = result.row_optimizer.state_dict()["param_groups"]
    assert settings["params"] == ["a.weight", "b.weight"]
    result.row_optimizer.param_groups[0]["lr"] = 0.0
    now = model.a.weight.detach().clone()
    model.a(INDICES, OFFSETS).sum().backward()
    assert torch.equal(model.a.weight, now)


def test_torchrecs_collections_are_exchanged_inside_torchrecs_models():
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec.models.dlrm import DLRM

    def build():
        torch.manual_seed(0)
        tables = [
            torchrec.EmbeddingBagConfig(
                name=name, num_embeddings=size, embedding_dim=4, feature_names=[name]
            )
            for name, size in (("user", 9), ("item", 5))
        ]
        model = DLRM(torchrec.EmbeddingBagCollection(tables), 3, [6, 4], [5, 1])
        return model, torch.optim.Adagrad(model.parameters(), lr=0.1)

    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        ["item", "user"], torch.tensor([0, 4, 4, 8, 1, 1]), torch.tensor([2, 1, 0, 3])
    )
    (plain, plain_optimizer), (model, optimizer) = build(), build()
    keys, weights = list(model.state_dict()), list(model.parameters())
    original = model.sparse_arch.embedding_bag_collection

    result = recsys.accelerate(model, optimizer=optimizer, always=True)
    for each, its_optimizer in ((plain, plain_optimizer), (model, optimizer)):
        for _ in range(3):
            its_optimizer.zero_grad()
            each(torch.ones(2, 3), features).square().sum().backward()
            its_optimizer.step()

    assert isinstance(model.sparse_arch.embedding_bag_collection, HotColdEmbeddingBagCollection)
    assert list(result.replacements.values()) == ["HotColdEmbeddingBagCollection"]
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    recsys.restore(model)
    assert model.sparse_arch.embedding_bag_collection is original


def collection():
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    torch.manual_seed(0)
    return torchrec.EmbeddingBagCollection(
        [
            torchrec.EmbeddingBagConfig(
                name=name, num_embeddings=5, embedding_dim=2, feature_names=[name]
            )
            for name in ("user", "item")
        ]
    )


def kjt():
    from torchrec import KeyedJaggedTensor

    lengths = torch.tensor([2, 1, 0, 3])
    return KeyedJaggedTensor.from_lengths_sync(["user", "item"], torch.arange(6) % 5, lengths)


def test_a_parameter_of_a_collection_and_a_bag_is_one_table():
    def build():
        model = Holder(ebc=collection(), a=bag(sparse=False))
        model.a.weight = model.ebc.embedding_bags["item"].weight
        model.ebc.tag = model.a.tables = "before"
        return model, torch.optim.Adagrad(model.parameters(), lr=0.1)

    (plain, plain_optimizer), (model, optimizer) = build(), build()
    recsys.accelerate(model, optimizer=optimizer, always=True)
    for each, its_optimizer in ((plain, plain_optimizer), (model, optimizer)):
        for _ in range(3):
            its_optimizer.zero_grad()
            pooled = each.ebc(kjt()).values()
            (pooled.square().sum() + each.a(INDICES, OFFSETS).sin().sum()).backward()
            its_optimizer.step()

    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-6, atol=1e-7)
    assert model.ebc.tag == "before"
    model.ebc.tag = "meanwhile"
    recsys.restore(model)
    assert (model.ebc.tag, model.a.tables) == ("meanwhile", "before")
    assert set(vars(model.ebc)) == set(vars(plain.ebc))


def test_the_tables_of_a_collection_have_one_optimizer_or_none():
    model = Holder(ebc=collection())
    frozen, moved = model.ebc.parameters()
    frozen.requires_grad = False

    with pytest.raises(ValueError, match=r"table 'ebc\.embedding_bags\.user': all tables of a"):
        recsys.accelerate(model, optimizer=torch.optim.SGD([moved], lr=0.1), always=True)

    assert type(model.ebc).__module__.startswith("torchrec")


def test_a_part_of_what_was_accelerated_is_not_restored_alone():
    model = Holder(first=Holder(bag=bag()), second=Holder(bag=bag()))
    recsys.accelerate(model, optimizer=sgd(model), always=True)

    with pytest.raises(ValueError, match=r"has 1 of the 2 modules .* on the whole model"):
        recsys.restore(model.first)

    assert kinds(model)["first.bag"] == "HotColdEmbeddingBag"
    recsys.restore(model)
    assert kinds(model)["first.bag"] == kinds(model)["second.bag"] == "EmbeddingBag"
