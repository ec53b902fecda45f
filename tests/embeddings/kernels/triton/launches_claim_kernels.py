"""Calls for `compiling.py`."""

import numpy as np
import torch

from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.row_space import number_rows
from recsys.embeddings.kernels.triton.slots import TritonSlotMap
from recsys.embeddings.rows.lookups import Lookups

# dtype of ids, whether bag i is value i, the id that is padding
CASES = [(torch.int64, True, None), (torch.int64, False, None), (torch.int32, False, 3)]
NUM_TABLES, BATCH_SIZE = 26, 2


def launches(is_all):
    every = np.arange(NUM_TABLES, dtype=np.uint64)
    lookups = Lookups(tables=every, positions=every, columns=every, width=NUM_TABLES)
    numbers = number_rows([50] * NUM_TABLES, 1, torch.zeros(1, 1))
    slots = TritonSlotMap(numbers, 3000)
    for dtype, is_one_hot, padding in CASES:
        offsets = torch.arange(NUM_TABLES * BATCH_SIZE + 1, dtype=dtype)
        bags = TorchBags.from_tensors(
            torch.zeros(NUM_TABLES * BATCH_SIZE, dtype=dtype),
            offsets,
            None,
            BATCH_SIZE,
            is_mean=False,
            is_one_hot=is_one_hot,
            padding=padding,
        )
        name = f"claim {dtype}, is_one_hot={is_one_hot}, padding={padding}"
        yield name, lambda bags=bags: slots.start(lookups, bags)
    for is_one_hot in (True, False):
        for batch_size, first in ((2, 0), (3, 1)):  # a view may begin anywhere
            num_called = NUM_TABLES - first
            called = lookups.of_tables(range(num_called))
            num_values = num_called * batch_size
            bags = TorchBags.from_tensors(
                torch.zeros(num_values + first, dtype=torch.int64)[first:],
                torch.arange(num_values + 1 + first)[first:],
                None,
                batch_size,
                is_mean=False,
                is_one_hot=is_one_hot,
            )
            name = f"claim of each mini-batch, is_one_hot={is_one_hot}"
            yield name, lambda called=called, bags=bags: slots.start(called, bags)
    yield "claim that refuses nothing", lambda: slots.start(lookups, bags, refuses=False)
    yield "release", lambda: slots.release(torch.zeros(64, dtype=torch.int32))
