"""Copies of rows as a device makes them by itself, by numpy: the CPU stands in for the device.

Triton's interpreter takes a hundred times as long, so few tests copy rows by it.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from recsys.embeddings.kernels import choice
from recsys.embeddings.kernels.choice import HostCopies
from recsys.embeddings.kernels.torch.pooled_lookup import TieredRows, pooled_lookup
from tests.torch_kernels import BY_NUMBA, BY_TRITON

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy knows no bfloat16


class _HostRows:
    def __init__(self, tables, device, sizes=None):
        self.tables = [table.detach() for table in tables]
        self.firsts = np.cumsum([0, *(map(len, tables) if sizes is None else sizes)])


def _copy(host, rows, slots, in_slots, *, is_fetch):
    rows, slots = rows.numpy(), slots.numpy()
    assert (rows[: (rows >= 0).sum()] >= 0).all()  # kernels stop where no rows are
    in_slots = _numbers(in_slots)
    for table, first, end in zip(host.tables, host.firsts, host.firsts[1:], strict=False):
        places = np.flatnonzero((rows >= first) & (rows < end))
        at, ids = slots[places], rows[places] - first
        if not len(table):
            in_slots[at] = 0 if is_fetch else in_slots[at]
        elif is_fetch:
            in_slots[at] = _numbers(table)[ids]
        else:
            _numbers(table)[ids] = in_slots[at]


def look_up(reached, lookups, bags, result):
    """Pool rows from slots or the host's tables, by torch, from a copy of all tables."""
    tables = [table.detach() for table in reached.host.tables]
    everything = torch.arange(sum(map(len, tables)))
    rows = TieredRows(reached, reached.slots, reached.rows, everything, torch.cat(tables))
    return pooled_lookup(rows, lookups, bags, result)


def _numbers(rows):
    return rows.detach().view(len(rows), -1).view(_BITS[rows.itemsize]).numpy()


HOST_COPIES = HostCopies(
    _HostRows,
    lambda *arguments: _copy(*arguments, is_fetch=True),
    lambda *arguments: _copy(*arguments, is_fetch=False),
    look_up,
)


def reach_host(monkeypatch, copies=HOST_COPIES):
    """Have the CPU copy rows by itself, as a device does; None: have neither do it."""
    before = choice.DEVICE_KERNELS | BY_NUMBA
    makers = {kind: partial(_with_copies, copies, make) for kind, make in before.items()}
    monkeypatch.setattr(choice, "DEVICE_KERNELS", makers)


def _with_copies(copies, make, device):
    kernels = make(device)
    has_own = copies is not None and device.type == "cuda"
    return kernels if has_own else replace(kernels, host_copies=copies)


def use_triton(monkeypatch):
    """Have Triton kernels do everything, on the CPU too if there is no GPU: it interprets them."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(choice, "DEVICE_KERNELS", BY_TRITON)
