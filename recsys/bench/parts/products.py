"""Only the matrix products of a dense step of DLRM, forward and backward: a floor for its time."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from recsys._support.torch_compat import onednn_has_bf16
from recsys.models.linear import onednn_product, weight_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["Products"]


class Products:
    """Operands of every product, and the products by two libraries.

    Args:
        batch_size: B.
        dense_arch: Layer sizes of the bottom MLP; the last is D.
        over_arch: Layer sizes of the top MLP.
        num_sparse: Pooled vectors of a sample.
        precision: "bf16", or any other for float32.
        device: Where operands are; oneDNN is for the CPU.
    """

    def __init__(
        self,
        batch_size: int,
        dense_arch: Sequence[int],
        over_arch: Sequence[int],
        num_sparse: int,
        precision: str,
        device: torch.device | str = "cpu",
    ) -> None:
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._device = device
        dim, num_vectors = dense_arch[-1], num_sparse + 1
        over_in = dim + num_vectors * (num_vectors - 1) // 2
        self._layers = [
            (
                self._randn(batch_size, num_inputs),
                self._randn(num_outputs, num_inputs),
                self._randn(batch_size, num_outputs),
            )
            for sizes in ([13, *dense_arch], [over_in, *over_arch])
            for num_inputs, num_outputs in pairwise(sizes)
        ]
        self._vectors = self._randn(batch_size, num_vectors, dim)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).to(self._dtype)

    @torch.no_grad()
    def by_torch(self) -> None:
        """Make the products by torch.mm and torch.bmm."""
        for number, (inputs, weight, outputs) in enumerate(self._layers):
            torch.mm(inputs, weight.t())
            if number:  # the dense features need no gradient
                torch.mm(outputs, weight)
            torch.mm(outputs.t(), inputs)
        self._interaction()

    @torch.no_grad()
    def by_onednn(self) -> None:
        """Make the products of layers by oneDNN."""
        for number, (inputs, weight, outputs) in enumerate(self._layers):
            self._product(inputs, weight)
            if number:
                self._product(outputs, weight.t())
            if self._dtype == torch.float32:
                weight_gradient(inputs, outputs)
            else:  # PyTorch uses oneDNN here too, without a copy
                torch.mm(outputs.t(), inputs)
        self._interaction()

    @cached_property
    def _product(self) -> Callable[[Tensor, Tensor], Tensor]:
        # Processors without AVX-512 have no products of bfloat16 in oneDNN; PyTorch has its own.
        is_by_onednn = self._dtype == torch.float32 or onednn_has_bf16()
        return onednn_product if is_by_onednn else _torch_product

    def _interaction(self) -> None:
        products = torch.bmm(self._vectors, self._vectors.transpose(1, 2))
        torch.bmm(products, self._vectors)


def _torch_product(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left, right.t())
