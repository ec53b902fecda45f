import math

import pytest
import torch

from recsys.embeddings import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from tests.exact.oracle import update_rows

STATES = {
    SGD: {},
    Adagrad: {"momentum1": 8},
    RowWiseAdagrad: {"momentum1": 1},
    Adam: {"momentum1": 8, "exp_avg_sq": 8},
    PartialRowWiseAdam: {"momentum1": 8, "exp_avg_sq": 1},
}
# A row of a step may be looked up several times, and rows of one step rest in the next.
ROWS = [[3, 0, 3], [1], [0, 0, 4, 1, 0], [3, 2]]


def make_states(optimizer, weight):
    sizes = optimizer.state_sizes(weight.shape[1])
    return [weight.new_zeros(len(weight), size) for size in sizes.values()]


def steps(dim, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.tensor(rows), torch.randn(len(rows), dim, generator=generator, dtype=dtype))
        for rows in ROWS
    ]


@pytest.mark.parametrize(("kind", "sizes"), STATES.items())
def test_state_arrays_have_torchrecs_names(kind, sizes):
    assert kind(lr=0.1).state_sizes(8) == sizes


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(lr=0.1), lambda weight: torch.optim.SGD([weight], lr=0.1)),
        (Adagrad(lr=0.1, eps=0.3), lambda weight: torch.optim.Adagrad([weight], lr=0.1, eps=0.3)),
        (
            Adam(lr=0.1, betas=(0.7, 0.95), eps=0.3),
            lambda weight: torch.optim.SparseAdam([weight], lr=0.1, betas=(0.7, 0.95), eps=0.3),
        ),
    ],
    ids=["SGD", "Adagrad", "Adam"],
)
def test_the_reference_steps_as_torchs_optimizer_does(ours, theirs):
    weight = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = weight.clone()
    optimizer, states = theirs(expected), make_states(ours, weight)

    for number, (rows, gradients) in enumerate(steps(8), 1):
        update_rows(ours, weight, states, rows, gradients, number)
        expected.grad = torch.sparse_coo_tensor(
            rows.unsqueeze(0), gradients, expected.shape, check_invariants=True
        ).coalesce()
        with torch.sparse.check_sparse_tensor_invariants(enable=True):
            optimizer.step()

        torch.testing.assert_close(weight, expected, rtol=1e-13, atol=1e-13)


def test_partial_rowwise_adam_corrects_both_averages_and_then_adds_eps():
    """FBGEMM has it on GPUs alone; here number by number, as Kingma and Ba write Adam."""
    ours = PartialRowWiseAdam(lr=0.1, betas=(0.7, 0.95), eps=0.3)
    weight = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = weight.clone().tolist()
    states = make_states(ours, weight)
    first = [[0.0] * 8 for _ in range(5)]
    second = [0.0] * 5

    for t, (rows, gradients) in enumerate(steps(8), 1):
        update_rows(ours, weight, states, rows, gradients, t)
        for row in set(rows.tolist()):
            gradient = gradients[rows == row].sum(0).tolist()
            mean_square = sum(g * g for g in gradient) / 8
            second[row] = 0.95 * second[row] + 0.05 * mean_square
            corrected_second = second[row] / (1 - 0.95**t)
            for d, g in enumerate(gradient):
                first[row][d] = 0.7 * first[row][d] + 0.3 * g
                corrected_first = first[row][d] / (1 - 0.7**t)
                expected[row][d] -= 0.1 * corrected_first / (math.sqrt(corrected_second) + 0.3)

        torch.testing.assert_close(weight, torch.tensor(expected, dtype=torch.float64))
