"""Tables on CUDA need triton; the CPU stands in for CUDA, and an import that fails for none."""

import sys

import pytest
from torch import nn

import recsys
from recsys.embeddings import SGD, HotColdEmbeddingBag, HotColdEmbeddingBagCollection, TableConfig
from recsys.embeddings.kernels import choice
from recsys.errors import MissingDependency
from tests.torch_kernels import BY_TRITON

OPTIMIZER = SGD(lr=0.1)
TABLES = [TableConfig(name="a", num_embeddings=9, embedding_dim=4)]

REFUSALS = [
    ("a bag", lambda: HotColdEmbeddingBag(9, 4, optimizer=OPTIMIZER)),
    ("a budget", lambda: HotColdEmbeddingBag(999, 4, optimizer=OPTIMIZER, budget="8KiB")),
    ("a collection", lambda: HotColdEmbeddingBagCollection(TABLES)),
    ("accelerate", lambda: recsys.accelerate(bags(), optimizer=OPTIMIZER)),
]


def bags():
    return nn.Sequential(nn.EmbeddingBag(9, 4, mode="sum"))


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setattr(choice, "DEVICE_KERNELS", BY_TRITON)
    package = "recsys.embeddings.kernels.triton"
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("use", [each[1] for each in REFUSALS], ids=[each[0] for each in REFUSALS])
def test_tables_on_cuda_are_refused_without_triton(use):
    with pytest.raises(MissingDependency, match="triton"):
        use()


@pytest.mark.usefixtures("without_triton")
def test_a_model_that_is_refused_stays_as_it_was():
    model = bags()

    with pytest.raises(MissingDependency):
        recsys.accelerate(model, optimizer=OPTIMIZER)

    assert type(model[0]) is nn.EmbeddingBag
    assert type(model[0].weight) is nn.Parameter
