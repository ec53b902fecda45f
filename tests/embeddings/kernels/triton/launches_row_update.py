"""Calls for `compiling.py`."""

import numpy as np
import torch
from launches_row_runs import NUM_TABLES, entry, tables

from recsys.embeddings.kernels.cpu.rounding import TO_NEAREST
from recsys.embeddings.kernels.torch.row_space import SlotRows, TorchRowSpace, number_rows
from recsys.embeddings.kernels.torch.slots import TorchSlots
from recsys.embeddings.kernels.triton.row_update import row_update
from recsys.embeddings.optimizer import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.embeddings.rows.row_space import compute_dtype

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


def update(dtype, dim, optimizer, **how):
    """A call for one entry; rows of 16 bits are rounded stochastically."""
    states = [
        TorchRowSpace(
            [torch.zeros(16, size, dtype=compute_dtype(dtype)) for _ in range(NUM_TABLES)]
        )
        for size in optimizer.state_sizes(dim).values()
    ]
    keys = TO_NEAREST if dtype.itemsize > 2 else np.arange(NUM_TABLES, dtype=np.uint64)
    rates, ledger = np.ones((NUM_TABLES, 2)), [entry(dtype, dim, **how)]
    return lambda: row_update(tables(dtype, dim), states, optimizer, rates, ledger, keys)


def launches(is_all):
    for number, (dtype, dim, optimizer) in enumerate(ALL_CASES if is_all else CASES):
        for is_one_hot in (True, False) if is_all else (number % 2 == 0,):
            is_wide = dim * dtype.itemsize % 16 == 0
            how = ", 16 bytes by _sum_kernel and _update_kernel" if is_wide else ""
            if 1 in optimizer.state_sizes(dim).values():
                how += ", replaces a number of several threads"
            name = f"row_update {dtype}, D={dim}, {type(optimizer).__name__}, {is_one_hot=}{how}"
            yield name, update(dtype, dim, optimizer, is_one_hot=is_one_hot)
    slots = TorchSlots.empty(16, 16, torch.device("cpu"))
    in_slots = SlotRows(
        torch.zeros(16, 64), slots, number_rows([8] * NUM_TABLES, 64, torch.zeros(1))
    )
    arguments = (
        in_slots,
        [],
        SGD(lr=0.1),
        np.ones((NUM_TABLES, 2)),
        [entry(torch.float32, 64, is_one_hot=True)],
    )
    yield "row_update in slots", lambda: row_update(*arguments)
    for is_one_hot in (True, False):
        for number, batch_size in enumerate((8, 1, 37)):
            how = {"is_one_hot": is_one_hot, "batch_size": batch_size, "shift": number % 2}
            how["num_tables"] = NUM_TABLES - number  # those that are called
            launch = update(torch.float32, 64, Adam(lr=0.1), **how)
            yield f"row_update, {is_one_hot=}, each mini-batch", launch
