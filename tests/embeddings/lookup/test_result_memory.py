"""A lookup writes its result to memory that is offered to it, once, and only if it fits."""

import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings import SGD, HotColdEmbeddingBagCollection, TableConfig
from recsys.embeddings.lookup.result_memory import result_in

TABLES = [TableConfig(name=name, num_embeddings=50, embedding_dim=4) for name in "ab"]
IDS = JaggedIds.from_one_hot(["a", "b"], torch.tensor([[1, 2, 3], [4, 4, 0]]))


@pytest.fixture(params=[None, 900], ids=["resident", "tiered"])
def collection(request):
    torch.manual_seed(0)
    return HotColdEmbeddingBagCollection(TABLES, optimizer=SGD(lr=0.1), budget=request.param)


def test_the_first_result_is_in_it(collection):
    memory = torch.full((3, 2, 4), torch.nan)
    with torch.no_grad():
        expected = collection(IDS, stacked=True).clone()

    with result_in(memory):
        first, second = collection(IDS, stacked=True), collection(IDS, stacked=True)

    assert first.data_ptr() == memory.data_ptr()
    assert second.data_ptr() != memory.data_ptr()
    for found in (memory, first, second):
        assert torch.equal(found, expected)
    before = collection.table_weights()[0].detach().clone()
    first.sum().backward()
    assert torch.allclose(collection.table_weights()[0][1], before[1] - 0.1)


@pytest.mark.parametrize(
    "memory", [torch.empty(3, 8), torch.empty(4, 2, 4), torch.empty(3, 2, 4).double(), None]
)
def test_other_memory_is_left_alone(collection, memory):
    with result_in(memory):
        found = collection(IDS, stacked=True)

    assert memory is None or found.data_ptr() != memory.data_ptr()


def test_nothing_is_offered_after_the_context(collection):
    memory = torch.empty(3, 2, 4)
    with result_in(memory):
        pass

    assert collection(IDS, stacked=True).data_ptr() != memory.data_ptr()
