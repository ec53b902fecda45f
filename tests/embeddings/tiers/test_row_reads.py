"""Rows are read where they are: nothing is claimed, moved or written back."""

import numpy as np
import pytest
import torch

from recsys.batch import JaggedIds
from recsys.embeddings import Adagrad, HotColdEmbeddingBagCollection, TableConfig
from recsys.embeddings.kernels import choice as kernel_choice
from tests.torch_kernels import BY_TORCH

SIZES = [300, 0, 5, 400]
NUM_ROWS = sum(SIZES)


def make_model(data_type, **where):
    tables = [
        TableConfig(
            name=f"t{number}",
            embedding_dim=4,
            num_embeddings=size,
            feature_names=(f"f{number}",),
            data_type=data_type,
        )
        for number, size in enumerate(SIZES)
        if size
    ]
    model = HotColdEmbeddingBagCollection(tables=tables, optimizer=Adagrad(lr=0.1), **where)
    with torch.no_grad():
        for bag in model.embedding_bags.values():
            bag.weight.copy_(torch.randn(bag.weight.shape))
    return model


def train(model, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, size, (20,), generator=generator) for size in SIZES if size]
    features = JaggedIds(
        keys=[f"f{number}" for number, size in enumerate(SIZES) if size],
        values=torch.cat(ids),
        offsets=torch.arange(len(ids) * 20 + 1),
    )
    (model(features).values() ** 2).sum().backward()


@pytest.fixture(params=["resident", "host", "file"])
def where(request, tmp_path):
    return {
        "resident": {},
        "host": {"budget": 9_000},
        "file": {"budget": 9_000, "cold_tier": "file", "cold_path": tmp_path},
    }[request.param]


@pytest.mark.parametrize("data_type", ["fp32", "bf16"])
@pytest.mark.parametrize("by_torch", [False, True])
def test_rows_are_the_newest_and_nothing_moves(where, data_type, by_torch, monkeypatch):
    if by_torch:
        monkeypatch.setattr(kernel_choice, "DEVICE_KERNELS", BY_TORCH)
    model = make_model(data_type, **where)
    [updated] = model.row_updater.groups
    group = updated.group
    for seed in range(6):
        train(model, seed)
    chosen = [np.arange(NUM_ROWS), np.array([3, 299, 300, 304, 305, 700]), np.arange(0)]
    tiers = group.tiers
    assert (tiers is None) == (not where)
    if tiers is not None:
        before = tiers.residency.counts
        assert len(tiers.hot.dirty()[0])
        assert tiers.hot.num_slots < NUM_ROWS

    found = [group.read_rows(rows) for rows in chosen]

    if tiers is not None:
        assert tiers.residency.counts == before
        assert len(tiers.hot.dirty()[0])
        assert not tiers.residency.num_claimed
    weights = torch.cat([bag.weight.detach() for bag in model.embedding_bags.values()])
    for rows, each in zip(chosen, found, strict=True):
        assert each.dtype is weights.dtype
        assert torch.equal(each, weights[torch.from_numpy(rows)])
