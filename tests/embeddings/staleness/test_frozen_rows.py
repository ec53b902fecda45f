"""Frozen rows keep their bytes and their optimizer state; all other rows are updated as always."""

import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    Adam,
    HotColdEmbeddingBagCollection,
    RowWiseAdagrad,
    TableConfig,
)
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Lookups
from recsys.embeddings.staleness.row_marks import RowMarks

STEPS = 5
STALE = [0, 1, 2, 7, 500, 503, 506, 507, 530]


def state_of(model):
    """Rows and optimizer state, (R, columns)."""
    arrays = []
    for bag in model.embedding_bags.values():
        weight, state = bag.weight, model.row_updater.optimizer.state.get(bag.weight, {})
        columns = [weight.detach(), *(each for each in state.values() if torch.is_tensor(each))]
        arrays.append(torch.cat([each.reshape(len(weight), -1) for each in columns], 1))
    return torch.cat(arrays)


def train(small, model, numbers, **kinds):
    for number in numbers:
        small.step(model, small.make_batch(number, **kinds), number)
    model.row_updater.flush()
    return state_of(model).clone()


@pytest.mark.in_ci("20000-False-sum", "None-True-mean")
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("budget", [None, 20_000])
@pytest.mark.parametrize(
    "optimizer",
    [SGD(lr=0.1), Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.1)],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_a_frozen_row_keeps_its_bytes_and_a_thawed_one_does_not(
    small, optimizer, budget, is_weighted, pooling
):
    kinds = {} if budget is None else {"budget": budget}
    if is_weighted:
        kinds["is_weighted"] = True
    is_one_hot = pooling == "sum" and not is_weighted
    of_batches = {"is_weighted": is_weighted, "is_one_hot": is_one_hot}
    plain, frozen = (small.make_model(optimizer, pooling=pooling, **kinds) for _ in range(2))
    assert bool(frozen.tiers()) == (budget is not None)
    [updated] = frozen.row_updater.groups
    group = updated.group
    # The first steps make the state.
    before = train(small, frozen, range(3), **of_batches)
    assert torch.equal(train(small, plain, range(3), **of_batches), before)
    marks = group.staleness = RowMarks(small.SIZES)
    marks.set_stale(torch.tensor(STALE).numpy(), True)
    marks.is_freezing = True

    after = train(small, frozen, range(3, 3 + STEPS), **of_batches)
    expected = train(small, plain, range(3, 3 + STEPS), **of_batches)

    # The gradient does not depend on the rows, so rows that are not frozen are those of `plain`.
    expected_after = expected.clone()
    expected_after[STALE] = before[STALE]
    assert not torch.equal(expected[STALE], before[STALE])
    assert torch.equal(after, expected_after)

    marks.set_stale(torch.tensor(STALE).numpy(), False)
    thawed = train(small, frozen, range(8, 8 + STEPS), **of_batches)
    assert (thawed[STALE] != after[STALE]).any(1).sum() > 5


def freeze(model, sizes, rows):
    """The marks of a model, which freeze those rows and count all."""
    [updated] = model.row_updater.groups
    marks = updated.group.staleness = RowMarks(sizes)
    marks.set_stale(rows.numpy(), True)
    marks.is_freezing = marks.is_counting = True
    return marks


def test_frozen_rows_are_not_written_back(small):
    written = []
    for is_freezing in (False, True):
        model = small.make_model(budget=20_000)
        [updated] = model.row_updater.groups
        marks = updated.group.staleness = RowMarks(small.SIZES)
        marks.set_stale(torch.arange(sum(small.SIZES)).numpy(), True)
        marks.is_freezing = is_freezing
        rows = small.rows_of(model)
        train(small, model, range(4))
        [tiers] = model.tiers()
        assert not tiers.residency.num_claimed  # tickets are released all the same
        assert torch.equal(small.rows_of(model), rows) == is_freezing
        written.append(tiers.residency.counts.num_written_back)
    assert written[0] > 0
    assert written[1] == 0


def test_a_feature_of_two_tables_may_be_stale_in_one(small):
    for kinds in ({}, {"budget": 7_000}):
        tables = [
            TableConfig(name=name, embedding_dim=4, num_embeddings=300, feature_names=["f"])
            for name in "ab"
        ]
        model = HotColdEmbeddingBagCollection(tables=tables, optimizer=SGD(lr=0.1), **kinds)
        marks = freeze(model, [300, 300], torch.tensor([5, 306]))
        before = [bag.weight.detach().clone() for bag in model.embedding_bags.values()]
        ids = JaggedIds(keys=["f"], values=torch.tensor([5, 6, 7]), offsets=torch.tensor([0, 2, 3]))
        model(ids).values().sum().backward()
        after = [bag.weight.detach() for bag in model.embedding_bags.values()]
        changed = [
            (old != new).any(1).nonzero().flatten().tolist()
            for old, new in zip(before, after, strict=True)
        ]
        assert changed == [[6, 7], [5, 7]]
        assert marks.counted()[0].tolist() == [6, 7, 305, 307]


def test_gradients_of_several_passes_are_cut_and_counted_once(small):
    model = small.make_model(SGD(lr=0.1), auto_apply=False)
    plain = small.make_model(SGD(lr=0.1), auto_apply=False)
    marks = freeze(model, small.SIZES, torch.tensor(STALE))
    before = small.rows_of(model)
    for each in (model, plain):
        for number in range(3):
            small.step(each, small.make_batch(number), number)
        each.row_updater.update_rows()
    expected = small.rows_of(plain)
    changed = (expected != before).any(1)
    expected[STALE] = before[STALE]
    changed[STALE] = False
    assert torch.equal(small.rows_of(model), expected)
    rows, counts = marks.counted()
    assert set(changed.nonzero().flatten().tolist()) <= set(rows.tolist())
    assert (counts == 1).all()
    assert not set(rows.tolist()) & set(STALE)


def test_frozen_rows_on_a_device(small, device):
    """The torch kernels leave the same rows out."""
    model, plain = small.make_model(Adagrad(lr=0.1)), small.make_model(Adagrad(lr=0.1))
    before = train(small, model, range(2))
    train(small, plain, range(2))
    marks = freeze(model, small.SIZES, torch.tensor(STALE))
    after = train(small, model, range(2, 6))
    expected = train(small, plain, range(2, 6))
    expected[STALE] = before[STALE]
    torch.testing.assert_close(after, expected)
    assert torch.equal(after[STALE], before[STALE])
    assert len(marks.counted()[0])


@pytest.mark.parametrize("kinds", [{}, {"budget": 20_000}])
def test_a_step_of_frozen_rows_alone_on_a_device(small, kinds, device):
    model = small.make_model(Adagrad(lr=0.1), **kinds)
    before = train(small, model, range(2))
    marks = freeze(model, small.SIZES, torch.arange(sum(small.SIZES)))
    assert torch.equal(train(small, model, range(2, 4)), before)
    assert not len(marks.counted()[0])
    assert not any(tiers.residency.num_claimed for tiers in model.tiers())


@pytest.mark.parametrize("is_one_hot", [True, False])
@pytest.mark.parametrize("kinds", [{}, {"budget": 20_000}])
def test_what_is_left_out_is_counted(small, kinds, is_one_hot):
    """Every lookup counts in every step, also while nothing is stale and while nothing freezes."""
    model = small.make_model(**kinds)
    [updated] = model.row_updater.groups
    marks = updated.group.staleness = RowMarks(small.SIZES)
    marks.is_counting_lookups = True
    batches = [small.make_batch(number, is_one_hot=is_one_hot) for number in range(5)]
    num_lookups = num_left_out = 0
    for number, batch in enumerate(batches):
        if number == 1:
            marks.set_stale(torch.tensor(STALE).numpy(), True)
        marks.is_freezing = number != 3
        small.step(model, batch, number)
        for key, first_row in zip(batch.keys(), marks.first_rows, strict=False):
            rows = batch[key].values() + int(first_row)
            num_lookups += len(rows)
            if number not in (0, 3):
                num_left_out += int(torch.isin(rows, torch.tensor(STALE)).sum())
    assert num_left_out > 0
    assert marks.lookups == (num_lookups, num_left_out)


@pytest.mark.parametrize("num_stale", [0, 1])
def test_padding_is_no_lookup(num_stale):
    marks = RowMarks([9])
    marks.is_freezing = marks.is_counting_lookups = True
    marks.set_stale(torch.arange(num_stale).numpy(), True)
    numbers = torch.zeros(1).numpy().astype("uint64")
    lookups = Lookups(tables=numbers, positions=numbers, columns=numbers, width=4)
    values, offsets = torch.tensor([0, 8, 8, 3]), torch.tensor([0, 2, 4])
    bags = TorchBags(values, offsets, None, 2, is_mean=False, padding=8)
    marks.before_update([LedgerEntry(lookups, bags, torch.zeros(2, 4))])
    assert marks.lookups == (2, num_stale)
