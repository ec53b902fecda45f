"""`weight.grad` of the engine's tables, beside that of plain PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from recsys.embeddings import SGD, Adagrad
from recsys.embeddings.rows.grads import bind_table
from tests.unit.embeddings.model import Tables, are_equal

SIZES, FEATURES = [7, 5], [0, 1, 0]
IDS = torch.tensor([1, 2, 1, 0, 3, 3, 4, 1, 1, 4, 2, 0])
OFFSETS = torch.tensor([0, 2, 4, 7, 8, 11])
WEIGHTS = torch.linspace(0.1, 1.2, 12)


def made(*, is_sparse, formula=SGD(lr=0.5), is_mean=False, dtype=torch.float32):  # noqa: B008
    tables = Tables(SIZES, FEATURES, 4, formula, is_mean=is_mean, dtype=dtype)
    for number in range(len(SIZES)):
        bind_table(tables.group, number, is_sparse=is_sparse)
    return tables


def backward(tables, factor=1.0, *, has_weights=False):
    weights = WEIGHTS if has_weights else None
    pooled = tables(tables.bags(IDS, OFFSETS, weights))
    factors = torch.arange(pooled.numel()).view(pooled.shape) * factor
    (pooled * factors).sum().backward()


def by_torch(tables, factor=1.0, *, has_weights=False, is_sparse=True):
    """The gradients of torch."""
    weights = [nn.Parameter(weight.detach().clone()) for weight in tables.weights]
    bounds = [*OFFSETS.tolist(), len(IDS)]
    pooled = []
    for place, table in enumerate(FEATURES):
        begin, middle, end = bounds[2 * place], bounds[2 * place + 1], bounds[2 * place + 2]
        pooled.append(
            functional.embedding_bag(
                IDS[begin:end],
                weights[table],
                torch.tensor([0, middle - begin]),
                mode="mean" if tables.lookups.is_mean else "sum",
                sparse=is_sparse,
                per_sample_weights=WEIGHTS[begin:end].to(weights[0].dtype) if has_weights else None,
            )
        )
    whole = torch.cat(pooled, dim=1)
    (whole * torch.arange(whole.numel()).view(whole.shape) * factor).sum().backward()
    return [weight.grad for weight in weights]


@pytest.mark.parametrize("is_sparse", [True, False])
def test_reading_changes_nothing(is_sparse):
    one, other = made(is_sparse=is_sparse), made(is_sparse=is_sparse)
    for tables in (one, other):
        for _ in range(2):
            backward(tables)
            assert tables is one or tables.weights[0].grad is not None
        tables.optimizer.step()
        assert tables.weights[0].grad is None
    assert are_equal(one, other)


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("formula", [SGD(lr=0.5), Adagrad(lr=0.1)])
def test_a_grad_can_be_scaled_in_place(is_sparse, formula):
    one, other = (made(is_sparse=is_sparse, formula=formula, dtype=torch.float64) for _ in range(2))
    backward(one, 0.25)
    backward(one, 0.5)
    backward(other, 1.0)
    for weight in other.weights:
        weight.grad.mul_(0.25)
    backward(other, 0.5)  # as in torch, a later backward adds to what was scaled
    assert other.weights[0].grad is not None
    for tables in (one, other):
        tables.optimizer.step()
    for mine, its in zip(one.weights, other.weights, strict=True):
        torch.testing.assert_close(mine, its)


def test_a_norm_is_clipped_as_by_torch():
    tables = made(is_sparse=False, dtype=torch.float64)
    backward(tables)
    expected = by_torch(tables, is_sparse=False)
    before = [weight.detach().clone() for weight in tables.weights]
    norm = nn.utils.clip_grad_norm_(tables.weights, 1.0)
    tables.optimizer.step()
    whole = torch.stack([gradient.norm() for gradient in expected]).norm()
    torch.testing.assert_close(norm, whole)
    for weight, old, gradient in zip(tables.weights, before, expected, strict=True):
        torch.testing.assert_close(weight.detach(), old - 0.5 * gradient / (whole + 1e-6))


def test_a_grad_can_be_dropped_or_replaced():
    tables = made(is_sparse=True)
    before = [weight.detach().clone() for weight in tables.weights]
    backward(tables)
    tables.weights[0].grad = None
    tables.weights[1].grad = torch.eye(5, 4)
    with pytest.warns(UserWarning, match="'t1'"):
        tables.optimizer.step()
    assert torch.equal(tables.weights[0], before[0])
    torch.testing.assert_close(tables.weights[1].detach(), before[1] - 0.5 * torch.eye(5, 4))


def test_a_copy_is_a_plain_table():
    tables = made(is_sparse=True)
    backward(tables)
    assert copy.deepcopy(tables.weights[0]).grad is None
