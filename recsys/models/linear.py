"""A linear layer and its ReLU, through whichever library multiplies matrices fastest here.

PyTorch hands float32 products on the CPU to MKL, which on processors of other makers than Intel
leaves AVX-512 unused: about half of what oneDNN, which PyTorch carries too, gets out of the
same cores (`recsys bench step`). There the three products of a layer (forward, gradient of the
input, gradient of the weight) go to oneDNN; everywhere else, and on other devices, they stay with
`torch.nn.functional.linear`. In bfloat16 PyTorch uses oneDNN by itself.

oneDNN could apply the ReLU too, but its ReLU makes 0 of NaN: a model that has diverged would go on
as if nothing were.

The two libraries sum in different orders, so results agree within float32 rounding and not to the
bit. Which one is used depends on the machine alone: runs on one machine repeat exactly.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from recsys.machine import cpu_vendor

__all__ = ["linear_relu", "linear_relu_reference", "onednn_product", "weight_gradient"]


def linear_relu(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`relu(features @ weight.T + bias)`, once differentiable.

    Operands are cast and refused as `torch.nn.functional.linear` casts and refuses them.

    Shape:
        features (B, I); weight (O, I); bias (O,), one dtype; result (B, O).
    """
    if torch.compiler.is_compiling() or not _takes_onednn(features, weight, bias):
        return linear_relu_reference(features, weight, bias)
    return cast("Tensor", _LinearReluFunction.apply(features, weight, bias))  # type: ignore[no-untyped-call]


def linear_relu_reference(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same in plain PyTorch; see `linear_relu`."""
    return functional.linear(features, weight, bias).relu_()


class _LinearReluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        output = onednn_product(features, weight, bias).relu_()
        ctx.save_for_backward(features, weight, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        features, weight, output = ctx.saved_tensors
        gradient = torch.ops.aten.threshold_backward(gradient, output, 0)
        of_features = onednn_product(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        of_weight = weight_gradient(features, gradient) if ctx.needs_input_grad[1] else None
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return of_features, of_weight, of_bias


def onednn_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`left @ right.T + bias` by oneDNN.

    Shape:
        left (N, K), copied where it is not contiguous; right (M, K), any strides; bias (M,);
        result (N, M).
    """
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return result


def weight_gradient(features: Tensor, gradient: Tensor) -> Tensor:
    """`gradient.T @ features` by oneDNN.

    Shape:
        features (B, I); gradient (B, O); result (O, I).
    """
    if 8 * features.shape[1] < gradient.shape[1]:
        # The operand on the left is made contiguous, and autograd makes the result so: where one
        # side is much narrower that costs less.
        return onednn_product(features.t(), gradient.t()).t()
    return onednn_product(gradient.t(), features.t())


def _takes_onednn(features: Tensor, weight: Tensor, bias: Tensor) -> bool:
    return (
        features.device.type == weight.device.type == bias.device.type == "cpu"
        and features.dtype == weight.dtype == bias.dtype == torch.float32
        and features.dim() == weight.dim() == 2
        and features.shape[1] == weight.shape[1]
        and bias.shape == weight.shape[:1]
        and bias.is_contiguous()  # oneDNN would read over the gaps of any other
        and features.numel() > 0
        and weight.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and _onednn_is_faster()
    )


def _onednn_is_faster() -> bool:
    return bool(torch.backends.mkldnn.enabled) and _onednn_is_faster_here()


@cache
def _onednn_is_faster_here() -> bool:
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpu_vendor() not in ("GenuineIntel", None)
    )
