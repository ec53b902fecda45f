"""Calls for `compiling.py`."""

import mmap

import torch
from launches_lookup import NUM_ROWS, ON_CPU

from recsys.engine.kernels.triton.lookup import DeviceLookups
from recsys.engine.kernels.triton.row_sort import DeviceEntry, sort_rows
from recsys.engine.rows.tables import compute_dtype

NUM_TABLES = 26


def entry(
    dtype, dim, *, is_one_hot, is_mean=False, batch_size=16, shift=0, tables=NUM_TABLES, at=None
):
    """One-hot bags, or weighted bags of any length; ids and weights begin anywhere in memory."""
    numbers = range(tables)
    locations = [(number, number, number * dim) for number in numbers]
    firsts = [number * NUM_ROWS for number in numbers]
    lookups = DeviceLookups(locations, [NUM_ROWS] * tables, firsts, ON_CPU)
    num_bags, computed = tables * batch_size, compute_dtype(dtype)
    kept = torch.zeros(3 * num_bags + 1 + shift, dtype=torch.int32)[shift:]
    weights = None if is_one_hot else torch.ones(num_bags + shift, dtype=computed)[shift:]
    gradient = torch.zeros(batch_size, tables * dim, dtype=computed) if at is None else at
    num_bounds = 0 if is_one_hot else num_bags
    return DeviceEntry(lookups, kept, num_bags, batch_size, num_bounds, is_mean, weights, gradient)


def launches(is_all):
    for is_one_hot in (True, False):
        found = [entry(torch.float32, 16, is_one_hot=is_one_hot)]
        yield f"sort_rows, {is_one_hot=}", lambda found=found: sort_rows(found, 9, 16)
    for two in (in_memory(2**15), in_memory(2**32)):
        found = [entry(torch.float32, 16, is_one_hot=True, at=gradient) for gradient in two]
        yield (
            "sort_rows, gradients anywhere, each mini-batch",
            lambda found=found: sort_rows(found, 9, 16),
        )


def in_memory(num_numbers):
    """Gradients at both ends of so much memory, of which nothing is used."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE of Linux
    memory = torch.frombuffer(mmap.mmap(-1, 4 * num_numbers, flags=flags), dtype=torch.float32)
    size = 16 * NUM_TABLES * 16
    return [part.view(16, NUM_TABLES * 16) for part in (memory[:size], memory[-size:])]
