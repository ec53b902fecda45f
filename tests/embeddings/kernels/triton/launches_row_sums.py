"""Calls for `compiling.py`."""

import torch
from launches_row_runs import entry, tables

from recsys.embeddings.kernels.triton.row_runs import find_runs
from recsys.embeddings.kernels.triton.row_sums import sum_runs

CASES = [(torch.float32, 128), (torch.float32, 1), (torch.float64, 32)]
ALL_CASES = [
    (dtype, dim) for dtype in (torch.float32, torch.float64) for dim in (1, 16, 64, 100, 128, 256)
]


def sums(dtype, dim, *, is_one_hot):
    space = tables(dtype, dim)
    return sum_runs(space, find_runs(space, [entry(dtype, dim, is_one_hot=is_one_hot)]))


def launches(is_all):
    for number, (dtype, dim) in enumerate(ALL_CASES if is_all else CASES):
        for is_one_hot in (True, False) if is_all else (number % 2 == 0,):
            how = ", 16 bytes by _sum_kernel" if dim * dtype.itemsize % 16 == 0 else ""
            name = f"sum_runs {dtype}, D={dim}, {is_one_hot=}{how}"
            yield (
                name,
                lambda of=(dtype, dim), is_one_hot=is_one_hot: sums(*of, is_one_hot=is_one_hot),
            )
