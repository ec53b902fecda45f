import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.models import interaction
from recsys.models.interaction import InteractionArch, interact_reference
from tests.unit.models.test_linear import outcome

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@pytest.fixture(scope="module")
def triton_interaction():
    return pytest.importorskip("recsys.models.triton_interaction")


@pytest.fixture
def _only_triton(triton_device, monkeypatch):
    monkeypatch.setattr(interaction, "_BY_TRITON", {triton_device.type})
    monkeypatch.setattr(interaction, "_InteractFunction", None)


@pytest.fixture
def _only_others(triton_interaction, triton_device, monkeypatch):
    monkeypatch.setattr(interaction, "_BY_TRITON", {triton_device.type})
    monkeypatch.setattr(triton_interaction, "TritonInteraction", None)


def reference(dense, sparse):
    """In float64, of the same numbers."""
    size = sparse.shape[1] + 1
    first, second = torch.triu_indices(size, size, offset=1, device=sparse.device)
    return interact_reference(dense.double(), sparse.double(), first * size + second)


def vectors(batch_size, num_sparse, dim, device, dtype=torch.float32, sparse_dtype=None):
    generator = torch.Generator().manual_seed(dim)
    dense = torch.randn(batch_size, dim, generator=generator) / dim**0.5
    sparse = torch.randn(batch_size, num_sparse, dim, generator=generator) / dim**0.5
    return dense.to(device, dtype), sparse.to(device, sparse_dtype or dtype)


@settings(deadline=None)
@given(
    st.integers(0, 3),
    st.sampled_from([1, 2, 15, 16, 26, 63]),
    st.sampled_from([1, 3, 16, 20, 70]),
    st.sampled_from(list(TOLERANCE)),
)
def test_result_and_gradients_are_the_references(
    triton_interaction, triton_device, batch_size, num_sparse, dim, dtype
):
    dense, sparse = vectors(batch_size, num_sparse, dim, triton_device, dtype)

    found = outcome(triton_interaction.TritonInteraction.apply, (dense, sparse))

    assert torch.equal(found[0][:, :dim], dense)
    for ours, expected in zip(found, outcome(reference, (dense, sparse)), strict=True):
        assert ours.dtype == dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(ours.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("_only_triton")
@pytest.mark.parametrize(
    ("dense_dtype", "sparse_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.half, torch.half)],
)
def test_vectors_of_several_dtypes_are_multiplied_in_the_wider_one(
    triton_device, dense_dtype, sparse_dtype
):
    dense, sparse = vectors(2, 4, 8, triton_device, dense_dtype, sparse_dtype)

    found = outcome(InteractionArch(4), (dense, sparse))

    assert found[0].dtype == torch.promote_types(dense_dtype, sparse_dtype)
    assert [each.dtype for each in found[1:]] == [dense_dtype, sparse_dtype]
    for ours, expected in zip(found, outcome(reference, (dense, sparse)), strict=True):
        torch.testing.assert_close(ours.double(), expected.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("_only_triton")
def test_views_are_multiplied_as_they_are(triton_device):
    dense, sparse = vectors(3, 6, 8, triton_device)

    found = InteractionArch(3)(dense[:, ::2], sparse[:, ::2, ::2])

    expected = InteractionArch(3)(dense[:, ::2].contiguous(), sparse[:, ::2, ::2].contiguous())
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("_only_others")
@pytest.mark.parametrize(
    ("num_sparse", "dtype"),
    [(32, torch.float32), (64, torch.bfloat16), (64, torch.float16), (2, torch.float64)],
)
def test_more_vectors_and_float64_are_multiplied_by_pytorch(triton_device, num_sparse, dtype):
    dense, sparse = vectors(2, num_sparse, 4, triton_device, dtype)

    found = InteractionArch(num_sparse)(dense, sparse)

    tolerance = TOLERANCE.get(dtype, 1e-12)
    expected = reference(dense, sparse)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_float32_is_rounded_to_tf32_only_where_pytorch_may_do_so(triton_interaction):
    dense, sparse = vectors(1, 2, 4, "cpu")
    before = torch.get_float32_matmul_precision()

    found = []
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        found.append(triton_interaction._options(dense, sparse)["PRECISION"])
    torch.set_float32_matmul_precision(before)

    assert found == ["ieee", "tf32"]
