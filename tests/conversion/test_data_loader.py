"""An accelerated model trains on a `DataLoader` whose workers are forked or spawned."""

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import recsys


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, 4, mode="sum", sparse=True) for size in (2000, 50)
        )
        self.top = nn.Linear(8, 1)

    def forward(self, ids):
        pooled = [bag(ids[:, [place]]) for place, bag in enumerate(self.bags)]
        return self.top(torch.cat(pooled, 1)).squeeze(1)


def losses_of(loader):
    """The losses of an epoch, with rows in two tiers."""
    torch.manual_seed(0)
    model = Clicks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recsys.accelerate(model, optimizer=optimizer, budget="24KiB")
    losses = []
    for ids, labels in loader:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(ids), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_change_no_bit(start):
    ids = torch.stack([torch.arange(512) * 7 % 2000, torch.arange(512) % 50], 1)
    samples = TensorDataset(ids, (ids.sum(1) % 2).float())
    expected = losses_of(DataLoader(samples, 64))  # kernels have run before workers are forked

    found = losses_of(DataLoader(samples, 64, num_workers=2, multiprocessing_context=start))

    assert found == expected
    assert len(found) == 8
