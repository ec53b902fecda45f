import pytest
import torch

from recsys.models.interaction import InteractionArch, pairwise_dots, pairwise_dots_reference


def pairs_of(num_vectors):
    first, second = torch.triu_indices(num_vectors, num_vectors, offset=1)
    return first * num_vectors + second, second * num_vectors + first


@pytest.mark.parametrize("shape", [(1, 2, 1), (3, 5, 4), (17, 27, 16), (0, 3, 2)])
def test_pairs_and_gradients_are_the_references(shape):
    torch.manual_seed(0)
    upper, lower = pairs_of(shape[1])
    vectors = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    copy = vectors.detach().clone().requires_grad_()

    found = pairwise_dots(vectors, upper, lower)
    expected = pairwise_dots_reference(copy, upper)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()

    assert torch.equal(found, expected)
    torch.testing.assert_close(vectors.grad, copy.grad, rtol=1e-12, atol=1e-12)


def test_columns_are_the_dense_vector_and_the_upper_triangle_row_by_row():
    dense = torch.tensor([[1.0, 2.0]])
    sparse = torch.tensor([[[3.0, 0.0], [0.0, 5.0]]])

    found = InteractionArch(2)(dense, sparse)

    assert found.tolist() == [[1, 2, 3, 10, 0]]


def test_autocast_multiplies_in_its_dtype_and_gives_gradients_in_that_of_the_rows():
    torch.manual_seed(0)
    dense = torch.randn(4, 3, requires_grad=True)
    sparse = torch.randn(4, 2, 3, requires_grad=True)
    expected = InteractionArch(2)(dense, sparse)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = InteractionArch(2)(dense, sparse)
    found.sum().backward()

    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=5e-2)
    assert sparse.grad.dtype == dense.grad.dtype == torch.float32
