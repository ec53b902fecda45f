import pytest
import torch

from recsys.models import linear
from recsys.models.linear import linear_relu, linear_relu_reference

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


@pytest.fixture(params=[True, False], ids=["onednn", "plain"])
def library(request, monkeypatch):
    """Both ways, whatever this machine would choose."""
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(linear, "_onednn_is_faster", lambda: request.param)


def operands(batch_size, num_inputs, num_outputs, dtype=torch.float32):
    generator = torch.Generator().manual_seed(batch_size + 31 * num_inputs + 997 * num_outputs)
    shapes = [(batch_size, num_inputs), (num_outputs, num_inputs), (num_outputs,)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def outcome(function, inputs):
    """Result and gradients, with a gradient that differs from place to place."""
    copies = [value.detach().clone().requires_grad_() for value in inputs]
    result = function(*copies)
    weights = torch.arange(1.0, result.numel() + 1, device=result.device).sin()
    (result * weights.view_as(result).to(result.dtype)).sum().backward()
    return [result, *(copy.grad for copy in copies)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (3, 13, 512), (128, 64, 16), (257, 367, 33), (5, 1, 7), (0, 3, 2)]
)
@pytest.mark.usefixtures("library")
def test_result_and_gradients_are_the_references(sizes, dtype):
    inputs = operands(*sizes, dtype)

    found, expected = outcome(linear_relu, inputs), outcome(linear_relu_reference, inputs)

    for name, ours, theirs in zip(("result", "x", "w", "b"), found, expected, strict=True):
        scale = max([1e-6, *theirs.detach().abs().flatten().tolist()])
        assert ours.shape == theirs.shape
        assert ((ours - theirs).abs() <= TOLERANCE[dtype] * scale).all(), name
        assert ours.dtype == dtype


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "bias", [torch.arange(8.0)[::2], torch.ones(1).expand(4)], ids=["strided", "expanded"]
)
def test_a_bias_with_gaps_is_read_with_its_gaps(bias):
    features, weight, _ = operands(5, 3, 4)

    result = linear_relu(features, weight, bias)

    torch.testing.assert_close(result, linear_relu_reference(features, weight, bias.contiguous()))


def test_onednn_is_left_alone_where_the_user_has_switched_it_off(monkeypatch):
    monkeypatch.setattr(linear, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(linear, "onednn_product", None)

    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        result = linear_relu(*operands(4, 3, 2))

    assert result.shape == (4, 2)


@pytest.mark.usefixtures("library")
def test_under_autocast_it_is_pytorchs():
    inputs = operands(64, 20, 30)

    def under_autocast(function):
        def run(*values):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(*values)

        return run

    found = outcome(under_autocast(linear_relu), inputs)
    expected = outcome(under_autocast(linear_relu_reference), inputs)

    assert [value.dtype for value in found] == [torch.bfloat16] + [torch.float32] * 3
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_not_hidden(bad):
    features, weight, bias = operands(3, 4, 5)
    with torch.no_grad():
        weight.zero_()
        weight[2, 1] = bad
        features.fill_(1.0)

    assert not linear_relu(features, weight, bias)[:, 2].isfinite().any()
