"""Bytes of fast memory that tables take under a budget, computed without the library."""

import torch


def slot_bytes(dim, dtype, state_sizes):
    """Bytes of one slot: a row, its state, and 11 of marks."""
    of_state = 8 if dtype is torch.float64 else 4
    return dim * dtype.itemsize + sum(state_sizes.values()) * of_state + 11


def floor_bytes(num_rows, slots):
    """Bytes of the row map, and of slots of each kind: how many, and the bytes of one."""
    return 4 * num_rows + sum(count * num_bytes for count, num_bytes in slots)
