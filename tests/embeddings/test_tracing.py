"""`torch.export` and the meta device."""

import pytest
import torch
from torch import nn

import recsys
from recsys.embeddings import (
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    TableConfig,
)

TABLES = [TableConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=("f", "g"))]


@pytest.mark.filterwarnings("ignore")  # of torch.export
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_torch_export_is_refused_until_the_model_is_restored(kind):
    model = nn.Sequential(kind(9, 4, sparse=True))
    recsys.accelerate(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), always=True)
    ids = torch.tensor([[1, 2], [3, 8]])

    with pytest.raises(ValueError, match="restore"):
        torch.export.export(model, (ids,))

    recsys.restore(model)
    assert torch.equal(torch.export.export(model, (ids,)).module()(ids), model(ids))


@pytest.mark.parametrize("kind", [HotColdEmbeddingBagCollection, HotColdEmbeddingCollection])
def test_a_collection_is_built_on_the_device_of_the_context(kind):
    with torch.device("meta"):
        module = kind(TABLES)

    assert module.device.type == "meta"
    assert {each.device.type for each in module.parameters()} == {"meta"}
