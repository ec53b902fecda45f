"""Calls for `compiling.py`."""

import mmap

import numpy as np
import torch

from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.row_space import TorchRowSpace
from recsys.embeddings.kernels.triton.row_runs import find_runs
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Lookups
from recsys.embeddings.rows.row_space import compute_dtype

NUM_TABLES = 26


def tables(dtype, dim):
    return TorchRowSpace([torch.zeros(16, dim, dtype=dtype) for _ in range(NUM_TABLES)])


def entry(dtype, dim, *, is_one_hot, batch_size=16, shift=0, num_tables=NUM_TABLES):
    """One-hot bags, or bags of any length, weighted and averaged, with padding.

    Ids, offsets and weights begin `shift` numbers after the start of their memory.
    """
    computed, numbers = compute_dtype(dtype), np.arange(num_tables, dtype=np.uint64)
    lookups = Lookups(
        tables=numbers, positions=numbers, columns=numbers * np.uint64(dim), width=num_tables * dim
    )
    num_bags = num_tables * batch_size
    bags = TorchBags.from_tensors(
        torch.zeros(num_bags + shift, dtype=torch.int64)[shift:],
        torch.arange(num_bags + 1 + shift)[shift:],
        None if is_one_hot else torch.ones(num_bags + shift, dtype=computed)[shift:],
        batch_size,
        is_mean=not is_one_hot,
        is_one_hot=is_one_hot or None,
        padding=None if is_one_hot else 1,
    )
    return LedgerEntry(lookups, bags, torch.zeros(batch_size, num_tables, dim, dtype=computed))


def launches(is_all):
    for is_one_hot in (True, False):
        arguments = tables(torch.float32, 16), [entry(torch.float32, 16, is_one_hot=is_one_hot)]
        yield f"find_runs, {is_one_hot=}", lambda arguments=arguments: find_runs(*arguments)
    for two in (in_memory(2**15), in_memory(2**32)):
        ledger = [
            entry(torch.float32, 16, is_one_hot=True)._replace(gradient=gradient)
            for gradient in two
        ]
        yield (
            "find_runs, gradients anywhere, each mini-batch",
            lambda ledger=ledger: find_runs(tables(torch.float32, 16), ledger),
        )


def in_memory(num_numbers):
    """Gradients at both ends of so much memory, of which nothing is used."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE of Linux
    memory = torch.frombuffer(mmap.mmap(-1, 4 * num_numbers, flags=flags), dtype=torch.float32)
    shape = 16, NUM_TABLES, 16
    size = 16 * NUM_TABLES * 16
    return [each.view(shape) for each in (memory[:size], memory[-size:])]
