"""Calls for `compiling.py`."""

import torch

from recsys.models.triton_interaction import TritonInteraction

CASES = [(torch.float32, 27, 128), (torch.bfloat16, 27, 128), (torch.float16, 9, 16)]
ALL_CASES = [
    (dtype, num_vectors, dim)
    for dtype, most in ((torch.float32, 32), (torch.bfloat16, 64))
    for num_vectors in (2, 27, most)
    for dim in (3, 16, 128)
]


def launches(is_all):
    for dtype, num_vectors, dim in ALL_CASES if is_all else CASES:
        for precision in ("ieee", "tf32") if dtype == torch.float32 else ("tf32",):
            call = dtype, dtype, num_vectors, dim, precision
            yield (
                f"interaction {dtype} {precision}, N={num_vectors}, D={dim}",
                lambda call=call: run(*call),
            )
    autocast = torch.bfloat16, torch.float32, 27, 128, "ieee"
    yield "interaction of float32 under autocast", lambda: run(*autocast)


def run(dtype, sparse_dtype, num_vectors, dim, precision):
    torch.backends.cuda.matmul.fp32_precision = precision
    dense = torch.zeros(4, dim, dtype=dtype, requires_grad=True)
    sparse = torch.zeros(4, num_vectors - 1, dim, dtype=sparse_dtype, requires_grad=True)
    TritonInteraction.apply(dense, sparse).sum().backward()
