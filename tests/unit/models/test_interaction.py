import pytest
import torch

from recsys.models import interaction
from recsys.models.interaction import InteractionArch, interact_reference
from tests.unit.models.test_linear import outcome


@pytest.fixture(params=[True, False], ids=["kernels", "plain"])
def way(request, monkeypatch):
    """Both ways, on the CPU."""
    monkeypatch.setattr(interaction, "_has_kernels", lambda _: request.param)


def reference(dense, sparse):
    first, second = torch.triu_indices(sparse.shape[1] + 1, sparse.shape[1] + 1, offset=1)
    return interact_reference(dense, sparse, first * (sparse.shape[1] + 1) + second)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 4), (17, 26, 16), (0, 2, 2)])
def test_result_and_gradients_are_the_references(shape, dtype, rtol):
    torch.manual_seed(0)
    dense = torch.randn(shape[0], shape[2], dtype=dtype)
    sparse = torch.randn(shape, dtype=dtype)

    found = outcome(InteractionArch(shape[1]), (dense, sparse))
    expected = outcome(reference, (dense, sparse))

    assert torch.equal(found[0], expected[0])
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=10 * rtol)


@pytest.mark.parametrize(
    ("dense_dtype", "sparse_dtype"),
    [(torch.float32, torch.float64), (torch.float32, torch.bfloat16)],
)
def test_different_dtypes_meet_in_the_wider_one(dense_dtype, sparse_dtype):
    dense = torch.ones(2, 3, dtype=dense_dtype)
    sparse = torch.ones(2, 2, 3, dtype=sparse_dtype, requires_grad=True)

    result = InteractionArch(2)(dense, sparse)
    result.sum().backward()

    assert result.dtype == torch.promote_types(dense_dtype, sparse_dtype)
    assert sparse.grad.dtype == sparse_dtype


def test_a_compiler_sees_the_whole_of_it():
    torch.manual_seed(0)
    dense, sparse = torch.randn(5, 4), torch.randn(5, 3, 4)
    arch = InteractionArch(3)

    found = outcome(torch.compile(arch, backend="eager", fullgraph=True), (dense, sparse))

    for ours, theirs in zip(found, outcome(arch, (dense, sparse)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("num_sparse", "dense", "sparse", "name"),
    [
        (3, (2, 4), (2, 5, 4), "sparse_features"),
        (40, (2, 4), (2, 2, 4), "sparse_features"),
        (3, (1, 4), (2, 3, 4), "dense_features"),
        (3, (2, 1), (2, 3, 4), "dense_features"),
    ],
)
def test_other_shapes_are_refused_by_name(num_sparse, dense, sparse, name):
    with pytest.raises(ValueError, match=name):
        InteractionArch(num_sparse)(torch.ones(dense), torch.ones(sparse))
