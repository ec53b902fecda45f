"""A bag whose rows are in two tiers computes what a resident one does, to the last bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.batch import JaggedIds
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.optimizer import SGD, RowWiseAdagrad
from recsys.embeddings.table import TableConfig
from recsys.errors import IdOutOfRange


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
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


@settings(max_examples=min(50, settings().max_examples))
@given(
    st.data(),
    st.sampled_from(["sum", "mean", "max"]),
    st.sampled_from([None, 3]),
    st.sampled_from([1.0, 2.0, float("inf")]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_are_scaled_down_to_max_norm_wherever_they_are(
    data, mode, padding_idx, norm_type, dtype
):
    bags = []
    for budget in (None, 4 * 300 + 40 * 24):
        torch.manual_seed(0)
        bag = HotColdEmbeddingBag(
            300,
            4,
            max_norm=1.0,
            norm_type=norm_type,
            mode=mode,
            padding_idx=padding_idx,
            dtype=dtype,
            optimizer=RowWiseAdagrad(lr=0.5),
            budget=budget,
        )
        with torch.no_grad():
            bag.weight[3] = 2.0  # the padding's norm is kept, too
        bags.append(bag)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 5)))

    for _ in range(data.draw(st.integers(1, 8))):
        ids = torch.randint(0, 300, (24,), generator=generator)
        ids[5] = 3
        is_trained = data.draw(st.booleans())
        with torch.set_grad_enabled(is_trained):
            outputs = [bag(ids, torch.tensor([0, 5, 5, 20])) for bag in bags]
        assert torch.equal(*outputs)
        if is_trained:
            for output in outputs:
                output.square().sum().backward()

    assert torch.equal(bags[1].weight, bags[0].weight)


def test_a_norm_that_is_kept_takes_no_row_anew():
    bag = HotColdEmbeddingBag(
        300, 4, max_norm=1.0, mode="sum", optimizer=SGD(lr=0.1), budget=4 * 300 + 40 * 24
    )

    for _ in range(10):
        bag(torch.arange(24).reshape(4, 6)).square().sum().backward()
    with torch.no_grad():
        bag(torch.arange(200, 224).reshape(4, 6))

    counts = bag.tiers()[0].residency.counts
    assert counts.num_fetched == 24
    assert counts.num_written_back == 0
    assert (bag.weight.detach()[200:224].norm(dim=1) < 1 + 1e-6).all()


def test_rows_in_slots_that_were_only_scaled_are_written_back():
    bag = HotColdEmbeddingBag(
        300, 4, max_norm=1.0, mode="sum", optimizer=SGD(lr=0.1), budget=4 * 300 + 40 * 24
    )
    ids = torch.arange(24).reshape(4, 6)
    bag(ids)  # they come, and stay as they are
    bag.max_norm = 0.25

    with torch.no_grad():
        bag(ids)

    assert (bag.weight.detach()[:24].norm(dim=1) < 0.25 + 1e-6).all()


def test_rows_that_others_have_written_are_scaled_down():
    bags = []
    for budget in (None, 4 * 300 + 40 * 24):
        torch.manual_seed(0)
        bag = HotColdEmbeddingBag(
            300, 4, max_norm=1.0, mode="sum", optimizer=SGD(lr=0.1), budget=budget
        )
        bags.append(bag)
    ids = torch.arange(24).reshape(4, 6)
    for bag in bags:
        bag(ids).sum().backward()
        bag.weight.detach().numpy()[:] *= 3

    for bag in bags:
        bag(ids).sum().backward()

    assert torch.equal(bags[1].weight, bags[0].weight)


def test_an_id_that_is_no_row_is_named_before_rows_are_scaled():
    bag = HotColdEmbeddingBag(300, 4, max_norm=1.0, optimizer=SGD(lr=0.1), budget=4 * 300 + 40 * 24)
    before = bag.weight.detach().clone()

    with pytest.raises(IdOutOfRange, match="sample 1: id 300"):
        bag(torch.tensor([[1], [300]]))

    assert torch.equal(bag.weight, before)


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
