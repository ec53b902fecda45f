"""Calls for `compiling.py`."""

import torch

from recsys.embeddings.kernels.triton.transfers import HostRows, fetch_rows, write_rows

CASES = [(torch.float32, 128), (torch.float32, 1), (torch.bfloat16, 64)]
ALL_CASES = [
    (dtype, dim)
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    for dim in (1, 16, 64, 100, 128, 256)
]


def launches(is_all):
    places = torch.zeros(64, dtype=torch.int32)
    for dtype, dim in ALL_CASES if is_all else CASES:
        host = HostRows([torch.zeros(16, dim, dtype=dtype)] * 26, torch.device("cpu"))
        slots = torch.zeros(64, dim, dtype=dtype)
        how = ", 16 bytes" if dim * dtype.itemsize % 16 == 0 else ""
        for each in (fetch_rows, write_rows):
            name = f"{each.__name__} {dtype}, D={dim}{how}"
            yield name, lambda each=each, of=(host, places, places, slots): each(*of)
