"""Dot-product interaction of a sample's feature vectors.

PyTorch multiplies many small matrices fast, but the indexing around the product is slow: in
bfloat16, choosing the pairs of 2,048 samples takes three times as long as multiplying them. On the
CPU, two kernels here copy numbers into and out of the product. They never compute, so the
arithmetic is PyTorch's. On CUDA, a Triton kernel does it all; see `triton_interaction`.
"""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numba import prange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recsys._support.jit import num_parts, parallel_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["InteractionArch", "interact", "interact_reference"]

# Device types that use Triton kernels. Tests add "cpu".
_BY_TRITON = {"cuda"}
# The most vectors that the Triton kernels multiply. Without TF32, products of float32 keep their
# factors in registers; 64 vectors took more than 128 registers a thread.
_MOST_VECTORS = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}


class InteractionArch(nn.Module):
    """The dense vector, followed by the dot products of all pairs of feature vectors.

    The dense vector counts as the first feature. Pairs are ordered by rows of the strict upper
    triangle, as in TorchRec (the classic DLRM uses the lower one).

    Args:
        num_sparse_features: F.
        embedding_dim: D, for `out_features` only.

    Attributes:
        out_features: Width of the result; None if D is not given.

    Shape:
        dense_features (B, D); sparse_features (B, F, D); result (B, D + F + F * (F - 1) / 2).

    References:
        Naumov et al. (2019), Deep Learning Recommendation Model for Personalization and
        Recommendation Systems.
    """

    def __init__(self, num_sparse_features: int, embedding_dim: int | None = None) -> None:
        super().__init__()
        self._num_sparse, size = num_sparse_features, num_sparse_features + 1
        self.out_features = None if embedding_dim is None else embedding_dim + comb(size, 2)
        first, second = torch.triu_indices(size, size, offset=1, device="cpu")
        pairs = torch.arange(len(first), dtype=torch.int32, device="cpu")
        pair_of = torch.zeros(size, size, dtype=torch.int32, device="cpu")
        pair_of[first, second] = pair_of[second, first] = pairs
        # Not buffers, and on the CPU at first: under a meta device their values would be lost.
        self._entry_of_pair = (first * size + second).int()
        self._pair_of_entry = pair_of.view(-1)

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Combine one dense and F sparse vectors per sample.

        Shape:
            dense_features (B, D); sparse_features (B, F, D); result as for the class.

        Raises:
            ValueError: F is another than that of the module, or there is not one dense vector of D
                numbers for each sample.
        """
        # Kernels would read other memory, or one dense vector would serve all samples.
        batch_size, num_sparse, dim = sparse_features.shape
        if num_sparse != self._num_sparse:
            raise ValueError(
                f"InteractionArch: sparse_features must be (B, {self._num_sparse}, D), got "
                f"{tuple(sparse_features.shape)}; give the model's number of sparse features"
            )
        if dense_features.shape != (batch_size, dim):
            raise ValueError(
                f"InteractionArch: dense_features must be {(batch_size, dim)}, one vector for each "
                f"sample of sparse_features {tuple(sparse_features.shape)}, got "
                f"{tuple(dense_features.shape)}; give both the same samples"
            )
        if self._entry_of_pair.device != dense_features.device:
            self._entry_of_pair = self._entry_of_pair.to(dense_features.device)
            self._pair_of_entry = self._pair_of_entry.to(dense_features.device)
        return interact(dense_features, sparse_features, self._entry_of_pair, self._pair_of_entry)


def interact(dense: Tensor, sparse: Tensor, entry_of_pair: Tensor, pair_of_entry: Tensor) -> Tensor:
    """The dense vector, then the dot products of chosen pairs of a sample's vectors.

    Once differentiable. Both operands of the product are the same tensor: autograd's backward would
    multiply once for each, this one multiplies once by a symmetric matrix. The result has the wider
    dtype of dense and sparse; under autocast it has autocast's dtype unless it is float64, as in
    PyTorch. The sparse vectors, which are many, are cast while they are copied.

    Shape:
        dense (B, D), vector 0 of N vectors; sparse (B, N - 1, D); entry_of_pair (P,) int32, the
        position of pair p in the N x N products; pair_of_entry (N * N,) int32, the pair of every
        entry, arbitrary on the diagonal; result (B, D + P).
    """
    device_type = dense.device.type
    dtype = torch.promote_types(dense.dtype, sparse.dtype)
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    if torch.compiler.is_compiling():  # the compiler fuses the copies itself
        return interact_reference(dense.to(dtype), sparse.to(dtype), entry_of_pair)
    if _has_triton_kernels(sparse, dtype):
        from recsys.models.triton_interaction import TritonInteraction

        return cast("Tensor", TritonInteraction.apply(dense.to(dtype), sparse))  # type: ignore[no-untyped-call]
    return cast(
        "Tensor",
        _InteractFunction.apply(dense.to(dtype), sparse, entry_of_pair, pair_of_entry),  # type: ignore[no-untyped-call]
    )


def interact_reference(dense: Tensor, sparse: Tensor, entry_of_pair: Tensor) -> Tensor:
    """`interact` in plain PyTorch, for inputs of one dtype."""
    vectors = torch.cat([dense.unsqueeze(1), sparse], dim=1)
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    return torch.cat([dense, products.index_select(1, entry_of_pair)], dim=1)


@parallel_kernel
def _choose_pairs_kernel(
    products: NDArray[Any], entry_of_pair: NDArray[np.uint32], num_parts: int, pairs: NDArray[Any]
) -> None:
    """Copy products (B, N * N) to pairs (B, P). A part is a range of samples.

    Indices are unsigned: numba checks every signed index for a negative value.
    """
    num_samples = len(products)
    for part in prange(num_parts):
        for sample in range(part * num_samples // num_parts, (part + 1) * num_samples // num_parts):
            for pair in range(len(entry_of_pair)):
                pairs[sample, pair] = products[sample, entry_of_pair[pair]]


@parallel_kernel
def _spread_pairs_kernel(
    pairs: NDArray[Any],
    pair_of_entry: NDArray[np.uint32],
    num_vectors: int,
    num_parts: int,
    symmetric: NDArray[Any],
) -> None:
    """Copy pairs (B, P) to symmetric (B, N * N) with a zero diagonal. A part is a sample range."""
    num_samples = len(pairs)
    for part in prange(num_parts):
        for sample in range(part * num_samples // num_parts, (part + 1) * num_samples // num_parts):
            for entry in range(len(pair_of_entry)):
                symmetric[sample, entry] = pairs[sample, pair_of_entry[entry]]
            for vector in range(num_vectors):
                symmetric[sample, vector * num_vectors + vector] = 0


class _InteractFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dense: Tensor, sparse: Tensor, entry_of_pair: Tensor, pair_of_entry: Tensor
    ) -> Tensor:
        batch_size, num_sparse, dim = sparse.shape
        vectors = dense.new_empty(batch_size, num_sparse + 1, dim)
        vectors[:, 0] = dense
        vectors[:, 1:] = sparse
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        ctx.save_for_backward(vectors, pair_of_entry)
        ctx.sparse_dtype = sparse.dtype
        if not _has_kernels(dense):
            return torch.cat([dense, products.index_select(1, entry_of_pair)], dim=1)
        result = dense.new_empty(batch_size, dim + len(entry_of_pair))
        result[:, :dim] = dense
        _choose_pairs_kernel(
            _raw(products), _indices(entry_of_pair), num_parts(), _raw(result[:, dim:])
        )
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        vectors, pair_of_entry = ctx.saved_tensors
        batch_size, num_vectors, dim = vectors.shape
        if _has_kernels(gradient):
            symmetric = gradient.new_empty(batch_size, num_vectors * num_vectors)
            _spread_pairs_kernel(
                _raw(gradient[:, dim:]),
                _indices(pair_of_entry),
                num_vectors,
                num_parts(),
                _raw(symmetric),
            )
        else:
            symmetric = gradient[:, dim:].index_select(1, pair_of_entry)
            symmetric[:, :: num_vectors + 1] = 0
        of_vectors = torch.bmm(symmetric.view(batch_size, num_vectors, num_vectors), vectors)
        of_sparse = of_vectors[:, 1:].to(ctx.sparse_dtype, memory_format=torch.contiguous_format)
        return gradient[:, :dim] + of_vectors[:, 0], of_sparse, None, None


def _has_triton_kernels(sparse: Tensor, dtype: torch.dtype) -> bool:
    return (
        sparse.device.type in _BY_TRITON
        and type(sparse) in (Tensor, nn.Parameter)
        and sparse.shape[1] < _MOST_VECTORS.get(dtype, 0)
    )


def _has_kernels(tensor: Tensor) -> bool:
    # Tensor subclasses may have no memory, for example while a model is traced.
    return tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter)


def _raw(tensor: Tensor) -> NDArray[Any]:
    """A view for kernels that only copy: numpy has no bfloat16, and numba has no float16."""
    tensor = tensor.detach()
    bits: NDArray[Any] = (tensor.view(torch.int16) if tensor.itemsize == 2 else tensor).numpy()
    return bits


def _indices(tensor: Tensor) -> NDArray[np.uint32]:
    return tensor.numpy().view(np.uint32)
