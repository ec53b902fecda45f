"""Calls for `compiling.py`."""

import numpy as np
import torch
from launches_lookup import memories
from launches_row_sort import NUM_TABLES, entry

from recsys.embeddings.kernels.cpu.rounding import TO_NEAREST
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.engine.kernels.triton.update import update_rows

OPTIMIZERS = [
    SGD(lr=0.5),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    PartialRowWiseAdam(lr=0.1),
]
CASES = [
    (torch.float32, 128, RowWiseAdagrad(lr=0.1)),
    (torch.float32, 64, Adam(lr=0.1)),
    (torch.float32, 1024, RowWiseAdagrad(lr=0.1)),
    (torch.float32, 1, SGD(lr=0.1)),
    (torch.bfloat16, 64, PartialRowWiseAdam(lr=0.1)),
    (torch.bfloat16, 16, SGD(lr=0.1)),
    (torch.float64, 32, Adagrad(lr=0.1)),
]
ALL_CASES = [
    *((torch.float32, 64, optimizer) for optimizer in OPTIMIZERS),
    *(
        (dtype, dim, OPTIMIZERS[-1])
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for dim in (1, 16, 64, 100, 128, 256)
    ),
]


def update(dtype, dim, optimizer, *, has_slots=True, **how):
    """A call for one entry; rows of 16 bits are rounded stochastically."""
    sizes = optimizer.state_sizes(dim).values()
    found = memories(dtype, dim, NUM_TABLES, has_slots=has_slots, num_states=sizes)
    keys = TO_NEAREST if dtype.itemsize > 2 else np.arange(NUM_TABLES, dtype=np.uint64)
    rates, ledger = np.ones((NUM_TABLES, 2)), [entry(dtype, dim, **how)]
    return lambda: update_rows(found, optimizer, rates, keys, ledger)


def launches(is_all):
    for number, (dtype, dim, optimizer) in enumerate(ALL_CASES if is_all else CASES):
        for has_slots in (True, False) if is_all else (number % 2 == 1,):
            is_wide, is_one_hot = dim * dtype.itemsize % 16 == 0, not has_slots
            how = ", 16 bytes by _sum_kernel and _update_kernel" if is_wide else ""
            if 1 in optimizer.state_sizes(dim).values() and not has_slots and dim > 1:
                how += ", replaces a number of several threads"
            name = f"update_rows {dtype}, D={dim}, {type(optimizer).__name__}, {has_slots=}{how}"
            yield name, update(dtype, dim, optimizer, has_slots=has_slots, is_one_hot=is_one_hot)
    for is_one_hot in (True, False):
        for number, batch_size in enumerate((8, 1, 37)):
            how = {"is_one_hot": is_one_hot, "batch_size": batch_size, "shift": number % 2}
            how["tables"] = NUM_TABLES - number  # those that are looked up
            launch = update(torch.float32, 64, Adam(lr=0.1), **how)
            yield f"update_rows, {is_one_hot=}, each mini-batch", launch
