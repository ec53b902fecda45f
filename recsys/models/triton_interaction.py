"""Dot interaction on CUDA: one Triton kernel forward, one backward.

A program handles a sample. It reads its vectors from dense and sparse features, multiplies them in
its registers, and writes only what `interact` returns. Nothing of size N x N, and no copy of the
vectors, is in memory. `interaction.interact` has the contract.

Letters: B samples, N vectors (one dense, N - 1 sparse), D dim, W columns of the result.
"""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from recsys._support.cuda.triton_launches import launched

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TritonInteraction"]

_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class TritonInteraction(torch.autograd.Function):
    """`interact` for vectors of 32 or 16 bits, all pairs in the order of the upper triangle."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, sparse: Tensor) -> Tensor:
        """The dense vector, then the products of pairs; in the dtype of the dense vector."""
        batch_size, num_sparse, dim = sparse.shape
        dense, sparse = dense.contiguous(), sparse.contiguous()
        ctx.save_for_backward(dense, sparse)
        result = dense.new_empty(batch_size, dim + comb(num_sparse + 1, 2))
        if batch_size:
            with torch.cuda.device_of(dense):
                _forward_kernel[(batch_size,)](dense, sparse, result, **_options(dense, sparse))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of dense and sparse vectors, each in its dtype."""
        dense, sparse = ctx.saved_tensors
        of_dense, of_sparse = torch.empty_like(dense), torch.empty_like(sparse)
        if len(dense):
            with torch.cuda.device_of(dense):
                _backward_kernel[(len(dense),)](
                    gradient.contiguous(),
                    dense,
                    sparse,
                    of_dense,
                    of_sparse,
                    **_options(dense, sparse),
                )
        return of_dense, of_sparse


def _options(dense: Tensor, sparse: Tensor) -> dict[str, Any]:
    """What both kernels are compiled for."""
    num_vectors, dim = sparse.shape[1] + 1, sparse.shape[2]
    has_tensor_cores = dense.dtype != torch.float32 or _allows_tf32()
    dtype = _FLOATS[dense.dtype]
    if triton.knobs.runtime.interpret and dtype == tl.bfloat16:
        dtype = tl.float32  # the interpreter multiplies bfloat16 as if it were integers
    # Columns that are multiplied at a time. Without tensor cores each thread keeps its factors in
    # registers, so these are few.
    block_vectors = max(16, triton.next_power_of_2(num_vectors))
    most_columns = min(64, 2048 // block_vectors) if has_tensor_cores else 16
    return {
        "NUM_VECTORS": num_vectors,
        "DIM": dim,
        "WIDTH": dim + comb(num_vectors, 2),
        "BLOCK_VECTORS": block_vectors,
        "BLOCK_DIM": min(max(16, triton.next_power_of_2(dim)), most_columns),
        "FACTORS": dtype,
        "PRECISION": "tf32" if has_tensor_cores else "ieee",
        "num_warps": block_vectors // 8,
    }


def _allows_tf32() -> bool:
    """Whether PyTorch's own products of float32 round their factors to TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@launched
@triton.jit
def _forward_kernel(
    dense_BD,
    sparse_BFD,
    result_BW,
    NUM_VECTORS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_VECTORS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FACTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply the vectors of a sample by each other."""
    sample = tl.program_id(0).to(tl.int64)
    vectors = tl.arange(0, BLOCK_VECTORS)
    of_result = result_BW + sample * WIDTH
    products = tl.zeros([BLOCK_VECTORS, BLOCK_VECTORS], tl.float32)
    for start in range(0, DIM, BLOCK_DIM):
        d = tl.multiple_of(start, BLOCK_DIM) + tl.arange(0, BLOCK_DIM)
        found = _read(dense_BD, sparse_BFD, sample, vectors, d, NUM_VECTORS, DIM).to(FACTORS)
        products = tl.dot(found, tl.trans(found), products, input_precision=PRECISION)
        tl.store(of_result + d, tl.load(dense_BD + sample * DIM + d, d < DIM), d < DIM)
    pairs = _pairs(vectors[:, None], vectors[None, :], NUM_VECTORS)
    is_pair = (vectors[:, None] < vectors[None, :]) & (vectors < NUM_VECTORS)[None, :]
    tl.store(of_result + DIM + pairs, products.to(result_BW.dtype.element_ty), is_pair)


@launched
@triton.jit
def _backward_kernel(
    gradient_BW,
    dense_BD,
    sparse_BFD,
    of_dense_BD,
    of_sparse_BFD,
    NUM_VECTORS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_VECTORS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FACTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply the gradient of the products, symmetric with a zero diagonal, by the vectors."""
    sample = tl.program_id(0).to(tl.int64)
    vectors = tl.arange(0, BLOCK_VECTORS)
    gradient = gradient_BW + sample * WIDTH
    first = tl.minimum(vectors[:, None], vectors[None, :])
    second = tl.maximum(vectors[:, None], vectors[None, :])
    is_pair = (first < second) & (second < NUM_VECTORS)
    symmetric = tl.load(gradient + DIM + _pairs(first, second, NUM_VECTORS), is_pair, 0).to(FACTORS)
    for start in range(0, DIM, BLOCK_DIM):
        d = tl.multiple_of(start, BLOCK_DIM) + tl.arange(0, BLOCK_DIM)
        is_column = (d < DIM)[None, :]
        found = _read(dense_BD, sparse_BFD, sample, vectors, d, NUM_VECTORS, DIM).to(FACTORS)
        of_vectors = tl.dot(symmetric, found, input_precision=PRECISION)
        of_sparse = of_sparse_BFD + _at(sample, vectors, d, NUM_VECTORS, DIM)
        is_sparse = ((vectors > 0) & (vectors < NUM_VECTORS))[:, None] & is_column
        tl.store(of_sparse, of_vectors.to(of_sparse_BFD.dtype.element_ty), is_sparse)
        of_vectors += tl.load(gradient + d, d < DIM, 0).to(tl.float32)[None, :]
        of_dense = of_dense_BD + (sample * DIM + d)[None, :] + tl.zeros_like(vectors)[:, None]
        is_dense = (vectors == 0)[:, None] & is_column
        tl.store(of_dense, of_vectors.to(of_dense_BD.dtype.element_ty), is_dense)


@triton.jit
def _read(dense_BD, sparse_BFD, sample, vectors, d, NUM_VECTORS: tl.constexpr, DIM: tl.constexpr):
    """Columns of the vectors of a sample, in the dtype of the dense one; zeros beyond them."""
    is_sparse = ((vectors > 0) & (vectors < NUM_VECTORS))[:, None] & (d < DIM)[None, :]
    sparse = tl.load(sparse_BFD + _at(sample, vectors, d, NUM_VECTORS, DIM), is_sparse, 0)
    dense = tl.load(dense_BD + sample * DIM + d, d < DIM, 0)
    return tl.where((vectors == 0)[:, None], dense[None, :], sparse.to(dense.dtype))


@triton.jit
def _at(sample, vectors, d, NUM_VECTORS: tl.constexpr, DIM: tl.constexpr):
    """Places of sparse vectors; vector 0, the dense one, has none."""
    return ((sample * (NUM_VECTORS - 1) + vectors - 1) * DIM)[:, None] + d[None, :]


@triton.jit
def _pairs(first, second, NUM_VECTORS: tl.constexpr):
    """Numbers of pairs, first < second: the strict upper triangle, row by row."""
    return first * (2 * NUM_VECTORS - first - 1) // 2 + second - first - 1
