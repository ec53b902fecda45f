"""`torch.fx`, `torch.export` and the meta device: our modules as those that they replace."""

import pytest
import torch
from torch import fx, nn

import recsys
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
