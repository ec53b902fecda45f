"""Calls for `compiling.py`."""

import numpy as np
import torch

from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.row_space import ReachedRows, TorchRowSpace, number_rows
from recsys.embeddings.kernels.torch.slots import TorchSlots
from recsys.embeddings.kernels.triton.pooled_lookup import pooled_lookup, row_gradient_dots
from recsys.embeddings.kernels.triton.transfers import HostRows
from recsys.embeddings.rows.lookups import Lookups

ALWAYS = "one-hot", "weighted mean", "one-hot in two tiers", "dots"
CASES = [(torch.float32, 128), (torch.float32, 3), (torch.bfloat16, 64), (torch.float64, 16)]
ALL_CASES = [
    (dtype, dim)
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    for dim in (1, 4, 16, 64, 100, 128, 256, 1000)
]


def launches(is_all):
    for number, (dtype, dim) in enumerate(ALL_CASES if is_all else CASES):
        for name, launch in launches_of(dtype, dim, batch_size=8):
            if number and not is_all and name not in ALWAYS:
                continue
            how = ", 16 bytes" if dim * dtype.itemsize % 16 == 0 and name != "dots" else ""
            yield f"{name} {dtype}, D={dim}{how}", launch
    for number, batch_size in enumerate((8, 1, 37)):
        for name, launch in launches_of(torch.float32, 128, batch_size, shift=number % 2):
            yield f"{name}, each mini-batch", launch


def launches_of(dtype, dim, batch_size, shift=0):
    """Calls with two features; ids, offsets and weights begin anywhere in memory."""
    space = TorchRowSpace([torch.zeros(9, dim, dtype=dtype)] * 2)
    lookups = Lookups(
        tables=np.array([0, 1, 1], np.uint64),
        positions=np.array([0, 1, 0], np.uint64),
        columns=np.array([2 * dim, 0, dim], np.uint64),
        width=3 * dim,
    )
    result = torch.zeros(batch_size, 3 * dim, dtype=space.compute_dtype)
    size = 2 * batch_size
    values, offsets = torch.zeros(size + shift).long()[shift:], torch.arange(size + 1 + shift)
    weights = torch.zeros(size + shift, dtype=result.dtype)[shift:]
    one_hot = TorchBags(values, None, None, batch_size, is_mean=False)
    jagged = one_hot._replace(offsets=offsets[shift:])
    weighted = jagged._replace(weights=weights)
    kinds = {
        "one-hot": one_hot,
        "jagged": jagged,
        "weighted, unfused": weighted,
        "weighted mean": weighted._replace(is_mean=True, padding=3),
    }
    for name, bags in kinds.items():
        yield name, lambda bags=bags: pooled_lookup(space, lookups, bags, result)
    host = HostRows([torch.zeros(9, dim, dtype=dtype)] * 2, torch.device("cpu"))
    slots = TorchSlots.empty(18, 9, host.addresses.device)
    reached = ReachedRows(number_rows([9, 9], dim, space.rows), slots, space.rows, host)
    for name in ("one-hot", "weighted mean"):
        arguments = reached, lookups, kinds[name], result
        yield f"{name} in two tiers", lambda arguments=arguments: pooled_lookup(*arguments)
    dots = space, lookups, kinds["weighted mean"], result, torch.zeros_like(weights)
    yield "dots", lambda: row_gradient_dots(*dots)
