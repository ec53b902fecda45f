"""Frozen rows keep their bytes and their optimizer state; all other rows are updated as always."""

import numpy as np
import pytest
import torch

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    Adagrad,
    Adam,
    HotColdEmbeddingBagCollection,
    RowWiseAdagrad,
    TableConfig,
)
from recsys.embeddings.staleness.marks import RowMarks, UpdateWatch
from tests.embeddings.staleness import stream
from tests.unit.embeddings.model import Tables

STEPS = 5
STALE = [0, 1, 2, 7, 500, 503, 506, 507, 530]
pytestmark = pytest.mark.filterwarnings("ignore:tables .* were used in the cold tier")


def state_of(model):
    """Rows and optimizer state, (R, columns)."""
    state = model.row_optimizer.state_dict()["state"]  # it writes rows back
    arrays = []
    for key, weight in model.named_parameters():
        columns = [weight.detach(), *filter(is_array, state.get(key, {}).values())]
        arrays.append(torch.cat([each.reshape(len(weight), -1) for each in columns], 1))
    return torch.cat(arrays)


def is_array(value):
    return torch.is_tensor(value) and value.dim() > 0


def train(model, numbers, **kinds):
    for number in numbers:
        stream.step(model, stream.make_batch(number, **kinds), number)
    return state_of(model).clone()


def freeze(groups, rows):
    """The watch of some groups, which freezes these rows and counts all, and their marks."""
    marks = RowMarks(groups)
    watch = UpdateWatch(marks)
    marks.set_stale(np.array(rows, np.int64))
    watch.freezes = watch.is_counting = True
    return watch, marks


@pytest.mark.parametrize(
    ("budget", "is_weighted", "pooling"), [(20_000, False, "sum"), (None, True, "mean")]
)
@pytest.mark.parametrize(
    "optimizer",
    [SGD(lr=0.1), Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.1)],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_a_frozen_row_keeps_its_bytes_and_a_thawed_one_does_not(
    optimizer, budget, is_weighted, pooling
):
    kinds = {} if budget is None else {"budget": budget}
    if is_weighted:
        kinds["is_weighted"] = True
    is_one_hot = pooling == "sum" and not is_weighted
    of_batches = {"is_weighted": is_weighted, "is_one_hot": is_one_hot}
    plain, frozen = (
        stream.make_model(optimizer, pooling=pooling, dims=(4, 4, 4), **kinds) for _ in range(2)
    )
    assert all(bool(group.num_slots) == (budget is not None) for group in frozen.groups())
    # The first steps make the state.
    before = train(frozen, range(3), **of_batches)
    assert torch.equal(train(plain, range(3), **of_batches), before)
    watch, marks = freeze(frozen.groups(), STALE)

    after = train(frozen, range(3, 3 + STEPS), **of_batches)
    found = watch.num_lookups, watch.num_left_out
    expected = train(plain, range(3, 3 + STEPS), **of_batches)

    # The gradient does not depend on the rows, so rows that are not frozen are those of `plain`.
    expected_after = expected.clone()
    expected_after[STALE] = before[STALE]
    assert not torch.equal(expected[STALE], before[STALE])
    assert torch.equal(after, expected_after)
    changed = (after != before).any(1).nonzero().flatten().tolist()
    counted, _ = marks.counted()
    assert set(changed) <= set(counted.tolist())
    assert not set(counted.tolist()) & set(STALE)

    firsts, looked_up = [0, *np.cumsum(stream.SIZES)], []
    for number in range(3, 3 + STEPS):
        batch = stream.make_batch(number, **of_batches)
        for key, first in zip(batch.keys(), firsts, strict=False):
            looked_up += (batch[key].values() + int(first)).tolist()
    assert found == (len(looked_up), np.isin(looked_up, STALE).sum())

    marks.set_stale(np.array([], np.int64))
    thawed = train(frozen, range(8, 8 + STEPS), **of_batches)
    assert (thawed[STALE] != after[STALE]).any(1).sum() > 5


@pytest.mark.parametrize("kinds", [{}, {"budget": 7_000}])
def test_a_feature_of_two_tables_may_be_stale_in_one(kinds):
    tables = [
        TableConfig(name=name, embedding_dim=4, num_embeddings=300, feature_names=["f"])
        for name in "ab"
    ]
    model = HotColdEmbeddingBagCollection(tables=tables, optimizer=SGD(lr=0.1), **kinds)
    _, marks = freeze(model.groups(), [5, 306])
    before = [bag.weight.detach().clone() for bag in model.embedding_bags.values()]
    ids = JaggedIds(keys=["f"], values=torch.tensor([5, 6, 7]), offsets=torch.tensor([0, 2, 3]))
    model(ids).values().sum().backward()
    changed = [
        (old != bag.weight.detach()).any(1).nonzero().flatten().tolist()
        for old, bag in zip(before, model.embedding_bags.values(), strict=True)
    ]
    assert changed == [[6, 7], [5, 7]]
    assert marks.counted()[0].tolist() == [6, 7, 305, 307]


def test_rows_of_a_torch_optimizer_freeze_too():
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4, mode="mean", sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, always=True)
    freeze(model[0].groups(), [2, 3])
    before = model[0].weight.detach().clone()
    model(torch.tensor([[1, 2], [3, 4]])).sum().backward()
    optimizer.step()
    changed = (before != model[0].weight.detach()).any(1).nonzero().flatten()
    assert changed.tolist() == [1, 4]


@pytest.mark.parametrize("num_slots", [None, 20])
@pytest.mark.parametrize("is_mean", [False, True])
def test_a_device_leaves_out_the_same_rows(triton_device, is_mean, num_slots):
    stale, sizes, found = [0, 3, 7, 41], [40, 12], []
    for device in (None, triton_device):
        tables = Tables(
            sizes,
            [0, 1, 0],
            4,
            Adagrad(lr=0.1),
            is_mean=is_mean,
            num_slots=num_slots,
            device=device,
        )
        watch, marks = freeze([tables.group], stale)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            lengths = torch.randint(0, 4, (9,), generator=generator)
            ids = torch.randint(0, 12, (int(lengths.sum()),), generator=generator)
            bags = tables.bags(ids, lengths.cumsum(0) - lengths)
            if device is not None:
                bags = bags._replace(ids=bags.ids.to(device), offsets=bags.offsets.to(device))
            factors = torch.randn(3, 12, generator=generator)
            tables.train(bags, factors if device is None else factors.to(device))
        counted = [each.tolist() for each in marks.counted()]
        found.append((tables.values(), counted, watch.num_lookups, watch.num_left_out))
    (values, *counts), (on_device, *counts_on_device) = found
    assert counts_on_device == counts
    for key, expected in values.items():
        torch.testing.assert_close(on_device[key].cpu(), expected)
    start = Tables(sizes, [0], 4, Adagrad(lr=0.1)).values()
    for row in stale:
        key = (0, "rows") if row < 40 else (1, "rows")
        assert torch.equal(on_device[key][row % 40].cpu(), start[key][row % 40])
