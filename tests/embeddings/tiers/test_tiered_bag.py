"""A bag whose rows are in two tiers computes what a resident one does, to the last bit."""

import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD, RowWiseAdagrad
from recsys.embeddings.table import TableConfig
from recsys.errors import IdOutOfRange


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_with_a_budget_is_that_without(mode):
    bags = []
    for budget in (None, 4 * 300 + 40 * 24):
        torch.manual_seed(0)
        bags.append(
            HotColdEmbeddingBag(300, 4, mode=mode, optimizer=RowWiseAdagrad(lr=0.1), budget=budget)
        )
    generator = torch.Generator().manual_seed(0)

    for _ in range(30):
        ids = torch.randint(0, 300, (24,), generator=generator)
        outputs = [bag(ids, torch.tensor([0, 5, 5, 20])) for bag in bags]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()

    assert bags[1].tiers()[0].residency.counts.num_written_back > 0
    assert torch.equal(bags[1].weight, bags[0].weight)


def test_an_error_that_is_kept_holds_no_slots():
    tables = [
        TableConfig(name=name, num_embeddings=1000, embedding_dim=dim)
        for name, dim in (("a", 4), ("b", 8))
    ]
    module = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.1), budget=9400)
    features = JaggedIds.from_one_hot(["a", "b"], torch.tensor([[1, 2, 3], [4, 5, 1000]]))

    with pytest.raises(IdOutOfRange) as kept:  # after the rows of the first table got slots
        module(features)

    assert kept.value.__context__ is None
    assert [tiers.residency.num_claimed for tiers in module.tiers()] == [0, 0]
