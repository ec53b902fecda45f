"""`torch.fx`, and forward on the meta device: modules of ours as those they stand for."""

from functools import partial

import pytest
import torch
from torch import fx, nn

import recsys
from recsys import JaggedIds
from recsys.embeddings import (
    SGD,
    HotColdEmbedding,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    TableConfig,
)

OPTIMIZERS = pytest.mark.parametrize("optimizer", [None, SGD(lr=0.1)], ids=["none", "ours"])
TABLES = [TableConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=("f", "g"))]


class Model(nn.Module):
    def __init__(self, bag, embedding):
        super().__init__()
        self.bag, self.embedding, self.top = bag, embedding, nn.Linear(8, 1)

    def forward(self, ids, offsets, matrix):
        pooled = self.bag(ids, offsets), self.embedding(matrix).sum(1)
        return self.top(torch.cat(pooled, dim=1))


class Features(nn.Module):
    def __init__(self, collection, *, is_pooled):
        super().__init__()
        self.collection, self.is_pooled = collection, is_pooled

    def forward(self, features):
        found = self.collection(features)
        if self.is_pooled:
            return found.values().relu()
        return torch.cat([found["f"].values(), found["g"].values()]).relu()


def calls_in(traced):
    return [node.target for node in traced.graph.nodes if node.op == "call_module"]


def model(optimizer):
    return Model(
        HotColdEmbeddingBag(9, 4, mode="sum", optimizer=optimizer),
        HotColdEmbedding(9, 4, padding_idx=0, optimizer=optimizer),
    )


@OPTIMIZERS
def test_a_traced_model_calls_modules_of_ours_as_they_are(optimizer):
    plain = model(optimizer)
    arguments = torch.tensor([1, 2, 3]), torch.tensor([0, 1]), torch.tensor([[1, 0], [4, 8]])

    traced = fx.symbolic_trace(plain)

    assert calls_in(traced) == ["bag", "embedding", "top"]
    assert traced.bag is plain.bag
    assert torch.equal(traced(*arguments), plain(*arguments))
    before = plain.bag.weight.detach().clone()
    traced(*arguments).sum().backward()
    if optimizer is not None:
        assert not torch.equal(plain.bag.weight, before)


def test_an_accelerated_model_is_traced_as_the_plain_one():
    plain = Model(nn.EmbeddingBag(9, 4, mode="sum"), nn.Embedding(9, 4))
    expected = calls_in(fx.symbolic_trace(plain))

    recsys.accelerate(plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1), always=True)

    assert calls_in(fx.symbolic_trace(plain)) == expected


@OPTIMIZERS
@pytest.mark.parametrize("is_light", [True, False])
@pytest.mark.parametrize("kind", [HotColdEmbeddingBagCollection, HotColdEmbeddingCollection])
def test_a_traced_model_calls_a_collection_as_it_is(kind, is_light, optimizer):
    ids = JaggedIds(["f", "g"], torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 2, 3]))
    if not is_light:
        pytest.importorskip("torchrec", exc_type=ImportError)
        ids = ids.to_torchrec()
    plain = Features(
        kind(TABLES, optimizer=optimizer), is_pooled=kind is HotColdEmbeddingBagCollection
    )

    traced = fx.symbolic_trace(plain)

    assert calls_in(traced) == ["collection"]
    assert torch.equal(traced(ids), plain(ids))


@OPTIMIZERS
def test_forward_on_meta_gives_shapes(optimizer):
    made = {"device": "meta", "optimizer": optimizer}
    matrix = torch.zeros(3, 2, dtype=torch.int64, device="meta")
    flat = torch.zeros(5, dtype=torch.int64, device="meta")

    bag = HotColdEmbeddingBag(9, 4, mode="sum", **made)
    embedding = HotColdEmbedding(9, 4, padding_idx=1, **made)

    assert bag(matrix).shape == (3, 4)
    assert bag(flat, flat[:2]).shape == (2, 4)
    assert embedding(matrix).shape == (3, 2, 4)
    assert bag(matrix).device.type == embedding(matrix).device.type == "meta"


@OPTIMIZERS
@pytest.mark.parametrize("is_light", [True, False])
def test_collections_on_meta_give_shapes(is_light, optimizer):
    ids = JaggedIds(["f", "g"], torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 2, 3]))
    if not is_light:
        pytest.importorskip("torchrec", exc_type=ImportError)
        ids = ids.to_torchrec()
    ids = ids.to(torch.device("meta"))
    made = {"device": torch.device("meta"), "optimizer": optimizer}

    pooled = HotColdEmbeddingBagCollection(TABLES, **made)(ids)

    assert pooled.values().shape == (2, 8)
    assert pooled.values().device.type == "meta"


@OPTIMIZERS
@pytest.mark.parametrize("lengths_are_known", [True, False])
def test_an_unpooled_collection_on_meta_gives_torchrecs_shapes(optimizer, lengths_are_known):
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    device = torch.device("meta")
    features = torchrec.KeyedJaggedTensor(
        ["f", "g"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 0, 1, 1]),
        length_per_key=[1, 2] if lengths_are_known else None,
    ).to(device)
    config = torchrec.EmbeddingConfig(
        name="t", num_embeddings=9, embedding_dim=4, feature_names=["f", "g"]
    )
    expected = torchrec.EmbeddingCollection(tables=[config], device=device)(features)

    found = HotColdEmbeddingCollection([config], device, optimizer=optimizer)(features)

    assert list(found) == list(expected) == ["f", "g"]
    for feature, rows in expected.items():
        assert found[feature].values().shape == rows.values().shape
        assert found[feature].lengths().shape == rows.lengths().shape
        assert found[feature].values().device == device


def test_what_cannot_be_traced_right_is_refused_by_name():
    hooked = model(None)
    hooked.bag.register_forward_hook(lambda *_: None)

    with pytest.raises(TypeError, match="HotColdEmbeddingBag has forward hooks, which would"):
        fx.symbolic_trace(hooked)
    with pytest.raises(TypeError, match="cannot trace HotColdEmbedding alone"):
        fx.symbolic_trace(HotColdEmbedding(9, 4))


def test_torch_jit_script_is_refused_by_name_for_the_module_and_for_a_model_that_has_it():
    for module in (HotColdEmbedding(9, 4), nn.Sequential(HotColdEmbedding(9, 4))):
        with pytest.raises(
            TypeError, match=r"script cannot compile HotColdEmbedding; call recsys.restore"
        ):
            torch.jit.script(module)


@pytest.mark.filterwarnings("ignore")  # of torch.export
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_torch_export_is_refused_by_name_until_the_model_is_restored(kind):
    model = nn.Sequential(kind(9, 4, sparse=True))
    recsys.accelerate(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), always=True)
    ids = torch.tensor([[1, 2], [3, 8]])
    inputs = [(model, (ids,))]
    if kind is nn.EmbeddingBag:
        inputs.append((model[0], (ids.flatten(), torch.tensor([0, 3]))))

    for traced, arguments in inputs:
        with pytest.raises(
            TypeError, match=r"export cannot trace HotCold\w+ while .* recsys.restore"
        ):
            torch.export.export(traced, arguments)

    recsys.restore(model)
    assert torch.equal(torch.export.export(model, (ids,)).module()(ids), model(ids))


@pytest.mark.parametrize("kind", [HotColdEmbeddingBagCollection, HotColdEmbeddingCollection])
def test_a_collection_is_built_on_the_device_of_the_context(kind):
    with torch.device("meta"):
        module = kind(TABLES)

    assert module.device.type == "meta"
    assert {each.device.type for each in module.parameters()} == {"meta"}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_torch_jit_and_vmap_go_by_torch_and_leave_the_module_as_it_was():
    embedding = HotColdEmbedding(9, 4, optimizer=SGD(lr=0.1))
    bag = HotColdEmbeddingBag(9, 4, mode="sum", optimizer=SGD(lr=0.1))
    ids = torch.tensor([[1, 2], [3, 8]])

    with torch.no_grad():
        traced = [torch.jit.trace(each, (ids,)) for each in (embedding, bag)]
        mapped = torch.vmap(embedding)(ids)

    assert torch.equal(traced[0](ids), embedding(ids))
    assert torch.equal(traced[1](ids), bag(ids))
    assert torch.equal(mapped, embedding(ids))


def test_vmap_over_ids_trains_rows_in_two_tiers_as_resident_ones():
    ids = torch.tensor([[1, 2], [3, 8]])
    results = []
    for budget in (None, 1000):
        torch.manual_seed(0)
        embedding = HotColdEmbedding(99, 4, optimizer=SGD(lr=0.1), budget=budget)
        embedding(ids).square().sum().backward()  # so the newest rows are in slots
        mapped = torch.vmap(lambda row, looked_up=embedding: looked_up(row).sum(0))(ids)
        mapped.square().sum().backward()
        embedding.row_optimizer.step()
        results.append((mapped.detach(), embedding.weight.detach().clone()))

    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


TRANSFORMS = {
    "vmap": lambda scores, vectors: torch.vmap(scores)(vectors),
    "grad": lambda scores, vectors: torch.func.grad(lambda v: scores(v).sum())(vectors[0]),
    "jacrev": lambda scores, vectors: torch.func.jacrev(scores)(vectors[0]),
    "jacfwd": lambda scores, vectors: torch.func.jacfwd(scores)(vectors[0]),
    "hessian": lambda scores, vectors: torch.func.hessian(lambda v: scores(v).norm())(vectors[0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func_read_the_newest_rows_of_a_weight_inside(transform):
    found = []
    for budget in (None, 1000):
        torch.manual_seed(0)
        embedding = HotColdEmbedding(99, 4, optimizer=SGD(lr=0.1), budget=budget)
        embedding(torch.tensor([1, 8])).square().sum().backward()
        scores = partial(lambda weight, vectors: vectors @ weight.T, embedding.weight)
        found.append(transform(scores, torch.ones(3, 4)).detach())

    assert torch.equal(*found)


@pytest.mark.parametrize("budget", [None, 1000])
def test_transforms_of_torch_func_are_refused_by_name(budget):
    bag = HotColdEmbeddingBag(99, 4, mode="sum", optimizer=SGD(lr=0.1), budget=budget)
    ids = torch.tensor([[1, 2], [3, 8]])

    with pytest.raises(RuntimeError, match="do not go through lookups of recsys; look rows up"):
        torch.vmap(lambda factor: factor * bag(ids))(torch.ones(3))
    with pytest.raises(RuntimeError, match="do not go through lookups of recsys; look rows up"):
        torch.func.grad(lambda factor: (factor * bag(ids)).sum())(torch.ones(()))
    pooled = bag(ids)
    mapped = torch.vmap(lambda factor: factor * pooled)(torch.ones(3))

    assert torch.equal(mapped, pooled.expand(3, 2, 4))
