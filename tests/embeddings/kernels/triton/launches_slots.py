"""Calls for `compiling.py`."""

import torch

from recsys.embeddings.kernels.torch.slot_rows import number_rows
from recsys.embeddings.kernels.triton.slots import TritonSlotMap


def launches(is_all):
    slots = TritonSlotMap(number_rows([50], 1, torch.zeros(1, 1)), 30)
    yield "release", lambda: slots.release(torch.zeros(64, dtype=torch.int32))
