"""The update of a ledger whose entries are joined."""

import numpy as np
import pytest
import torch

from recsys.embeddings.kernels.cpu.rounding import table_key
from recsys.embeddings.kernels.torch.bags import TorchBags
from recsys.embeddings.kernels.torch.row_space import TorchRowSpace
from recsys.embeddings.kernels.triton import row_runs, row_update
from recsys.embeddings.optimizer import Adam
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Lookups

SIZES, DIM, NUM_SAMPLES, OPTIMIZER = (1, 6, 40), 6, 50, Adam(lr=0.1)


@pytest.mark.parametrize("is_apart", [False, True], ids=["columns", "apart"])
def test_entries_of_one_hot_bags_are_located_together_with_the_same_bits(
    triton_device, monkeypatch, is_apart
):
    torch.manual_seed(0)
    numbers = 1e4 * torch.randn(NUM_SAMPLES, 3, DIM, device=triton_device)
    gradients = [each.clone() for each in numbers.unbind(1)] if is_apart else numbers.unbind(1)
    ids = torch.stack([torch.randint(0, SIZES[table], (NUM_SAMPLES,)) for table in (2, 1, 2)])
    ledger = [
        LedgerEntry(
            Lookups.one(table, DIM),
            TorchBags(of_table, None, None, NUM_SAMPLES, is_mean=False),
            gradient,
        )
        for table, of_table, gradient in zip(
            (2, 1, 2), ids.to(triton_device), gradients, strict=True
        )
    ]
    num_located, locate = [], row_runs._located

    def located(space, parts, *arguments):
        num_located.append(len(parts))
        return locate(space, parts, *arguments)

    monkeypatch.setattr(row_runs, "_located", located)

    def updated():
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randn(size, DIM, generator=generator).bfloat16() for size in SIZES]
        states = [[torch.zeros(size, DIM) for size in SIZES] for _ in range(2)]
        arrays = [[each.to(triton_device) for each in of] for of in (rows, *states)]
        space, *states = [TorchRowSpace(each) for each in arrays]
        for step in (1, 2):
            rates = np.array([OPTIMIZER.rate_and_eps(0.1, step)] * 3)
            keys = np.array([table_key(7, step, table) for table in range(3)], np.uint64)
            row_update.row_update(space, states, OPTIMIZER, rates, ledger, keys)
        return [table for each in arrays for table in each]

    found = updated()

    monkeypatch.setattr(row_update, "join_entries", lambda ledger: ledger)
    expected = updated()
    assert num_located == [1, 1, 3, 3]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
