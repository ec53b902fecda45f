"""The clicks that the examples beside this file train on, and an ordinary model for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIZES = (1000, 500, 200)
NUM_SAMPLES, BATCH_SIZE = 4096, 128


def make_clicks() -> tuple[Tensor, Tensor]:
    """One id per table and a label for every sample.

    Shape:
        ids (NUM_SAMPLES, 3) int64; labels (NUM_SAMPLES,) float32.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randint(size, (NUM_SAMPLES,), generator=generator) for size in SIZES])
    return ids.T.contiguous(), (ids.sum(0) % 3 == 0).float()


class ClickModel(nn.Module):
    """One `nn.EmbeddingBag` per feature, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(size, 16, mode="sum") for size in SIZES)
        self.layers = nn.Sequential(nn.Linear(16 * len(SIZES), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """The logits of a mini-batch: ids (B, 3), result (B,)."""
        pooled = [bag(ids[:, [feature]]) for feature, bag in enumerate(self.bags)]
        return self.layers(torch.cat(pooled, dim=1)).squeeze(1)
