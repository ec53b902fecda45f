"""Calls for `compiling.py`."""

import torch
from launches_lookup import NUM_ROWS, ON_CPU

from recsys.engine.kernels.triton.claim import DeviceMarks, claim
from recsys.engine.kernels.triton.lookup import DeviceInput, DeviceLookups

NUM_TABLES = 26


def launches(is_all):
    locations = [(number, number, number) for number in range(NUM_TABLES)]
    firsts = [number * NUM_ROWS for number in range(NUM_TABLES)]
    lookups = DeviceLookups(locations, [NUM_ROWS] * NUM_TABLES, firsts, ON_CPU)
    marks = DeviceMarks.empty(NUM_TABLES * NUM_ROWS, 3000, ON_CPU)
    for dtype in (torch.int64, torch.int32):
        for is_one_hot in (True, False):
            for batch_size, first in ((2, 0), (3, 1)):  # a view may begin anywhere
                num_ids = NUM_TABLES * batch_size
                ids = torch.zeros(num_ids + first, dtype=dtype)[first:]
                offsets = torch.arange(num_ids + 1 + first, dtype=dtype)[first:]
                of_bags = None if is_one_hot else offsets, None, batch_size, num_ids
                given = DeviceInput(ids, *of_bags, is_mean=False)
                name = f"claim {dtype}, {is_one_hot=}, each mini-batch"
                arguments = marks, 1 + batch_size, batch_size, lookups, given, 16
                yield name, lambda arguments=arguments: claim(*arguments)
