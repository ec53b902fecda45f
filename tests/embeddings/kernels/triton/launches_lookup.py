"""Calls for `compiling.py`."""

import torch

from recsys.engine.kernels.triton.lookup import DeviceInput, DeviceLookups, pool, weight_gradients
from recsys.engine.kernels.triton.memory import DeviceMemories, ErrorRecord, Rows
from recsys.engine.rows.tables import compute_dtype

CASES = [(torch.float32, 128), (torch.float32, 3), (torch.bfloat16, 64), (torch.float64, 16)]
ALL_CASES = [
    (dtype, dim)
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    for dim in (1, 4, 16, 64, 100, 128, 256, 1000)
]
ON_CPU = torch.device("cpu")
NUM_ROWS = 9


def memories(dtype, dim, num_tables, *, has_slots, num_states=()):
    """Tables of `NUM_ROWS` rows, and state arrays of so many numbers per row."""
    num_all, number = num_tables * NUM_ROWS, int(has_slots)
    of_dtype = (dtype, dim), *((compute_dtype(dtype), size) for size in num_states)
    rows, *states = [
        Rows([torch.zeros(NUM_ROWS, size, dtype=kind) for _ in range(num_tables)], slots)
        for kind, size in of_dtype
        for slots in [torch.zeros(16 * number, size, dtype=kind)]
    ]
    firsts = torch.arange(num_tables + 1) * NUM_ROWS
    slot_of_row = torch.full((num_all,), -1, dtype=torch.int32) if has_slots else None
    is_dirty = torch.zeros(16, dtype=torch.uint8) if has_slots else None
    record = ErrorRecord(ON_CPU)
    return DeviceMemories(rows, states, firsts, num_all, slot_of_row, is_dirty, record)


def launches(is_all):
    for number, (dtype, dim) in enumerate(ALL_CASES if is_all else CASES):
        for name, launch in launches_of(dtype, dim, batch_size=8, is_every=is_all or not number):
            how = ", 16 bytes" if dim * dtype.itemsize % 16 == 0 and "dots" not in name else ""
            yield f"pool {name} {dtype}, D={dim}{how}", launch
    for number, batch_size in enumerate((8, 1, 37)):
        for name, launch in launches_of(torch.float32, 128, batch_size, number % 2):
            yield f"pool {name}, each mini-batch", launch


def launches_of(dtype, dim, batch_size, shift=0, *, is_every=True):
    """Calls with two features; ids, offsets and weights begin anywhere in memory."""
    locations = [(0, 0, 2 * dim), (1, 0, dim), (1, 1, 0)]
    lookups = DeviceLookups(locations, [NUM_ROWS] * 2, [0, NUM_ROWS], ON_CPU)
    computed = compute_dtype(dtype)
    result = torch.zeros(batch_size, 3 * dim, dtype=computed)
    size = 2 * batch_size
    ids, offsets = torch.zeros(size + shift).long()[shift:], torch.arange(size + 1 + shift)[shift:]
    weights = torch.zeros(size + shift, dtype=computed)[shift:]
    kinds = {
        "one-hot": DeviceInput(ids, None, None, batch_size, size, is_mean=False),
        "weighted, unfused": DeviceInput(ids, offsets, weights, batch_size, size, is_mean=False),
    }
    if is_every:
        kinds["mean"] = DeviceInput(ids, offsets, None, batch_size, size, is_mean=True)
    kept = torch.zeros(3 * size + 1, dtype=torch.int32)
    for has_slots in (False, True):
        found = memories(dtype, dim, 2, has_slots=has_slots)
        for name, given in kinds.items():
            arguments = found, lookups, given, kept, result
            yield f"{name}, {has_slots=}", lambda arguments=arguments: pool(*arguments)
        dots = found, lookups, given._replace(is_mean=True), kept, result, weights
        if is_every:
            yield f"dots, {has_slots=}", lambda dots=dots: weight_gradients(*dots)
