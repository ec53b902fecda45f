"""Calls for `compiling.py`."""

import numpy as np
import torch

from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.row_space import TorchRowSpace
from recsys.embeddings.kernels.triton.pooled_lookup import pooled_lookup, row_gradient_dots
from recsys.embeddings.rows.lookups import Lookups

CASES = [(torch.float32, 128), (torch.float32, 3), (torch.bfloat16, 64), (torch.float64, 16)]
ALL_CASES = [
    (dtype, dim)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for dim in (1, 4, 16, 64, 100, 128, 256, 1000)
]


def launches(is_all):
    for dtype, dim in ALL_CASES if is_all else CASES:
        space = TorchRowSpace([torch.zeros(9, dim, dtype=dtype)] * 2)
        lookups = Lookups(
            tables=np.array([0, 1, 1], np.uint64),
            positions=np.array([0, 1, 0], np.uint64),
            columns=np.array([2 * dim, 0, dim], np.uint64),
            width=3 * dim,
        )
        result = torch.zeros(8, 3 * dim, dtype=space.compute_dtype)
        values, offsets = torch.zeros(16, dtype=torch.int64), torch.arange(17)
        one_hot = TorchBags(values, None, None, 8, is_mean=False)
        weighted = TorchBags(values, offsets, result[0, :1].expand(16), 8, is_mean=True, padding=3)
        jagged = weighted._replace(weights=None, is_mean=False, padding=None)
        how = ", 16 bytes" if dim * dtype.itemsize % 16 == 0 else ""
        kinds = {
            "one-hot": one_hot,
            "jagged": jagged,
            "weighted, unfused": weighted._replace(is_mean=False),
            "weighted mean": weighted,
        }
        for name, bags in kinds.items():
            call = (space, lookups, bags, result)
            yield f"{name} {dtype}, D={dim}{how}", lambda call=call: pooled_lookup(*call)
        call = (space, lookups, weighted, result, result[0, :1].repeat(16))
        yield f"dots {dtype}, D={dim}", lambda call=call: row_gradient_dots(*call)
