"""Calls for `compiling.py`."""

import torch
from launches_lookup import memories

from recsys.engine.kernels.triton.claim import Moves
from recsys.engine.kernels.triton.move import move_rows

CASES = [(torch.float32, 128), (torch.float32, 1), (torch.bfloat16, 64)]
ALL_CASES = [
    (dtype, dim)
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    for dim in (1, 16, 64, 100, 128, 256)
]


def launches(is_all):
    for dtype, dim in ALL_CASES if is_all else CASES:
        found = memories(dtype, dim, 26, has_slots=True)
        how = ", 16 bytes" if dim * dtype.itemsize % 16 == 0 else ""
        moves = Moves(torch.zeros(2, 64).long(), torch.zeros(16, dtype=torch.int32))
        name = f"move {dtype}, D={dim}{how}"
        yield name, lambda found=found, moves=moves: move_rows(found, moves)
