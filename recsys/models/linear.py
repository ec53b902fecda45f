"""A linear layer and its ReLU, by the library that multiplies matrices fastest on this machine.

PyTorch computes float32 products on the CPU with MKL. On processors not made by Intel, MKL does not
use AVX-512 and is about half as fast as oneDNN, which PyTorch includes too (`benchmarks/step.py`).
On such processors the three products of a layer (forward, gradient of the input, gradient of the
weight) use oneDNN. In all other cases they use `torch.nn.functional.linear`. In bfloat16 PyTorch
itself uses oneDNN.

The ReLU is not fused: oneDNN's ReLU turns NaN into 0 and would hide that a model has diverged.

The two libraries sum in different orders, so their results differ by float32 rounding. The choice
depends on the machine alone, so runs on one machine repeat exactly.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from recsys._support.machine import cpu_info
from recsys._support.torch_compat import onednn_linear

__all__ = ["linear_relu", "linear_relu_reference", "onednn_product", "weight_gradient"]


def linear_relu(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`relu(features @ weight.T + bias)`, once differentiable.

    Operands are cast, and errors raised, as by `torch.nn.functional.linear`.

    Shape:
        features (B, I); weight (O, I); bias (O,), all of one dtype; result (B, O).
    """
    if torch.compiler.is_compiling() or not _takes_onednn(features, weight, bias):
        return linear_relu_reference(features, weight, bias)
    return cast("Tensor", _LinearReluFunction.apply(features, weight, bias))  # type: ignore[no-untyped-call]


def linear_relu_reference(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`linear_relu` in plain PyTorch."""
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
        left (N, K), copied if not contiguous; right (M, K), any strides; bias (M,); result (N, M).
    """
    result: Tensor = onednn_linear(left, right, bias, "none", [], "")
    return result


def weight_gradient(features: Tensor, gradient: Tensor) -> Tensor:
    """`gradient.T @ features` by oneDNN.

    Shape:
        features (B, I); gradient (B, O); result (O, I).
    """
    if 8 * features.shape[1] < gradient.shape[1]:
        # oneDNN copies a left operand that is not contiguous, and autograd copies such a result.
        # If features are much narrower than gradient, these copies cost less this way.
        return onednn_product(features.t(), gradient.t()).t()
    return onednn_product(gradient.t(), features.t())


def _takes_onednn(features: Tensor, weight: Tensor, bias: Tensor) -> bool:
    return (
        features.device.type == weight.device.type == bias.device.type == "cpu"
        and features.dtype == weight.dtype == bias.dtype == torch.float32
        and features.dim() == weight.dim() == 2
        and features.shape[1] == weight.shape[1]
        and bias.shape == weight.shape[:1]
        and bias.is_contiguous()  # oneDNN ignores the strides of a bias
        and features.numel() > 0
        and weight.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and bool(torch.backends.mkldnn.enabled)
        and _onednn_is_faster()
    )


@cache
def _onednn_is_faster() -> bool:
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and onednn_linear is not None
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpu_info("vendor_id") not in ("GenuineIntel", None)
    )
