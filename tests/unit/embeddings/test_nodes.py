"""The autograd nodes of lookups: shared by a pass, kept or not, and what they are given."""

import pytest
import torch

from recsys.embeddings import SGD
from tests.unit.embeddings.model import Tables


def ones():
    """A table of ones."""
    tables = Tables([5], [0], 4, SGD(lr=1.0))
    with torch.no_grad():
        tables.weights[0].fill_(1)
    return tables


def look_up(tables, *ids):
    return tables(tables.bags(torch.tensor(ids)))


def test_calls_of_a_pass_share_a_node_from_the_second_pass_on():
    tables = ones()
    for number in range(3):
        found = [look_up(tables, 1, 2) for _ in range(3)]
        nodes_of = [pooled.grad_fn for pooled in found]
        if number > 0:  # results of a shared node are views
            nodes_of = [view.next_functions[0][0] for view in nodes_of]
        assert len({*map(id, nodes_of)}) == (3 if number == 0 else 1)
        sum(pooled.sum() for pooled in found[:2]).backward()  # the third is not used
        assert len(tables.group.ledger.entries) == 2
        tables.optimizer.step()
    assert tables.weights[0][1].tolist() == [-5.0] * 4


def test_a_graph_can_be_kept_for_a_second_backward_and_else_refuses_it():
    tables = ones()
    pooled = look_up(tables, 1)
    pooled.sum().backward(retain_graph=True)
    pooled.sum().backward()
    tables.optimizer.step()
    assert tables.weights[0][1].tolist() == [-1.0] * 4
    with pytest.raises(RuntimeError, match="second time"):
        pooled.sum().backward()


def test_a_gradient_changed_before_its_update_is_refused():
    tables = ones()
    pooled = look_up(tables, 1, 3)
    gradient = torch.ones(2, 4)
    pooled.backward(gradient)
    gradient.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        tables.optimizer.step()
