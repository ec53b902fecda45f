"""`weight.grad` dropped and replaced; `tests/programs.py` reads, scales and clips it."""

import pytest
import torch

from recsys.embeddings import SGD
from recsys.embeddings.rows.grads import bind_table
from tests.unit.embeddings.model import Tables


@pytest.fixture
def tables():
    """Tables with gradients."""
    made = Tables([7, 5], [0, 1, 0], 4, SGD(lr=0.5))
    for number in range(2):
        bind_table(made.group, number, is_sparse=True)
    made(made.bags(torch.tensor([1, 2, 1, 0, 3, 3]))).sum().backward()
    return made


def test_a_grad_can_be_dropped_or_replaced(tables):
    before = [weight.detach().clone() for weight in tables.weights]
    tables.weights[0].grad = None
    tables.weights[1].grad = torch.eye(5, 4)
    with pytest.warns(UserWarning, match="'t1'"):
        tables.optimizer.step()
    assert torch.equal(tables.weights[0], before[0])
    torch.testing.assert_close(tables.weights[1].detach(), before[1] - 0.5 * torch.eye(5, 4))
