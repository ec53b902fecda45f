"""Rows whose gradient has nan or inf in it are not updated, and all others are."""

import pytest
import torch
from torch import nn

import recsys
from recsys.batch import JaggedIds
from recsys.embeddings import (
    SGD,
    Adam,
    HotColdEmbeddingBag,
    HotColdEmbeddingBagCollection,
    RowWiseAdagrad,
    TableConfig,
)
from recsys.errors import NonFiniteGradient, TrainingDiverged

IDS = torch.tensor([[0, 1], [1, 2]])
BAD = [float("nan"), float("inf"), -float("inf")]


def bag(optimizer, **options):
    torch.manual_seed(0)
    return HotColdEmbeddingBag(50, 4, mode="sum", optimizer=optimizer, **options)


def gradient_with(value):
    gradient = torch.ones(2, 4)
    gradient[1, 2] = value
    return gradient


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.1)])
@pytest.mark.parametrize("budget", [None, 600])
def test_only_rows_with_a_finite_gradient_are_updated_and_training_goes_on(
    value, optimizer, budget
):
    module = bag(optimizer, budget=budget, auto_apply=False)
    expected = bag(optimizer, auto_apply=False)

    module(IDS).backward(gradient_with(value))
    with pytest.raises(NonFiniteGradient, match=r"^table 'weight': the gradient of row 1 has nan"):
        module.row_optimizer.step()
    expected(torch.tensor([[0]])).backward(torch.ones(1, 4))  # rows 1 and 2 are the second bag's
    expected.row_optimizer.step()

    assert torch.equal(module.weight, expected.weight)
    for each in (module, expected):
        each(IDS).square().sum().backward()
        each.row_optimizer.step()
    assert torch.equal(module.weight, expected.weight)
    states = [
        each.row_optimizer.state_dict()["state"].get("weight", {}) for each in (module, expected)
    ]
    for name, value in states[1].items():
        assert torch.equal(torch.as_tensor(states[0][name]), torch.as_tensor(value))


@pytest.mark.parametrize(
    ("optimizer", "dtype", "dim"),
    [
        *((SGD(lr=0.1), torch.float32, dim) for dim in (1, 7, 8, 16, 24, 33)),
        (SGD(lr=0.1), torch.float64, 7),
        (RowWiseAdagrad(lr=0.1), torch.bfloat16, 33),
    ],
)
def test_every_column_counts(dim, dtype, optimizer):
    for column in range(dim):
        module = HotColdEmbeddingBag(3, dim, dtype=dtype, optimizer=optimizer)
        before = module.weight.detach().clone()
        pooled = module(torch.tensor([[0], [1], [2]]))
        gradient = torch.ones_like(pooled)
        gradient[1, column] = float("nan")

        with pytest.raises(NonFiniteGradient, match="row 1 "):
            pooled.backward(gradient)

        is_updated = (module.weight != before).any(1)
        assert is_updated.tolist() == [True, False, True]


def test_the_first_row_of_the_first_table_is_named():
    tables = [
        TableConfig(name=name, num_embeddings=10, embedding_dim=dim)
        for name, dim in (("users", 4), ("goods", 8), ("pages", 8))
    ]
    ids = JaggedIds.from_one_hot(["users", "goods", "pages"], torch.arange(8, -1, -1).view(3, 3))
    module = HotColdEmbeddingBagCollection(tables, optimizer=SGD(lr=0.1))
    pooled = module(ids).values()
    gradient = torch.ones_like(pooled)
    gradient[:, 4 + 8 + 3] = float("nan")

    with pytest.raises(NonFiniteGradient, match=r"^table 'pages': the gradient of row 0 "):
        pooled.backward(gradient)


@pytest.mark.parametrize(
    ("optimizer", "number"),
    [(SGD(lr=1e-38), 3e38), (RowWiseAdagrad(lr=0.1), 1e30)],
    ids=["total", "squares"],
)
def test_finite_gradients_whose_total_or_squares_overflow_are_taken(optimizer, number):
    module = bag(optimizer)
    before = module.weight.detach().clone()

    module(torch.tensor([[0], [1]])).backward(torch.full((2, 4), number))

    assert module.weight.isfinite().all()
    # A step over the root of inf is 0.
    assert (module.weight != before)[:2].all() == isinstance(optimizer, SGD)


def test_an_accelerated_models_dense_part_is_not_updated_either():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"users": nn.EmbeddingBag(20, 4, mode="sum", sparse=True), "top": nn.Linear(4, 1)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, always=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (model["top"](model["users"](IDS)).sum() * float("inf")).backward()

    with pytest.raises(TrainingDiverged, match=r"^table 'users'"):
        optimizer.step()

    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    optimizer.zero_grad()  # of the dense part
    model["top"](model["users"](IDS)).sum().backward()
    optimizer.step()


def test_the_gradient_of_an_empty_bag_may_be_anything():
    module = bag(SGD(lr=0.1), padding_idx=7)
    plain = nn.EmbeddingBag(
        50, 4, mode="sum", padding_idx=7, _weight=module.weight.detach().clone()
    )
    ids, offsets = torch.tensor([1, 2, 7, 3]), torch.tensor([0, 2, 2, 3])

    for each in (module, plain):
        each(ids, offsets).square().sum(1).sqrt().mean().backward()
    with torch.no_grad():
        plain.weight -= 0.1 * plain.weight.grad

    assert plain.weight.isfinite().all()
    torch.testing.assert_close(module.weight, plain.weight)
