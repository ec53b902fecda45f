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

_ONEDNN_DTYPES = {torch.float32, torch.bfloat16}


def linear_relu(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`relu(features @ weight.T + bias)`, once differentiable.

    Operands are cast as `torch.nn.functional.linear` casts them under autocast, and refused as it
    refuses them.

    Shape:
        features (B, I); weight (O, I); bias (O,), one dtype; result (B, O).
    """
    dtype = _dtype_of_products(features, weight, bias)
    if torch.compiler.is_compiling() or dtype is None or not _onednn_is_faster():
        return linear_relu_reference(features, weight, bias)
    with torch.autocast(features.device.type, enabled=False):
        return cast(
            "Tensor",
            _LinearReluFunction.apply(features, weight, bias, dtype),  # type: ignore[no-untyped-call]
        )


def linear_relu_reference(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same in plain PyTorch; see `linear_relu`."""
    return functional.linear(features, weight, bias).relu_()


class _LinearReluFunction(torch.autograd.Function):
    """Casts are made in here: as steps of their own they would cost as much as small products."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.dtypes = features.dtype, weight.dtype, bias.dtype
        features, weight = features.to(dtype), weight.to(dtype)
        output = onednn_product(features, weight, bias.to(dtype)).relu_()
        ctx.save_for_backward(features, weight, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        features, weight, output = ctx.saved_tensors
        features_dtype, weight_dtype, bias_dtype = ctx.dtypes
        gradient = torch.ops.aten.threshold_backward(gradient, output, 0)
        of_features = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_features = onednn_product(gradient, weight.t()).to(features_dtype)
        if ctx.needs_input_grad[1]:
            of_weight = weight_gradient(features, gradient).to(weight_dtype)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0, dtype=bias_dtype)
        return of_features, of_weight, of_bias, None


def weight_gradient(features: Tensor, gradient: Tensor) -> Tensor:
    """`gradient.T @ features`, laid out as the weight is: autograd would copy it otherwise.

    Shape:
        features (B, I), gradient (B, O), float32 or bfloat16; result (O, I).
    """
    if features.dtype == torch.bfloat16:
        return torch.mm(gradient.t(), features)  # oneDNN too, and it copies neither operand
    if 8 * features.shape[1] < gradient.shape[1]:
        # The operand on the left is made contiguous: the narrow one costs less, its result too.
        return onednn_product(features.t(), gradient.t()).t()
    return onednn_product(gradient.t(), features.t())


def onednn_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`left @ right.T + bias` by oneDNN.

    Shape:
        left (N, K), copied where it is not contiguous; right (M, K), any strides; bias (M,);
        result (N, M).
    """
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return result


def _dtype_of_products(features: Tensor, weight: Tensor, bias: Tensor) -> torch.dtype | None:
    """In which oneDNN would multiply, None for operands that PyTorch should take, or refuse."""
    fits = (
        features.device.type == weight.device.type == bias.device.type == "cpu"
        and features.dim() == weight.dim() == 2
        and features.shape[1] == weight.shape[1]
        and bias.shape == weight.shape[:1]
        and features.numel() > 0
        and weight.numel() > 0
    )
    dtypes = {features.dtype, weight.dtype, bias.dtype}
    if fits and torch.is_autocast_enabled("cpu") and dtypes <= _ONEDNN_DTYPES:
        dtypes = {torch.get_autocast_dtype("cpu")}
    return dtypes.pop() if fits and len(dtypes) == 1 and dtypes <= _ONEDNN_DTYPES else None


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
